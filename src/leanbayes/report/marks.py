"""Marks: which figure of a column is the best, which may be as good, and enough decimals to see why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from leanbayes.evaluation.statistics import difference_error, Estimate
from leanbayes.report.columns import Column

Mark = Literal["best", "near", ""]
MORE = 2  # decimals beyond the usual ones; a difference that only more would show is none to a reader


def decimals_of(column: Column, estimates: Sequence[Estimate]) -> int:
    """Choose the decimals of a column: so many that what is worse than the best does not read like it."""
    usual = column.decimals(estimates)
    if not column.marked or not estimates:
        return usual
    best = _best(column, estimates)
    worse = [found for found in estimates if not _may_equal(found, best)]

    def tells_apart(decimals: int) -> bool:
        return _read(column, best, decimals) not in {_read(column, found, decimals) for found in worse}

    return next((decimals for decimals in range(usual, usual + MORE + 1) if tells_apart(decimals)), usual)


def marks_of(column: Column, estimates: Sequence[Estimate], decimals: int) -> list[Mark]:
    """Mark the best mean and what reads like it, and those no farther from it than one standard error.

    The standard error is that of the difference. Where all means read alike there is no best.
    """
    read = [_read(column, found, decimals) for found in estimates]
    if not column.marked or len(set(read)) < 2:
        return [""] * len(estimates)
    best = _best(column, estimates)
    top = _read(column, best, decimals)

    def mark(found: Estimate, text: str) -> Mark:
        if text == top:
            return "best"
        return "near" if _may_equal(found, best) else ""

    return [mark(found, text) for found, text in zip(estimates, read, strict=True)]


def _best(column: Column, estimates: Sequence[Estimate]) -> Estimate:
    sign = 1 if column.better == "higher" else -1
    return max(estimates, key=lambda found: sign * found.mean)


def _may_equal(found: Estimate, best: Estimate) -> bool:
    return abs(found.mean - best.mean) <= difference_error(found, best)


def _read(column: Column, found: Estimate, decimals: int) -> str:
    """Return the mean as a reader sees it."""
    return column.write(found, decimals)[0]
