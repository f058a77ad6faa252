"""Networks that a study trains on its own, and keeps for the next study.

For what a `Job` cannot say: named layers, a watch over every epoch, one network cut to many widths. A training that was
killed goes on where it was, and a finished one is only read: its last state lies in `OUT/trained/NAME-DIGEST/seedK`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn, Tensor

from leanbayes.compare.experiment import load, pick_device
from leanbayes.compare.job import DataSpec
from leanbayes.compare.run import Callback
from leanbayes.core.conversion import convert
from leanbayes.data import DataSet
from leanbayes.distributions.likelihoods import Categorical
from leanbayes.methods._base import Method
from leanbayes.models import build
from leanbayes.training import Recipe
from leanbayes.training.fit import fit
from leanbayes_papers.study import Case

FOLDER = "trained"

Data = tuple[Tensor, Tensor]


class Trained(NamedTuple):
    """A trained network.

    Attributes:
        model: in eval mode, on the device of the case.
        data: what it learned from.
        rows: what was seen after each epoch, where somebody looked.
    """

    model: nn.Module
    data: DataSet
    rows: list[dict[str, Any]]

    def train(self, rows: int = 0) -> Data:
        """Return training inputs and targets: all, or so many evenly spaced ones."""
        return some(self.data.prepared(self.data.train), rows)

    def test(self, rows: int = 0) -> Data:
        """Return test inputs and targets: all, or so many evenly spaced ones."""
        return some(self.data.prepared(self.data.test), rows)


@dataclass(frozen=True, kw_only=True)
class Trainee:
    """A network and how it is trained.

    Attributes:
        name: what its folder is called.
        source: the data.
        net: a name of `leanbayes.models`.
        recipe: how it is trained; seeds come from the case.
        method: what it is converted with; None for a plain network.
    """

    name: str
    source: DataSpec
    net: str
    recipe: Recipe
    method: Method | None = None

    def make(self, data: DataSet, seed: int) -> nn.Module:
        """Return the untrained model."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = build(self.net, num_outputs=data.num_outputs, input_shape=data.input_shape)
            return net if self.method is None else convert(net, self.method, likelihood=Categorical())

    def folder(self, out: Path, seed: int) -> Path:
        """Return where its training is kept; other settings have another folder."""
        settings = repr(replace(self, source=replace(self.source, root=None)))
        return out / FOLDER / f"{self.name}-{hashlib.sha256(settings.encode()).hexdigest()[:12]}" / f"seed{seed}"


def train(
    trainee: Trainee, case: Case, seed: int, *, callbacks: Sequence[Callback] = (), start: nn.Module | None = None
) -> Trained:
    """Train a network, go on with its training, or read it if it is finished.

    Args:
        trainee: what is trained, and how.
        case: where, and whether anew.
        seed: of the network and of the training.
        callbacks: called after every epoch.
        start: the model to train, in place; None makes a fresh one.
    """
    data = loaded(trainee.source)
    model = trainee.make(data, seed) if start is None else start
    fit(
        model,
        data.prepared(data.train),
        replace(trainee.recipe, seed=seed),
        likelihood=Categorical(),
        folder=trainee.folder(case.out, seed),
        resume=not case.fresh,
        callbacks=list(callbacks),
        progress=case.budget != "quick",
    )
    model.to(pick_device(case.device)).eval()
    return Trained(model, data, [])


@lru_cache(maxsize=1)
def loaded(source: DataSpec) -> DataSet:
    """Return data; the last set is kept, since the networks of a study share theirs."""
    return load(source)


def some(data: Data, rows: int) -> Data:
    """Return all rows, or so many evenly spaced ones."""
    x, y = data
    if not 0 < rows < len(x):
        return data
    picked = torch.arange(rows) * len(x) // rows
    return x[picked], y[picked]
