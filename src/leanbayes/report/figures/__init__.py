"""Figures of a group as inline SVG. `figures` lists them in the order of the page; one without numbers is left out."""

from __future__ import annotations

from leanbayes.report.figures.answers import confusion_figure, ood_figure, predicted_figure
from leanbayes.report.figures.curves import cost_figure, selective_figure, severity_figure, training_figure
from leanbayes.report.figures.distributions import histogram_figure, reliability_figure
from leanbayes.report.load import Contender, Group
from leanbayes.report.svg import Figure

__all__ = ["figures"]


def figures(group: Group, preferred: Contender | None = None) -> list[Figure]:
    """Return the figures of a group, in the order of the page.

    `preferred` is the contender whose confusion matrix is shown next to that of the plain network.
    """
    plotted = (
        cost_figure(group),
        reliability_figure(group),
        selective_figure(group),
        predicted_figure(group),
        confusion_figure(group, preferred),
        severity_figure(group),
        ood_figure(group),
        histogram_figure(group, "total"),
        histogram_figure(group, "epistemic"),
        training_figure(group),
    )
    return [figure for figure in plotted if figure is not None]
