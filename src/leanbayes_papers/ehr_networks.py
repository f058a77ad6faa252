"""The seven networks of Table 4 of the rank-1 paper, for health records: how each is converted and trained, by budget.

All of them are the same `EHRNet`, dropout included. What the paper leaves open (scales of priors and posteriors, when a
network is converted, rates) was chosen on 1,000 stays of set a that were left out of training; docs/results/ehr.md says
what was tried.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn
from typing_extensions import override

from leanbayes.compare.job import KL_EPOCHS
from leanbayes.core.conversion import convert
from leanbayes.data import DataSet
from leanbayes.distributions.likelihoods import Categorical
from leanbayes.methods._base import Method
from leanbayes.methods.mean_field import MeanField
from leanbayes.methods.rank1 import BatchEnsemble, Rank1
from leanbayes.models import build
from leanbayes.training import Recipe
from leanbayes_papers.suite import Setting
from leanbayes_papers.trained import Trainee

DATA = "physionet2012"
NET = "lstm-ehr"
QUICK_ROWS = 256
DETERMINISTIC = "Deterministic"
SAMPLES = 25
"""Draws of a prediction, as in the paper."""

EMBEDDING = ("embedding",)
AFFINE = ("lstm", "head")

VECTORS = MeanField(prior_std=0.1, init_std=0.02)
"""For embedding vectors, which begin with a deviation of 0.05, and for all weights of the fully Bayesian network."""

GAUSSIAN = Rank1(components=4, prior_std=0.1, init_spread=0.1, init_std=0.03)
CAUCHY = Rank1(components=4, posterior="cauchy", prior="cauchy", prior_std=0.05, init_spread=0.1, init_std=0.003)
"""Narrow at the start: a far draw is the same in all 48 hours."""

MEMBERS = BatchEnsemble(components=4, init_spread=0.1)

Conversion = tuple[Method, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Converted(Trainee):
    """A network that is converted part by part.

    Attributes:
        parts: methods and the layers that they are for, in turn; none for a plain network.
    """

    parts: tuple[Conversion, ...] = ()

    @property
    def samples(self) -> int:
        """Draws of a prediction; the members of a BatchEnsemble have no noise, and each is asked once."""
        counts = [method.components for method, _ in self.parts if isinstance(method, BatchEnsemble)]
        return counts[0] if counts else SAMPLES

    @override
    def make(self, data: DataSet, seed: int) -> nn.Module:
        """Return the untrained model; all that share a seed begin with the same weights, and compare in pairs."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = build(self.net, num_outputs=data.num_outputs, input_shape=data.input_shape)
            for method, where in self.parts:
                model = convert(model, method, where=where, likelihood=Categorical())
        return model


def networks(setting: Setting) -> dict[str, Converted]:
    """Return the networks of the table by the name of their row; the ensemble is made of deterministic ones."""
    plain = Recipe(
        epochs=setting.pick(quick=2, short=8, full=8), batch_size=128, optimizer="adam", lr=2e-3, clip_norm=1.0
    )
    late = replace(plain, convert_at_epoch=plain.epochs // 2)
    bayesian = replace(late, anneal_epochs=KL_EPOCHS)
    vectors: Conversion = (VECTORS, EMBEDDING)
    parts: dict[str, tuple[Recipe, tuple[Conversion, ...]]] = {
        DETERMINISTIC: (plain, ()),
        "BatchEnsemble": (replace(late, posterior_lr=plain.lr / 2), ((MEMBERS, AFFINE),)),
        "Bayesian embeddings": (bayesian, (vectors,)),
        "Fully Bayesian": (bayesian, (vectors, (VECTORS, AFFINE))),
        "Rank-1, Gaussian": (bayesian, (vectors, (GAUSSIAN, AFFINE))),
        "Rank-1, Cauchy": (bayesian, (vectors, (CAUCHY, AFFINE))),
    }
    return {name: _network(setting, name, recipe, conversions) for name, (recipe, conversions) in parts.items()}


def _network(setting: Setting, name: str, recipe: Recipe, parts: tuple[Conversion, ...]) -> Converted:
    folder = name.lower().replace(",", "").replace(" ", "-")
    source = setting.source(DATA, quick_rows=QUICK_ROWS)
    return Converted(name=folder, source=source, net=NET, recipe=setting.recipe(recipe), parts=parts)
