"""Read `numbers.toml` of a paper: the numbers that it prints, titles and claims of our studies, columns of our tables.

A table has `columns`, a list of names, and `rows`, one string of numbers for each row. A number is written as the paper
prints it: "0.120", "6.72±0.06", or "-" where there is none. A study has a `title` and the paper's `claim`.

    [table2]
    columns = ["nll", "accuracy"]
    rows."Rank-1 BNN, Cauchy" = "0.120 96.5"
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

PACKAGE = "leanbayes_papers"


@dataclass(frozen=True)
class Printed:
    """A number as a paper prints it."""

    text: str

    @property
    def value(self) -> float:
        """The number."""
        return float(self.text.partition("±")[0])

    @property
    def spread(self) -> float | None:
        """The number after the ±."""
        spread = self.text.partition("±")[2]
        return float(spread) if spread else None


Row = dict[str, Printed]


def printed(paper: str, table: str) -> dict[str, Row]:
    """Return a table of a paper: printed numbers by row and column."""
    found = numbers(paper)[table]
    return {name: _row(found["columns"], line, name) for name, line in found["rows"].items()}


def _row(columns: list[str], line: str, name: str) -> Row:
    texts = line.split()
    if len(texts) != len(columns):
        raise ValueError(f"row {name!r}: expected {len(columns)} numbers, got {len(texts)}; write - for a missing one")
    return {column: Printed(text) for column, text in zip(columns, texts, strict=True) if text != "-"}


@cache
def numbers(paper: str) -> dict[str, Any]:
    """Return the file of a paper."""
    return tomllib.loads(files(PACKAGE).joinpath(paper, "numbers.toml").read_text(encoding="utf-8"))
