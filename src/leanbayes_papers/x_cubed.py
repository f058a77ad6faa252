"""The regression y = x^3 with networks of one to five hidden layers: figure 1 of the implicit-nodes paper, both rows.

30 points, x uniform on [-4, 4], noise of standard deviation 3, layers of 256 ReLU units. `examples/x_cubed.py` shows
the row of implicit nodes in more detail; here mean field stands above it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from leanbayes.core.conversion import convert
from leanbayes.core.predictor import predict
from leanbayes.distributions.likelihoods import Gaussian
from leanbayes.methods._base import Method
from leanbayes.methods.implicit import ImplicitNodes
from leanbayes.methods.mean_field import MeanField
from leanbayes.models import MLP
from leanbayes.training import Recipe
from leanbayes.training.fit import fit
from leanbayes_papers.study import Case, new_figure, Numbers, save_figure

POINTS, EDGE, NOISE, WIDTH = 30, 4.0, 3.0, 256
X_UNIT, Y_UNIT = EDGE / 3**0.5, EDGE**3 / 7**0.5
"""Standard deviations of x and of x^3 on [-4, 4]."""

METHODS: dict[str, Method] = {
    "mean field": MeanField(prior_std=1.0, init_std=0.01),
    "implicit nodes": ImplicitNodes(components=8, prior_std=0.3, init_spread=0.75, init_std=0.05),
}
DEPTHS = {"quick": (1, 3), "short": (1, 2, 3, 4, 5), "full": (1, 2, 3, 4, 5)}
STEPS = {"quick": 300, "short": 1200, "full": 4000}


def regress(case: Case) -> Numbers:
    """Fit both methods at every depth to the data of the first seed."""
    seed, grid = case.seeds[0], torch.linspace(-6, 6, 121)[:, None]
    x, y = points(seed)
    rows = [
        {"method": name, "depth": depth} | fitted(method, depth, (x, y), grid, STEPS[case.budget], seed=seed)
        for name, method in METHODS.items()
        for depth in DEPTHS[case.budget]
    ]
    return {"x": _list(x), "y": _list(y), "grid": _list(grid), "rows": rows}


def points(seed: int) -> tuple[Tensor, Tensor]:
    """Draw the data of a seed: x (30, 1) and y = x^3 + noise (30, 1)."""
    generator = torch.Generator().manual_seed(seed)
    x = (2 * torch.rand(POINTS, 1, generator=generator, device=generator.device) - 1) * EDGE
    return x, x**3 + NOISE * torch.randn(POINTS, 1, generator=generator, device=generator.device)


def fitted(
    method: Method, depth: int, data: tuple[Tensor, Tensor], grid: Tensor, steps: int, *, seed: int = 0
) -> Numbers:
    """Fit one network; return its curve with its epistemic standard deviation, and two figures.

    `rmse` is the distance of the mean from x^3 between the edges of the data; `inside` is the spread there, `outside`
    the spread beyond |x| = 5, where a network that knows what it does not know has a larger one.
    """
    x, y = data
    start = 100 * seed + depth
    likelihood = Gaussian(std=NOISE / Y_UNIT)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(start)
        model = convert(MLP(1, 1, hidden=(WIDTH,) * depth), method)
        recipe = Recipe(
            epochs=steps,
            batch_size=len(x),
            optimizer="adam",
            lr=1e-3,
            posterior_lr=1e-2,
            weight_decay=0.0,
            tile=True,
            accelerator="cpu",
            seed=start,
        )
        fit(model, (x / X_UNIT, y / Y_UNIT), recipe, likelihood=likelihood, progress=False)
    p = predict(model, grid / X_UNIT, likelihood, samples=64)
    mean, spread = p.mean * Y_UNIT, p.epistemic.sqrt() * Y_UNIT
    inside, outside = grid.abs() <= EDGE, grid.abs() > 5
    return {
        "mean": _list(mean),
        "spread": _list(spread),
        "rmse": _root_mean_square((mean - grid**3)[inside]),
        "inside": _root_mean_square(spread[inside]),
        "outside": _root_mean_square(spread[outside]),
    }


def say_regression(numbers: Numbers) -> list[str]:
    """Tell fit and spread of every network."""
    return [
        f"{row['method']}, {row['depth']} hidden: RMSE to x^3 {row['rmse']:.2f} (a constant has {Y_UNIT:.1f}), spread "
        f"{row['inside']:.2f} among the data, {row['outside']:.2f} beyond them"
        for row in numbers["rows"]
    ]


def draw_regression(numbers: Numbers, path: Path) -> None:
    """Draw the data and every prediction with ±2 standard deviations, methods below each other, depths side by side."""
    methods = list(dict.fromkeys(row["method"] for row in numbers["rows"]))
    depths = list(dict.fromkeys(row["depth"] for row in numbers["rows"]))
    figure = new_figure(2.8 * len(depths), 2.8 * len(methods))
    axes = figure.subplots(len(methods), len(depths), sharex=True, sharey=True, squeeze=False)
    for row in numbers["rows"]:
        axis = axes[methods.index(row["method"]), depths.index(row["depth"])]
        mean, spread = torch.tensor(row["mean"]), torch.tensor(row["spread"])
        axis.fill_between(numbers["grid"], mean - 2 * spread, mean + 2 * spread, color="#6fa8dc", lw=0)
        axis.plot(numbers["grid"], mean, color="navy")
        axis.plot(numbers["x"], numbers["y"], "o", color="red", ms=3)
        axis.set(title=f"{row['method']}, {row['depth']} hidden", xlim=(-6, 6), ylim=(-170, 170))
    save_figure(figure, path)


def _list(values: Tensor) -> list[float]:
    return [round(value, 6) for value in values.flatten().tolist()]


def _root_mean_square(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())
