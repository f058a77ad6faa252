"""Rules of early stopping, chosen on held-out training rows: `python -m benchmarks.stopping --out FILE`.

Classes: LeNet on Fashion-MNIST, three plain epochs, two after conversion. Real targets: an MLP on three UCI tables. A
rule sees the first 4, 8, ... of sixteen draws of a row. It stops the row if a quantity is at most a threshold:

    divergence       1/2 (1/s - 1/S) sum_c v_c / p_c nats, or v / (total variance): the library (`core/stopping.py`)
    relative error   standard error of the top class / (1 - p)
    top class        standard error of the top class
    decided          standard error of the top class / (p - 1/2), infinite below one half
    standard error   of the mean of a real target
    fixed            1 / draws: every row takes the same number

A threshold fits a bound if the mean NLL of held-out rows is within the bound of that of all draws, for every method
and design; tables are averaged. For each bound in `LOSSES`, a rule takes its fitting threshold with the fewest draws.
The rules within `TIE` draws of the fewest are the best. Figures of test rows have the same thresholds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn, Tensor

import leanbayes as lb
from benchmarks.price import seconds
from leanbayes.core.stopping import SMALLEST_PROBABILITY, stages

METHODS = {"implicit": lb.ImplicitNodes(), "rank1": lb.Rank1()}
DESIGNS = ("independent", "paired")
TABLES = ("uci-concrete", "uci-kin8nm", "uci-power")
LIMIT = 16
ENDS = [stage.stop for stage in stages(LIMIT)]
HELD_OUT = 6
"""One row of n is held out."""
ROWS = 5_000
"""Rows of each kind that are predicted at most."""
DRAWN = (1, 2)
"""Seeds of the draws; figures are means over them."""
LOSSES = {"classes": (1.5e-3, 5e-4, 2e-4), "targets": (1e-2, 3e-3, 1e-3)}
"""Bounds in nats; the first one for classes is half a percent of the NLL."""
TIE = 0.1
THRESHOLDS = [10 ** (step / 8) for step in range(-40, 9)]


class Stage(NamedTuple):
    """The rows after s draws: mean, variance of a draw, total variance (of targets), all (B, C)."""

    count: int
    mean: Tensor
    variance: Tensor
    total: Tensor


class Case(NamedTuple):
    """All rows of one model and one seed of draws, after each check."""

    group: str
    stages: list[Stage]
    nll: list[Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--trainings", type=int, default=2, help="of each method")
    parser.add_argument("--rows", type=int, default=60_000, help="training rows, held-out ones included")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"draws": LIMIT, "trainings": options.trainings}
    found["classes"] = of_classes(options.trainings, options.rows)
    found["targets"] = of_targets(options.trainings, options.rows)
    text = json.dumps(found, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


def of_classes(trainings: int, rows: int) -> dict[str, Any]:
    """Choose the rule for classes, and measure its time."""
    data = lb.data.load("fashion-mnist")
    x, y = data.inputs(data.train.x[:rows]), data.train.y[:rows]
    held, test = torch.arange(len(x)) % HELD_OUT == 0, (data.inputs(data.test.x), data.test.y)
    models = [model for seed in range(trainings) for model in lenets(seed, x[~held], y[~held])]
    validation = [case for name, model in models for case in cases(name, model, x[held], y[held])]
    tested = [case for name, model in models for case in cases(name, model, *test)]
    bounds = choose(validation, tested, CLASS_RULES, LOSSES["classes"])
    tolerance = bounds[1]["rules"]["divergence"]["threshold"]
    times = [row for name, model in models[: len(METHODS)] for row in timed(name, model, test[0], tolerance)]
    return {"bounds": bounds, "time": {"tolerance": tolerance, "rows": times}}


def of_targets(trainings: int, rows: int) -> dict[str, Any]:
    """Choose the rule for real targets."""
    validation, test = [], []
    for table in TABLES:
        data = lb.data.load(table)
        (x, y), of_test = ((t[:rows] for t in data.prepared(data.train)), data.prepared(data.test))
        held = torch.arange(len(x)) % HELD_OUT == 0
        for seed in range(trainings):
            for name, model in mlps(seed, x[~held], y[~held]):
                validation += cases(name, model, x[held], y[held])
                test += cases(name, model, *of_test)
    return {"bounds": choose(validation, test, TARGET_RULES, LOSSES["targets"])}


def lenets(seed: int, x: Tensor, y: Tensor) -> Iterator[tuple[str, nn.Module]]:
    torch.manual_seed(seed)
    net = lb.models.build("lenet", num_outputs=10, input_shape=(1, 28, 28))
    train(net, x, y, lb.Categorical(), epochs=3, lr=2e-3)
    for name, method in METHODS.items():
        model = lb.convert(net, method, likelihood=lb.Categorical())
        train(model, x, y, None, epochs=2, lr=1e-3)
        yield name, model


def mlps(seed: int, x: Tensor, y: Tensor) -> Iterator[tuple[str, nn.Module]]:
    for name, method in METHODS.items():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(x.shape[1], 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1))
        model = lb.convert(net, method, likelihood=lb.Gaussian(std=0.5, learn=True))
        train(model, x, y, None, epochs=max(10, 1500 * 128 // len(x)), lr=3e-3)
        yield name, model


def train(model: nn.Module, x: Tensor, y: Tensor, likelihood: Any, *, epochs: int, lr: float) -> None:
    """Train with Adam on the whole bound."""
    optimizer = torch.optim.Adam(lb.parameter_groups(model, lr=lr, posterior_lr=1e-2))
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(128):
            optimizer.zero_grad()
            lb.elbo(model, x[rows], y[rows], likelihood, num_data=len(x)).loss.backward()
            optimizer.step()


def cases(name: str, model: nn.Module, x: Tensor, y: Tensor) -> Iterator[Case]:
    """Yield the answers of a model after each check, by design and seed of the draws."""
    for design in DESIGNS:
        for seed in DRAWN:
            p = lb.predict(model, x[:ROWS], samples=LIMIT, seed=seed, design=design)  # type: ignore[arg-type]
            yield Case(f"{name}, {design}", *after_checks(p, y[:ROWS], unit=2 if design == "paired" else 1))


def after_checks(p: lb.Prediction, y: Tensor, unit: int) -> tuple[list[Stage], list[Tensor]]:
    """Return the rows after each number of draws, and their losses."""
    assert p.samples is not None
    found, nll = [], []
    for count in ENDS:
        draws, own = p.samples[:count], None if p.variances is None else p.variances[:count]
        mean, variance = draws.mean(0), unit * draws.unflatten(0, (-1, unit)).mean(1).var(0)
        total = torch.zeros_like(mean) if own is None else own.mean(0) + draws.var(0, correction=0)
        found.append(Stage(count, mean, variance, total))
        nll.append(-p.likelihood.log_prob_of_mixture(mean, draws, own, y).double())
    return found, nll


def divergence(rows: Stage) -> Tensor:
    return 0.5 * (1 / rows.count - 1 / LIMIT) * (rows.variance / (rows.mean + SMALLEST_PROBABILITY)).sum(1)


def divergence_of_targets(rows: Stage) -> Tensor:
    return 0.5 * (1 / rows.count - 1 / LIMIT) * (rows.variance / rows.total).sum(1)


def top_class(rows: Stage) -> Tensor:
    return (rows.variance.gather(1, rows.mean.argmax(1, keepdim=True))[:, 0] / rows.count).sqrt()


def relative_error(rows: Stage) -> Tensor:
    return top_class(rows) / (1 - rows.mean.amax(1))


def decided(rows: Stage) -> Tensor:
    lead = rows.mean.amax(1) - 0.5
    return torch.where(lead > 0, top_class(rows) / lead, torch.inf)


def standard_error(rows: Stage) -> Tensor:
    return (rows.variance / rows.count).sqrt().amax(1)


def fixed(rows: Stage) -> Tensor:
    return torch.full_like(rows.mean[:, 0], 1 / rows.count)


Rules = dict[str, Callable[[Stage], Tensor]]
CLASS_RULES: Rules = {
    "divergence": divergence,
    "relative error": relative_error,
    "top class": top_class,
    "decided": decided,
    "fixed": fixed,
}
TARGET_RULES: Rules = {"divergence": divergence_of_targets, "standard error": standard_error, "fixed": fixed}


def choose(validation: list[Case], test: list[Case], rules: Rules, losses: Sequence[float]) -> list[dict[str, Any]]:
    """Return, for each bound of the loss, the best rules, and threshold and figures of each rule."""
    found: list[dict[str, Any]] = [{"loss": loss, "best": [], "rules": {}} for loss in losses]
    for name, rule in rules.items():
        quantities = [[rule(stage) for stage in case.stages] for case in validation]
        tried = [(each, apply(validation, quantities, each)) for each in (0.0, *THRESHOLDS)]
        of_test = [[rule(stage) for stage in case.stages] for case in test]
        for bound in found:
            fitting = [one for one in tried if all(row["loss"] <= bound["loss"] for row in one[1].values())]
            threshold, rows = min(fitting, key=lambda one: mean_draws(one[1]))
            tested = apply(test, of_test, threshold)
            own = {"threshold": threshold, "draws": mean_draws(rows), "test draws": mean_draws(tested)}
            bound["rules"][name] = own | {"held out": rows, "test": tested}
    for bound in found:
        fewest = min(own["draws"] for own in bound["rules"].values())
        bound["best"] = [name for name, own in bound["rules"].items() if own["draws"] <= fewest + TIE]
    return found


def apply(cases: list[Case], quantities: list[list[Tensor]], threshold: float) -> dict[str, dict[str, float]]:
    """Return the mean draws, the NLL lost against all draws, its error for one seed, and that NLL, by group."""
    by_group: dict[str, list[tuple[float, ...]]] = {}
    for case, quantity in zip(cases, quantities, strict=True):
        draws, nll = torch.full_like(case.nll[-1], LIMIT), case.nll[-1]
        for count, own, seen in reversed(list(zip(ENDS[:-1], case.nll[:-1], quantity[:-1], strict=True))):
            stops = seen <= threshold
            draws, nll = draws.masked_fill(stops, count), torch.where(stops, own, nll)
        lost = nll - case.nll[-1]
        error = lost.std().item() / len(lost) ** 0.5
        row = (draws.mean().item(), lost.mean().item(), error, case.nll[-1].mean().item())
        by_group.setdefault(case.group, []).append(row)
    means = {
        group: [statistics.fmean(column) for column in zip(*rows, strict=True)] for group, rows in by_group.items()
    }
    return {group: dict(zip(("draws", "loss", "error", "nll"), row, strict=True)) for group, row in means.items()}


def mean_draws(rows: dict[str, dict[str, float]]) -> float:
    return statistics.fmean(row["draws"] for row in rows.values())


def timed(name: str, model: nn.Module, x: Tensor, tolerance: float) -> Iterator[dict[str, Any]]:
    """Yield the CPU time of answers with a tolerance over that of all draws, at one and at 1,024 rows."""
    for rows, blocks in ((1, x[:64].split(1)), (1024, [x[:1024]])):
        for design in DESIGNS:
            whole, early = (
                lb.Predictor(model, samples=LIMIT, design=design, keep_samples=False, tolerance=t)  # type: ignore[arg-type]
                for t in (None, tolerance)
            )
            ratios = [ratio(early, whole, blocks) for _ in range(5)]
            yield {"method": name, "design": design, "rows": rows, "time": statistics.median(ratios)}


def ratio(one: Callable[[Tensor], object], other: Callable[[Tensor], object], blocks: Any) -> float:
    """Return CPU time of one / that of the other, over the same blocks."""
    mine, theirs = (seconds(lambda run=run: [run(block) for block in blocks], 1) for run in (one, other))
    return mine / theirs if theirs > 0 else math.nan


if __name__ == "__main__":
    main()
