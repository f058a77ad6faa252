"""Figures that runs wrote down, pooled over seeds: reliability bins and histograms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from leanbayes.report.estimate import number
from leanbayes.report.load import Run

BINS = 15  # of a reliability diagram
SLOTS = 30  # of a histogram


@dataclass(frozen=True)
class Bin:
    """Inputs of similar confidence: how sure, how often right, how many (0: levels of intervals, not counted)."""

    confidence: float
    accuracy: float
    count: float


@dataclass(frozen=True)
class Histogram:
    """Shares of inputs between edges, for the test set and every foreign set."""

    edges: list[float]
    shares: dict[str, list[float]]


def pooled_reliability(runs: Sequence[Run]) -> list[Bin]:
    """Pool reliability bins over seeds: every input counts once, so bins weigh what they count.

    Runs leave empty bins out, so a bin is known by its confidence. Regression runs hold {level, coverage} instead.
    """
    found: dict[float, list[Bin]] = {}
    for run in runs:
        for row in run.rows("figures", "reliability", "bins"):
            confidence, accuracy, count = (number(row.get(key)) for key in ("confidence", "accuracy", "count"))
            if confidence is not None and accuracy is not None and count:
                found.setdefault(math.ceil(confidence * BINS), []).append(Bin(confidence, accuracy, count))
        for row in run.rows("figures", "reliability", "levels"):
            level, coverage = number(row.get("level")), number(row.get("coverage"))
            if level is not None and coverage is not None:
                found.setdefault(level, []).append(Bin(level, coverage, 0))
    return [_pool(found[key]) for key in sorted(found)]


def _pool(bins: list[Bin]) -> Bin:
    total = sum(b.count for b in bins)
    weights = [b.count / total if total else 1 / len(bins) for b in bins]
    confidence = sum(w * b.confidence for w, b in zip(weights, bins, strict=True))
    accuracy = sum(w * b.accuracy for w, b in zip(weights, bins, strict=True))
    return Bin(confidence, accuracy, total)


def pooled_histograms(groups: Sequence[Sequence[Run]], kind: str) -> list[Histogram | None]:
    """Average an uncertainty's histograms over the runs of each group, on edges that all groups share."""
    found = [[h for run in runs if (h := read_histogram(run, kind)) is not None] for runs in groups]
    everything = [h for group in found for h in group]
    if not everything:
        return [None for _ in groups]
    low, high = min(h.edges[0] for h in everything), max(h.edges[-1] for h in everything)
    edges = [low + (high - low) * i / SLOTS for i in range(SLOTS + 1)]
    return [_average(group, edges) if group else None for group in found]


def read_histogram(run: Run, kind: str) -> Histogram | None:
    """Read {edges, counts: {set: shares}} of a run; None if it is not there or does not fit together."""
    edges = _numbers(run.part("figures", "histograms", kind, "edges"))
    counts = run.part("figures", "histograms", kind, "counts")
    if not isinstance(counts, dict) or len(edges) < 2 or any(b <= a for a, b in pairwise(edges)):
        return None
    shares = {name: _numbers(values) for name, values in counts.items()}
    fitting = {name: values for name, values in shares.items() if len(values) == len(edges) - 1}
    return Histogram(edges, fitting) if fitting else None


def rebin(edges: list[float], shares: list[float], wanted: list[float]) -> list[float]:
    """Move a histogram to other edges, as if inputs were spread evenly inside each of its bins."""
    moved = []
    for low, high in pairwise(wanted):
        parts = zip(edges, edges[1:], shares, strict=False)
        moved.append(sum(s * max(min(b, high) - max(a, low), 0.0) / (b - a) for a, b, s in parts))
    return moved


def _average(histograms: list[Histogram], edges: list[float]) -> Histogram:
    names = list(dict.fromkeys(name for h in histograms for name in h.shares))
    averages = {}
    for name in names:
        moved = [rebin(h.edges, h.shares[name], edges) for h in histograms if name in h.shares]
        averages[name] = [sum(column) / len(moved) for column in zip(*moved, strict=True)]
    return Histogram(edges, averages)


def _numbers(values: Any) -> list[float]:
    """Return a list of finite numbers, or an empty one if any is not."""
    found = [number(value) for value in values] if isinstance(values, list) else []
    return [] if None in found else [value for value in found if value is not None]
