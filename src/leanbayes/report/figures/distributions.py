"""Figures: calibration curves and histograms of uncertainty, one small chart for each contender."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from leanbayes.evaluation.statistics import number
from leanbayes.report.figures.svg import Axis, Chart, Figure, linear_axis, Numbers, Panel, SMALL, write_tick
from leanbayes.report.load import Contender, Group, Run
from leanbayes.report.table import comparison

BINS = 15  # of a reliability diagram
SLOTS = 30  # of a histogram
HOME = "test"
FEW = 20  # inputs; the accuracy of a smaller bin is uncertain, and its point is faint
HALVES = (0.0, 0.5, 1.0)
NOTES = {"classification": ("test", "ece"), "regression": ("test", "coverage")}
KINDS = {
    ("total", "regression"): ("Total uncertainty", "predictive variance"),
    ("epistemic", "regression"): ("Epistemic uncertainty", "variance between draws"),
    ("total", "classification"): ("Total uncertainty", "entropy, nats"),
    ("epistemic", "classification"): ("Epistemic uncertainty", "mutual information, nats"),
}


@dataclass(frozen=True)
class Bin:
    """Inputs of similar confidence: mean confidence, accuracy, count (0 for levels of intervals)."""

    confidence: float
    accuracy: float
    count: float


@dataclass(frozen=True)
class Histogram:
    """Shares of inputs between edges, for the test set and each out-of-distribution set."""

    edges: list[float]
    shares: dict[str, list[float]]


def pooled_reliability(runs: Sequence[Run]) -> list[Bin]:
    """Pool reliability bins over seeds, weighted by their counts.

    Runs omit empty bins, so the confidence identifies a bin. Regression runs hold {level, coverage} instead.
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
    """Average the histograms of an uncertainty over the runs of each group, on common edges."""
    found = [[h for run in runs if (h := read_histogram(run, kind)) is not None] for runs in groups]
    everything = [h for group in found for h in group]
    if not everything:
        return [None for _ in groups]
    low, high = min(h.edges[0] for h in everything), max(h.edges[-1] for h in everything)
    edges = [low + (high - low) * i / SLOTS for i in range(SLOTS + 1)]
    return [_average(group, edges) if group else None for group in found]


def read_histogram(run: Run, kind: str) -> Histogram | None:
    """Read {edges, counts: {set: shares}} of a run; None if it is missing or inconsistent."""
    edges = _numbers(run.part("figures", "histograms", kind, "edges"))
    counts = run.part("figures", "histograms", kind, "counts")
    if not isinstance(counts, dict) or len(edges) < 2 or any(b <= a for a, b in pairwise(edges)):
        return None
    shares = {name: _numbers(values) for name, values in counts.items()}
    fitting = {name: values for name, values in shares.items() if len(values) == len(edges) - 1}
    return Histogram(edges, fitting) if fitting else None


def rebin(edges: list[float], shares: list[float], wanted: list[float]) -> list[float]:
    """Move a histogram to other edges; inputs count as uniform inside each bin."""
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


def reliability_figure(group: Group) -> Figure | None:
    """Plot accuracy against confidence; for regression, the coverage of intervals against their level."""
    found = [(c, bins) for c in group.contenders if (bins := pooled_reliability(c.runs))]
    if not found:
        return None
    regression = group.task == "regression"
    across, upwards = ("level", "coverage") if regression else ("confidence", "accuracy")
    notes = _notes(group)
    caption = (
        "Share of targets inside central intervals against the level these promise. "
        if regression
        else "Accuracy against confidence over bins; bars show how many inputs each holds, faint points fewer than 20. "
    )
    return Figure(
        key="reliability",
        title="Calibration",
        caption=f"{caption}A curve on the diagonal is calibrated, below it the network is too sure.",
        panels=[Panel(c.label, _reliability(c, bins, across, upwards), notes[c.series], c) for c, bins in found],
        numbers=Numbers(
            ("Method", across.capitalize(), upwards.capitalize(), *([] if regression else ["Inputs"])),
            [
                (c.label, f"{b.confidence:.3f}", f"{b.accuracy:.3f}", *([] if regression else [f"{b.count:.0f}"]))
                for c, bins in found
                for b in bins
            ],
        ),
        small=True,
    )


