"""Calibration curves and histograms of uncertainty, one small chart for each contender."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from leanbayes.evaluation.statistics import number
from leanbayes.report import svg
from leanbayes.report.load import Contender, Group, Run
from leanbayes.report.svg import Axis, Chart, Figure, linear_axis, Numbers, Panel, SMALL
from leanbayes.report.table import comparison

BINS = 15  # of a reliability diagram
SLOTS = 30  # of a histogram
HOME = "test"
FEW = 20  # inputs; the accuracy of a smaller bin is uncertain, and its point is faint
HALVES = (0.0, 0.5, 1.0)
CROWDED = 0.5  # share of test inputs in the first equal bin from which on bins are logarithmic
WIDE = 10  # ratio of ends from which on logarithmic bins show more than equal ones
ZERO = 1e-100  # the only bin of an uncertainty that is zero for all inputs ends here
KINDS = {  # name of an uncertainty, its measure for classes, its measure for real targets
    "total": ("Total uncertainty", "entropy, nats", "predictive std"),
    "epistemic": ("Epistemic uncertainty", "mutual information, nats", "std between draws"),
}


@dataclass(frozen=True)
class Bin:
    """Inputs of similar confidence: mean confidence, accuracy, count (0 for levels of intervals)."""

    confidence: float
    accuracy: float
    count: float


@dataclass(frozen=True)
class Histogram:
    """Shares of inputs between edges, for the test set and each out-of-distribution set.

    `below` has the shares below the first edge, of histograms with logarithmic bins.
    """

    edges: list[float]
    shares: dict[str, list[float]]
    below: dict[str, float] = field(default_factory=dict)

    @property
    def is_zero(self) -> bool:
        """Whether all inputs have an uncertainty of zero."""
        return not self.edges or self.edges[-1] == ZERO

    def rooted(self) -> Histogram:
        """Return the histogram of the root: a standard deviation instead of a variance."""
        return self if self.is_zero else Histogram([math.sqrt(edge) for edge in self.edges], self.shares, self.below)

    @property
    def reach(self) -> tuple[float, float]:
        """The ends of the bins that are not empty."""
        full = [i for i in range(len(self.edges) - 1) if any(shares[i] for shares in self.shares.values())]
        return (self.edges[full[0]], self.edges[full[-1] + 1]) if full else (self.edges[0], self.edges[-1])


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
    pooled = []
    for _, bins in sorted(found.items()):
        total = sum(b.count for b in bins)
        weighted = [(b.count / total if total else 1 / len(bins), b) for b in bins]
        confidence, accuracy = sum(w * b.confidence for w, b in weighted), sum(w * b.accuracy for w, b in weighted)
        pooled.append(Bin(confidence, accuracy, total))
    return pooled


def pooled_histograms(groups: Sequence[Sequence[Run]], kind: str, *, rooted: bool = False) -> list[Histogram | None]:
    """Average the histograms of an uncertainty over the runs of each group, on common edges.

    The bins are equal, and not narrower than those of the runs, or logarithmic if more than half of the test inputs of
    a group would fall into the first bin and all runs have such bins. `rooted` turns variances into standard
    deviations.
    """
    found = [_read_all(runs, "histograms", kind, rooted) for runs in groups]
    everything = [h for group in found for h in group]
    if not everything:
        return [None for _ in groups]
    low, high = min(h.reach[0] for h in everything), max(h.reach[1] for h in everything)
    widths = [b - a for h in everything if not h.is_zero for a, b in pairwise(h.edges)]
    slots = max(1, min(SLOTS, round((high - low) / min(widths)))) if widths else SLOTS  # none narrower than those read
    edges = [low + (high - low) * i / slots for i in range(slots + 1)]
    equal = [_average(group, edges) if group else None for group in found]
    fine = [_read_all(runs, "log_histograms", kind, rooted) for runs in groups]
    complete = all(len(logs) >= len(plain) for logs, plain in zip(fine, found, strict=True))
    crowded = any(h and not _all_zero(some) and _first(h) > CROWDED for h, some in zip(equal, found, strict=True))
    if not (complete and crowded and low < high / WIDE):
        return equal
    grid = sorted({edge for group in fine for h in group for edge in h.edges})
    return [_average_log(group, grid) if group else None for group in fine] if len(grid) > 1 else equal


def _first(histogram: Histogram) -> float:
    return histogram.shares.get(HOME, [0.0])[0]


def _all_zero(histograms: Sequence[Histogram]) -> bool:
    return all(h.is_zero for h in histograms)


def _read_all(runs: Sequence[Run], name: str, kind: str, rooted: bool) -> list[Histogram]:
    found = [h for run in runs if (h := read_histogram(run, kind, name)) is not None]
    return [h.rooted() for h in found] if rooted else found


def read_histogram(run: Run, kind: str, name: str = "histograms") -> Histogram | None:
    """Read {edges, counts: {set: shares}, below: {set: share}} of a run; None if it is missing or inconsistent."""
    edges = _numbers(run.part("figures", name, kind, "edges"))
    counts, below = (run.part("figures", name, kind, part) for part in ("counts", "below"))
    if isinstance(counts, dict) and len(edges) > 1 and not any(edges):  # zero for every input, and rounded
        return Histogram([0.0, ZERO], {each: [1.0] for each in counts})
    if not isinstance(counts, dict) or any(b <= a for a, b in pairwise(edges)) or any(edge < 0 for edge in edges):
        return None
    outside = (
        {s: v for s, share in below.items() if (v := number(share)) is not None} if isinstance(below, dict) else {}
    )
    if len(edges) < 2:  # an uncertainty of zero has no logarithmic bins
        return Histogram([], {}, outside) if outside and not edges else None
    shares = {each: _numbers(values) for each, values in counts.items()}
    fitting = {each: values for each, values in shares.items() if len(values) == len(edges) - 1}
    return Histogram(edges, fitting, outside) if fitting else None


def rebin(edges: list[float], shares: list[float], wanted: list[float]) -> list[float]:
    """Move a histogram to other edges; inputs count as uniform inside each bin."""
    moved = []
    for low, high in pairwise(wanted):
        parts = zip(edges, edges[1:], shares, strict=False)
        moved.append(sum(s * max(min(b, high) - max(a, low), 0.0) / (b - a) for a, b, s in parts))
    return moved


def _average(histograms: list[Histogram], edges: list[float]) -> Histogram:
    averages = {}
    for name in dict.fromkeys(name for h in histograms for name in h.shares):
        moved = [rebin(h.edges, h.shares[name], edges) for h in histograms if name in h.shares]
        averages[name] = [sum(column) / len(moved) for column in zip(*moved, strict=True)]
    return Histogram(edges, averages)


def _average_log(histograms: list[Histogram], grid: list[float]) -> Histogram:
    """Average histograms whose edges are part of one grid, with the shares below their first edge."""
    shares: dict[str, list[float]] = {}
    below: dict[str, float] = {}
    for name in dict.fromkeys(name for h in histograms for name in (*h.shares, *h.below)):
        known = [h for h in histograms if name in h.shares or name in h.below]
        moved = [rebin(h.edges, h.shares[name], grid) if name in h.shares else [0.0] * (len(grid) - 1) for h in known]
        shares[name] = [sum(column) / len(known) for column in zip(*moved, strict=True)]
        below[name] = sum(h.below.get(name, 0.0) for h in known) / len(known)
    return Histogram(grid, shares, below)


def _numbers(values: Any) -> list[float]:
    """Return a list of finite numbers, or an empty one if any is not."""
    found = [number(value) for value in values] if isinstance(values, list) else []
    return [] if None in found else [value for value in found if value is not None]


def reliability_figure(group: Group) -> Figure | None:
    """Plot accuracy against confidence; for regression, the coverage of intervals against their level."""
    found = [(c, bins) for c in group.contenders if (bins := pooled_reliability(c.runs))]
    if not found:
        return None
    if group.task == "regression":
        axes, counted, noted = ("level", "coverage"), False, "coverage"
        caption = "Share of targets inside central intervals against the level these promise. "
    else:
        axes, counted, noted = ("confidence", "accuracy"), True, "ece"
        caption = (
            "Accuracy against confidence over bins; bars show how many inputs each holds, faint points fewer than 20. "
        )
    table = comparison(group)
    notes = {
        row.contender.series: f"{column.title}: {cell.text} {column.unit}"
        for row in table.rows
        for column, cell in zip(table.columns, row.cells, strict=True)
        if column.key == ("test", noted) and cell
    }
    rows = [
        (c.label, f"{b.confidence:.3f}", f"{b.accuracy:.3f}", *([f"{b.count:.0f}"] if counted else []))
        for c, bins in found
        for b in bins
    ]
    return Figure(
        key="reliability",
        title="Calibration",
        caption=f"{caption}A curve on the diagonal is calibrated, below it the network is too sure.",
        panels=[Panel(c.label, _reliability(c, bins, *axes), notes.get(c.series, ""), c) for c, bins in found],
        numbers=Numbers(("Method", *map(str.capitalize, axes), *(["Inputs"] if counted else [])), rows),
        small=True,
    )


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
        count = f", {b.count:.0f} inputs" if largest else ""
        title = f"{across} {b.confidence:.3f}, {upwards} {b.accuracy:.3f}{count}"
        chart.marker((b.confidence, b.accuracy), contender.look, title, "sparse" if few else "")
    return chart.render(f"{contender.label}: {upwards} against {across}")


def histogram_figure(group: Group, kind: str) -> Figure | None:
    """Plot histograms of an uncertainty on test and out-of-distribution inputs."""
    rooted = group.task == "regression"
    pooled = pooled_histograms([contender.runs for contender in group.contenders], kind, rooted=rooted)
    found = [(c, h) for c, h in zip(group.contenders, pooled, strict=True) if h]
    zero = {c.series for c, _ in found if _all_zero(_read_all(c.runs, "histograms", kind, rooted))}
    if all(c.series in zero for c, _ in found):
        return None
    title, of_classes, of_targets = KINDS[kind]
    label = of_targets if rooted else of_classes
    if rooted and group.target:
        label = f"{label}, {group.target}"
    sets = sorted({name for _, h in found for name in h.shares}, key=lambda name: (name != HOME, name))
    others = [name for name in sets if name != HOME]
    is_log = any(h.below for _, h in found)
    scale = " The scale of the uncertainty is logarithmic; the first bar has all smaller values." if is_log else ""
    overlap = " The less they overlap, the better out-of-distribution inputs are detected." if others else ""
    return Figure(
        key=f"{kind}-histogram",
        title=f"{title} on test and out-of-distribution inputs" if others else f"{title} on test inputs",
        caption="Shares of inputs, means over seeds, on a root scale so that small shares stay visible."
        + scale
        + overlap,
        panels=[
            Panel(c.label, _histogram(c, h, label, others, _tallest(found)), "zero for all" * (c.series in zero), c)
            for c, h in found
        ],
        numbers=Numbers(("Method", label.capitalize(), *sets), [row for c, h in found for row in _rows(c, h, sets)]),
        small=True,
        styles=tuple([(HOME, "test set"), *((f"ood f{i % 4}", name) for i, name in enumerate(others))]),
    )


def _tallest(found: list[tuple[Contender, Histogram]]) -> float:
    return max(
        share for _, h in found for name, shares in h.shares.items() for share in (*shares, h.below.get(name, 0))
    )


def _rows(contender: Contender, h: Histogram, sets: list[str]) -> list[tuple[str, ...]]:
    """Return the shares of each bin; bins that are empty in all sets are left out."""
    rows = []
    if h.below:
        cells = (f"{h.below[name]:.3f}" if name in h.below else "" for name in sets)
        rows.append((contender.label, f"below {h.edges[0]:.3g}", *cells))
    for i, ends in enumerate(pairwise(h.edges)):
        if any(shares[i] for shares in h.shares.values()):
            cells = (f"{h.shares[name][i]:.3f}" if name in h.shares else "" for name in sets)
            rows.append((contender.label, " to ".join(f"{edge:.3g}" for edge in ends), *cells))
    return rows


def _histogram(contender: Contender, histogram: Histogram, label: str, others: list[str], tallest: float) -> str:
    edges, shares = histogram.edges, histogram.shares
    if histogram.below:
        edges = [edges[0] ** 2 / edges[1], *edges]  # one more bin for all that is smaller
        shares = {name: [histogram.below.get(name, 0.0), *values] for name, values in shares.items()}
        ticks = svg.log_axis("", edges[1:], wanted=3).ticks
        across = Axis(label, edges[0], edges[-1], tuple(t for t in ticks if edges[1] <= t <= edges[-1]), math.log)
    else:
        ticks = tuple(tick for tick in linear_axis("", edges, wanted=3).ticks if edges[0] <= tick <= edges[-1])
        across = Axis(label, edges[0], edges[-1], ticks)
    upwards = tuple(tick for tick in (0.05, 0.2, 0.5, 1.0) if tick <= tallest * 1.1) or (float(f"{tallest:.2g}"),)
    chart = Chart(across, Axis("", 0, tallest, (0.0, *upwards), math.sqrt), SMALL)
    steps = {
        name: [(x, share) for ends, share in zip(pairwise(edges), values, strict=True) for x in ends]
        for name, values in shares.items()
    }
    if HOME in steps:
        chart.area([(edges[0], 0), *steps[HOME], (edges[-1], 0)], HOME, "test set")
    for i, name in enumerate(others):
        if name in steps:
            chart.line(steps[name], f"curve ood f{i % 4} {contender.look.classes}", name)
    return chart.render(f"{contender.label}: histogram of {label}")
