"""What the tests of published pages share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def lacking(page: str, rows: Iterable[Sequence[str]], says: Iterable[str]) -> list[str]:
    """Return the rows of tables and the items of lists that a page of docs/results lacks."""
    text = (RESULTS / f"{page}.md").read_text()
    lines = [f"| {' | '.join(cells)} |\n" for cells in rows] + [f"* {line}\n" for line in says]
    return [line for line in lines if line not in text]
