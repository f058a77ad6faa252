"""Figure 1 of the implicit-nodes paper: the regression y = x^3 with networks of one to five hidden layers.

30 points, x uniform on [-4, 4], noise of standard deviation 3, layers of 256 ReLU units. `examples/x_cubed.py` shows
the row of implicit nodes in more detail.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

import leanbayes as lb
from leanbayes.methods._base import Method
from leanbayes_papers.harness import Column, Record, Run, Study, Table
from leanbayes_papers.harness.charts import new_figure, save_figure

POINTS, EDGE, NOISE, WIDTH = 30, 4.0, 3.0, 256
X_UNIT, Y_UNIT = EDGE / 3**0.5, EDGE**3 / 7**0.5
"""Standard deviations of x and of x^3 on [-4, 4]."""

METHODS: dict[str, Method] = {
    "mean field": lb.MeanField(prior_std=1.0, init_std=0.01),
    "implicit nodes": lb.ImplicitNodes(components=8, prior_std=0.3, init_spread=0.75, init_std=0.05),
}
DEPTHS = {"quick": (1, 3), "short": (1, 2, 3, 4, 5), "full": (1, 2, 3, 4, 5)}
STEPS = {"quick": 300, "short": 1200, "full": 4000}


TABLE = Table(
    by=("method", "depth"),
    columns=(
        Column("rmse", f"RMSE to x^3 (constant: {Y_UNIT:.1f})", ".2f"),
        Column("inside", "std among the data", ".2f"),
        Column("outside", "std beyond them", ".2f"),
    ),
)


def x_cubed() -> Study:
    """Return the study."""
    return Study.of("implicit", "x-cubed", measure=measure, tables=(TABLE,), plot=plot)


def measure(run: Run) -> list[Record]:
    """Fit both methods at every depth to the data of the first seed."""
    seed, grid = run.seeds[0], torch.linspace(-6, 6, 121)[:, None]
    x, y = points(seed)
    rows = [
        {"method": name, "depth": depth} | fitted(method, depth, (x, y), grid, STEPS[run.budget], seed=seed)
        for name, method in METHODS.items()
        for depth in DEPTHS[run.budget]
    ]
    return [*rows, {"x": _list(x), "y": _list(y), "grid": _list(grid)}]


def points(seed: int) -> tuple[Tensor, Tensor]:
    """Draw the data of a seed: x (30, 1) and y = x^3 + noise (30, 1)."""
    generator = torch.Generator().manual_seed(seed)
    x = (2 * torch.rand(POINTS, 1, generator=generator, device=generator.device) - 1) * EDGE
    return x, x**3 + NOISE * torch.randn(POINTS, 1, generator=generator, device=generator.device)


def fitted(
    method: Method, depth: int, data: tuple[Tensor, Tensor], grid: Tensor, steps: int, *, seed: int = 0
) -> Record:
    """Fit one network; return its mean and epistemic standard deviation on the grid, and three numbers.

    `rmse` is the distance of the mean from x^3 between the edges of the data, `inside` the standard deviation there,
    `outside` that beyond |x| = 5.
    """
    x, y = data
    start = 100 * seed + depth
    likelihood = lb.Gaussian(std=NOISE / Y_UNIT)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(start)
        model = lb.convert(lb.models.MLP(1, 1, hidden=(WIDTH,) * depth), method)
        recipe = lb.Recipe(
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
        lb.fit(model, (x / X_UNIT, y / Y_UNIT), recipe, likelihood=likelihood, progress=False)
    p = lb.predict(model, grid / X_UNIT, likelihood, samples=64)
    mean, std = p.mean * Y_UNIT, p.epistemic.sqrt() * Y_UNIT
    inside, outside = grid.abs() <= EDGE, grid.abs() > 5
    return {
        "mean": _list(mean),
        "std": _list(std),
        "rmse": _root_mean_square((mean - grid**3)[inside]),
        "inside": _root_mean_square(std[inside]),
        "outside": _root_mean_square(std[outside]),
    }


def plot(records: list[Record], path: Path) -> None:
    """Plot the data and every prediction with ±2 standard deviations: methods below each other, depths side by side."""
    *rows, data = records
    methods, depths = (list(dict.fromkeys(row[name] for row in rows)) for name in ("method", "depth"))
    figure = new_figure(2.8 * len(depths), 2.8 * len(methods))
    axes = figure.subplots(len(methods), len(depths), sharex=True, sharey=True, squeeze=False)
    for row in rows:
        axis = axes[methods.index(row["method"]), depths.index(row["depth"])]
        mean, std = torch.tensor(row["mean"]), torch.tensor(row["std"])
        axis.fill_between(data["grid"], mean - 2 * std, mean + 2 * std, color="#6fa8dc", lw=0)
        axis.plot(data["grid"], mean, color="navy")
        axis.plot(data["x"], data["y"], "o", color="red", ms=3)
        axis.set(title=f"{row['method']}, {row['depth']} hidden", xlim=(-6, 6), ylim=(-170, 170))
    save_figure(figure, path)


def _list(values: Tensor) -> list[float]:
    return [round(value, 6) for value in values.flatten().tolist()]


def _root_mean_square(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())
