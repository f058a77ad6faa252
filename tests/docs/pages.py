"""Shared by tests of pages: texts of pages without line breaks, committed files, rows of tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"


def text_of(page: str) -> str:
    """Return the text of a page, given from the root of the repository, with every line break as a space."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def unsaid(page: str, sentences: Iterable[str]) -> list[str]:
    """Return the sentences that a page lacks; how the page breaks its lines does not matter."""
    text = text_of(page)
    return [sentence for sentence in sentences if " ".join(sentence.split()) not in text]


def lacking(page: str, rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the rows of a table that a page lacks."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    return [row for row in (f"| {' | '.join(cells)} |" for cells in rows) if row not in lines]


def file_of(path: str) -> Any:
    """Return a committed JSON file of docs/results."""
    return json.loads((RESULTS / path).read_text(encoding="utf-8"))


def span(values: Iterable[float], digits: int = 2) -> str:
    """Write the smallest and the largest value, "1.16 to 1.45"."""
    found = sorted(values)
    return f"{found[0]:.{digits}f} to {found[-1]:.{digits}f}"
