"""The CIFAR networks of the rank-1 paper by budget: recipes, factors, and ensembles of equal size."""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import replace
from functools import cache
from typing import Any

import torch

import leanbayes as lb
from leanbayes.compare.job import EvaluationSpec, recipe_for, stretched
from leanbayes.compare.job import recipe as recipe_of
from leanbayes.methods._base import Method
from leanbayes_papers.harness import Run, TrainingSpec

COMPONENTS = 4
# K times the unique rows of a batch, which the paper keeps constant: 128 rows for each of 4 components.
ROWS_OF_ALL_COMPONENTS = 512
# The paper's factors on CIFAR.
FROM_SCRATCH: dict[str, Any] = {"init": "random_sign", "sign_probability": 0.5, "init_std": 0.0316, "prior_std": 0.1}
STEPS = 100  # widths are tried in hundredths
Factors = lb.Rank1 | lb.BatchEnsemble


def network(run: Run) -> str:
    """Return the network of the budget."""
    return run.pick(quick="lenet", short="wrn-16-4", full="wrn-28-10")


def recipe(run: Run) -> lb.Recipe:
    """Return the recipe of the plain network, from which the others differ in a few fields."""
    chosen = recipe_of(run.budget, kind="image", rows=50_000, augment="crop_flip")
    if run.budget == "quick":
        chosen = replace(stretched(chosen, 6), batch_size=64, lr=0.05)
    return run.recipe(chosen)


def evaluation(run: Run, samples: int) -> EvaluationSpec:
    """Return the evaluation: `samples` draws in full, else the same for all, so that they share loaded data."""
    images = run.pick(quick=50, short=1000, full=10_000)
    draws = run.pick(quick=16, short=16, full=samples)
    return run.evaluation(draws, 1000, ood=run.svhn, shift=True, shift_images=images)


def spec(run: Run, name: str, method: Method | None, data: str = "cifar10", **changes: Any) -> TrainingSpec:
    """Return a network without components: from scratch in full, else converted late; `changes` are of its recipe."""
    plain = replace(recipe(run), **changes)
    if run.budget == "full":  # one rate for everything, as in the paper; late factors learn at the method's own
        plain = replace(plain, posterior_lr=plain.posterior_lr or plain.lr)
    late = 0.0 if method is None else min(method.late, run.pick(quick=0.5, short=0.7, full=0.0))
    fields = {"method": method, "evaluation": evaluation(run, 16)}
    return run.spec(name, data, network(run), recipe_for(method, plain, late), quick_rows=2000, **fields)


def factor_spec(run: Run, name: str, method: Factors, data: str = "cifar10", **changes: Any) -> TrainingSpec:
    """Return a network with factors, every row of a batch in every component.

    In full, from scratch as in the paper: K times the unique rows are 512, at a rate of 0.1 for every 128 unique rows.
    Else the plain network is trained first, then converted, and rows are repeated from the conversion on.
    """
    made = spec(run, name, method, data, **changes)
    late = made.recipe
    if run.budget != "full":
        return replace(made, recipe=replace(late, tile_last_epochs=late.epochs - late.convert_at_epoch))
    rows = ROWS_OF_ALL_COMPONENTS // method.components
    rate = rows / late.batch_size
    assert late.posterior_lr is not None
    chosen = replace(late, batch_size=rows, lr=late.lr * rate, posterior_lr=late.posterior_lr * rate, tile=True)
    return replace(made, recipe=chosen, evaluation=evaluation(run, draws(method)))


def rank1(run: Run, **fields: Any) -> lb.Rank1:
    """Return rank-1 factors: the paper's for a training from scratch, the library's for a late conversion."""
    return lb.Rank1(**(run.pick(quick={}, short={}, full=FROM_SCRATCH) | fields))


def batch_ensemble(run: Run, data: str = "cifar10") -> TrainingSpec:
    """Return BatchEnsemble: factors at half the rate of the weights; in full a spread of 0.5 and an L2 of 3e-4."""
    plain = recipe(run)
    decay = run.pick(quick=plain.weight_decay, short=plain.weight_decay, full=2 * 3e-4)
    method = lb.BatchEnsemble(components=COMPONENTS, init_spread=run.pick(quick=0.25, short=0.25, full=0.5))
    return factor_spec(run, "batch_ensemble", method, data, weight_decay=decay, posterior_lr=plain.lr / 2)


def draws(method: Factors) -> int:
    """Return the paper's number of draws: one of every component, four under Cauchy factors."""
    return (4 if getattr(method, "posterior", "normal") != "normal" else 1) * method.components


def equal_parameters(net: str, members: int, *, num_outputs: int, input_shape: tuple[int, ...]) -> str:
    """Return the narrower network (lenet, lenet-wWIDTH, wrn-DEPTH-WIDTH): `members` of it are as large as one `net`.

    Example:
        >>> equal_parameters("wrn-28-10", 4, num_outputs=10, input_shape=(3, 32, 32))
        'wrn-28-5'
    """
    found = re.fullmatch(r"(wrn-\d+-|lenet-w)([\d.]+)", "lenet-w1" if net == "lenet" else net)
    if found is None:
        raise ValueError(f"expected a network that comes in any width, lenet or wrn-DEPTH-WIDTH, got {net!r}")
    stem, width = found[1], float(found[2])

    def total(step: int) -> int:
        return members * count(f"{stem}{step / STEPS:g}", num_outputs=num_outputs, input_shape=input_shape)

    target = count(net, num_outputs=num_outputs, input_shape=input_shape)
    steps = range(1, round(width * STEPS) + 1)
    above = min(bisect_left(steps, target, key=total), len(steps) - 1)
    best = min(steps[max(0, above - 1)], steps[above], key=lambda step: abs(total(step) - target))
    return f"{stem}{best / STEPS:g}"


@cache
def count(net: str, *, num_outputs: int, input_shape: tuple[int, ...]) -> int:
    """Return the number of parameters of a network, without making any."""
    with torch.device("meta"):
        made = lb.models.build(net, num_outputs=num_outputs, input_shape=input_shape)
    return sum(parameter.numel() for parameter in made.parameters())
