"""The networks of the variance paper (Neklyudov et al., 2019): variance layers here, binary dropout there.

What was seen of the phase transition after every epoch lies beside the state of a training.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from typing_extensions import override

from leanbayes.core.conversion import convert
from leanbayes.data import DataSet
from leanbayes.distributions.likelihoods import Categorical
from leanbayes.layers import Abs, activate, Selector
from leanbayes.layers.family import DROPOUTS, LINEAR_MAPS
from leanbayes.layers.select import choose
from leanbayes.methods.mc_dropout import MCDropout
from leanbayes.methods.variance import VarianceLayers
from leanbayes.models import build
from leanbayes.phase import Transition
from leanbayes.runtime._files import write_text
from leanbayes_papers.study import Case
from leanbayes_papers.trained import loaded, Trained, Trainee
from leanbayes_papers.trained import train as train_one

ROWS_FILE = "transition.json"
WATCHED = {"quick": 100, "short": 1000, "full": 1000}
"""Test rows that are looked at after every epoch."""

QUICK_LOOKS = 20
"""Looks in a training of the quick budget, which has many short epochs."""

ACTIVATIONS: dict[str, type[nn.Module]] = {"abs": Abs, "softplus": nn.Softplus}


@dataclass(frozen=True, kw_only=True)
class Network(Trainee):
    """A network with some variance layers, or without.

    Dropout layers that it has stay on when predicting, except in front of variance layers, whose own noise takes their
    place.

    Attributes:
        method: of the variance layers; None for a network without any.
        layers: which they are.
        activation: what stands behind them in the place of a rectifier.
        curvature_rows: training rows over which kappa is summed after every epoch; 0 leaves it out.
    """

    method: VarianceLayers | None = None
    layers: tuple[Selector, ...] = ()
    activation: Literal["", "abs", "softplus"] = ""
    curvature_rows: int = 0

    @override
    def make(self, data: DataSet, seed: int) -> nn.Module:
        """Return the untrained model."""
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a zero-mean layer has no trained function to lose here
            torch.manual_seed(seed)
            net = build(self.net, num_outputs=data.num_outputs, input_shape=data.input_shape)
            places = list(net.named_modules())
            chosen = sorted(set().union(*(choose(places, layers) for layers in self.layers)))
            without_dropout_before(net, chosen)
            if self.activation:
                net = activate(net, chosen, ACTIVATIONS[self.activation])
            if any(isinstance(module, DROPOUTS) for module in net.modules()):
                net = convert(net, MCDropout(), likelihood=Categorical())
            if self.method is not None:
                net = convert(net, self.method, where=chosen, likelihood=Categorical())
            return net


def train(network: Network, case: Case, seed: int) -> Trained:
    """Train a network, go on with its training, or read it if it is finished; variance layers are watched."""
    watch = None if network.method is None else Watch(network.folder(case.out, seed) / ROWS_FILE, network, case)
    found = train_one(network, case, seed, callbacks=[] if watch is None else [watch])
    return found if watch is None else found._replace(rows=watch.rows)


class Watch(Transition):
    """Keeps on disk what is seen after every epoch; accuracies are those with noise on activations, as in the paper."""

    def __init__(self, path: Path, network: Network, case: Case) -> None:
        """Go on with the rows that are there."""
        rows, trained = network.curvature_rows, Trained(nn.Identity(), loaded(network.source), [])
        curvature = trained.train(rows) if rows else None
        test, threshold = trained.test(WATCHED[case.budget]), threshold_of(trained, rows)
        every = max(1, network.recipe.epochs // QUICK_LOOKS) if case.budget == "quick" else 1
        super().__init__(test, curvature=curvature, threshold=threshold, every=every, noise="activation")
        self.path = path
        if path.is_file() and not case.fresh:
            self.rows = json.loads(path.read_text(encoding="utf-8"))

    @override
    def __call__(self, state: Any) -> None:
        self.rows = [row for row in self.rows if row["epoch"] < state.epoch]
        seen = len(self.rows)
        super().__call__(state)
        if len(self.rows) > seen:
            write_text(json.dumps(self.rows) + "\n", self.path)


THRESHOLD = 10**1.5
"""kappa_0 of the paper, for the loss summed over all training rows."""


def threshold_of(trained: Trained, rows: int) -> float:
    """Return kappa_0 for a loss that is summed over fewer rows."""
    whole = len(trained.data.train)
    return THRESHOLD * (min(rows, whole) or whole) / whole


def without_dropout_before(net: nn.Module, layers: list[str]) -> None:
    """Take dropout layers out that stand directly in front of the named layers, in the order of registration."""
    last = ""
    for path, module in list(net.named_modules()):
        if isinstance(module, DROPOUTS):
            last = path
        elif isinstance(module, LINEAR_MAPS):
            if last and path in layers:
                net.set_submodule(last, nn.Identity())
            last = ""
