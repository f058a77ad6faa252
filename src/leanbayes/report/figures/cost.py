"""Quality against cost: is the gain worth its price?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from leanbayes.report.figures.figure import ends, Figure, Numbers, Panel, write
from leanbayes.report.figures.svg import Chart, linear_axis, Point, ratio_axis, series_class
from leanbayes.report.load import Group
from leanbayes.report.verdict import AFFORDABLE, Candidate, candidates, COSTS, headline

TITLES = {"training_ratio": "Training", "predict_ratio": "Prediction", "parameter_ratio": "Parameters"}
LETTER = 6.4  # pixels, about the width of one at the size of labels
LINE = 11.0
Box = tuple[float, float, float, float]


class Cross(NamedTuple):
    """A point with the boxes of its whiskers, in pixels."""

    centre: Point
    flat: Box
    upright: Box

    def places(self) -> Iterator[tuple[float, float, str]]:
        """Suggest where its name may stand: at an end of the flat whisker, above or below it."""
        x, y = self.centre
        yield max(x + 8, self.flat[2] + 3), y + 4, "start"
        yield min(x - 8, self.flat[0] - 3), y + 4, "end"
        for drop in (-8, 16):
            yield x + 5, y + drop, "start"
            yield x - 5, y + drop, "end"


def cost_figure(group: Group) -> Figure | None:
    """Draw the deciding figure against the cost of training, prediction and parameters."""
    found = sorted(candidates(group), key=lambda candidate: candidate.contender.series)
    column = headline(group.task)
    panels = [
        Panel(TITLES[name], _scatter(known, name, f"{column.title} ({column.better} is better)"))
        for name in COSTS
        if len(known := [candidate for candidate in found if name in candidate.ratios]) > 1
    ]
    if not panels:
        return None
    rows = [(c.label, c.written, *(write(c.ratios.get(name)) for name in COSTS)) for c in found]
    return Figure(
        key="cost",
        title="Quality against cost",
        caption="Means over seeds; whiskers are standard errors. Costs are in plain networks, on a logarithmic scale; "
        f"the shaded side costs more than {AFFORDABLE:g}. Predictions are compared pass for pass: an answer takes as "
        "many passes as it has draws.",
        panels=panels,
        numbers=Numbers(("Method", column.title, *(TITLES[name] for name in COSTS)), rows),
        legend=tuple(candidate.contender for candidate in found),
    )


def _scatter(found: list[Candidate], name: str, quality: str) -> str:
    """Draw one cost."""
    x = ratio_axis("times the plain network", [end for c in found for end in ends(c.ratios[name])])
    y = linear_axis(quality, [end for c in found for end in ends(c.quality)])
    chart = Chart(x, y)
    if x.high > AFFORDABLE:
        chart.bar((AFFORDABLE, y.low), (x.high, y.high), "dear", f"more than {AFFORDABLE:g} times the plain network")
    places = [(c.ratios[name].mean, c.quality.mean) for c in found]
    crosses = []
    for c, (cost, good) in zip(found, places, strict=True):
        bars = [(end, good) for end in ends(c.ratios[name])], [(cost, end) for end in ends(c.quality)]
        for bar in bars:
            chart.line(bar, f"whisker {series_class(c.contender.series)}")
        crosses.append(Cross(chart.at(cost, good), *(_around([chart.at(*end) for end in bar], 2) for bar in bars)))
    _name_points(chart, crosses, [c.contender.name for c in found])
    for c, place in zip(found, places, strict=True):
        title = f"{c.label}: {c.written} at {write(c.ratios[name])} times the plain network"
        chart.marker(place, c.contender.series, title)
    return chart.render(f"{quality} against {TITLES[name].lower()} in times the plain network")


def _name_points(chart: Chart, crosses: list[Cross], names: list[str]) -> None:
    """Write names where they cover neither markers nor whiskers nor each other; the legend names the others."""
    size = chart.size
    taken = [box for cross in crosses for box in (_around([cross.centre], 5), cross.flat, cross.upright)]
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
    """Return the box around points: left, top, right, bottom."""
    across, down = zip(*points, strict=True)
    return min(across) - margin, min(down) - margin, max(across) + margin, max(down) + margin


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
