"""Figures 2 to 5 of the rank-1 paper, on CIFAR-10: which factors, how many components, which loss, how diverse.

A checkpoint is the model after an epoch. `Checkpoints` evaluates it and keeps the numbers in `checkpoints.json`.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn, Tensor

import leanbayes as lb
from leanbayes.runtime._files import write_text
from leanbayes.runtime.passes import components_of
from leanbayes_papers.harness import plot_curves, Record, Run, Study, Suite, Table, TrainingSpec
from leanbayes_papers.rank1 import networks as nets
from leanbayes_papers.rank1 import PAPER

MEASURES = ("nll", "accuracy", "ece", "c_nll", "c_accuracy", "c_ece", "disagreement")
SIZES = (1, 2, 4, 8, 16)
FIGURES = {
    "figure2": {"s (inputs)": "rank1-inputs", "r (outputs)": "rank1-outputs", "both": "rank1-both"},
    "figure3": {f"K = {k}": "rank1-both" if k == nets.COMPONENTS else f"rank1-k{k}" for k in SIZES},
    "figure4": {"average": "rank1-both", "log-mixture": "rank1-mixture"},
}
FILE = "checkpoints.json"
ROWS = 2000  # rows of the test set, and of the training set, on which a checkpoint is evaluated


def rank1_ablations(run: Run) -> Suite:
    """Rank-1 factors on inputs, outputs, both; K from 1 to 16; average or mixture loss; diversity (Figures 2-5)."""
    made = specs(run)
    tables = (
        Study.of("rank1", figure).compared({name: made[label] for name, label in labels.items()}, MEASURES)
        for figure, labels in FIGURES.items()
    )
    pairs = (("components", "rank1-mixture"), ("disagreement", "batch_ensemble"))
    figures = (_figure(kind, (made["rank1-both"], made[other])) for kind, other in pairs)
    return Suite(paper=PAPER, studies=(*tables, *figures))


def specs(run: Run) -> dict[str, TrainingSpec]:
    """Return all networks by label; the one of four components on both sides is in every comparison."""
    k = nets.COMPONENTS
    one = {"components": k, "other": run.pick(quick="none", short="none", full="point")}
    methods = {f"rank1-{side}s": nets.rank1(run, factors=side, **one) for side in ("input", "output")}
    methods |= {"rank1-both": nets.rank1(run, components=k)}
    methods |= {f"rank1-k{size}": nets.rank1(run, components=size) for size in SIZES if size != k}
    made = {name: nets.factor_spec(run, name, method) for name, method in methods.items()}
    both = made["rank1-both"] = replace(made["rank1-both"], watch=Checkpoints)
    made["rank1-mixture"] = replace(both, name="rank1-mixture", recipe=replace(both.recipe, aggregate="mixture"))
    return made | {"batch_ensemble": replace(nets.batch_ensemble(run), watch=Checkpoints)}


def _figure(kind: str, specs: tuple[TrainingSpec, ...]) -> Study:
    table = Table.of("rank1", kind, derive=last_epoch)
    plot = partial(plot_curves, x="epoch", columns=table.columns)
    return Study.of("rank1", kind, measure=partial(checkpoints, specs=specs), tables=(table,), plot=plot, specs=specs)


def last_epoch(records: list[Record]) -> list[Record]:
    """Return the records of the last epoch."""
    last = max(record["epoch"] for record in records)
    return [record for record in records if record["epoch"] == last]


def checkpoints(run: Run, *, specs: tuple[TrainingSpec, ...]) -> list[Record]:
    """Collect the checkpoints of runs, with the mean NLL of the components."""
    found = []
    for spec in specs:
        for seed in run.seeds:
            rows = read(spec.folder(run.out, seed) / FILE)
            if not rows:
                raise ValueError(f"the checkpoints of {spec.name}, seed {seed}, were not evaluated; run with --fresh")
            means = (sum(row["test components"]) / len(row["test components"]) for row in rows)
            names = {"method": spec.name, "seed": seed}
            found += [names | row | {"component nll": nll} for row, nll in zip(rows, means, strict=True)]
    return found


class Checkpoints:
    """Callback of `fit`: evaluates one draw of every component on test and training rows after every epoch."""

    def __init__(self, spec: TrainingSpec, folder: Path, experiment: Any, run: Run) -> None:
        """Set the file; rows are prepared when the first epoch is done."""
        self.path, self.experiment = folder / FILE, experiment
        self.data: dict[str, tuple[Tensor, Tensor]] = {}

    def __call__(self, state: Any) -> None:
        """Evaluate the model of an epoch; a training that resumes keeps its earlier epochs."""
        if not state.fabric.is_global_zero:
            return
        self.data = self.data or self._prepare()
        before = [record for record in read(self.path) if record["epoch"] < state.epoch]
        parts = {part: evaluate_components(state.model, x, y) for part, (x, y) in self.data.items()}
        found = {f"{part} {name}": value for part, each in parts.items() for name, value in each.items()}
        write_text(json.dumps([*before, {"epoch": state.epoch} | found], allow_nan=False), self.path)

    def _prepare(self) -> dict[str, tuple[Tensor, Tensor]]:
        _, x, y = self.experiment.test
        train = self.experiment.data.train
        some, every = _evenly(len(x)), _evenly(len(train))
        return {"test": (x[some], y[some]), "train": (self.experiment.data.inputs(train.x[every]), train.y[every])}


def evaluate_components(model: nn.Module, x: Tensor, y: Tensor) -> Record:
    """Return NLL and accuracy of the average over components, the NLL of each, their disagreement over their error."""
    p = lb.predict(model, x, samples=components_of(model)).to("cpu")
    assert p.samples is not None
    many = len(p.samples) > 1
    ratio = float(lb.metrics.disagreement(p.samples, y, error="members")) if many else math.nan
    return {
        "nll": float(lb.metrics.nll(p.mean, y)),
        "accuracy": float(lb.metrics.accuracy(p.mean, y)),
        "components": [float(lb.metrics.nll(sample, y)) for sample in p.samples],
        "disagreement": ratio if math.isfinite(ratio) else None,
    }


def read(path: Path) -> list[Record]:
    """Return the evaluated checkpoints of a run, epoch by epoch; none if there is no file."""
    return list(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else []


def _evenly(rows: int) -> Tensor:
    return torch.arange(rows) if rows <= ROWS else torch.arange(ROWS) * rows // ROWS
