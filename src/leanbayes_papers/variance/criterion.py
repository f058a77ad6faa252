"""Figures 1, 3, 4 and 5 of the variance paper, and section 4.2: the phase transition and the curvature criterion.

A LeNet-5 whose first dense layer is a variance layer with softplus after it. kappa (eq. 16) is summed over some
training rows and multiplied up to all of them, so that the paper's threshold of 10^1.5 means the same for any number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn, Tensor

import leanbayes as lb
from leanbayes_papers.harness import Data, plot_curves, Record, Run, Study, Suite, Table, TrainingSpec
from leanbayes_papers.harness.charts import new_figure, save_figure, SMALL
from leanbayes_papers.variance import networks as nets
from leanbayes_papers.variance import PAPER

# Shares of the weights that are replaced, those with the smallest kappa.
SHARES = (0.0, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 0.9999)
CURVATURE_ROWS = {"quick": 50, "short": 1000, "full": 1000}
CLASSES = 10
# Share of the way from its best accuracy to a guess after which the deterministic procedure counts as falling.
FALLEN = 0.25


def _join(name: str, form: str, rows: Sequence[Record]) -> str:
    return ", ".join(f"{value:{form}}" for value in rows[0].get(name, {}).values()) or "-"


TEXTS = {"log_alpha": partial(_join, "log_alpha", ".1f"), "sampled": partial(_join, "sampled", ",.0f")}
EPOCHS = Table.of("variance", "epochs", TEXTS, derive=lambda records: around(records))
ACCURACIES = EPOCHS.some("deterministic", "ensemble")
SWEEP, REFERENCES = Table.of("variance", "sweep"), Table.of("variance", "references")


def variance_criterion(run: Run) -> Suite:
    """The phase transition, kappa before and after it, and sparse ensembles by kappa (Figures 1, 3, 4 and 5)."""
    options: dict[str, Any] = {"layers": nets.FIRST_DENSE, "curvature_rows": CURVATURE_ROWS[run.budget]}
    small = nets.lenet(run, "lenet-softplus", lb.VarianceLayers(), activation="softplus", **options)
    large = nets.vgg(run, "cifar10", "cifar10-variance", lb.VarianceLayers(), layers=nets.VGG_LAYERS)
    studies = (  # name, network, measure, tables, plot
        ("transition", large, follow, (EPOCHS,), partial(plot_curves, x="epoch", by=(), columns=ACCURACIES)),
        ("criterion", small, follow, (EPOCHS,), plot_criterion),
        (
            "sparse",
            small,
            sweep,
            (SWEEP, REFERENCES),
            partial(plot_curves, x="kappa", by=(), columns=SWEEP.columns, log=True),
        ),
    )
    made = (
        Study.of(
            "variance", name, measure=partial(measure, spec=spec), tables=tables, plot=plot, data=(spec.source.name,)
        )
        for name, spec, measure, tables, plot in studies
    )
    return Suite(paper=PAPER, studies=tuple(made))


def follow(run: Run, *, spec: TrainingSpec) -> list[Record]:
    """Return the measurements of every epoch of the first seed, kappa for all training rows."""
    trained = run.train(spec, run.seeds[0])
    shift = math.log10(nets.kappa_factor(trained.data, spec.options.get("curvature_rows", 0)))
    return [shifted(row, shift) for row in trained.watched]


def shifted(row: Record, shift: float) -> Record:
    """Return a row whose histograms of log10 kappa are moved by `shift`."""
    if "kappa" not in row:
        return row
    moved = {p: {"edges": [e + shift for e in h["edges"]], "counts": h["counts"]} for p, h in row["kappa"].items()}
    return row | {"kappa": moved}


def around(rows: list[Record]) -> list[Record]:
    """Return the epochs before, during and after the phase transition; without one the first, the middle and last.

    During it the deterministic accuracy has fallen by a quarter of the way from its best to a guess, and stays there;
    before it is the epoch before that; after it the last.
    """
    means, last = [row["deterministic"] for row in rows], len(rows) - 1
    limit = max(means) - FALLEN * (max(means) - 1 / CLASSES)
    stays = next((k for k in range(last, -1, -1) if means[k] > limit), last) + 1
    if stays <= last:
        return [rows[k] | {"phase": p} for p, k in (("before", max(stays - 1, 0)), ("during", stays), ("after", last))]
    return [rows[k] | {"phase": p} for p, k in (("first", 0), ("middle", last // 2), ("last", last))]


def sweep(run: Run, *, spec: TrainingSpec) -> list[Record]:
    """Replace the weights of smallest kappa, more and more of them, and evaluate the remaining ensemble."""
    trained = run.train(spec, run.seeds[0])
    model, rows = trained.model, spec.options["curvature_rows"]
    test, samples = trained.test(nets.TEST_ROWS[run.budget]), nets.SAMPLES[run.budget]
    found = lb.phase.kappa(model, trained.train(rows))
    scores = {path: values * nets.kappa_factor(trained.data, rows) for path, values in found.items()}
    references = {
        "full ensemble": accuracy(model, test, "ensemble", samples),
        "means alone": accuracy(model, test, "deterministic"),
        "zero means": accuracy(lb.phase.zero_means(model), test, "ensemble", samples),
        "permuted deviations": accuracy(lb.phase.permute_scales(model), test, "ensemble", samples),
    }
    return [
        *(replaced(model, scores, threshold, test, samples) for threshold in thresholds(scores)),
        *({"network": name, "accuracy": value} for name, value in references.items()),
    ]


def thresholds(scores: dict[str, Tensor]) -> list[float]:
    """Return rising thresholds: those that replace certain shares of all weights, and the paper's."""
    ranked = torch.cat([score.flatten().double().cpu() for score in scores.values()]).sort().values
    places = [min(int(share * len(ranked)), len(ranked) - 1) for share in SHARES]
    return sorted({float(ranked[place]) for place in places} | {nets.THRESHOLD})


