"""Figures of a group as inline SVG: quality against cost, calibration, curves, histograms of uncertainty.

`figures` lists them in the order of the page. A figure without numbers is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from leanbayes.evaluation.statistics import curve, Estimate, number
from leanbayes.report import svg
from leanbayes.report.load import Contender, Group, Run
from leanbayes.report.svg import Axis, Chart, ends, Figure, linear_axis, Numbers, Panel, Point, SMALL, write
from leanbayes.report.table import comparison, over_severity
from leanbayes.report.verdict import Candidate, candidates, headline, LIMITS


def figures(group: Group) -> list[Figure]:
    """Return the figures of a group, in the order of the page."""
    plotted = (
        cost_figure(group),
        reliability_figure(group),
        severity_figure(group),
        histogram_figure(group, "total"),
        histogram_figure(group, "epistemic"),
        training_figure(group),
    )
    return [figure for figure in plotted if figure is not None]


# Quality against cost.

COSTS = {  # title and unit of each limit of the verdict
    "training_ratio": ("Training", "trainings of the plain network"),
    "answer_passes": ("One answer", "passes of the plain network"),
    "parameter_ratio": ("Parameters", "times the plain network"),
}
LETTER = 6.4  # pixels, about the width of a letter of a label
LINE = 11.0
SEEN = 0.7  # a limit is plotted only if a cost exceeds this share of it
Box = tuple[float, float, float, float]


class Cross(NamedTuple):
    """A point and the boxes of its whiskers, in pixels."""

    centre: Point
    flat: Box
    upright: Box

    def places(self) -> Iterator[tuple[float, float, str]]:
        """Yield possible places of its name: at an end of the flat whisker, above it, below it."""
        x, y = self.centre
        yield max(x + 8, self.flat[2] + 3), y + 4, "start"
        yield min(x - 8, self.flat[0] - 3), y + 4, "end"
        for drop in (-8, 16):
            yield x + 5, y + drop, "start"
            yield x - 5, y + drop, "end"


def cost_figure(group: Group) -> Figure | None:
    """Plot the deciding figure against the costs of training, of one answer and of parameters."""
    found = sorted(candidates(group), key=lambda candidate: candidate.contender.series)
    column = headline(group.task)
    panels = [
        Panel(title, _scatter(known, name, f"{column.title} ({column.better} is better)"))
        for name, (title, _) in COSTS.items()
        if len(known := [candidate for candidate in found if name in candidate.costs]) > 1
    ]
    if not panels:
        return None
    rows = [(c.label, c.written, *(write(c.costs.get(name)) for name in COSTS)) for c in found]
    return Figure(
        key="cost",
        title="Quality against cost",
        caption="Means over seeds; whiskers are standard errors. Costs are on a logarithmic scale; the shaded side is "
        "beyond the limit of the rule. The cost of one answer counts all its passes, one for every draw or member.",
        panels=panels,
        numbers=Numbers(("Method", column.title, *map(", ".join, COSTS.values())), rows),
        legend=tuple(candidate.contender for candidate in found),
    )


def _scatter(found: list[Candidate], name: str, quality: str) -> str:
    (title, unit), limit = COSTS[name], LIMITS[name]
    reach = [end for c in found for end in ends(c.costs[name])]
    x = svg.ratio_axis(unit, [*reach, *([1.1 * limit] if max(reach) > SEEN * limit else [])])
    y = linear_axis(quality, [end for c in found for end in ends(c.quality)])
    chart = Chart(x, y)
    taken = _plot_limit(chart, limit, unit) if x.high > limit else []
    places = [(c.costs[name].mean, c.quality.mean) for c in found]
    crosses = []
    for c, (cost, good) in zip(found, places, strict=True):
        bars = [(end, good) for end in ends(c.costs[name])], [(cost, end) for end in ends(c.quality)]
        for bar in bars:
            chart.line(bar, f"whisker {c.contender.look.classes}")
        crosses.append(Cross(chart.at(cost, good), *(_around([chart.at(*end) for end in bar], 2) for bar in bars)))
    _name_points(chart, crosses, [c.label for c in found], taken)
    for c, place in zip(found, places, strict=True):
        chart.marker(place, c.contender.look, f"{c.label}: {c.written} at {write(c.costs[name])} {unit}")
    return chart.render(f"{quality} against {title.lower()}, {unit}")


def _plot_limit(chart: Chart, limit: float, unit: str) -> list[Box]:
    """Shade the area beyond the limit and label it; return the covered boxes."""
    chart.bar((limit, chart.y.low), (chart.x.high, chart.y.high), "dear", f"more than {limit:g} {unit}")
    chart.line([(limit, chart.y.low), (limit, chart.y.high)], "diagonal", f"the limit: {limit:g} {unit}")
    (right, foot), (_, top) = chart.at(limit, chart.y.low), chart.at(limit, chart.y.high)
    name = f"limit {limit:g}"
    chart.text((right - 4, foot - 4), name, "end", "note")
    return [(right - 4 - LETTER * len(name), foot - 4 - LINE, right, foot), (right - 1, top, right + 1, foot)]


def _name_points(chart: Chart, crosses: list[Cross], names: list[str], covered: list[Box]) -> None:
    """Write names that cover no marker, no whisker and no other name; the legend has the others."""
    size = chart.size
    taken = [box for cross in crosses for box in (_around([cross.centre], 5), cross.flat, cross.upright)] + covered
    for cross, name in zip(crosses, names, strict=True):
        wide = LETTER * len(name)
        for x, y, anchor in cross.places():
            left = x - (wide if anchor == "end" else 0)
            box = (left, y - LINE, left + wide, y + 2)
            inside = chart.left <= left and box[2] <= size.width and box[3] <= size.height - size.bottom
            if inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                chart.text((x, y), name, anchor)
                break


def _around(points: list[Point], margin: float) -> Box:
    across, down = zip(*points, strict=True)
    return min(across) - margin, min(down) - margin, max(across) + margin, max(down) + margin


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


# Curves over the severity of corruptions, and over the epochs of training.


class Measure(NamedTuple):
    """A measure: its key in the results, title, unit, and the factor to that unit."""

    key: str
    title: str
    unit: str
    scale: float = 1.0


class Curve(NamedTuple):
    """The points of one contender."""

    contender: Contender
    points: dict[float, Estimate]


SEVERITY = (
    Measure("accuracy", "Accuracy", "%", 100),
    Measure("nll", "NLL", "nats"),
    Measure("ece", "Calibration error (ECE)", "%", 100),
    Measure("epistemic", "Epistemic uncertainty", "nats"),
    Measure("aleatoric", "Aleatoric uncertainty", "nats"),
)
TRAINING = (
    Measure("loss", "Loss", "nats per input"),
    Measure("nll", "NLL", "nats per input"),
    Measure("kl", "KL", "nats"),
)


def severity_figure(group: Group) -> Figure | None:
    """Plot quality and uncertainty against severity, averaged over corruptions."""
    caption = (
        "Means over corruptions, then over seeds; whiskers are standard errors. Severity 0 is the clean "
        "subset: the test images before corruption, not the whole test set. As images get worse, a good network "
        "loses accuracy late and becomes unsure in time."
    )
    return _curves(
        group, SEVERITY, over_severity, "severity", key="severity", title="Under corruption", caption=caption
    )


def training_figure(group: Group) -> Figure | None:
    """Plot loss, negative log-likelihood and KL over epochs."""

    def read(run: Run, key: str) -> dict[float, float | None]:
        rows = run.rows("history")
        return {float(row["epoch"]): number(row.get(key)) for row in rows if number(row.get("epoch")) is not None}

    caption = "Means over seeds. Loss = NLL + beta KL / N; a curve that is zero throughout is left out."
    return _curves(group, TRAINING, read, "epoch", key="training", title="Training", caption=caption)


def _curves(
    group: Group,
    measures: Sequence[Measure],
    read: Callable[[Run, str], dict[float, float | None]],
    across: str,
    **texts: Any,
) -> Figure | None:
    """Plot the mean over seeds of each measure; one point or only zeros is no curve."""
    found: list[list[Curve]] = []
    for measure in measures:
        curves = [Curve(c, curve(read(run, measure.key) for run in c.runs)) for c in group.contenders]
        found.append([c for c in curves if len(c.points) > 1 and any(point.mean for point in c.points.values())])
    if not any(found):
        return None
    panels = [
        Panel(f"{measure.title}, {measure.unit}", _curve_chart(measure, curves, across))
        for measure, curves in zip(measures, found, strict=True)
        if curves
    ]
    values = [{c.contender.series: c.points for c in curves} for curves in found]
    legend = tuple(c for c in group.contenders if any(c.series in points for points in values))
    rows = []
    for contender in legend:
        known = [points.get(contender.series, {}) for points in values]
        for x in sorted({x for points in known for x in points}):
            cells = (write(points.get(x), m.scale) for m, points in zip(measures, known, strict=True))
            rows.append((contender.label, f"{x:g}", *cells))
    heads = ("Method", across.capitalize(), *(f"{m.title}, {m.unit}" for m in measures))
    return Figure(panels=panels, numbers=Numbers(heads, rows), legend=legend, **texts)


def _curve_chart(measure: Measure, curves: list[Curve], across: str) -> str:
    """Plot lines with their last point on hover; over severities, with whiskers and a marker for every point."""
    xs, scale = [x for c in curves for x in c.points], measure.scale
    low, high = min(xs), max(xs)
    ticks = linear_axis(across, (low, high), wanted=max(min(6, int(high - low)), 1)).ticks
    x_axis = Axis(across, low, high, tuple(tick for tick in ticks if low <= tick <= high))
    y_axis = linear_axis("", [scale * end for c in curves for point in c.points.values() for end in ends(point)])
    chart = Chart(x_axis, y_axis)
    marked = across == "severity"
    for contender, points in curves:
        look = contender.look
        titles = [f"{contender.label}, {across} {x:g}: {write(point, scale)}" for x, point in points.items()]
        line = [(x, scale * point.mean) for x, point in points.items()]
        chart.line(line, f"curve {look.classes}", "" if marked else titles[-1])
        for place, point, title in zip(line, points.values(), titles, strict=True) if marked else ():
            if point.sem:
                chart.line([(place[0], scale * end) for end in ends(point)], f"whisker {look.classes}")
            chart.marker(place, look, title)
    return chart.render(f"{measure.title} against {across}")


# Calibration curves and histograms of uncertainty, one small chart for each contender.

BINS = 15  # of a reliability diagram
SLOTS = 30  # of a histogram
HOME = "test"
FEW = 20  # inputs; the accuracy of a smaller bin is uncertain, and its point is faint
HALVES = (0.0, 0.5, 1.0)
KINDS = {  # name of an uncertainty, its measure for classes, its measure for real targets
    "total": ("Total uncertainty", "entropy, nats", "predictive variance"),
    "epistemic": ("Epistemic uncertainty", "mutual information, nats", "variance between draws"),
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
    pooled = []
    for _, bins in sorted(found.items()):
        total = sum(b.count for b in bins)
        weighted = [(b.count / total if total else 1 / len(bins), b) for b in bins]
        confidence, accuracy = sum(w * b.confidence for w, b in weighted), sum(w * b.accuracy for w, b in weighted)
        pooled.append(Bin(confidence, accuracy, total))
    return pooled


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
    averages = {}
    for name in dict.fromkeys(name for h in histograms for name in h.shares):
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
    pooled = pooled_histograms([contender.runs for contender in group.contenders], kind)
    found = [
        (c, h) for c, h in zip(group.contenders, pooled, strict=True) if h and any(map(_varies, h.shares.values()))
    ]
    if not found:
        return None
    title, of_classes, of_targets = KINDS[kind]
    label = of_targets if group.task == "regression" else of_classes
    sets = sorted({name for _, h in found for name in h.shares}, key=lambda name: (name != HOME, name))
    others = [name for name in sets if name != HOME]
    tallest = max(share for _, h in found for shares in h.shares.values() for share in shares)
    rows = []
    for contender, h in found:
        for i, (left, right) in enumerate(pairwise(h.edges)):
            cells = (f"{h.shares[name][i]:.3f}" if name in h.shares else "" for name in sets)
            slot = " to ".join(svg.write_tick(round(edge, 3)) for edge in (left, right))
            rows.append((contender.label, slot, *cells))
    return Figure(
        key=f"{kind}-histogram",
        title=f"{title} on test and out-of-distribution inputs" if others else f"{title} on test inputs",
        caption="Shares of inputs, means over seeds, on a root scale so that small shares stay visible. "
        + ("The less they overlap, the better out-of-distribution inputs are detected." if others else ""),
        panels=[Panel(c.label, _histogram(c, h, label, others, tallest), contender=c) for c, h in found],
        numbers=Numbers(("Method", label.capitalize(), *sets), rows),
        small=True,
        styles=tuple([(HOME, "test set"), *((f"ood f{i % 4}", name) for i, name in enumerate(others))]),
    )


def _varies(shares: list[float]) -> bool:
    return any(share > 0 for share in shares[1:])  # a plain network has no epistemic uncertainty


def _histogram(contender: Contender, histogram: Histogram, label: str, others: list[str], tallest: float) -> str:
    edges = histogram.edges
    ticks = tuple(tick for tick in linear_axis("", edges, wanted=3).ticks if edges[0] <= tick <= edges[-1])
    shares = tuple(tick for tick in (0.05, 0.2, 0.5, 1.0) if tick <= tallest * 1.1) or (tallest,)
    chart = Chart(Axis(label, edges[0], edges[-1], ticks), Axis("", 0, tallest, (0.0, *shares), math.sqrt), SMALL)
    steps = {
        name: [(x, share) for ends, share in zip(pairwise(edges), shares, strict=True) for x in ends]
        for name, shares in histogram.shares.items()
    }
    if HOME in steps:
        chart.area([(edges[0], 0), *steps[HOME], (edges[-1], 0)], HOME, "test set")
    for i, name in enumerate(others):
        if name in steps:
            chart.line(steps[name], f"curve ood f{i % 4} {contender.look.classes}", name)
    return chart.render(f"{contender.label}: histogram of {label}")
