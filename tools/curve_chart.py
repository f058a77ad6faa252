"""Draw the picture of docs/results/curve.md: NLL of every way to an answer over its price, a panel for each method.

Open marks are without a temperature, filled ones with it. The dotted line is at sixteen draws with all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.results_charts import save

GROUPS = {
    "plain": ("#5b6573", "o", "plain network, ensembles of 2 and 4"),
    "draws": ("#0072b2", "s", "2, 4, 8, 16 draws"),
    "tolerance": ("#56b4e9", "v", "early stopping"),
    "late": ("#009e73", "D", "late layers, 4 and 16 draws"),
    "mean": ("#cc79a7", "P", "mean network"),
    "student": ("#d55e00", "^", "student"),
}
"""Colour, mark and label of each kind of way."""
ALL = "16 draws"


def group(way: str) -> str:
    """Return the kind of a way."""
    first = way.split(" ", maxsplit=1)[0]
    if first in ("plain", "ensemble"):
        return "plain"
    if first in ("mean", "student", "tolerance"):
        return first
    return "draws" if way.endswith(" draws") and first.isdigit() else "late"


def draw(points: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the panels and write them with their points as description."""
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys(point["panel"] for point in points))
    figure = Figure(figsize=(4.5 * len(panels), 4.2), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axis, panel in zip(axes, panels, strict=True):
        _panel(axis, [point for point in points if point["panel"] == panel])
        axis.set(title=panel, xlabel="price of an answer, plain passes", xscale="log")
        axis.set_xticks([1, 2, 4, 8, 16], labels=["1", "2", "4", "8", "16"])
        axis.minorticks_off()
    axes[0].set_ylabel("NLL (less is better); filled: with a temperature")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    save(figure, path, points)


def _panel(axis: Any, points: Sequence[dict[str, Any]]) -> None:
    for point in points:
        if point["way"] == ALL:
            axis.axhline(point["y"], color=GROUPS["draws"][0], linewidth=0.6, linestyle=":")
    for name, (colour, mark, label) in GROUPS.items():
        for side in ("raw", "tempered"):
            own = sorted((p for p in points if group(p["way"]) == name and p["side"] == side), key=lambda p: p["x"])
            axis.errorbar(
                [p["x"] for p in own],
                [p["y"] for p in own],
                yerr=[p["error"] for p in own],
                color=colour,
                marker=mark,
                markersize=5,
                markerfacecolor=colour if side == "tempered" else "white",
                capsize=2,
                linewidth=0.8,
                linestyle="-" if name in ("draws", "plain", "tolerance") else "",
                label=label if side == "tempered" else None,
            )
