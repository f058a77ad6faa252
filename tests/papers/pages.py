"""Shared by the tests of the papers: records of committed studies, rows that a page lacks, and small data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from leanbayes.compare.job import DataSpec
from leanbayes_papers.harness import Run
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


def few_rows(run: Run, name: str, *, quick_rows: int = 0) -> DataSpec:
    """Return a source of 200 training rows, in place of `Run.source`."""
    return DataSpec(name=name, root=run.root, train_rows=200)
