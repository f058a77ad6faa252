"""The nested networks by budget, and the evaluation that all suites of them share.

The paper trains VGG11, one and a half times as wide, for 600 epochs by a natural-gradient method and keeps two thirds
of it. Here it is SGD with the same schedule (*full*), or a cosine over fewer epochs (*short*), in the usual width; the
networks that are `wide` have the paper's width and head.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn, Tensor

import leanbayes as lb
from leanbayes.core.predictor import multiply_adds
from leanbayes.methods._base import Method
from leanbayes_papers.harness import Record, Run, Trained, TrainingSpec
from leanbayes_papers.harness.spec import build_network

DATA = {"quick": ("digits",), "short": ("cifar10", "fashion-mnist"), "full": ("cifar10",)}
OOD = {"digits": "noise", "fashion-mnist": "notmnist", "cifar10": "svhn"}
NETS = {"digits": "small", "fashion-mnist": "lenet5-bn", "cifar10": "vgg11-bn"}
WIDE = NETS | {"cifar10": "vgg11-dense-w1.5"}  # the paper's, whose linear layers stay plain
CONVOLUTIONS = "features.*"
GROUPS = {"digits": 8, "fashion-mnist": 16, "cifar10": 32}
SAMPLES = 6
NORM_ROWS = 1024  # training rows over which the statistics of norms are collected at every width (C.2)
POSTERIOR_RATE = lb.NestedDropout.posterior_rate  # rate of keep probabilities and noise, in units of the weights' rate
# Share of the epochs over which the divergence comes in: at once, it would drop channels before they are of use.
ANNEALED = 2 / 3


def bn3(data: str, **fields: Any) -> lb.NestedDropout:
    """Return the method with the paper's groups; one in sixteen is always on."""
    return lb.NestedDropout(groups=GROUPS[data], always_on=max(1, GROUPS[data] // 16), **fields)


def fn3(data: str) -> lb.NestedDropout:
    """Return fixed nested dropout: uniform tails, no noise, no divergence."""
    return bn3(data, tail="categorical", weight_noise=False)


def spec(run: Run, data: str, name: str, method: Method | None, *, wide: bool = False) -> TrainingSpec:
    """Return a network of the suites; of a `wide` one, the convolutions alone are converted."""
    short = "wide" if wide and data == "cifar10" else data
    recipe = run.recipe_of("nested", run.pick(quick=data, short=short, full="full"))
    posterior_lr = (0.05 if run.budget != "full" else recipe.lr) * POSTERIOR_RATE
    recipe = replace(recipe, posterior_lr=posterior_lr, anneal_epochs=round(ANNEALED * recipe.epochs))
    recipe = replace(recipe, compile=run.torch_device.type == "cuda")  # many small operations, else
    options, nets = ({"where": CONVOLUTIONS}, WIDE) if wide else ({}, NETS)
    return run.spec(f"{data}-{name}", data, nets[data], recipe, quick_rows=1000, method=method, options=options)


def individual(run: Run, data: str, width: float, *, share: float = 1.0) -> TrainingSpec:
    """Return a Bayesian network of a fixed width (IBNN), trained on its own; a `share` below one makes it wide."""
    made = spec(run, data, f"ibnn-{width:g}", bn3(data, rescale=False), wide=share < 1)
    options = {**made.options, "width": width}
    cut = share * width
    return replace(made, options=options, build=lambda spec, data: lb.slim.narrow(build_network(spec, data), cut))


class Evaluation:
    """Evaluates networks of one data set alike: accuracy, likelihood, calibration, out-of-distribution inputs, size."""

    def __init__(self, trained: Trained, data: str, run: Run) -> None:
        """Prepare test data, out-of-distribution inputs, and the rows of norm statistics."""
        self.device = next(trained.model.parameters()).device
        self.test = trained.test()
        raw = lb.data.ood(OOD[data], trained.data, run.root)
        self.ood: dict[str, Any] = {OOD[data]: (trained.data.inputs(raw), None)}
        self.norm_rows = trained.train(NORM_ROWS)[0].to(self.device)

    def narrowed(self, model: nn.Module, width: float, *, means: bool = False) -> nn.Module:
        """Return a network cut to a width, its norms adapted."""
        small = lb.slim.narrow(model, width)
        small = (lb.mean(small) if means else small).to(self.device).eval()
        lb.update_norm(small, self.norm_rows)
        return small

    def __call__(self, model: nn.Module) -> Record:
        """Return the measures of one network."""
        found = lb.evaluate(model, self.test, ood=self.ood, samples=SAMPLES)
        test, (ood,) = found.metrics["test"], found.metrics["ood"].values()
        return {
            "accuracy": 100 * test["accuracy"],
            "nll": test["nll"],
            "ece": test["ece"],
            "aupr": ood["aupr"],
            "auroc": ood["auroc"],
            **size_of(model, self.test[0][:1]),
        }

    def tempered(self, model: nn.Module) -> Record:
        """Return ECE and NLL after temperature scaling; each half of the test set has the temperature of the other."""
        x, y = self.test
        prediction = lb.predict(model, x, samples=SAMPLES).to("cpu")
        halves = [torch.arange(len(y)) % 2 == k for k in range(2)]
        parts = [
            lb.recalibrate.Temperature(scale="mean").fit(_rows(prediction, other), y[other])(_rows(prediction, mine))
            for mine, other in (halves, halves[::-1])
        ]
        p, targets = torch.cat([part.mean for part in parts]), torch.cat([y[half] for half in halves])
        nll = torch.cat([-part.log_prob(y[half]) for part, half in zip(parts, halves, strict=True)])
        return {"ece": float(lb.metrics.ece(p, targets)), "nll": float(nll.mean())}


def _rows(prediction: lb.Prediction, chosen: Tensor) -> lb.Prediction:
    names = ("mean", "total", "aleatoric", "epistemic")
    return replace(prediction, samples=None, **{name: getattr(prediction, name)[chosen] for name in names})


def size_of(model: nn.Module, row: Tensor) -> dict[str, int]:
    """Return weights and multiply-adds of a network's mean, for one row."""
    plain = copy.deepcopy(lb.mean(model)).cpu().eval()
    with torch.no_grad():
        count = multiply_adds(lambda: plain(row.cpu()))
    return {"parameters": sum(p.numel() for p in plain.parameters()), "multiply_adds": count}
