"""Curves over the severity of corruptions, over the share of kept answers, and over the epochs of training.

Quality against the costs of training, of one answer and of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from leanbayes.evaluation.statistics import curve, Estimate, number
from leanbayes.report import svg
from leanbayes.report.figures.labels import Box, cross, LETTER, LINE, name_points
from leanbayes.report.load import Contender, Group, Run
from leanbayes.report.svg import Axis, Chart, ends, Figure, linear_axis, Numbers, Panel, wide_axis, write
from leanbayes.report.table import estimates_of, over_severity
from leanbayes.report.verdict import candidates, headline, LIMITS


class Measure(NamedTuple):
    """A measure: its key in the results, title, unit, and the factor to that unit."""

    key: str
    title: str
    unit: str
    scale: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.title}, {self.unit}" if self.unit else self.title


class Curve(NamedTuple):
    """The points of one contender."""

    contender: Contender
    points: dict[float, Estimate]


class Across(NamedTuple):
    """The horizontal axis: its name, the factor to its unit, and whether each point has a marker."""

    name: str
    scale: float = 1.0
    marked: bool = False


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
    Measure("valid_nll", "Validation NLL", "nats per input"),
    Measure("kl", "KL", "nats"),
)


def severity_figure(group: Group) -> Figure | None:
    """Plot quality and uncertainty against severity, averaged over corruptions."""
    caption = (
        "Means over corruptions, then over seeds; whiskers are standard errors. Severity 0 is the clean "
        "subset: the test images before corruption, not the whole test set. As images get worse, a good network "
        "loses accuracy late and becomes unsure in time."
    )
    across = Across("severity", marked=True)
    return _curves(group, SEVERITY, over_severity, across, key="severity", title="Under corruption", caption=caption)


def training_figure(group: Group) -> Figure | None:
    """Plot loss, negative log-likelihood of training and held-out rows, and KL over epochs."""

    def read(run: Run, key: str) -> dict[float, float | None]:
        rows = run.rows("history")
        return {float(row["epoch"]): number(row.get(key)) for row in rows if number(row.get("epoch")) is not None}

    caption = (
        "Means over seeds, on logarithmic scales where values differ much. Loss = NLL + beta KL / N; the validation "
        "NLL is that of the predictive mean on held-out training rows. A curve that is zero throughout is left out."
    )
    return _curves(group, TRAINING, read, Across("epoch"), wide_axis, key="training", title="Training", caption=caption)


def selective_figure(group: Group) -> Figure | None:
    """Plot accuracy, or the error of real targets, against the share of answers that are kept."""
    unit = group.target_unit
    measure = Measure("rmse", "RMSE", unit) if group.task == "regression" else Measure("accuracy", "Accuracy", "%", 100)

    def read(run: Run, key: str) -> dict[float, float | None]:
        shares, values = (run.part("figures", "selective", name) for name in ("coverage", key))
        if not isinstance(shares, list) or not isinstance(values, list):
            return {}
        pairs = ((number(share), number(value)) for share, value in zip(shares, values, strict=False))
        return {round(20 * share) / 20: value for share, value in pairs if share is not None}

    by = "smallest predictive variance" if group.task == "regression" else "highest confidence"
    better = "lower" if group.task == "regression" else "higher"
    caption = (
        f"The answers with the {by} are kept, the others are handed on; at 100 % all are kept. Means over seeds. The "
        f"{better} a curve runs on the left, the better the uncertainty finds the errors."
    )
    titles: dict[str, Any] = {"key": "selective", "title": f"{measure.title} against coverage", "caption": caption}
    return _curves(group, (measure,), read, Across("kept answers, %", 100), **titles)


def _curves(
    group: Group,
    measures: Sequence[Measure],
    read: Callable[[Run, str], dict[float, float | None]],
    across: Across,
    axis: Callable[[str, Sequence[float]], Axis] = linear_axis,
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
        Panel(measure.name, _curve_chart(measure, curves, across, axis))
        for measure, curves in zip(measures, found, strict=True)
        if curves
    ]
    shown = [(m, {c.contender.series: c.points for c in curves}) for m, curves in zip(measures, found, strict=True)]
    shown = [(measure, points) for measure, points in shown if points]
    legend = tuple(c for c in group.contenders if any(c.series in points for _, points in shown))
    rows = []
    for contender in legend:
        known = [(measure, points.get(contender.series, {})) for measure, points in shown]
        for x in sorted({x for _, points in known for x in points}):
            cells = (write(points.get(x), measure.scale) for measure, points in known)
            rows.append((contender.label, f"{across.scale * x:g}", *cells))
    heads = ("Method", across.name.capitalize(), *(measure.name for measure, _ in shown))
    return Figure(panels=panels, numbers=Numbers(heads, rows), legend=legend, **texts)


def _curve_chart(
    measure: Measure, curves: list[Curve], across: Across, axis: Callable[[str, Sequence[float]], Axis]
) -> str:
    """Plot lines with their last point on hover; if marked, with whiskers and a marker for every point."""
    xs, scale = [across.scale * x for c in curves for x in c.points], measure.scale
    low, high = min(xs), max(xs)
    ticks = linear_axis(across.name, (low, high), wanted=max(min(6, int(high - low)), 1)).ticks
    x_axis = Axis(across.name, low, high, tuple(tick for tick in ticks if low <= tick <= high))
    reach = [
        scale * end for c in curves for p in c.points.values() for end in (ends(p) if across.marked else (p.mean,))
    ]
    positive = [value for value in reach if value]  # the KL is zero before the conversion
    y_axis = axis("", positive if axis is wide_axis and positive else reach)
    chart = Chart(x_axis, y_axis)
    for contender, found in curves:
        look = contender.look
        named = [(across.scale * x, point) for x, point in found.items()]
        titles = [f"{contender.label}, {across.name} {x:g}: {write(point, scale)}" for x, point in named]
        line = [(x, scale * point.mean) for x, point in named]
        seen = [place for place in line if y_axis.low <= place[1] <= y_axis.high] if axis is wide_axis else line
        chart.line(seen, f"curve {look.classes}", "" if across.marked else titles[-1])
        if len(seen) == 1 and not across.marked:  # a line of one point is not seen
            chart.marker(seen[0], look, titles[line.index(seen[0])])
        for place, point, title in zip(line, found.values(), titles, strict=True) if across.marked else ():
            if point.sem:
                chart.line([(place[0], scale * end) for end in ends(point)], f"whisker {look.classes}")
            chart.marker(place, look, title)
    return chart.render(f"{measure.title} against {across.name}")


COSTS = {  # title and unit of each cost; those of the verdict have a limit
    "training_ratio": ("Training", "trainings of the plain network"),
    "answer_passes": ("One answer", "passes of the plain network"),
    "answer_ms": ("One answer, time", "ms a row, many rows at once"),
    "answer_ms_one": ("One answer alone, time", "ms for a single row"),
    "parameter_ratio": ("Parameters", "times the plain network"),
}
PLOTTED = ("training_ratio", "answer_passes", "answer_ms", "parameter_ratio")
SEEN = 0.7  # a limit is plotted only if a cost exceeds this share of it


@dataclass(frozen=True)
class Priced:
    """A contender with its quality, the same as text, its costs by the names of COSTS, and those that do not decide."""

    contender: Contender
    quality: Estimate
    written: str
    costs: Mapping[str, Estimate]
    free: frozenset[str]

    @property
    def label(self) -> str:
        return self.contender.label


def cost_figure(group: Group) -> Figure | None:
    """Plot the deciding figure against the costs of training, of one answer and of parameters."""
    found = _priced(group)
    column = headline(group.task)
    panels = [
        Panel(COSTS[name][0], _scatter(known, name, f"{column.title} ({column.better} is better)"))
        for name in PLOTTED
        if len(known := [each for each in found if name in each.costs]) > 1
    ]
    if not panels:
        return None
    shown = [name for name in COSTS if any(name in each.costs for each in found)]
    rows = [(each.label, each.written, *(write(each.costs.get(name)) for name in shown)) for each in found]
    return Figure(
        key="cost",
        title="Quality against cost",
        caption="Means over seeds; whiskers are standard errors. Costs are on a logarithmic scale; a shaded side is "
        "beyond a limit of the rule that decides. The cost of one answer counts all its passes, one for every draw "
        "or member.",
        panels=panels,
        numbers=Numbers(("Method", column.title, *(", ".join(COSTS[name]) for name in shown)), rows),
        legend=tuple(each.contender for each in found),
    )


def _priced(group: Group) -> list[Priced]:
    """Return the contenders with the deciding figure, and their costs, in the order of the group."""
    estimates = {c.series: e for c, e in zip(group.contenders, estimates_of(group), strict=True)}
    found = []
    for each in sorted(candidates(group), key=lambda candidate: candidate.contender.series):
        measured = estimates[each.contender.series]
        times = {name: measured[key] for name in ("answer_ms", "answer_ms_one") if (key := ("cost", name)) in measured}
        positive = {name: time for name, time in times.items() if time.mean > 0}  # a logarithm needs it
        found.append(Priced(each.contender, each.quality, each.written, {**each.costs, **positive}, each.free))
    return found


def _scatter(found: list[Priced], name: str, quality: str) -> str:
    (title, unit), limit = COSTS[name], LIMITS.get(name)
    reach = [end for each in found for end in ends(each.costs[name])]
    if limit is None:
        x = svg.log_axis(
            unit, [max(end, each.costs[name].mean / 10) for each in found for end in ends(each.costs[name])]
        )
    else:
        x = svg.ratio_axis(unit, [*reach, *([1.1 * limit] if max(reach) > SEEN * limit else [])])
    y = linear_axis(quality, [end for each in found for end in ends(each.quality)])
    chart = Chart(x, y)
    decides = limit is not None and _decides(found, name, limit)
    taken = _plot_limit(chart, limit, unit) if limit is not None and decides and x.high > limit else []
    places = [(each.costs[name].mean, each.quality.mean) for each in found]
    crosses = []
    for each, (cost, good) in zip(found, places, strict=True):
        bars = [(end, good) for end in ends(each.costs[name])], [(cost, end) for end in ends(each.quality)]
        for bar in bars:
            chart.line(bar, f"whisker {each.contender.look.classes}")
        crosses.append(cross(chart, (cost, good), *bars))
    name_points(chart, crosses, [each.label for each in found], taken)
    for each, place in zip(found, places, strict=True):
        chart.marker(place, each.contender.look, f"{each.label}: {each.written} at {write(each.costs[name])} {unit}")
    return chart.render(f"{quality} against {title.lower()}, {unit}")


def _decides(found: list[Priced], name: str, limit: float) -> bool:
    """Return whether the limit of a cost decides for a row beyond it, or no row is beyond it."""
    beyond = [each for each in found if each.costs[name].mean > limit]
    return not beyond or any(name not in each.free for each in beyond)


def _plot_limit(chart: Chart, limit: float, unit: str) -> list[Box]:
    """Shade the area beyond the limit and label it; return the covered boxes."""
    chart.bar((limit, chart.y.low), (chart.x.high, chart.y.high), "dear", f"more than {limit:g} {unit}")
    chart.line([(limit, chart.y.low), (limit, chart.y.high)], "diagonal", f"the limit: {limit:g} {unit}")
    (right, foot), (_, top) = chart.at(limit, chart.y.low), chart.at(limit, chart.y.high)
    name = f"limit {limit:g}"
    chart.text((right - 4, foot - 4), name, "end", "note")
    return [(right - 4 - LETTER * len(name), foot - 4 - LINE, right, foot), (right - 1, top, right + 1, foot)]
