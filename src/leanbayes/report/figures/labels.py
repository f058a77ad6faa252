"""Names next to the points of a chart, where they cover no marker, no whisker and no other name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from leanbayes.report.svg import Chart, Point

LETTER = 6.4  # pixels, about the width of a letter of a label
LINE = 11.0
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


def cross(chart: Chart, point: Point, flat: Sequence[Point], upright: Sequence[Point]) -> Cross:
    """Return a point of a chart with its whiskers, in pixels."""
    boxes = (_around([chart.at(*end) for end in whisker], 2) for whisker in (flat, upright))
    return Cross(chart.at(*point), *boxes)


def name_points(chart: Chart, crosses: list[Cross], names: list[str], covered: list[Box]) -> None:
    """Write the names that fit; the legend has the others."""
    size = chart.size
    taken = [box for cross in crosses for box in (_around([cross.centre], 5), cross.flat, cross.upright)] + covered
    for each, name in zip(crosses, names, strict=True):
        wide = LETTER * len(name)
        for x, y, anchor in each.places():
            left = x - (wide if anchor == "end" else 0)
            box = (left, y - LINE, left + wide, y + 2)
            inside = chart.left <= left and box[2] <= size.width and size.top <= box[3] <= size.height - size.bottom
            if inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                chart.text((x, y), name, anchor)
                break


def _around(points: list[Point], margin: float) -> Box:
    across, down = zip(*points, strict=True)
    return min(across) - margin, min(down) - margin, max(across) + margin, max(down) + margin


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
