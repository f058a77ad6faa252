"""Figure: quality against cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from leanbayes.report.figures.svg import Chart, ends, Figure, linear_axis, Numbers, Panel, Point, ratio_axis, write
from leanbayes.report.load import Group
from leanbayes.report.verdict import Candidate, candidates, headline, LIMITS

TITLES = {"training_ratio": "Training", "answer_passes": "One answer", "parameter_ratio": "Parameters"}
UNITS = {
    "training_ratio": "trainings of the plain network",
    "answer_passes": "passes of the plain network",
    "parameter_ratio": "times the plain network",
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
        Panel(TITLES[name], _scatter(known, name, f"{column.title} ({column.better} is better)"))
        for name in LIMITS
        if len(known := [candidate for candidate in found if name in candidate.costs]) > 1
    ]
    if not panels:
        return None
    rows = [(c.label, c.written, *(write(c.costs.get(name)) for name in LIMITS)) for c in found]
    heads = (f"{TITLES[name]}, {UNITS[name]}" for name in LIMITS)
    return Figure(
        key="cost",
        title="Quality against cost",
        caption="Means over seeds; whiskers are standard errors. Costs are on a logarithmic scale; the shaded side is "
        "beyond the limit of the rule. The cost of one answer counts all its passes, one for every draw or member.",
        panels=panels,
        numbers=Numbers(("Method", column.title, *heads), rows),
        legend=tuple(candidate.contender for candidate in found),
    )


def _scatter(found: list[Candidate], name: str, quality: str) -> str:
    unit, limit = UNITS[name], LIMITS[name]
    reach = [end for c in found for end in ends(c.costs[name])]
    x = ratio_axis(unit, [*reach, *([1.1 * limit] if max(reach) > SEEN * limit else [])])
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
    return chart.render(f"{quality} against {TITLES[name].lower()}, {unit}")


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
