"""Shared by tests of pages: texts of pages without line breaks, committed files, rows of tables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
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


def tables_of(page: str) -> list[list[str]]:
    """Return the heads of all tables of a page, as lists of cells."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    heads = [head for head, rule in pairwise(lines) if head.startswith("|") and re.fullmatch(r"[|\-: ]+", rule)]
    return [[cell.strip() for cell in head.strip("|").split("|")] for head in heads]


def of_one_seed(head: Sequence[str]) -> list[str]:
    """Return the head of a table, its first cell with the words "one seed"."""
    return [f"{head[0]}, one seed" if head[0] else "one seed", *head[1:]]


def file_of(path: str) -> Any:
    """Return a committed JSON file of docs/results."""
    return json.loads((RESULTS / path).read_text(encoding="utf-8"))


def span(values: Iterable[float], digits: int = 2) -> str:
    """Write the smallest and the largest value, "1.16 to 1.45"."""
    found = sorted(values)
    return f"{found[0]:.{digits}f} to {found[-1]:.{digits}f}"