def histogram_figure(group: Group, kind: str) -> Figure | None:
    """Plot histograms of an uncertainty on test and out-of-distribution inputs."""
    pooled = pooled_histograms([contender.runs for contender in group.contenders], kind)
    found = [(c, h) for c, h in zip(group.contenders, pooled, strict=True) if h is not None and _varies(h)]
    if not found:
        return None
    title, label = KINDS[kind, group.task if group.task == "regression" else "classification"]
    sets = sorted({name for _, h in found for name in h.shares}, key=lambda name: (name != HOME, name))
    others = [name for name in sets if name != HOME]
    tallest = max(share for _, h in found for shares in h.shares.values() for share in shares)
    where = "on test and out-of-distribution inputs" if others else "on test inputs"
    return Figure(
        key=f"{kind}-histogram",
        title=f"{title} {where}",
        caption="Shares of inputs, means over seeds, on a root scale so that small shares stay visible. "
        + ("The less they overlap, the better out-of-distribution inputs are detected." if others else ""),
        panels=[Panel(c.label, _histogram(c, h, label, others, tallest), contender=c) for c, h in found],
        numbers=_histogram_numbers(found, sets, label),
        small=True,
        styles=tuple([(HOME, "test set"), *((f"ood f{i % 4}", name) for i, name in enumerate(others))]),
    )


def _notes(group: Group) -> dict[int, str]:
    """Return the ECE or the coverage of each contender, by series."""
    table = comparison(group)
    keys = [column.key for column in table.columns]
    wanted = NOTES["regression" if group.task == "regression" else "classification"]
    if wanted not in keys:
        return {row.contender.series: "" for row in table.rows}
    i = keys.index(wanted)
    column = table.columns[i]
    cells = {row.contender.series: row.cells[i] for row in table.rows}
    return {series: f"{column.title}: {cell.text} {column.unit}" if cell else "" for series, cell in cells.items()}


def _reliability(contender: Contender, bins: list[Bin], across: str, upwards: str) -> str:
    """Plot one curve with the gap to the diagonal filled, above bars of counts."""
    chart = Chart(Axis(across, 0, 1, HALVES), Axis("", 0, 1, HALVES), SMALL)
    series = contender.look.classes
    largest = max(b.count for b in bins)
    half = 0.4 * min((1.0, *(b.confidence - a.confidence for a, b in pairwise(bins))))
    for b in bins if largest else []:
        low, high = max(b.confidence - half, 0), min(b.confidence + half, 1)
        chart.bar((low, 0), (high, 0.22 * b.count / largest), "count", f"{b.count:.0f} inputs")
    sparse = [0 < b.count < min(FEW, largest) for b in bins]
    curve = [(b.confidence, b.accuracy) for b, few in zip(bins, sparse, strict=True) if not few]
    chart.area([*curve, (curve[-1][0], curve[-1][0]), (curve[0][0], curve[0][0])], f"gap {series}")
    chart.line([(0, 0), (1, 1)], "diagonal")
    chart.line(curve, f"curve {series}")
    for b, few in zip(bins, sparse, strict=True):
        title = f"{across} {b.confidence:.3f}, {upwards} {b.accuracy:.3f}" + (
            f", {b.count:.0f} inputs" if largest else ""
        )
        chart.marker((b.confidence, b.accuracy), contender.look, title, "sparse" if few else "")
    return chart.render(f"{contender.label}: {upwards} against {across}")


def _varies(histogram: Histogram) -> bool:
    """Return whether any input is outside the first bin; a plain network has no epistemic uncertainty."""
    return any(share > 0 for shares in histogram.shares.values() for share in shares[1:])


def _histogram(contender: Contender, histogram: Histogram, label: str, others: list[str], tallest: float) -> str:
    edges = histogram.edges
    ticks = tuple(tick for tick in linear_axis("", edges, wanted=3).ticks if edges[0] <= tick <= edges[-1])
    shares = tuple(tick for tick in (0.05, 0.2, 0.5, 1.0) if tick <= tallest * 1.1) or (tallest,)
    chart = Chart(Axis(label, edges[0], edges[-1], ticks), Axis("", 0, tallest, (0.0, *shares), math.sqrt), SMALL)
    if HOME in histogram.shares:
        steps = _steps(edges, histogram.shares[HOME])
        chart.area([(edges[0], 0), *steps, (edges[-1], 0)], HOME, "test set")
    for i, name in enumerate(others):
        if name in histogram.shares:
            steps = _steps(edges, histogram.shares[name])
            chart.line(steps, f"curve ood f{i % 4} {contender.look.classes}", name)
    return chart.render(f"{contender.label}: histogram of {label}")


def _steps(edges: list[float], shares: list[float]) -> list[tuple[float, float]]:
    return [(x, share) for left, right, share in zip(edges, edges[1:], shares, strict=False) for x in (left, right)]


def _histogram_numbers(found: list[tuple[Contender, Histogram]], sets: list[str], label: str) -> Numbers:
    rows = []
    for contender, h in found:
        for i, (left, right) in enumerate(pairwise(h.edges)):
            cells = (f"{h.shares[name][i]:.3f}" if name in h.shares else "" for name in sets)
            rows.append((contender.label, f"{write_tick(round(left, 3))} to {write_tick(round(right, 3))}", *cells))
    return Numbers(("Method", label.capitalize(), *sets), rows)
