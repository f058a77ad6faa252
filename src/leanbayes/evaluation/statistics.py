"""Means over seeds and their standard errors."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds.

    Attributes:
        mean: the mean.
        sem: its standard error s / sqrt(n), with s^2 = sum (x - mean)^2 / (n - 1); None for one seed.
        count: the number of seeds n.
        bound: "≥ " or "≤ " if the mean is only a bound; written before it.
    """

    mean: float
    sem: float | None
    count: int
    bound: str = ""


def estimate(values: Iterable[float | None]) -> Estimate | None:
    """Return the mean of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    sem = statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None
    return Estimate(statistics.fmean(known), sem, len(known))


def curve(series: Iterable[Mapping[float, float | None]]) -> dict[float, Estimate]:
    """Return the mean curve of one mapping {x: y} per seed, ordered by x."""
    seeds = list(series)
    points = {x: estimate(seed.get(x) for seed in seeds) for x in sorted({x for seed in seeds for x in seed})}
    return {x: point for x, point in points.items() if point is not None}


def difference_error(one: Estimate, other: Estimate) -> float:
    """Return the standard error of a difference, sqrt(sem_1^2 + sem_2^2); an unknown error counts as zero."""
    return math.hypot(one.sem or 0.0, other.sem or 0.0)


def number(value: Any) -> float | None:
    """Return a finite number as a float; None for anything else (null, text, NaN, overflow)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def numbers(values: Mapping[str, Any]) -> dict[str, float | None]:
    """Return plain floats for JSON, with None in place of NaN and infinity."""
    return {name: number(float(value)) for name, value in values.items()}
