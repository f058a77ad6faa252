"""What the checkpoints of a training are like, epoch by epoch: NLL of the whole and of each component, diversity.

Behind figures 4 and 5 of the rank-1 paper. A checkpoint is the model after an epoch; `Checkpoints` looks at it while it
is there, and keeps the numbers in `checkpoints.json` beside the run.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn, Tensor

from leanbayes import metrics
from leanbayes.compare.experiment import Experiment
from leanbayes.compare.job import Job
from leanbayes.core.predictor import predict
from leanbayes.runtime._files import write_text
from leanbayes.runtime.passes import components_of
from leanbayes.training import EpochState
from leanbayes_papers.study import Case, new_figure, Numbers, save_figure

FILE = "checkpoints.json"
LOOKED_AT = 2000
"""Rows of the test set, and of the training set, on which a checkpoint is looked at."""


class Checkpoints:
    """A callback of `fit`: one draw of every component on test rows and on training rows, after every epoch.

    A training that was killed and goes on keeps the epochs that were looked at before.
    """

    def __init__(self, job: Job, experiment: Experiment, out: Path) -> None:
        """Say where the run lies; its rows are prepared when the first epoch is done."""
        self.path = job.folder(out) / FILE
        self.experiment = experiment
        self.rows: dict[str, tuple[Tensor, Tensor]] = {}

    def __call__(self, state: EpochState) -> None:
        """Look at the model of an epoch."""
        if not state.fabric.is_global_zero:
            return
        self.rows = self.rows or self._prepare()
        before = [row for row in read(self.path) if row["epoch"] < state.epoch]
        looked = {name: look(state.model, x, y) for name, (x, y) in self.rows.items()}
        write_text(json.dumps([*before, {"epoch": state.epoch} | looked], allow_nan=False), self.path)

    def _prepare(self) -> dict[str, tuple[Tensor, Tensor]]:
        _, x, y = self.experiment.test
        train = self.experiment.data.train
        some, every = _evenly(len(x)), _evenly(len(train))
        return {"test": (x[some], y[some]), "train": (self.experiment.data.inputs(train.x[every]), train.y[every])}


def look(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Any]:
    """Return NLL and accuracy of the average over components, the NLL of each, and their disagreement over their error.

    One draw of every component. A network without components has no disagreement.
    """
    p = predict(model, x, samples=components_of(model)).to("cpu")
    assert p.samples is not None
    found = {
        "nll": float(metrics.nll(p.mean, y)),
        "accuracy": float(metrics.accuracy(p.mean, y)),
        "components": [float(metrics.nll(sample, y)) for sample in p.samples],
        "disagreement": None,
    }
    if len(p.samples) > 1:
        ratio = float(metrics.disagreement(p.samples, y, error="members"))
        found["disagreement"] = ratio if math.isfinite(ratio) else None
    return found


def read(path: Path) -> list[dict[str, Any]]:
    """Return what is known of the checkpoints of a run, epoch by epoch; nothing where there is no file."""
    return list(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else []


def curves(case: Case) -> Numbers:
    """Collect the checkpoints of runs by label and seed."""
    found: Numbers = {}
    for job in case.jobs:
        rows = read(job.folder(case.out) / FILE)
        if not rows:
            raise ValueError(f"the checkpoints of {job.label}, seed {job.seed}, were not looked at; run with --fresh")
        found.setdefault(job.label, {})[str(job.seed)] = rows
    return found


def say_components(numbers: Numbers) -> list[str]:
    """Tell the last NLLs: of the average and of the components on test rows, of the average on training rows."""
    lines = []
    for label, seeds in numbers.items():
        last = [rows[-1] for rows in seeds.values()]
        test, train = (_mean([row[part]["nll"] for row in last]) for part in ("test", "train"))
        each = _mean([nll for row in last for nll in row["test"]["components"]])
        lines.append(f"{label}: test NLL {test:.4f}, of a component {each:.4f}, train NLL {train:.4f}")
    return lines


def say_disagreement(numbers: Numbers) -> list[str]:
    """Tell accuracy, NLL and disagreement at the end of training."""
    lines = []
    for label, seeds in numbers.items():
        last = [rows[-1]["test"] for rows in seeds.values()]
        ratios = [row["disagreement"] for row in last if row["disagreement"] is not None]
        said = f"{_mean(ratios):.3f}" if ratios else "unknown"
        accuracy, nll = (_mean([row[name] for row in last]) for name in ("accuracy", "nll"))
        lines.append(f"{label}: disagreement / error {said} at accuracy {100 * accuracy:.2f} %, NLL {nll:.4f}")
    return lines


def draw_components(numbers: Numbers, path: Path) -> None:
    """Draw NLL over epochs for each label: average on test (blue), components (thin), average on training (black)."""
    figure = new_figure(4.2 * len(numbers), 3.4)
    axes = figure.subplots(1, len(numbers), sharey=True, squeeze=False)[0]
    for axis, (label, seeds) in zip(axes, numbers.items(), strict=True):
        rows = next(iter(seeds.values()))
        epochs = [row["epoch"] for row in rows]
        for k in range(max(len(row["test"]["components"]) for row in rows)):
            with_it = [row for row in rows if len(row["test"]["components"]) > max(k, 1)]
            axis.plot([r["epoch"] for r in with_it], [r["test"]["components"][k] for r in with_it], lw=0.8, alpha=0.7)
        axis.plot(epochs, [row["test"]["nll"] for row in rows], color="tab:blue", lw=2, label="average, test")
        axis.plot(epochs, [row["train"]["nll"] for row in rows], color="black", lw=2, label="average, training")
        axis.set(title=label, xlabel="epoch", ylabel="NLL")
        axis.legend(fontsize=7)
    save_figure(figure, path)


def draw_disagreement(numbers: Numbers, path: Path) -> None:
    """Draw the disagreement of checkpoints in the last half of training against accuracy and against NLL."""
    figure = new_figure(8.4, 3.4)
    axes = figure.subplots(1, 2, sharey=True)
    for label, seeds in numbers.items():
        rows = [row["test"] for found in seeds.values() for row in found[len(found) // 2 :]]
        rows = [row for row in rows if row["disagreement"] is not None]
        for axis, measure in zip(axes, ("accuracy", "nll"), strict=True):
            axis.scatter([r[measure] for r in rows], [r["disagreement"] for r in rows], s=12, label=label)
            axis.set(xlabel={"accuracy": "accuracy", "nll": "NLL"}[measure], ylabel="disagreement / error")
    axes[0].legend(fontsize=7)
    save_figure(figure, path)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _evenly(rows: int) -> Tensor:
    return torch.arange(rows) if rows <= LOOKED_AT else torch.arange(LOOKED_AT) * rows // LOOKED_AT
