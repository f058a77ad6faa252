"""Quality against the costs of training, of one answer and of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from leanbayes.evaluation.statistics import Estimate
from leanbayes.report import svg
from leanbayes.report.figures.labels import Box, cross, LETTER, LINE, name_points
from leanbayes.report.load import Contender, Group
from leanbayes.report.svg import Chart, ends, Figure, linear_axis, Numbers, Panel, write
from leanbayes.report.table import estimates_of
from leanbayes.report.verdict import candidates, headline, LIMITS

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
    """A contender with its quality, the same as text, and its costs by the names of COSTS."""

    contender: Contender
    quality: Estimate
    written: str
    costs: Mapping[str, Estimate]

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
        caption="Means over seeds; whiskers are standard errors. Costs are on a logarithmic scale; the shaded side is "
        "beyond the limit of the rule. The cost of one answer counts all its passes, one for every draw or member.",
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
        found.append(Priced(each.contender, each.quality, each.written, {**each.costs, **positive}))
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
    taken = _plot_limit(chart, limit, unit) if limit is not None and x.high > limit else []
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


def _plot_limit(chart: Chart, limit: float, unit: str) -> list[Box]:
    """Shade the area beyond the limit and label it; return the covered boxes."""
    chart.bar((limit, chart.y.low), (chart.x.high, chart.y.high), "dear", f"more than {limit:g} {unit}")
    chart.line([(limit, chart.y.low), (limit, chart.y.high)], "diagonal", f"the limit: {limit:g} {unit}")
    (right, foot), (_, top) = chart.at(limit, chart.y.low), chart.at(limit, chart.y.high)
    name = f"limit {limit:g}"
    chart.text((right - 4, foot - 4), name, "end", "note")
    return [(right - 4 - LETTER * len(name), foot - 4 - LINE, right, foot), (right - 1, top, right + 1, foot)]
