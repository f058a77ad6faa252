"""Figures of a group as inline SVG; a figure without numbers is left out."""

from __future__ import annotations

from leanbayes.report.figures.cost import cost_figure
from leanbayes.report.figures.curves import severity_figure, training_figure
from leanbayes.report.figures.distributions import histogram_figure, reliability_figure
from leanbayes.report.figures.svg import Figure
from leanbayes.report.load import Group


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
