"""The phase transition and what curvature says of it: Figures 1, 3, 4 and 5 of the variance paper, and section 4.2.

A LeNet-5 whose first dense layer is a variance layer with softplus behind it. kappa (eq. 16) is summed over some
training rows and multiplied up to all of them, so that the paper's threshold of 10^1.5 means the same for any number.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn, Tensor

from leanbayes.methods.variance import VarianceLayers
from leanbayes.metrics import accuracy
from leanbayes.phase import infer, kappa, permute_scales, sparsify, zero_means
from leanbayes_papers.study import Case, new_figure, Numbers, save_figure, Study
from leanbayes_papers.suite import Setting, Suite
from leanbayes_papers.trained import Data, Trained
from leanbayes_papers.variance_nets import Network, THRESHOLD, train
from leanbayes_papers.variance_settings import digits_name, FIRST_DENSE, lenet, PAPER, vgg, VGG_LAYERS
from leanbayes_papers.variance_table1 import SAMPLES, TEST_ROWS

SHARES = (0.0, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 0.9999)
"""Shares of the weights that are replaced, those with the smallest kappa."""

CURVATURE_ROWS = {"quick": 50, "short": 1000, "full": 1000}
FALLEN = 0.25
"""Share of the way from its best accuracy to a guess after which the deterministic procedure counts as falling."""


def variance_criterion(setting: Setting) -> Suite:
    """The phase transition, kappa before and after it, and sparse ensembles by kappa (Figures 1, 3, 4 and 5)."""
    rows = CURVATURE_ROWS[setting.budget]
    options: dict[str, Any] = {"method": VarianceLayers(), "layers": FIRST_DENSE, "curvature_rows": rows}
    small = lenet(setting, "lenet-softplus", activation="softplus", **options)
    large = vgg(setting, "cifar10", "cifar10-variance", method=VarianceLayers(), layers=VGG_LAYERS)
    studies = (
        Study(
            name="transition",
            title="Variance paper, Figure 1: the phase transition of the VGG-like network on CIFAR-10",
            claim="Around epoch 40 the accuracy of the means falls to a guess; that of the ensemble does not change.",
            data=("cifar10",),
            measure=partial(follow, network=large),
            draw=draw_epochs,
            say=say_epochs,
        ),
        Study(
            name="criterion",
            title="Variance paper, Figures 3 and 4: kappa of the first dense layer of LeNet-5 over training",
            claim="Weights with kappa above 10^1.5 appear as the deterministic accuracy starts to fall.",
            data=(digits_name(setting),),
            measure=partial(follow, network=small),
            draw=draw_criterion,
            say=say_epochs,
        ),
        Study(
            name="sparse",
            title="Variance paper, Figure 5 and section 4.2: which weights the ensemble needs",
            claim="98 % of the weights may be set to their means, or to zero, without loss; so may all means.",
            data=(digits_name(setting),),
            measure=partial(sweep, network=small),
            draw=draw_sweep,
            say=say_sweep,
        ),
    )
    return Suite(paper=PAPER, tables=(), studies=studies)


def follow(case: Case, *, network: Network) -> Numbers:
    """Return what was seen of the first seed's training after every epoch, and three epochs around the transition."""
    trained = train(network, case, case.seeds[0])
    classes = trained.data.num_outputs
    return {"epochs": [scaled(row, trained, network) for row in trained.rows], **around(trained.rows, classes)}


def scaled(row: Numbers, trained: Trained, network: Network) -> Numbers:
    """Return a row whose histograms of log10 kappa are those of the loss summed over all training rows."""
    if "kappa" not in row:
        return row
    shift = math.log10(factor(trained, network.curvature_rows))
    moved = {p: {"edges": [e + shift for e in h["edges"]], "counts": h["counts"]} for p, h in row["kappa"].items()}
    return row | {"kappa": moved}


def factor(trained: Trained, rows: int) -> float:
    """Return by what kappa over some training rows is multiplied to be that over all."""
    return len(trained.data.train) / min(rows, len(trained.data.train))


