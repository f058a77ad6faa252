"""`Figure`: one or several small charts, a legend, and the same numbers as a table."""

from __future__ import annotations

from dataclasses import dataclass

from leanbayes.evaluation.statistics import Estimate
from leanbayes.report.load import Contender


@dataclass(frozen=True)
class Panel:
    """One chart with its title, a note next to it, and its contender where it is about one."""

    title: str
    svg: str
    note: str = ""
    contender: Contender | None = None


@dataclass(frozen=True)
class Numbers:
    """What a figure shows, as a table."""

    head: tuple[str, ...]
    rows: list[tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure.

    Attributes:
        key: its name in the page.
        title: its title.
        caption: how to read it, in a sentence or two.
        panels: its charts.
        numbers: the same as a table.
        small: whether the charts are small multiples, one for every contender.
        legend: the contenders, where a chart shows several.
        styles: class and name of every line style, where a chart shows several data sets.
    """

    key: str
    title: str
    caption: str
    panels: list[Panel]
    numbers: Numbers
    small: bool = False
    legend: tuple[Contender, ...] = ()
    styles: tuple[tuple[str, str], ...] = ()


def write(found: Estimate | None, scale: float = 1.0) -> str:
    """Write an estimate to four significant digits, with its standard error where there is one."""
    if found is None:
        return ""
    mean = f"{found.mean * scale:z.4g}"
    return mean if found.sem is None else f"{mean} ± {found.sem * scale:.2g}"


def ends(found: Estimate) -> tuple[float, float]:
    """Return the mean less and plus one standard error."""
    return found.mean - (found.sem or 0.0), found.mean + (found.sem or 0.0)
