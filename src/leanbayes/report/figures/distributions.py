"""Distributions: confidence against accuracy, uncertainty at home and abroad; one small chart for every contender."""

from __future__ import annotations

import math
from itertools import pairwise

from leanbayes.report.figures.figure import Figure, Numbers, Panel
from leanbayes.report.figures.svg import Axis, Chart, linear_axis, SMALL, write_tick
from leanbayes.report.load import Contender, Group
from leanbayes.report.pooled import Bin, Histogram, pooled_histograms, pooled_reliability
from leanbayes.report.table import comparison

HOME = "test"
FEW = 20  # inputs; the accuracy of a smaller bin says little, and is drawn faint
HALVES = (0.0, 0.5, 1.0)
NOTES = {"classification": ("test", "ece"), "regression": ("test", "coverage")}
KINDS = {
    ("total", "regression"): ("Total uncertainty", "predictive variance"),
    ("epistemic", "regression"): ("Epistemic uncertainty", "variance between draws"),
    ("total", "classification"): ("Total uncertainty", "entropy, nats"),
    ("epistemic", "classification"): ("Epistemic uncertainty", "mutual information, nats"),
}


def reliability_figure(group: Group) -> Figure | None:
    """Draw confidence against accuracy, or for regression the level of intervals against their coverage."""
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
    """Draw how an uncertainty is distributed over test and over foreign inputs."""
    pooled = pooled_histograms([contender.runs for contender in group.contenders], kind)
    found = [(c, h) for c, h in zip(group.contenders, pooled, strict=True) if h is not None and _spread(h)]
    if not found:
        return None
    title, label = KINDS[kind, group.task if group.task == "regression" else "classification"]
    sets = sorted({name for _, h in found for name in h.shares}, key=lambda name: (name != HOME, name))
    foreign = [name for name in sets if name != HOME]
    tallest = max(share for _, h in found for shares in h.shares.values() for share in shares)
    where = "on test and on foreign inputs" if foreign else "on test inputs"
    return Figure(
        key=f"{kind}-histogram",
        title=f"{title} {where}",
        caption="Shares of inputs, means over seeds, on a root scale so that small shares stay visible. "
        + ("The less the two overlap, the better foreign inputs are told apart." if foreign else ""),
        panels=[Panel(c.label, _histogram(c, h, label, foreign, tallest), contender=c) for c, h in found],
        numbers=_histogram_numbers(found, sets, label),
        small=True,
        styles=tuple([(HOME, "test set"), *((f"foreign f{i % 4}", name) for i, name in enumerate(foreign))]),
    )


def _notes(group: Group) -> dict[int, str]:
    """Write the figure that sums up each chart."""
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
    """Draw one curve with the gap to the diagonal filled, above bars of counts."""
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


def _spread(histogram: Histogram) -> bool:
    """Whether any input lies outside the first bin: a plain network has no epistemic uncertainty to show."""
    return any(share > 0 for shares in histogram.shares.values() for share in shares[1:])


def _histogram(contender: Contender, histogram: Histogram, label: str, foreign: list[str], tallest: float) -> str:
    """Draw the test set as an area and every foreign set as a line."""
    edges = histogram.edges
    ticks = tuple(tick for tick in linear_axis("", edges, wanted=3).ticks if edges[0] <= tick <= edges[-1])
    shares = tuple(tick for tick in (0.05, 0.2, 0.5, 1.0) if tick <= tallest * 1.1) or (tallest,)
    chart = Chart(Axis(label, edges[0], edges[-1], ticks), Axis("", 0, tallest, (0.0, *shares), math.sqrt), SMALL)
    if HOME in histogram.shares:
        steps = _steps(edges, histogram.shares[HOME])
        chart.area([(edges[0], 0), *steps, (edges[-1], 0)], HOME, "test set")
    for i, name in enumerate(foreign):
        if name in histogram.shares:
            steps = _steps(edges, histogram.shares[name])
            chart.line(steps, f"curve foreign f{i % 4} {contender.look.classes}", name)
    return chart.render(f"{contender.label}: histogram of {label}")


def _steps(edges: list[float], shares: list[float]) -> list[tuple[float, float]]:
    """Return the corners of a histogram's outline."""
    return [(x, share) for left, right, share in zip(edges, edges[1:], shares, strict=False) for x in (left, right)]


def _histogram_numbers(found: list[tuple[Contender, Histogram]], sets: list[str], label: str) -> Numbers:
    rows = []
    for contender, h in found:
        for i, (left, right) in enumerate(pairwise(h.edges)):
            cells = (f"{h.shares[name][i]:.3f}" if name in h.shares else "" for name in sets)
            rows.append((contender.label, f"{write_tick(round(left, 3))} to {write_tick(round(right, 3))}", *cells))
    return Numbers(("Method", label.capitalize(), *sets), rows)
