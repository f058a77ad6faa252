"""Table 2 of the variance paper: the scope of alpha, with the zero-mean layer and other priors of its appendices."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn, Tensor

import leanbayes as lb
from leanbayes.runtime.batches import to_device
from leanbayes_papers.harness import Column, plot_rows, printed, Run, Study, Suite, Table, Trained, TrainingSpec
from leanbayes_papers.variance import PAPER
from leanbayes_papers.variance.networks import digits_name, FIRST_DENSE, lenet
from leanbayes_papers.variance.table1 import measure

BATCH = 1000
PASSES = {"quick": 2, "short": 10, "full": 10}
"""Draws of every training row in the bound."""

EULER = 0.5772156649015329
STUDENT = 0.5 * (math.log(2) + EULER)
"""Difference of `log_uniform_kl` and `student_kl` of a weight as nu -> 0."""

VERSIONS = {
    "Layer": lb.VarianceLayers(),
    "Neuron": lb.VarianceLayers(parameterization="neuron"),
    "Weight": lb.VarianceLayers(parameterization="weight"),
    "Additive": lb.VarianceLayers(parameterization="additive"),
    "Zero mean": lb.VarianceLayers(parameterization="zero_mean"),
    "Student prior": lb.VarianceLayers(prior="student"),
    "ARD prior": lb.VarianceLayers(prior="ard"),
}
TABLE = Table(
    by=("method",),
    columns=(
        Column("elbo", "ELBO, nats", ".3g"),
        Column("kl", "KL", ".3g"),
        Column("nll", "NLL", ".4f"),
        Column("deterministic", "deterministic, %", ".1f"),
        Column("ensemble", "ensemble, %", ".1f"),
    ),
    paper={(name,): row for name, row in printed("variance", "table2").items()},
)


def variance_parameterizations(run: Run) -> Suite:
    """Bound and accuracies by what alpha belongs to, with zero means and other priors (Table 2, appendices B, D)."""
    study = Study.of(
        "variance",
        "parameterizations",
        measure=partial(measure, specs=specs(run), more=bound_of),
        tables=(TABLE,),
        plot=partial(plot_rows, table=replace(TABLE, columns=TABLE.columns[3:])),
        data=(digits_name(run),),
    )
    return Suite(paper=PAPER, studies=(study,))


def specs(run: Run) -> dict[str, TrainingSpec]:
    """Return the networks by version; only the zero-mean layer has |x| after it."""
    options: dict[str, dict[str, Any]] = {"Zero mean": {"activation": "abs"}}
    return {
        name: lenet(run, name.lower().replace(" ", "-"), method, layers=FIRST_DENSE, **options.get(name, {}))
        for name, method in VERSIONS.items()
    }


def bound_of(trained: Trained, run: Run) -> dict[str, float]:
    """Return the bound of a trained network on its training set."""
    return bound(trained.model, trained.train(), passes=PASSES[run.budget])


@torch.no_grad()
def bound(model: nn.Module, data: tuple[Tensor, Tensor], *, passes: int, batch_size: int = BATCH) -> dict[str, float]:
    """Return the evidence lower bound of a data set in nats, with norms in eval mode.

        ELBO = sum_n E_q log p(y_n | x_n, W) - KL(q || p) = -N nll - KL

    The expectation is a mean over passes with fresh noise for every row. The log-uniform prior has no constant of its
    own; ours makes the KL zero for infinite alpha, and the KL of the Student prior agrees with it as nu -> 0.
    """
    x, y = data
    device = next(model.parameters()).device
    total = 0.0
    model.eval()
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
        torch.manual_seed(0)
        for start in range(0, len(x), batch_size):
            rows = slice(start, start + batch_size)
            terms = lb.elbo(model, to_device(x[rows], device), y[rows].to(device), num_data=len(x), samples=passes)
            total += float(terms.nll) * len(y[rows])
    layers = (layer for _, layer in lb.stochastic_layers(model))
    student = sum(layer.nodes for layer in layers if getattr(layer.method, "prior", "") == "student")
    divergence = float(lb.kl(model)) + STUDENT * student
    return {"elbo": -total - divergence, "nll": total / len(x), "kl": divergence}
