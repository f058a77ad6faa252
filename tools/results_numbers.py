"""Numbers of docs/results that no file holds as such: means over corruptions, counts of sets, counts of parameters."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import leanbayes as lb
from leanbayes.shift import corrupted_means, mean_corruption_error, relative_mean_corruption_error
from leanbayes_papers.patch.overhead import counted, METHODS, NETWORKS
from leanbayes_papers.patch.uci import against, COLUMNS, records_of

RESULTS = Path(__file__).parent.parent / "docs" / "results"
IMAGES = {"vgg16": (10, (3, 32, 32)), "wrn-28-10": (10, (3, 32, 32)), "resnet50": (1000, (3, 224, 224))}


@cache
def corrupted() -> dict[str, dict[str, float]]:
    """Return NLL and accuracy over all corruptions, mCE and relative mCE in percent, of every method on CIFAR-10."""
    folder = RESULTS / "cifar10" / "cifar10" / "wrn-16-4"
    shifts = {path.name: _result(path)["metrics"]["shift"] for path in sorted(folder.iterdir())}
    plain = shifts["plain"]
    return {
        name: {
            **corrupted_means(shift),
            "mce": 100 * mean_corruption_error(shift, plain),
            "relative mce": 100 * relative_mean_corruption_error(shift, plain),
        }
        for name, shift in shifts.items()
    }


@cache
def uci() -> dict[str, int]:
    """Return on how many sets neither RMSE nor log density of a method is worse than printed, and the sets."""
    folders = sorted((RESULTS / "patch-uci").iterdir())
    found = {"sets": len(folders)}
    for method in ("ECMP", "EMP", "Dropout", "Ensemble"):
        cells = [records_of(json.loads((each / f"{method.lower()}.json").read_text())) for each in folders]
        found[method] = sum(all(against(column, cell) != "worse" for column in COLUMNS) for cell in cells)
    return found


@cache
def counted_parameters() -> dict[str, dict[str, float]]:
    """Return the nodes of networks with implicit nodes, and parameters and overheads in percent of patched ones."""
    patched = {net: float(counted(net, METHODS["EMP"])["parameters"]) for net in NETWORKS}
    plain = {net: float(counted(net, METHODS["Dropout"])["parameters"]) for net in NETWORKS}
    return {
        "nodes": {net: float(_nodes(net)) for net in IMAGES},
        "parameters": patched,
        "overhead": {net: 100 * (patched[net] / plain[net] - 1) for net in NETWORKS},
    }


def correlation() -> dict[str, float]:
    """Return the correlation of entropies at a width with those at full width, by width (Figure 5 of nested)."""
    found = json.loads((RESULTS / "nested" / "correlation-cifar10.json").read_text(encoding="utf-8"))["numbers"]
    return {f"{width:g}": value for width, value in zip(found["widths"], found["matrix"][-1], strict=True)}


DERIVED: dict[str, Callable[[], Any]] = {
    "corrupted": corrupted,
    "uci": uci,
    "counted": counted_parameters,
    "correlation": correlation,
}
"""First keys of references that name a function here."""


def _nodes(net: str) -> int:
    outputs, shape = IMAGES[net]
    method = lb.ImplicitNodes(components=2)
    found = lb.summary(lb.convert(lb.models.build(net, num_outputs=outputs, input_shape=shape), method, copy=False))
    return found.extra_parameters // 4  # mean and deviation in each of two components


def _result(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("seed*/result.json")
    return dict(json.loads(path.read_text(encoding="utf-8")))
