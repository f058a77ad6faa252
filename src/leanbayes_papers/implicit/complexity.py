"""Figures 1, 2 and 4 and Table 6 of the implicit-nodes paper: networks and posteriors that grow, their components.

Component k has weights W_k = U diag(mu_k). Figure 2 maps loss and error of plain networks over the plane of the first
two principal components of the W_k. Figure 1 is the regression y = x^3: 30 points, x uniform on [-4, 4], noise of
standard deviation 3, one to five layers of 256 ReLU units; `examples/x_cubed.py` shows more of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn, Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import leanbayes as lb
from leanbayes.compare.experiment import Experiment
from leanbayes.core.plain import strip
from leanbayes.methods._base import Method
from leanbayes.runtime.passes import components_of
from leanbayes_papers.harness import Column, plot_curves, printed, Record, Run, Study, Suite, Table, TrainingSpec
from leanbayes_papers.harness.charts import new_figure, save_figure, SMALL
from leanbayes_papers.implicit import PAPER
from leanbayes_papers.implicit.cifar import INIT_STD, MEAN_FIELD, MEASURES, network, spec

# LeNets by width, with the numbers of parameters that Figure 4 gives.
WIDTHS = {"lenet": "42K", "lenet-w2": "165K", "lenet-w4": "657K", "lenet-w8": "2619K"}
NODES = lb.ImplicitNodes(components=8, prior_std=0.1, init_spread=0.5, init_std=INIT_STD)
GROWTH = Table.of("implicit", "growth")
GRID = {"quick": 7, "short": 17, "full": 25}
ROWS = 1000  # rows of each split on which a point of the plane is evaluated
MARGIN = 0.3  # margin of the map beyond the outermost component, as a share of the width


def _range(records: Sequence[Record]) -> str:
    errors = [100 * record["test error"] for record in records]
    return f"{errors[0]:.2f}" if len(errors) == 1 else f"{min(errors):.2f} to {max(errors):.2f}"


POINTS = Table(
    by=("point",),
    columns=(Column("test error", "test error, %", text=_range),),
    derive=lambda records: [record for record in records if record["point"] not in ("grid", "plane")],
)


def implicit_complexity(run: Run) -> Suite:
    """Implicit nodes and mean field on growing networks; K from 4 to 32; components (Figures 1, 2, 4, Table 6)."""
    nets = list(WIDTHS)[: run.pick(quick=3, short=4, full=4)]
    nodes = {net: lenet(run, net, "implicit-k8", NODES) for net in nets}
    weights = {net: lenet(run, net, "mean_field", MEAN_FIELD) for net in nets}
    rows = {
        f"{name}, {WIDTHS[net]}": made[net] for net in nets for name, made in (("iBNN", nodes), ("BNN-VI", weights))
    }
    both = (*nodes.values(), *weights.values())
    measured = partial(errors_by_size, specs=both)
    plot = partial(plot_curves, x="parameters", columns=GROWTH.columns, log=True)
    growth = Study.of("implicit", "growth", measure=measured, tables=(GROWTH,), plot=plot, specs=both)
    one = (nodes["lenet"],)
    mapped = partial(map_components, spec=one[0])
    components = Study.of("implicit", "components", measure=mapped, tables=(POINTS,), plot=plot_map, specs=one)
    table = Study.of("implicit", "figure4").compared(rows, (*MEASURES, "parameters"))
    cubed = Study.of("implicit", "x-cubed", measure=measure_x_cubed, tables=(X_CUBED,), plot=plot_x_cubed)
    return Suite(paper=PAPER, studies=(table, sizes(run), growth, components, cubed))


def sizes(run: Run) -> Study:
    """Return Table 6: on CIFAR-100 if it is here, else on CIFAR-10, with those numbers that Tables 3-5 have."""
    data = "cifar100" if run.has("cifar100") else "cifar10"
    paper, note = printed("implicit", "table6"), ""
    names = {name: f"iBNN-{name.removeprefix('K = ')}" for name in paper}
    if data == "cifar10":
        note = " (CIFAR-100 is not here; the paper's numbers on CIFAR-10 are those of Tables 3-5)"
        found = printed("implicit", "cifar10 VGG-16")
        paper = {name: found[other] for name, other in names.items() if other in found}
    words = {"set": data, "ours": network(run, "VGG-16"), "note": note}
    specs = {name: spec(run, other, data, "VGG-16") for name, other in names.items()}
    return Study.of("implicit", "table6", words).compared(specs, MEASURES, paper)


def lenet(run: Run, net: str, name: str, method: Method) -> TrainingSpec:
    """Return a LeNet on Fashion-MNIST; the paper does not give its recipe."""
    recipe = run.recipe_of("implicit", "lenet")
    evaluation = run.evaluation(run.pick(quick=16, short=40, full=40), 1000)
    return run.spec(name, "fashion-mnist", net, recipe, quick_rows=2000, method=method, evaluation=evaluation)


def errors_by_size(run: Run, *, specs: Sequence[TrainingSpec]) -> list[Record]:
    """Return test errors by method, seed and number of parameters of the plain network."""
    found = [(spec.name, seed, run.result(spec, seed)) for spec in specs for seed in run.seeds]
    return [
        {
            "method": name,
            "seed": seed,
            "parameters": result["network"]["parameters"],
            "error": 1 - result["metrics"]["test"]["accuracy"],
        }
        for name, seed, result in found
    ]


# ------------------------------------------------------------------------------------ the map of components


def plane_of(points: Tensor) -> tuple[Tensor, Tensor, list[float]]:
    """Return the plane of the first two principal components of points (K, P), K >= 3.

    It has a centre (P,), two orthonormal axes (2, P), and their shares of the variance.
    """
    centre = points.mean(0)
    _, sizes, axes = torch.linalg.svd(points - centre, full_matrices=False)
    shares = sizes.square() / sizes.square().sum()
    return centre, axes[:2], shares[:2].tolist()


def map_components(run: Run, *, spec: TrainingSpec) -> list[Record]:
    """Evaluate the components of the first seed, the shared weights, the average, and a grid over the plane."""
    model, experiment, _ = run.train(spec, run.seeds[0])
    shared = strip(model)
    weights = torch.stack([_flat(lb.mean(model, component=k)) for k in range(components_of(model))])
    centre, axes, explained = plane_of(weights)
    dots, star = ((points - centre) @ axes.T for points in (weights, _flat(shared)))
    ticks = [_ticks(torch.cat([dots[:, axis], star[axis, None]]), GRID[run.budget]) for axis in (0, 1)]
    rows = _rows(experiment)
    grid = [
        {"point": "grid", "x": float(x), "y": float(y)} | _at(shared, centre + torch.stack([x, y]) @ axes, rows)
        for y in ticks[1]
        for x in ticks[0]
    ]
    test = {"test": rows["test"]}
    components = [
        {"point": "component", "x": float(dot[0]), "y": float(dot[1])} | _at(shared, each, test)
        for dot, each in zip(dots, weights, strict=True)
    ]
    average = {f"test {m}": v for m, v in _evaluate(model, *rows["test"], samples=5 * len(weights)).items()}
    return [
        *components,
        {"point": "shared weights", "x": float(star[0]), "y": float(star[1])} | _at(strip(model), None, test),
        {"point": "averaged prediction"} | average,
        {"point": "plane", "explained": explained},
        *grid,
    ]


def plot_map(records: list[Record], path: Path) -> None:
    """Plot loss and error over the plane, on training and test rows, with the components and the shared weights."""
    grid, dots, star = ([r for r in records if r["point"] == p] for p in ("grid", "component", "shared weights"))
    ticks = [list(dict.fromkeys(record[axis] for record in grid)) for axis in ("x", "y")]
    figure = new_figure(15, 3.4)
    panels = [f"{part} {measure}" for part in ("train", "test") for measure in ("nll", "error")]
    for axis, panel in zip(figure.subplots(1, 4), panels, strict=True):
        values = torch.tensor([record[panel] for record in grid]).view(len(ticks[1]), len(ticks[0]))
        figure.colorbar(axis.contourf(*ticks, values.numpy(), levels=16, cmap="viridis"), ax=axis)
        axis.plot([d["x"] for d in dots], [d["y"] for d in dots], "o", color="orange", label="components")
        axis.plot(star[0]["x"], star[0]["y"], "*", color="red", ms=12, label="shared weights")
        axis.set(title=panel)
    axis.legend(fontsize=SMALL)
    save_figure(figure, path)


Rows = dict[str, tuple[Tensor, Tensor]]


def _rows(experiment: Experiment) -> Rows:
    _, x, y = experiment.test
    train = experiment.data.train
    some = torch.arange(0, len(train), max(1, len(train) // ROWS))[:ROWS]
    return {"train": (experiment.data.inputs(train.x[some]), train.y[some]), "test": (x[:ROWS], y[:ROWS])}


def _at(net: nn.Module, weights: Tensor | None, rows: Rows) -> dict[str, float]:
    """Return NLL and error of a plain network on each set of rows, with these weights in place of its own."""
    if weights is not None:
        vector_to_parameters(weights, net.parameters())
    found = {part: _evaluate(net, x, y, samples=1) for part, (x, y) in rows.items()}
    return {f"{part} {name}": value for part, each in found.items() for name, value in each.items()}


def _evaluate(model: nn.Module, x: Tensor, y: Tensor, *, samples: int) -> dict[str, float]:
    p = lb.predict(model, x, samples=samples, keep_samples=False).to("cpu")
    return {"nll": float(lb.metrics.nll(p.mean, y)), "error": 1 - float(lb.metrics.accuracy(p.mean, y))}


def _flat(net: nn.Module) -> Tensor:
    return parameters_to_vector(net.parameters()).detach()


def _ticks(values: Tensor, count: int) -> Tensor:
    low, high = values.min(), values.max()
    margin = MARGIN * (high - low)
    return torch.linspace(float(low - margin), float(high + margin), count, device=values.device)


# ------------------------------------------------------------------------------------ the regression y = x^3

COUNT, EDGE, NOISE, WIDTH = 30, 4.0, 3.0, 256
X_UNIT, Y_UNIT = EDGE / 3**0.5, EDGE**3 / 7**0.5  # standard deviations of x and of x^3 on [-4, 4]
X_CUBED_METHODS: dict[str, Method] = {
    "mean field": lb.MeanField(prior_std=1.0, init_std=0.01),
    "implicit nodes": lb.ImplicitNodes(components=8, prior_std=0.3, init_spread=0.75, init_std=0.05),
}
X_CUBED_DEPTHS = {"quick": (1, 3), "short": (1, 2, 3, 4, 5), "full": (1, 2, 3, 4, 5)}
X_CUBED_STEPS = {"quick": 300, "short": 1200, "full": 4000}
X_CUBED = Table.of("implicit", "x-cubed")


def measure_x_cubed(run: Run) -> list[Record]:
    """Fit both methods at every depth to the data of the first seed."""
    seed, grid = run.seeds[0], torch.linspace(-6, 6, 121)[:, None]
    x, y = points(seed)
    rows = [
        {"method": name, "depth": depth} | fitted(method, depth, (x, y), grid, X_CUBED_STEPS[run.budget], seed=seed)
        for name, method in X_CUBED_METHODS.items()
        for depth in X_CUBED_DEPTHS[run.budget]
    ]
    return [*rows, {"x": _list(x), "y": _list(y), "grid": _list(grid)}]


def points(seed: int) -> tuple[Tensor, Tensor]:
    """Draw the data of a seed: x (30, 1) and y = x^3 + noise (30, 1)."""
    generator = torch.Generator().manual_seed(seed)
    x = (2 * torch.rand(COUNT, 1, generator=generator, device=generator.device) - 1) * EDGE
    return x, x**3 + NOISE * torch.randn(COUNT, 1, generator=generator, device=generator.device)


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
        recipe = Run(device="cpu").recipe_of("implicit", "x-cubed", epochs=steps, seed=start)
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


def plot_x_cubed(records: list[Record], path: Path) -> None:
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
