"""What the tests of published pages share: records of committed studies, and rows that a page lacks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tools.convert_studies import read_records

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def records_of(page: str, name: str) -> list[dict[str, Any]]:
    """Return the records of a committed study."""
    return read_records(RESULTS / page / f"{name}.json")


def lacking(page: str, tables: Iterable[Sequence[Sequence[str]]]) -> list[str]:
    """Return the lines of tables that a page of docs/results lacks."""
    text = (RESULTS / f"{page}.md").read_text(encoding="utf-8")
    lines = [f"| {' | '.join(cells)} |\n" for table in tables for cells in table]
    return [line for line in lines if line not in text]
