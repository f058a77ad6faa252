"""Tables 1 and 2 of the variance paper: accuracy by three procedures, and the scope of alpha.

Table 2 comes with the zero-mean layer and the other priors of appendices B and D.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn, Tensor

import leanbayes as lb
from leanbayes.runtime.batches import to_device
from leanbayes_papers.harness import Column, plot_rows, printed, Record, Run, Study, Suite, Table, Trained, TrainingSpec
from leanbayes_papers.harness.numbers import numbers
from leanbayes_papers.variance import networks as nets
from leanbayes_papers.variance import PAPER

PROCEDURES = ("stochastic", "deterministic", "ensemble")
ACCURACIES = tuple(Column(name, f"{name}, %", ".1f") for name in PROCEDURES)


def variance_table1(run: Run) -> Suite:
    """Accuracy of dropout and variance networks: stochastic, deterministic and ensemble (Table 1)."""
    variance = lb.VarianceLayers()
    small = {
        "Dropout": nets.lenet(run, "lenet-dropout", dropout=True),
        "Variance": nets.lenet(run, "lenet-variance", variance, layers=nets.ALL_OF_LENET),
    }
    studies = [table_of(nets.digits_name(run), "mnist", small)]
    for data in ("cifar10", "cifar100"):
        large = {
            "Dropout": nets.vgg(run, data, f"{data}-dropout"),
            "Variance": nets.vgg(run, data, f"{data}-variance", variance, layers=nets.VGG_LAYERS),
        }
        studies.append(table_of(data, data, large))
    return Suite(paper=PAPER, studies=tuple(studies))


def table_of(data: str, paper: str, specs: Mapping[str, TrainingSpec]) -> Study:
    """Return the study of one data set, with the paper's numbers of this or another."""
    table = Table(
        by=("method",),
        columns=(*ACCURACIES, Column("log_alpha", "log alpha by layer", text=write_log_alphas)),
        paper={(name,): row for name, row in printed("variance", f"table1 {paper}").items()},
    )
    words = {"data": data, "alpha": numbers("variance")["alpha"][paper]}
    plot = partial(plot_rows, table=table)
    return Study.of("variance", "table1", words, measure=partial(measure, specs=specs), tables=(table,), plot=plot)


def measure(
    run: Run,
    *,
    specs: Mapping[str, TrainingSpec],
    data: str = "",
    more: Callable[[Trained, Run], Record] = lambda trained, run: {},
) -> list[Record]:
    """Train every network with every seed and evaluate it by the three procedures, with noise on activations."""
    records = []
    for name, spec in specs.items():
        for seed in run.seeds:
            trained = run.train(spec, seed)
            test, samples = trained.test(nets.TEST_ROWS[run.budget]), nets.SAMPLES[run.budget]
            found = lb.phase.accuracies(trained.model, test, samples=samples, noise="activation")
            accuracies = {procedure: 100 * found[procedure] for procedure in PROCEDURES}
            names = {"method": name, "seed": seed}
            records.append(names | accuracies | nets.log_alphas(trained.model) | more(trained, run))
    return records


def write_log_alphas(records: Sequence[Record]) -> str:
    """Write the log alpha of every layer, of the first seed."""
    found = {name.partition(" ")[2]: value for name, value in records[0].items() if name.startswith("log_alpha ")}
    return ", ".join(f"{path} {value:.1f}" for path, value in found.items() if value is not None) or "-"


# ------------------------------------------------------------------------------------ Table 2

BATCH = 1000
PASSES = {"quick": 2, "short": 10, "full": 10}  # draws of every training row in the bound
EULER = 0.5772156649015329
STUDENT = 0.5 * (math.log(2) + EULER)  # difference of `log_uniform_kl` and `student_kl` of a weight as nu -> 0
VERSIONS = {
    "Layer": lb.VarianceLayers(),
    "Neuron": lb.VarianceLayers(parameterization="neuron"),
    "Weight": lb.VarianceLayers(parameterization="weight"),
    "Additive": lb.VarianceLayers(parameterization="additive"),
    "Zero mean": lb.VarianceLayers(parameterization="zero_mean"),
    "Student prior": lb.VarianceLayers(prior="student"),
    "ARD prior": lb.VarianceLayers(prior="ard"),
}
TABLE2 = Table.of("variance", "table2")


def variance_parameterizations(run: Run) -> Suite:
    """Bound and accuracies by what alpha belongs to, with zero means and other priors (Table 2, appendices B, D)."""
    fields: dict[str, Any] = {
        "measure": partial(
            measure, specs=versions(run), more=lambda one, run: bound(one.model, one.train(), passes=PASSES[run.budget])
        ),
        "data": (nets.digits_name(run),),
    }
    plot = partial(plot_rows, table=replace(TABLE2, columns=TABLE2.columns[3:]))
    study = Study.of("variance", "parameterizations", tables=(TABLE2,), plot=plot, **fields)
    return Suite(paper=PAPER, studies=(study,))


def versions(run: Run) -> dict[str, TrainingSpec]:
    """Return the networks by version; only the zero-mean layer has |x| after it."""
    options: dict[str, dict[str, Any]] = {"Zero mean": {"activation": "abs"}}
    return {
        name: nets.lenet(run, name.lower().replace(" ", "-"), method, layers=nets.FIRST_DENSE, **options.get(name, {}))
        for name, method in VERSIONS.items()
    }


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
