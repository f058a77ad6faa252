"""Figures and small charts as SVG text: axes, lines, marks, bars. The page's style sheet sets the colours."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from leanbayes.evaluation.statistics import Estimate
from leanbayes.report.load import Contender, Look

Point = tuple[float, float]
DIGIT = 6.6  # pixels, at least the width of a character on an axis
TICK_GAP = 5  # pixels between a number and its axis
NAME_END = 20  # pixels from the edge to where the upright name of an axis is clear of the numbers


@dataclass(frozen=True)
class Axis:
    """A range of values with ticks; `bend` maps values to a linear scale."""

    label: str
    low: float
    high: float
    ticks: tuple[float, ...]
    bend: Callable[[float], float] = field(default=lambda value: value)

    def share(self, value: float) -> float:
        """Return the position of a value: 0 at the low end, 1 at the high end."""
        low, high = self.bend(self.low), self.bend(self.high)
        return (self.bend(min(max(value, self.low), self.high)) - low) / (high - low)


@dataclass(frozen=True)
class Size:
    """Size of a chart and its smallest margins, in CSS pixels."""

    width: int
    height: int
    left: int
    bottom: int
    top: int = 8
    right: int = 10


LARGE = Size(width=380, height=250, left=48, bottom=36)
SMALL = Size(width=200, height=170, left=30, bottom=32)


def linear_axis(label: str, values: Iterable[float], *, wanted: int = 5) -> Axis:
    """Return an axis around the values that ends at round numbers."""
    known = list(values)
    low, high = min(known), max(known)
    if high - low < 1e-9 * max(abs(high), 1.0):
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    step = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(step))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if step <= m * power * (1 + 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(round(i * step, 12) for i in range(first, last + 1))
    return Axis(label, ticks[0], ticks[-1], ticks)


def ratio_axis(label: str, values: Iterable[float]) -> Axis:
    """Return a logarithmic axis for costs relative to the plain network, which is 1."""
    known = [1.0, 1.25, *(max(value, LEAST) for value in values)]
    margin = max((max(known) / min(known)) ** 0.05, 1.03)
    low, high = min(known) / margin, max(known) * margin
    steps = next(steps for most, steps in LADDERS if high / low <= most)
    ticks: list[float] = []
    for tick in (t for t in steps if low <= t <= high):
        if not ticks or math.log(tick / ticks[-1]) > 0.11 * math.log(high / low):
            ticks.append(tick)
    return Axis(label, low, high, tuple(ticks), math.log)


LEAST = 1e-3  # smallest cost on an axis: a standard error may reach zero, which has no logarithm
LADDERS = (  # ticks of an axis, by the largest ratio of its ends
    (5, (0.2, 0.3, 0.5, 0.7, 1, 1.2, 1.5, 2, 3, 4, 5)),
    (200, tuple(2.0**power for power in range(-10, 10))),
    (math.inf, tuple(10.0**power for power in range(-3, 103))),
)


def log_axis(label: str, values: Iterable[float], *, wanted: int = 6) -> Axis:
    """Return a logarithmic axis around positive values, with ticks at 1, 2, 5 or at powers of ten."""
    known = list(values)
    margin = max((max(known) / min(known)) ** 0.04, 1.01)
    low, high = min(known) / margin, max(known) * margin
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [m * 10.0**p for p in powers for m in (1, 2, 5) if low <= m * 10.0**p <= high]
    if len(ticks) > wanted:
        tens = [10.0**p for p in powers if low <= 10.0**p <= high]
        ticks = tens[:: math.ceil(len(tens) / wanted)]
    return Axis(label, low, high, tuple(float(f"{tick:.6g}") for tick in ticks), math.log)


def wide_axis(label: str, values: Iterable[float]) -> Axis:
    """Return an axis on which no large value flattens the others.

    Positive values of more than a factor of 3 get a logarithmic axis. If some are not positive and one is far larger
    than the median size m, the axis bends by asinh(v / m), which is linear near zero and logarithmic far from it.
    """
    known = list(values)
    if min(known) > 0 and max(known) / min(known) > WIDE:
        return log_axis(label, known)
    sizes = sorted(abs(value) for value in known)
    middle = sizes[len(sizes) // 2]
    if min(known) > 0 or not middle or sizes[-1] < FAR * middle:
        return linear_axis(label, known)
    tens = [10.0**p for p in range(math.ceil(math.log10(middle)), math.ceil(math.log10(sizes[-1])) + 1)]
    few = tens[:: math.ceil(len(tens) / 4)]
    low, high = min(known), max(known)
    ticks = tuple(t for t in (*(-t for t in reversed(few)), 0.0, *few) if low <= t <= high)
    return Axis(label, low, high, ticks, lambda value: math.asinh(value / middle))


WIDE = 3.0  # ratio of ends from which on an axis is logarithmic
FAR = 20.0  # size of a far value, in median sizes


def write_tick(value: float) -> str:
    """Write a number on an axis in few characters."""
    if 0 < abs(value) < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-")
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * size:
            return f"{value / size:g}{letter}"
    return f"{value:.6g}"


@dataclass(frozen=True)
class Chart:
    """One chart; later marks cover earlier ones."""

    x: Axis
    y: Axis
    size: Size = LARGE
    marks: list[str] = field(default_factory=list)

    @cached_property
    def left(self) -> float:
        """The left margin; it grows with the widest number on the axis."""
        widest = DIGIT * max((len(write_tick(tick)) for tick in self.y.ticks), default=0)
        return max(self.size.left, widest + TICK_GAP + (NAME_END if self.y.label else 0))

    def at(self, x: float, y: float) -> Point:
        s = self.size
        across, up = s.width - self.left - s.right, s.height - s.top - s.bottom
        return self.left + across * self.x.share(x), s.top + up * (1 - self.y.share(y))

    def line(self, points: Sequence[Point], classes: str, title: str = "") -> None:
        self._add("polyline", classes, title, points=" ".join(_pair(self.at(*point)) for point in points))

    def area(self, points: Sequence[Point], classes: str, title: str = "") -> None:
        self._add("polygon", classes, title, points=" ".join(_pair(self.at(*point)) for point in points))

    def bar(self, low: Point, high: Point, classes: str, title: str = "") -> None:
        (x0, y1), (x1, y0) = self.at(*low), self.at(*high)
        self._add("rect", classes, title, x=_short(x0), y=_short(y0), width=_short(x1 - x0), height=_short(y1 - y0))

    def strokes(self, pairs: Sequence[tuple[Point, Point]], classes: str) -> None:
        """Add many straight strokes as one mark; a stroke without length is a dot."""
        ends = ((self.at(*start), self.at(*stop)) for start, stop in pairs)
        self._add("path", classes, "", d="".join(f"M{_pair(start)}L{_pair(stop)}" for start, stop in ends))

    def marker(self, point: Point, look: Look, title: str, kind: str = "") -> None:
        classes = f"marker {look.classes} {kind}".rstrip()
        place = f"translate({_pair(self.at(*point))})"
        self._add("path", classes, title, transform=place, d=SHAPES[look.shape])

    def text(self, pixel: Point, text: str, anchor: str, kind: str = "label") -> None:
        place = f'x="{_short(pixel[0])}" y="{_short(pixel[1])}" text-anchor="{anchor}"'
        self.marks.append(f'<text class="{kind}" {place}>{html.escape(text)}</text>')

    def slanted(self, pixel: Point, text: str, kind: str) -> None:
        """Write a text that ends at a place and rises to it."""
        place = f"translate({_pair(pixel)}) rotate(-40)"
        self.marks.append(f'<text class="{kind}" transform="{place}" text-anchor="end">{html.escape(text)}</text>')

    def render(self, description: str) -> str:
        """Return the chart as an SVG element that reads out as `description`."""
        s = self.size
        return (
            f'<svg viewBox="0 0 {s.width} {s.height}" role="img" aria-label="{html.escape(description)}">'
            f"{self._axes()}{''.join(self.marks)}</svg>"
        )

    def _add(self, tag: str, classes: str, title: str, **attributes: str) -> None:
        written = "".join(f' {name}="{value}"' for name, value in attributes.items())
        inside = f"<title>{html.escape(title)}</title>" if title else ""
        self.marks.append(f'<{tag} class="{classes}"{written}>{inside}</{tag}>')

    def _axes(self) -> str:
        s, left, parts = self.size, _short(self.left), []
        for tick in self.y.ticks:
            y = self.at(self.x.low, tick)[1]
            parts.append(f'<path class="grid" d="M{left} {_short(y)}H{s.width - s.right}"/>')
            parts.append(_tick_text(self.left - TICK_GAP, y + 3.5, "end", tick))
        for tick in self.x.ticks:
            x = self.at(tick, self.y.low)[0]
            parts.append(f'<path class="tick" d="M{_short(x)} {s.height - s.bottom}v4"/>')
            parts.append(_tick_text(x, s.height - s.bottom + 15, "middle", tick))
        parts.append(f'<path class="axis" d="M{left} {s.height - s.bottom}H{s.width - s.right}"/>')
        middle = (self.left + s.width - s.right) / 2
        parts.append(f'<text class="name" x="{_short(middle)}" y="{s.height - 4}">{html.escape(self.x.label)}</text>')
        if self.y.label:
            place = f"translate(11 {_short((s.top + s.height - s.bottom) / 2)}) rotate(-90)"
            parts.append(f'<text class="name" transform="{place}">{html.escape(self.y.label)}</text>')
        return "".join(parts)


SHAPES = (
    "M-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0 -7.2 0z",
    "M-3.3 -3.3h6.6v6.6h-6.6z",
    "M0 -4.4L4.2 3H-4.2z",
    "M0 -4.7L4.7 0L0 4.7L-4.7 0z",
    "M0 4.4L4.2 -3H-4.2z",
    "M-1.5 -4.2h3v2.7h2.7v3h-2.7v2.7h-3v-2.7h-2.7v-3h2.7z",
    "M-4.1 -2L-2 -4.1L0 -2.1L2 -4.1L4.1 -2L2.1 0L4.1 2L2 4.1L0 2.1L-2 4.1L-4.1 2L-2.1 0z",
    "M0 -5L1.5 -1.6L4.8 -1.5L2.2 0.8L3 4.2L0 2.3L-3 4.2L-2.2 0.8L-4.8 -1.5L-1.5 -1.6z",
)


def key_symbol(look: Look) -> str:
    """Return the marker of a contender alone, for legends and tables."""
    return (
        '<svg class="key" viewBox="-6 -6 12 12" aria-hidden="true">'
        f'<path class="marker {look.classes}" d="{SHAPES[look.shape]}"/></svg>'
    )


def _tick_text(x: float, y: float, anchor: str, value: float) -> str:
    return f'<text class="number" x="{_short(x)}" y="{_short(y)}" text-anchor="{anchor}">{write_tick(value)}</text>'


def _short(value: float) -> str:
    return f"{round(value, 1):g}"


def _pair(pixel: Point) -> str:
    return f"{_short(pixel[0])},{_short(pixel[1])}"


@dataclass(frozen=True)
class Panel:
    """One chart with its title, a note, and its contender if it shows only one."""

    title: str
    svg: str
    note: str = ""
    contender: Contender | None = None


@dataclass(frozen=True)
class Numbers:
    """The numbers of a figure, as a table."""

    head: tuple[str, ...]
    rows: list[tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Charts, a legend, and their numbers as a table.

    Attributes:
        key: its id in the page.
        title: its title.
        caption: how to read it, in a sentence or two.
        panels: its charts.
        numbers: the same numbers as a table.
        small: whether the charts are small multiples, one for each contender.
        legend: the contenders, if a chart shows several.
        styles: class and name of each line style, if a chart shows several data sets.
    """

    key: str
    title: str
    caption: str
    panels: list[Panel]
    numbers: Numbers
    small: bool = False
    legend: tuple[Contender, ...] = ()
    styles: tuple[tuple[str, str], ...] = ()

    @property
    def columns(self) -> int:
        """The most charts side by side: rows are as equal as can be, so that eight charts give 4 + 4."""
        rows = math.ceil(len(self.panels) / (6 if self.small else 3))
        return math.ceil(len(self.panels) / rows)


def write(found: Estimate | None, scale: float = 1.0) -> str:
    """Write an estimate to four significant digits, with its standard error if known."""
    if found is None:
        return ""
    mean = f"{found.mean * scale:z.4g}"
    return mean if found.sem is None else f"{mean} ± {found.sem * scale:.2g}"


def ends(found: Estimate) -> tuple[float, float]:
    """Return the mean minus and plus one standard error."""
    return found.mean - (found.sem or 0.0), found.mean + (found.sem or 0.0)
