"""The networks of the nested suites and how they are trained, by budget; what all of them are judged by.

The paper trains VGG11, one and a half times as wide, for 600 epochs by a natural-gradient method and keeps two thirds
of it. Here it is SGD with the same schedule (*full*), or a cosine over fewer epochs (*short*), in the usual width.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn, Tensor
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from leanbayes import data as sets
from leanbayes.compare.experiment import pick_device
from leanbayes.core.norm import update_norm
from leanbayes.core.plain import mean
from leanbayes.data import DataSet
from leanbayes.evaluation.evaluate import evaluate
from leanbayes.methods._base import Method
from leanbayes.methods.nested.config import NestedDropout
from leanbayes.slim import narrow
from leanbayes.training import Recipe
from leanbayes_papers.study import Numbers
from leanbayes_papers.suite import Setting
from leanbayes_papers.trained import Trained, Trainee

PAPER = "Cui, Mao, Liu, Li, Chan, Liu, Kuo, Xue, 2021: Variational Nested Dropout"
WIDTHS = (0.125, 0.25, 0.5, 0.75, 1.0)
DATA = {"quick": ("digits",), "short": ("cifar10", "fashion-mnist"), "full": ("cifar10",)}
FOREIGN = {"digits": "noise", "fashion-mnist": "notmnist", "cifar10": "svhn"}
NETS = {"digits": "small", "fashion-mnist": "lenet5-bn", "cifar10": "vgg11-bn"}
GROUPS = {"digits": 8, "fashion-mnist": 16, "cifar10": 32}
SAMPLES = 6
NORM_ROWS = 1024
"""Training rows over which the statistics of norms are collected at every width (C.2)."""

POSTERIOR_RATE = NestedDropout.posterior_rate
"""Of keep probabilities and noise, in units of the weights' rate."""

ANNEALED = 2 / 3
"""Share of the epochs over which the divergence comes in: at once, it would drop channels before they are of use."""


@dataclass(frozen=True, kw_only=True)
class Individual(Trainee):
    """A Bayesian network of a fixed width (IBNN): what `narrow` leaves of an untrained one."""

    width: float

    @override
    def make(self, data: DataSet, seed: int) -> nn.Module:
        return narrow(super().make(data, seed), self.width)


def ours(data: str, **fields: Any) -> NestedDropout:
    """Return the method with the paper's groups, of which one in sixteen is always on."""
    return NestedDropout(groups=GROUPS[data], always_on=max(1, GROUPS[data] // 16), **fields)


def fixed(data: str) -> NestedDropout:
    """Return fixed nested dropout (FN3): uniform tails, no noise, no divergence."""
    return ours(data, tail="categorical", weight_noise=False)


def trainee(setting: Setting, data: str, name: str, method: Method | None) -> Trainee:
    """Return a network of the suites."""
    return Trainee(**_common(setting, data, name), method=method)


def individual(setting: Setting, data: str, width: float) -> Trainee:
    """Return a Bayesian network of a fixed width, trained on its own."""
    return Individual(**_common(setting, data, f"{data}-ibnn-{width:g}"), method=ours(data, rescale=False), width=width)


def _common(setting: Setting, data: str, name: str) -> dict[str, Any]:
    common: dict[str, Any] = {"lr": 0.05, "posterior_lr": 0.05 * POSTERIOR_RATE, "weight_decay": 5e-4}
    recipe = {
        "digits": Recipe(epochs=30, batch_size=50, **common),
        "fashion-mnist": Recipe(epochs=8, batch_size=100, **common),
        "cifar10": Recipe(epochs=90, batch_size=250, augment="crop_flip", **common | {"lr": 0.1}),
    }[data]
    if setting.budget == "full":
        steps: dict[str, Any] = {"schedule": "step", "milestones": (150, 300, 450)}
        recipe = replace(recipe, epochs=600, batch_size=128, lr=0.1, posterior_lr=0.1 * POSTERIOR_RATE, **steps)
    recipe = replace(recipe, anneal_epochs=round(ANNEALED * recipe.epochs))
    recipe = replace(recipe, compile=pick_device(setting.device).type == "cuda")  # many small operations, else
    source = setting.source(data, quick_rows=1000)
    return {"name": name, "source": source, "net": NETS[data], "recipe": setting.recipe(recipe)}


class Judge:
    """Judges networks of one data set alike: accuracy, likelihood, calibration, foreign inputs, size."""

    def __init__(self, trained: Trained, data: str, root: str | None) -> None:
        """Prepare test data, foreign inputs, and the rows on which norms collect their statistics."""
        self.device = next(trained.model.parameters()).device
        self.test = trained.test()
        raw = sets.ood(FOREIGN[data], trained.data, root)
        self.foreign: dict[str, Any] = {FOREIGN[data]: (trained.data.inputs(raw), None)}
        self.norm_rows = trained.train(NORM_ROWS)[0].to(self.device)

    def narrowed(self, model: nn.Module, width: float, *, means: bool = False) -> nn.Module:
        """Return a network cut to a width, its norms adapted."""
        small = narrow(model, width)
        small = (mean(small) if means else small).to(self.device).eval()
        update_norm(small, self.norm_rows)
        return small

    def __call__(self, model: nn.Module) -> Numbers:
        """Return the figures of one network."""
        found = evaluate(model, self.test, ood=self.foreign, samples=SAMPLES)
        test, (foreign,) = found.metrics["test"], found.metrics["ood"].values()
        return {
            "accuracy": 100 * test["accuracy"],
            "nll": test["nll"],
            "ece": test["ece"],
            "aupr": foreign["aupr"],
            "auroc": foreign["auroc"],
            **size_of(model, self.test[0][:1]),
        }


def size_of(model: nn.Module, row: Tensor) -> dict[str, int]:
    """Return weights and multiply-adds of a network's mean, for one row."""
    plain = copy.deepcopy(mean(model)).cpu().eval()
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        plain(row.cpu())
    return {"parameters": sum(p.numel() for p in plain.parameters()), "multiply_adds": counter.get_total_flops() // 2}


def average(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the means of figures over seeds."""
    return {name: sum(run[name] for run in runs) / len(runs) for name in runs[0]}
