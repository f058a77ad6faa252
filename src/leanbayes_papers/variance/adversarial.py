"""Figure 2 of the variance paper: targeted attacks on ensembles."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

import leanbayes as lb
from leanbayes_papers.harness import Column, group, plot_curves, Record, Run, Study, Suite, Table, Trained, TrainingSpec
from leanbayes_papers.variance import PAPER
from leanbayes_papers.variance.networks import FIRST_DENSE, lenet, vgg, VGG_LAYERS

LEVELS = 255
SEED_STEP = 1000  # distance between the seeds of the members of an ensemble; the first has the seed itself
SAMPLES = 10
MEMBERS = {"quick": 2, "short": 5, "full": 5}
STEPS = {"quick": 5, "short": 30, "full": 30}
# In grey levels of 255. The paper's 0.5 has no unit; half a grey level is the only one that leaves room to differ.
STEP_SIZE = {"quick": 8.0, "short": 0.5, "full": 0.5}
IMAGES = {"quick": 50, "short": 1000, "full": 10_000}
CURVES = ("success", "entropy", "accuracy")
TABLE = Table.of("variance", "adversarial", derive=lambda records: summary(records))


def variance_adversarial(run: Run) -> Suite:
    """Success and entropy under targeted iterative fast sign attacks, five kinds of ensembles (Figure 2)."""
    variance = lb.VarianceLayers()
    data = run.pick(quick="digits", short="cifar10", full="cifar10")
    if data == "digits":
        specs = {
            "dropout": lenet(run, "digits-dropout", dropout=True),
            "plain": lenet(run, "digits-plain"),
            "variance": lenet(run, "digits-variance", variance, layers=FIRST_DENSE),
        }
    else:
        specs = {
            "dropout": vgg(run, data, f"{data}-dropout"),
            "plain": vgg(run, data, f"{data}-plain", dropout=False),
            "variance": vgg(run, data, f"{data}-variance", variance, layers=VGG_LAYERS),
        }
    columns = (Column("success", "share of successful attacks"), Column("entropy", "mean entropy, nats"))
    sizes = {"steps": STEPS[run.budget], "size": STEP_SIZE[run.budget], "members": MEMBERS[run.budget]}
    measured, plot = partial(measure, specs=specs), partial(plot_curves, x="step", columns=columns)
    fields = {"measure": measured, "tables": (TABLE,), "plot": plot, "data": (data,)}
    study = Study.of("variance", "adversarial", {"set": data, **sizes}, **fields)
    return Suite(paper=PAPER, studies=(study,))


def measure(run: Run, *, specs: Mapping[str, TrainingSpec]) -> list[Record]:
    """Attack all five models of the first seed; random targets other than the true class."""
    seed, members = run.seeds[0], MEMBERS[run.budget]
    dropout = run.train(specs["dropout"], seed)
    plain, variance = (
        [run.train(specs[name], seed + SEED_STEP * k).model for k in range(members)] for name in ("plain", "variance")
    )
    models = {
        "Dropout, deterministic": lb.mean(dropout.model),
        "Dropout": dropout.model,
        "Deep ensemble": lb.Ensemble(plain),
        "Variance": variance[0],
        "Variance ensemble": lb.Ensemble(variance),
    }
    return [{"method": name} | row for name, model in models.items() for row in attacked(model, dropout, run)]


def attacked(model: nn.Module, trained: Trained, run: Run) -> list[Record]:
    """Return success, entropy and accuracy after every step; None if there is no row to succeed on."""
    x, y = trained.test(IMAGES[run.budget])
    units = lb.shift.pixel_units(trained.data.mean, trained.data.std, levels=LEVELS)
    options: dict[str, Any] = {"bounds": (0, LEVELS), "samples": SAMPLES, "noise": "activation", "batch_size": 500}
    attack = lb.shift.fast_sign(STEPS[run.budget], STEP_SIZE[run.budget], units=units, **options)
    found = lb.shift.attack(model.eval(), x, y, attack, target="random")
    steps = zip(*(found.curve(name) for name in CURVES), strict=True)
    return [
        {"step": step} | {n: v if math.isfinite(v) else None for n, v in zip(CURVES, values, strict=True)}
        for step, values in enumerate(steps)
    ]


def summary(records: list[Record]) -> list[Record]:
    """Return one record for each model: clean images, half of the steps, the last step, and the highest entropy."""
    found = []
    for (method,), rows in group(records, ("method",)).items():
        times = {"clean": rows[0], "half": rows[(len(rows)) // 2], "end": rows[-1]}
        at = {f"{name} {time}": row[name] for time, row in times.items() for name in CURVES}
        found.append({"method": method, "entropy most": max(row["entropy"] for row in rows)} | at)
    return found
