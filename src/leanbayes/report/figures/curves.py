"""Figures: curves over the severity of corruptions, and over the epochs of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from leanbayes.evaluation.statistics import curve, Estimate, number
from leanbayes.report.columns import over_severity
from leanbayes.report.figures.svg import Axis, Chart, ends, Figure, linear_axis, Numbers, Panel, write
from leanbayes.report.load import Contender, Group, Run


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
    found = [_curves(group, over_severity, measure) for measure in SEVERITY]
    if not any(found):
        return None
    return Figure(
        key="severity",
        title="Under corruption",
        caption="Means over corruptions, then over seeds; whiskers are standard errors. Severity 0 is the clean "
        "subset: the test images before corruption, not the whole test set. As images get worse, a good network "
        "loses accuracy late and becomes unsure in time.",
        panels=_panels(SEVERITY, found, "severity", _plot_marked),
        numbers=_numbers(SEVERITY, found, "Severity"),
        legend=_present(group, found),
    )


def training_figure(group: Group) -> Figure | None:
    """Plot loss, negative log-likelihood and KL over epochs."""
    found = [_curves(group, _history, measure) for measure in TRAINING]
    if not any(found):
        return None
    return Figure(
        key="training",
        title="Training",
        caption="Means over seeds. Loss = NLL + beta KL / N; a curve that is zero throughout is left out.",
        panels=_panels(TRAINING, found, "epoch", _plot_line),
        numbers=_numbers(TRAINING, found, "Epoch"),
        legend=_present(group, found),
    )


def _history(run: Run, key: str) -> dict[float, float | None]:
    rows = run.rows("history")
    return {float(row["epoch"]): number(row.get(key)) for row in rows if number(row.get("epoch")) is not None}


def _curves(group: Group, read: Callable[[Run, str], dict[float, float | None]], measure: Measure) -> list[Curve]:
    """Average a measure over the seeds of each contender; one point or only zeros is no curve."""
    curves = [Curve(c, curve(read(run, measure.key) for run in c.runs)) for c in group.contenders]
    return [c for c in curves if len(c.points) > 1 and any(point.mean for point in c.points.values())]


Plot = Callable[[Chart, Curve, Measure, str], None]


def _panels(measures: Sequence[Measure], found: list[list[Curve]], across: str, plot: Plot) -> list[Panel]:
    panels = []
    for measure, curves in zip(measures, found, strict=True):
        if curves:
            chart = Chart(_across(across, curves), _upwards(measure, curves))
            for one in curves:
                plot(chart, one, measure, across)
            panels.append(Panel(f"{measure.title}, {measure.unit}", chart.render(f"{measure.title} against {across}")))
    return panels


def _across(label: str, curves: list[Curve]) -> Axis:
    xs = [x for c in curves for x in c.points]
    low, high = min(xs), max(xs)
    axis = linear_axis(label, (low, high), wanted=max(min(6, int(high - low)), 1))
    return Axis(label, low, high, tuple(tick for tick in axis.ticks if low <= tick <= high))


def _upwards(measure: Measure, curves: list[Curve]) -> Axis:
    return linear_axis("", [measure.scale * end for c in curves for point in c.points.values() for end in ends(point)])


def _plot_marked(chart: Chart, one: Curve, measure: Measure, across: str) -> None:
    """Plot a line with whiskers and markers; a marker shows its numbers on hover."""
    look, scale = one.contender.look, measure.scale
    chart.line([(x, scale * point.mean) for x, point in one.points.items()], f"curve {look.classes}")
    for x, point in one.points.items():
        if point.sem:
            chart.line([(x, scale * end) for end in ends(point)], f"whisker {look.classes}")
        title = f"{one.contender.label}, {across} {x:g}: {write(point, scale)}"
        chart.marker((x, scale * point.mean), look, title)


def _plot_line(chart: Chart, one: Curve, measure: Measure, across: str) -> None:
    """Plot a line; it shows its name and last point on hover."""
    last_x, last = list(one.points.items())[-1]
    title = f"{one.contender.label}, {across} {last_x:g}: {write(last, measure.scale)}"
    points = [(x, measure.scale * point.mean) for x, point in one.points.items()]
    chart.line(points, f"curve {one.contender.look.classes}", title)


def _numbers(measures: Sequence[Measure], found: list[list[Curve]], across: str) -> Numbers:
    values = [{c.contender.series: c.points for c in curves} for curves in found]
    contenders = {c.contender.series: c.contender for curves in found for c in curves}
    rows = []
    for series, contender in sorted(contenders.items()):
        for x in sorted({x for points in values for x in points.get(series, {})}):
            cells = (write(v.get(series, {}).get(x), m.scale) for m, v in zip(measures, values, strict=True))
            rows.append((contender.label, f"{x:g}", *cells))
    return Numbers(("Method", across, *(f"{m.title}, {m.unit}" for m in measures)), rows)


def _present(group: Group, found: list[list[Curve]]) -> tuple[Contender, ...]:
    series = {c.contender.series for curves in found for c in curves}
    return tuple(contender for contender in group.contenders if contender.series in series)
