"""Draw the two charts of docs/results/README.md and of the README from the figures of both rulers.

    python -m tools.results_charts          write docs/results/charts/worth.svg and price.svg

`worth.svg`: calibrated NLL of ensembles of plain networks by their number, and each method at its own. `price.svg`: NLL
and calibrated NLL of WRN-28-10 over the price of a training. The numbers drawn are also in the description of each
file, so that a test can compare them with the results.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from leanbayes.runtime._files import write_whole

RESULTS = Path(__file__).parent.parent / "docs" / "results"
NETS = {"wrn-16-4": ("ruler", "WRN-16-4"), "wrn-28-10": ("wrn28", "WRN-28-10")}
COLOURS = {"plain": "#5b6573", "implicit": "#0072b2", "rank1": "#d55e00", "batch_ensemble": "#009e73"}
MARKS = {"plain": "o", "implicit": "s", "rank1": "^", "batch_ensemble": "D"}
NAMES = {"implicit": "ImplicitNodes", "rank1": "Rank1", "batch_ensemble": "BatchEnsemble"}
PANELS = {"nll": "NLL", "cnll": "calibrated NLL"}
Point = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw both charts."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(
        arguments
    )
    for name, (points, draw) in {"worth": (worth(), draw_worth), "price": (price(), draw_price)}.items():
        save(draw(points), RESULTS / "charts" / f"{name}.svg", points)


def worth() -> list[Point]:
    """Return the points of the first chart: calibrated NLL by number of networks, and of each method."""
    found: list[Point] = []
    for net, (folder, _) in NETS.items():
        ruler = _read(folder, "ruler")
        curve = next(each for each in ruler["curves"] if each["net"] == net)["curve"]
        for row in curve:
            error = row["cnll"]["se_networks"]
            found.append(_point(net, "plain", row["networks"], row["cnll"]["mean"], error, row["subsets"]))
        for method in ruler["methods"]:
            both = method["parts"]["both"]
            values = [figures["cnll"] for figures in both["by_seed"].values()]
            found.append(_point(net, method["method"], both["networks"], *_mean_error(values), len(values)))
    return found


def price() -> list[Point]:
    """Return the points of the second chart: NLL and calibrated NLL of WRN-28-10 by the price of a training."""
    ruler, rows = _read("wrn28", "ruler"), {row["method"]: row for row in _read("wrn28", "price")["rows"][:-1]}
    floor = _read("wrn28", "floor")["rows"]
    (when,) = {(row["epochs"], row["convert_at_epoch"]) for row in floor if row["method"] != "plain"}
    epochs, before = when
    found = []
    for figure in PANELS:
        for row in ruler["curves"][0]["curve"]:
            each = row[figure]
            point = _point("wrn-28-10", "plain", row["networks"], each["mean"], each["se_networks"], row["subsets"])
            found.append(point | {"figure": figure})
        for method in ruler["methods"]:
            name = method["method"]
            values = [figures[figure] for figures in method["parts"]["both"]["by_seed"].values()]
            whole = (before + (epochs - before) * rows[name]["ratio"]) / epochs
            point = _point("wrn-28-10", name, whole, *_mean_error(values), len(values))
            found.append(point | {"figure": figure})
    return found


def draw_worth(points: Sequence[Point]) -> Any:
    """Return the first chart, a panel for each network."""
    figure = _figure(9.0, 3.6)
    axes = figure.subplots(1, len(NETS))
    for axis, (net, (_, title)) in zip(axes, NETS.items(), strict=True):
        own = [point for point in points if point["net"] == net]
        _plain(axis, own)
        for point in own:
            if point["method"] != "plain":
                axis.axhline(point["y"], color=COLOURS[point["method"]], linewidth=0.6, linestyle=":")
        _methods(axis, own)
        largest = max(point["x"] for point in own)
        axis.set(title=f"CIFAR-10, {title}", xlabel="networks", xlim=(0.7, largest + 0.3))
        axis.set_xticks(range(1, int(largest) + 1))
        axis.legend(fontsize=8, frameon=False)
    axes[0].set_ylabel("calibrated NLL (less is better)")
    return figure


def draw_price(points: Sequence[Point]) -> Any:
    """Return the second chart, a panel for NLL and one for calibrated NLL."""
    figure = _figure(9.0, 3.6)
    axes = figure.subplots(1, len(PANELS))
    for axis, (name, title) in zip(axes, PANELS.items(), strict=True):
        own = [point for point in points if point["figure"] == name]
        _plain(axis, own)
        _methods(axis, own)
        axis.set(title=f"CIFAR-10, WRN-28-10: {title}", xlabel="price of a training, plain = 1", ylabel=title)
        axis.set_xticks(range(1, 5))
        axis.legend(fontsize=8, frameon=False)
    return figure


def save(figure: Any, path: Path, points: Sequence[Point]) -> None:
    """Write a chart as SVG with its points as description; the same points give the same bytes."""
    import matplotlib

    metadata = {"Date": None, "Description": json.dumps(points)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "leanbayes", "svg.fonttype": "path"}):
        write_whole(path, lambda file: figure.savefig(file, format="svg", bbox_inches="tight", metadata=metadata))


def _plain(axis: Any, points: Sequence[Point]) -> None:
    """Draw ensembles of plain networks; between two of them the line is a + b / K, as in `ensemble_equivalent`."""
    own = [point for point in points if point["method"] == "plain"]
    for left, right in pairwise(own):
        shares = [step / 20 for step in range(21)]
        sizes = [1 / ((1 - share) / left["x"] + share / right["x"]) for share in shares]
        values = [(1 - share) * left["y"] + share * right["y"] for share in shares]
        axis.plot(sizes, values, color=COLOURS["plain"], linewidth=1)
    axis.errorbar(
        [point["x"] for point in own],
        [point["y"] for point in own],
        yerr=[point["error"] or 0.0 for point in own],
        color=COLOURS["plain"],
        marker=MARKS["plain"],
        markersize=4,
        capsize=2,
        linestyle="",
        label="ensembles of plain networks",
    )


def _methods(axis: Any, points: Sequence[Point]) -> None:
    for point in points:
        name = point["method"]
        if name == "plain":
            continue
        seeds = "one seed" if point["count"] == 1 else f"{point['count']} seeds"
        axis.errorbar(
            point["x"],
            point["y"],
            yerr=point["error"] or 0.0,
            color=COLOURS[name],
            marker=MARKS[name],
            markersize=6,
            capsize=3,
            linestyle="",
            label=f"{NAMES[name]}, {seeds}",
        )


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _point(net: str, method: str, x: float, y: float, error: float | None, count: int) -> Point:
    rounded = None if error is None else round(error, 6)
    return {"net": net, "method": method, "x": round(x, 4), "y": round(y, 6), "error": rounded, "count": count}


def _mean_error(values: Sequence[float]) -> tuple[float, float | None]:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return statistics.fmean(values), error


def _read(folder: str, name: str) -> Mapping[str, Any]:
    return dict(json.loads((RESULTS / folder / f"{name}.json").read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