def replaced(model: nn.Module, scores: dict[str, Tensor], threshold: float, test: Data, samples: int) -> Record:
    """Return the accuracies of ensembles whose weights below a threshold are means, or zero."""
    by_mean, by_zero = (lb.phase.sparsify(model, scores, threshold, instead=instead) for instead in ("mean", "zero"))
    return {
        "kappa": threshold,
        "kept": by_zero.kept,
        "share": by_zero.share,
        "compression": by_zero.compression,
        "mean": accuracy(by_mean.model, test, "ensemble", samples),
        "zero": accuracy(by_zero.model, test, "ensemble", samples),
    }


def accuracy(model: nn.Module, test: Data, procedure: Literal["ensemble", "deterministic"], samples: int = 1) -> float:
    """Return the accuracy of a procedure in percent."""
    p = lb.phase.infer(model, test[0], procedure, samples=samples, noise="activation").mean
    return 100 * float(lb.metrics.accuracy(p, test[1].to(p.device)))


def plot_criterion(records: list[Record], path: Path) -> None:
    """Plot histograms of log10 kappa at three epochs, accuracies and weights above kappa_0 over epochs."""
    figure = new_figure(13, 3.5)
    left, middle, right = figure.subplots(1, 3)
    for row, colour in zip(around(records), ("tab:blue", "tab:green", "tab:red"), strict=True):
        for found in row["kappa"].values():
            left.stairs(found["counts"], found["edges"], color=colour, label=f"{row['phase']}, epoch {row['epoch']}")
    left.axvline(math.log10(nets.THRESHOLD), color="red", lw=1)
    left.set(xlabel="log10 kappa", ylabel="weights", yscale="symlog")
    epochs = [row["epoch"] for row in records]
    for column in ACCURACIES:
        middle.plot(epochs, [100 * row[column.name] for row in records], label=column.head)
    right.plot(epochs, [sum(row["sampled"].values()) for row in records], label="weights above kappa_0")
    for axis in (left, middle, right):
        axis.legend(fontsize=SMALL)
    save_figure(figure, path)
