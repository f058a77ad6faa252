"""Describe a training: data, network, method and recipe in one frozen object.

The same object serves trainings of `leanbayes compare` (with `evaluation`) and all others. Those keep their state in
`OUT/trained/NAME-DIGEST/seedK`: a killed training resumes, a finished one is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn, Tensor

import leanbayes as lb
from leanbayes.compare.experiment import load
from leanbayes.compare.job import DataSpec, EvaluationSpec, Job
from leanbayes.data import DataSet
from leanbayes.methods._base import Method

FOLDER = "trained"
Data = tuple[Tensor, Tensor]


@lru_cache(maxsize=1)
def load_data(source: DataSpec) -> Any:
    """Return the data of a source; the last set is cached, because the networks of a study share theirs."""
    return load(source)


def build_network(spec: TrainingSpec, data: DataSet) -> nn.Module:
    """Return the named network, converted by the method if there is one, in the layers of the option `where`."""
    net = lb.models.build(spec.net, num_outputs=data.num_outputs, input_shape=data.input_shape)
    where = spec.options.get("where")
    return net if spec.method is None else lb.convert(net, spec.method, where=where, likelihood=lb.Categorical())


@dataclass(frozen=True, kw_only=True)
class TrainingSpec:
    """A network and its training. Seeds come from the run."""

    name: str  # of its folder; the label of the run in a comparison
    source: DataSpec
    net: str  # a name of `leanbayes.models`
    recipe: lb.Recipe
    method: Method | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # further settings, for the functions below
    evaluation: EvaluationSpec | None = None  # if given, `leanbayes compare` trains and evaluates the network
    load: Callable[[DataSpec], Any] = load_data
    build: Callable[[TrainingSpec, Any], nn.Module] = build_network  # the untrained model
    rows: Callable[[Any, int], Any] = lambda data, seed: data.prepared(data.train)  # of a seed
    watch: Callable[[TrainingSpec, Path, Any, Any], Any] | None = None  # callback of `fit` from folder, data and run

    @property
    def label(self) -> str:
        """Name and network: what a partial run is chosen by where networks share a name."""
        return f"{self.name} {self.net}"

    def make(self, data: Any, seed: int) -> nn.Module:
        """Return the untrained model of a seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build(self, data)

    def job(self, seed: int) -> Job:
        """Return the job of `leanbayes compare`."""
        assert self.evaluation is not None, "only specs with an evaluation are compared"
        place = {"source": self.source, "net": self.net, "method": self.method, "label": self.name}
        return Job(**place, recipe=replace(self.recipe, seed=seed), evaluation=self.evaluation)  # type: ignore[arg-type]

    def folder(self, out: Path, seed: int) -> Path:
        """Return the folder of the training; other settings have another folder."""
        if self.evaluation is not None:
            return self.job(seed).folder(out)
        source = replace(self.source, root=None)
        settings = (self.name, source, self.net, self.recipe, self.method, dict(self.options), self.build.__qualname__)
        digest = hashlib.sha256(repr(settings).encode()).hexdigest()[:12]
        return out / FOLDER / f"{self.name}-{digest}" / f"seed{seed}"


class Trained(NamedTuple):
    """A trained model in eval mode, its data, and the records of its `watch`."""

    model: nn.Module
    data: Any
    watched: list[dict[str, Any]]

    def train(self, rows: int = 0) -> Data:
        """Return training inputs and targets: all, or `rows` evenly spaced ones."""
        return evenly(self.data.prepared(self.data.train), rows)

    def test(self, rows: int = 0) -> Data:
        """Return test inputs and targets: all, or `rows` evenly spaced ones."""
        return evenly(self.data.prepared(self.data.test), rows)


def evenly(data: Data, rows: int) -> Data:
    """Return all rows, or `rows` evenly spaced ones."""
    x, y = data
    if not 0 < rows < len(x):
        return data
    picked = torch.arange(rows) * len(x) // rows
    return x[picked], y[picked]
