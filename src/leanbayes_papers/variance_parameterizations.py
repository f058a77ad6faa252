"""What alpha belongs to: Table 2 of the variance paper, with the zero-mean layer and other priors of its appendices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from leanbayes.core.conversion import stochastic_layers
from leanbayes.core.objective import elbo, kl
from leanbayes.methods.variance import VarianceLayer, VarianceLayers
from leanbayes.phase import accuracies
from leanbayes.runtime.batches import to_device
from leanbayes_papers.study import Case, new_figure, Numbers, save_figure, Study
from leanbayes_papers.suite import Setting, Suite
from leanbayes_papers.trained import Data
from leanbayes_papers.variance_nets import Network, train
from leanbayes_papers.variance_settings import digits_name, FIRST_DENSE, lenet, PAPER
from leanbayes_papers.variance_table1 import average, log_alphas, SAMPLES, TEST_ROWS

BATCH = 1000
PASSES = {"quick": 2, "short": 10, "full": 10}
"""Draws of every training row in the bound."""

EULER = 0.5772156649015329
STUDENT = 0.5 * (math.log(2) + EULER)
"""What `student_kl` of a weight is below `log_uniform_kl` as nu -> 0."""


@dataclass(frozen=True)
class MethodSpec:
    """A version of the layer, with what the paper prints: the bound, and both accuracies in percent."""

    method: VarianceLayers
    elbo: float | None = None
    deterministic: float | None = None
    ensemble: float | None = None
    activation: Literal["", "abs", "softplus"] = ""

    @property
    def paper(self) -> dict[str, float | None]:
        """The printed numbers by name."""
        return {"elbo": self.elbo, "deterministic": self.deterministic, "ensemble": self.ensemble}


VERSIONS = {
    "Layer": MethodSpec(VarianceLayers(), -5.9e2, 11.3, 99.2),
    "Neuron": MethodSpec(VarianceLayers(parameterization="neuron"), -7.7e2, 11.3, 99.2),
    "Weight": MethodSpec(VarianceLayers(parameterization="weight"), -6.4e4, 81.3, 99.2),
    "Additive": MethodSpec(VarianceLayers(parameterization="additive"), -2.3e4, 96.3, 99.2),
    "Zero mean": MethodSpec(VarianceLayers(parameterization="zero_mean"), None, None, 99.2, activation="abs"),
    "Student prior": MethodSpec(VarianceLayers(prior="student"), None, None, 99.2),
    "ARD prior": MethodSpec(VarianceLayers(prior="ard")),
}


def variance_parameterizations(setting: Setting) -> Suite:
    """Bound and accuracies by what alpha belongs to, with zero means and other priors (Table 2, appendices B, D)."""
    networks = {
        name: lenet(
            setting,
            name.lower().replace(" ", "-"),
            method=version.method,
            layers=FIRST_DENSE,
            activation=version.activation,
        )
        for name, version in VERSIONS.items()
    }
    study = Study(
        name="parameterizations",
        title="Variance paper, Table 2 and appendices B and D: versions of the first dense layer of LeNet-5",
        claim="All ensembles are equally accurate; the bound is highest where alpha is shared most, and only there the "
        "means become a guess. With a Student prior the same happens; zero means (with |x| behind them) are as good.",
        data=(digits_name(setting),),
        measure=partial(measure, networks=networks),
        draw=draw,
        say=say,
    )
    return Suite(paper=PAPER, tables=(), studies=(study,))


def measure(case: Case, *, networks: Mapping[str, Network]) -> Numbers:
    """Train every version with every seed; return bounds in nats and accuracies in percent, ours and the paper's."""
    return {
        name: {
            "seeds": [judged(network, case, seed) for seed in case.seeds],
            "paper": VERSIONS[name].paper,
        }
        for name, network in networks.items()
    }


def judged(network: Network, case: Case, seed: int) -> Numbers:
    """Return the bound on the training set with its two parts, and the accuracies, of one trained network."""
    trained = train(network, case, seed)
    test = trained.test(TEST_ROWS[case.budget])
    found = accuracies(trained.model, test, samples=SAMPLES[case.budget], noise="activation")
    return {
        "seed": seed,
        "log_alpha": log_alphas(trained.model),
        **bound(trained.model, trained.train(), passes=PASSES[case.budget]),
        **{name: 100 * value for name, value in found.items()},
    }


@torch.no_grad()
def bound(model: nn.Module, data: Data, *, passes: int, batch_size: int = BATCH) -> Numbers:
    """Return the evidence lower bound of a data set in nats, with norms in eval mode.

        ELBO = sum_n E_q log p(y_n | x_n, W) - KL(q || p) = -N nll - KL

    The expectation is a mean over passes with fresh noise for every row. The log-uniform prior has no constant of its
    own; ours makes the KL zero for infinite alpha, and that of the Student prior is taken to agree with it as nu -> 0.
    """
    x, y = data
    device = next(model.parameters()).device
    total = 0.0
    model.eval()
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
        torch.manual_seed(0)
        for start in range(0, len(x), batch_size):
            rows = slice(start, start + batch_size)
            terms = elbo(model, to_device(x[rows], device), y[rows].to(device), num_data=len(x), samples=passes)
            total += float(terms.nll) * len(y[rows])
    student = sum(layer.nodes for _, layer in stochastic_layers(model) if _has_student_prior(layer))
    divergence = float(kl(model)) + STUDENT * student
    return {"elbo": -total - divergence, "nll": total / len(x), "kl": divergence}


def say(numbers: Numbers) -> list[str]:
    """Tell bound and accuracies beside the paper's."""
    return [
        f"{name}: ELBO {_told(row, 'elbo', '.2g', ' nats')} with KL {average(row, 'kl'):.3g} and NLL "
        f"{average(row, 'nll'):.4f}; deterministic {_told(row, 'deterministic', '.1f', ' %')}, ensemble "
        f"{_told(row, 'ensemble', '.1f', ' %')}"
        for name, row in numbers.items()
    ]


def draw(numbers: Numbers, path: Path) -> None:
    """Draw minus the bound, on a logarithmic axis, and both accuracies of every version, the paper's as crosses."""
    figure = new_figure(8, 5)
    upper, lower = figure.subplots(2, 1, sharex=True)
    names = list(numbers)
    upper.plot(names, [abs(average(row, "elbo")) for row in numbers.values()], "o", label="ours")
    upper.plot(names, [-_number(row["paper"]["elbo"]) for row in numbers.values()], "kx", label="paper")
    upper.set(ylabel="|ELBO|, nats", yscale="log")
    for kind, colour in (("ensemble", "tab:blue"), ("deterministic", "tab:red")):
        lower.plot(names, [average(row, kind) for row in numbers.values()], "o", color=colour, label=kind)
        lower.plot(names, [_number(row["paper"][kind]) for row in numbers.values()], "x", color=colour)
    lower.set(ylabel="accuracy, %", ylim=(0, 105))
    for axis in (upper, lower):
        axis.legend(fontsize=7)
    save_figure(figure, path)


def _has_student_prior(layer: nn.Module) -> bool:
    return isinstance(layer, VarianceLayer) and layer.method.prior == "student"


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _told(row: Numbers, name: str, form: str, unit: str) -> str:
    paper = row["paper"][name]
    return f"{average(row, name):{form}}{unit}" + ("" if paper is None else f" (paper: {paper:{form}})")
