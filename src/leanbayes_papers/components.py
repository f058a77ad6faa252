"""Where the components of a posterior lie: their weights in the plane of the first two principal components.

Behind figure 2 of the implicit-nodes paper. Component k has weights W_k = U diag(mu_k); the plane is that of the W_k,
and loss and error of plain networks are mapped over it, on training and on test rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn, Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from leanbayes import metrics
from leanbayes.compare.experiment import Experiment
from leanbayes.core.plain import mean, strip
from leanbayes.core.predictor import predict
from leanbayes.runtime.passes import components_of
from leanbayes_papers.study import Case, new_figure, Numbers, save_figure

GRID = {"quick": 7, "short": 17, "full": 25}
LOOKED_AT = 1000
"""Rows of each split on which a point of the plane is evaluated."""

MARGIN = 0.3
"""Share of the width that the map reaches beyond the outermost component."""


class Plane(NamedTuple):
    """The plane of the first two principal components of some points.

    Attributes:
        centre: mean of the points (P,).
        axes: two orthonormal directions (2, P).
        explained: their shares of the variance.
    """

    centre: Tensor
    axes: Tensor
    explained: list[float]

    def coordinates(self, points: Tensor) -> Tensor:
        """Project points (..., P) onto the plane (..., 2)."""
        return (points - self.centre) @ self.axes.T

    def point(self, coordinates: Tensor) -> Tensor:
        """Return the point (P,) of the plane with these coordinates (2,)."""
        return self.centre + coordinates @ self.axes


def plane_of(points: Tensor) -> Plane:
    """Return the plane of the first two principal components of points (K, P), K >= 3."""
    centre = points.mean(0)
    _, sizes, axes = torch.linalg.svd(points - centre, full_matrices=False)
    shares = sizes.square() / sizes.square().sum()
    return Plane(centre, axes[:2], shares[:2].tolist())


def map_components(case: Case) -> Numbers:
    """Map the components of the first seed."""
    model, experiment = case.trained(case.jobs[0])
    shared = strip(model)
    weights = torch.stack([_flat(mean(model, component=k)) for k in range(components_of(model))])
    plane = plane_of(weights)
    dots, star = plane.coordinates(weights), plane.coordinates(_flat(shared))
    ticks = [_ticks(torch.cat([dots[:, axis], star[axis, None]]), GRID[case.budget]) for axis in (0, 1)]
    rows = _rows(experiment)
    maps: dict[str, dict[str, list[list[float]]]] = {part: {"nll": [], "error": []} for part in rows}
    for second in ticks[1]:
        line = [_judge(shared, plane.point(torch.stack([first, second])), rows) for first in ticks[0]]
        for part, measures in maps.items():
            for measure, lines in measures.items():
                lines.append([found[part][measure] for found in line])
    return {
        "components": dots.tolist(),
        "weights": star.tolist(),
        "explained": plane.explained,
        "ticks": [tick.tolist() for tick in ticks],
        "maps": maps,
        "at_components": [_judge(shared, each, rows)["test"] for each in weights],
        "at_weights": _judge(strip(model), None, rows)["test"],
        "at_average": _judged(model, *rows["test"], samples=5 * len(weights)),
    }


def say_map(numbers: Numbers) -> list[str]:
    """Tell the errors of the components, of the shared weights, and of the average of all predictions."""
    errors = [100 * each["error"] for each in numbers["at_components"]]
    share = 100 * sum(numbers["explained"])
    shared, average = (100 * numbers[name]["error"] for name in ("at_weights", "at_average"))
    return [
        f"{len(errors)} components, {share:.0f} % of their variance in the plane; test error of a component "
        f"{min(errors):.2f} to {max(errors):.2f} %, of the shared weights {shared:.2f} %, of the averaged prediction "
        f"{average:.2f} %"
    ]


def draw_map(numbers: Numbers, path: Path) -> None:
    """Draw loss and error over the plane, on training and test rows, with the components and the shared weights."""
    figure = new_figure(15, 3.4)
    panels = [(part, measure) for part in ("train", "test") for measure in ("nll", "error")]
    for axis, (part, measure) in zip(figure.subplots(1, 4), panels, strict=True):
        drawn = axis.contourf(*numbers["ticks"], numbers["maps"][part][measure], levels=16, cmap="viridis")
        figure.colorbar(drawn, ax=axis)
        axis.plot(*zip(*numbers["components"], strict=True), "o", color="orange", label="components")
        axis.plot(*numbers["weights"], "*", color="red", ms=12, label="shared weights")
        axis.set(title=f"{'NLL' if measure == 'nll' else 'error'}, {part}")
    axis.legend(fontsize=7)
    save_figure(figure, path)


def _rows(experiment: Experiment) -> dict[str, tuple[Tensor, Tensor]]:
    _, x, y = experiment.test
    train = experiment.data.train
    some = torch.arange(0, len(train), max(1, len(train) // LOOKED_AT))[:LOOKED_AT]
    known = experiment.data.inputs(train.x[some]), train.y[some]
    return {"train": known, "test": (x[:LOOKED_AT], y[:LOOKED_AT])}


def _judge(
    net: nn.Module, weights: Tensor | None, rows: dict[str, tuple[Tensor, Tensor]]
) -> dict[str, dict[str, float]]:
    """Return NLL and error of a plain network on each set of rows, with these weights in place of its own."""
    if weights is not None:
        vector_to_parameters(weights, net.parameters())
    return {part: _judged(net, x, y, samples=1) for part, (x, y) in rows.items()}


def _judged(model: nn.Module, x: Tensor, y: Tensor, *, samples: int) -> dict[str, float]:
    p = predict(model, x, samples=samples, keep_samples=False).to("cpu")
    return {"nll": float(metrics.nll(p.mean, y)), "error": 1 - float(metrics.accuracy(p.mean, y))}


def _flat(net: nn.Module) -> Tensor:
    return parameters_to_vector(net.parameters()).detach()


def _ticks(values: Tensor, count: int) -> Tensor:
    low, high = values.min(), values.max()
    margin = MARGIN * (high - low)
    return torch.linspace(float(low - margin), float(high + margin), count, device=values.device)