def around(rows: list[Numbers], classes: int) -> Numbers:
    """Return the epochs before, during and after the phase transition, and whether there is one.

    During it the deterministic accuracy has fallen by a quarter of the way from its best to a guess, and stays there;
    before it is the epoch before that; after it the last. Without a transition they are the first, the middle and last.
    """
    means, last = [row["deterministic"] for row in rows], len(rows) - 1
    limit = max(means) - FALLEN * (max(means) - 1 / classes)
    stays = next((k for k in range(last, -1, -1) if means[k] > limit), last) + 1
    found = stays <= last
    chosen = (max(stays - 1, 0), stays, last) if found else (0, last // 2, last)
    names = ("before", "during", "after")
    return {"found": found} | {name: rows[k]["epoch"] for name, k in zip(names, chosen, strict=True)}


def sweep(case: Case, *, network: Network) -> Numbers:
    """Replace the weights of smallest kappa, more and more of them, and judge the ensemble that is left."""
    trained = train(network, replace(case, fresh=False), case.seeds[0])  # the study before has trained it anew
    test, samples = trained.test(TEST_ROWS[case.budget]), SAMPLES[case.budget]
    data = trained.train(network.curvature_rows)
    scores = {p: k * factor(trained, network.curvature_rows) for p, k in kappa(trained.model, data).items()}
    model = trained.model
    return {
        "thresholds": [compared(model, scores, threshold, test, samples) for threshold in thresholds(scores)],
        "ensemble": judged(model, test, samples),
        "deterministic": 100 * _accuracy(infer(model, test[0], "deterministic").mean, test[1]),
        "zero means": judged(zero_means(model), test, samples),
        "permuted scales": judged(permute_scales(model), test, samples),
    }


def thresholds(scores: dict[str, Tensor]) -> list[float]:
    """Return rising thresholds: those that replace certain shares of all weights, and the paper's."""
    ranked = torch.cat([score.flatten().double().cpu() for score in scores.values()]).sort().values
    places = [min(int(share * len(ranked)), len(ranked) - 1) for share in SHARES]
    return sorted({float(ranked[place]) for place in places} | {THRESHOLD})


def compared(model: nn.Module, scores: dict[str, Tensor], threshold: float, test: Data, samples: int) -> Numbers:
    """Return the accuracies of ensembles whose weights below a threshold are means, or zero."""
    by_mean, by_zero = (sparsify(model, scores, threshold, instead=instead) for instead in ("mean", "zero"))
    return {
        "kappa": threshold,
        "kept": by_zero.kept,
        "share": by_zero.share,
        "compression": by_zero.compression,
        "mean": judged(by_mean.model, test, samples),
        "zero": judged(by_zero.model, test, samples),
    }


def judged(model: nn.Module, test: Data, samples: int) -> float:
    """Return the accuracy of an ensemble in percent."""
    p = infer(model, test[0], "ensemble", samples=samples, noise="activation").mean
    return 100 * _accuracy(p, test[1])


def say_epochs(numbers: Numbers) -> list[str]:
    """Tell accuracies, log alpha and how many weights are above the threshold before, during and after."""
    rows = {row["epoch"]: row for row in numbers["epochs"]}
    what = "The phase transition:" if numbers["found"] else "No phase transition:"
    lines = [f"{what} deterministic accuracy is {100 * rows[numbers['after']]['deterministic']:.1f} % in the end."]
    for name in ("before", "during", "after"):
        row = rows[numbers[name]]
        alphas = ", ".join(f"{value:.1f}" for value in row["log_alpha"].values())
        above = f", {sum(row['sampled'].values()):,} weights above kappa_0" if "sampled" in row else ""
        lines.append(
            f"{name}, epoch {row['epoch']}: deterministic {100 * row['deterministic']:.1f} %, ensemble "
            f"{100 * row['ensemble']:.1f} %, log alpha {alphas}{above}"
        )
    return lines


def say_sweep(numbers: Numbers) -> list[str]:
    """Tell the sparse ensembles, and the two diagnostics of section 4.2."""
    lines = [
        f"kappa below {row['kappa']:.3g}, {100 * row['share']:.2f} % of the weights (compression "
        f"{row['compression']:.1f}): means {row['mean']:.1f} %, zeros {row['zero']:.1f} %"
        for row in numbers["thresholds"]
    ]
    return [
        f"The full ensemble has {numbers['ensemble']:.1f} %, the means {numbers['deterministic']:.1f} %.",
        *lines,
        f"With zero means {numbers['zero means']:.1f} %, with permuted deviations {numbers['permuted scales']:.1f} %.",
    ]


def draw_epochs(numbers: Numbers, path: Path) -> None:
    """Draw the accuracies over epochs."""
    figure = new_figure(6, 3.5)
    _accuracies(figure.subplots(), numbers["epochs"])
    save_figure(figure, path)


def draw_criterion(numbers: Numbers, path: Path) -> None:
    """Draw histograms of log10 kappa before, during and after; beside them the weights above kappa_0 over epochs."""
    figure = new_figure(11, 3.5)
    left, right = figure.subplots(1, 2)
    rows = {row["epoch"]: row for row in numbers["epochs"]}
    for name, colour in (("before", "tab:blue"), ("during", "tab:green"), ("after", "tab:red")):
        for found in rows[numbers[name]]["kappa"].values():
            left.stairs(found["counts"], found["edges"], color=colour, label=f"{name}, epoch {numbers[name]}")
    left.axvline(math.log10(THRESHOLD), color="red", lw=1)
    left.set(xlabel="log10 kappa", ylabel="weights", yscale="symlog")
    left.legend(fontsize=7)
    _accuracies(right, numbers["epochs"])
    counts = right.twinx()
    counts.plot([*rows], [sum(row["sampled"].values()) for row in rows.values()], "k--")
    counts.set(ylabel="weights above kappa_0 (dashed)")
    save_figure(figure, path)


def draw_sweep(numbers: Numbers, path: Path) -> None:
    """Draw accuracy and compression over the threshold."""
    figure = new_figure(6, 3.5)
    axis = figure.subplots()
    rows = numbers["thresholds"]
    at = [math.log10(max(row["kappa"], 1e-25)) for row in rows]
    for name, colour in (("mean", "tab:blue"), ("zero", "tab:green")):
        axis.plot(at, [row[name] for row in rows], "o-", color=colour, label=f"{name}s instead")
    axis.axhline(numbers["ensemble"], color="red", label="full ensemble")
    axis.set(xlabel="log10 kappa", ylabel="accuracy, %")
    axis.legend(fontsize=7)
    other = axis.twinx()
    other.plot(at, [row["compression"] for row in rows], "b--")
    other.set(ylabel="compression (dashed)", yscale="log")
    save_figure(figure, path)


def _accuracies(axis: Any, rows: list[Numbers]) -> None:
    for name in ("ensemble", "deterministic"):
        axis.plot([row["epoch"] for row in rows], [100 * row[name] for row in rows], label=name)
    axis.set(xlabel="epoch", ylabel="accuracy, %")
    axis.legend(fontsize=7)


def _accuracy(p: Tensor, y: Tensor) -> float:
    return float(accuracy(p, y.to(p.device)))
