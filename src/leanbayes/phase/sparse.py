"""Sparse ensembles: sample only the weights that need it (Neklyudov et al., 2019, section 6.4, Figure 5).

Weights whose kappa is below a threshold are replaced by their means or by zero; what is left is an ordinary variance
layer in the additive parameterisation whose deviations are zero there. Sparse variational dropout prunes by log alpha
instead (Molchanov et al., 2017).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import nn, Tensor

from leanbayes.core.conversion import stochastic_layers
from leanbayes.methods.variance import VarianceLayer

Instead = Literal["mean", "zero"]


class Sparse(NamedTuple):
    """A sparse ensemble.

    Attributes:
        model: the network; fewer of its weights are random, or there.
        kept: number of weights that are still sampled.
        total: number of weights of the variance layers.
    """

    model: nn.Module
    kept: int
    total: int

    @property
    def share(self) -> float:
        """Share of the weights that were replaced."""
        return 1 - self.kept / self.total

    @property
    def compression(self) -> float:
        """How many weights there were for each that is left."""
        return self.total / max(self.kept, 1)


def sparsify(model: nn.Module, scores: Mapping[str, Tensor], threshold: float, *, instead: Instead = "zero") -> Sparse:
    """Replace the weights whose score is below a threshold, and return a copy in which the others are sampled.

    Args:
        model: a network with variance layers; it stays as it is.
        scores: for each of them by path, a number for every weight: `lb.phase.kappa`.
        threshold: scores below it are replaced.
        instead: the "mean", or "zero".

    Example:
        >>> sparse = lb.phase.sparsify(bnn, lb.phase.kappa(bnn, (x, y)), threshold=30.0)
    """
    if instead not in ("mean", "zero"):
        raise ValueError(f"expected instead to be one of mean, zero, got {instead!r}")
    model = copy.deepcopy(model)
    layers = {path: layer for path, layer in stochastic_layers(model) if isinstance(layer, VarianceLayer)}
    if not layers or not set(scores) <= set(layers):
        raise ValueError(
            f"expected scores of variance layers among {', '.join(layers) or 'none'}, got {', '.join(scores)}"
        )
    kept = 0
    for path, score in scores.items():
        keep = score.to(layers[path].device) >= threshold
        kept += int(keep.sum())
        twin = additive(layers[path])
        with torch.no_grad():
            twin.posterior.log_sigma[~keep] = -torch.inf
            if instead == "zero":
                twin.base.weight[~keep] = 0.0
        put(model, path, twin)
    return Sparse(model, kept, sum(score.numel() for score in scores.values()))


def prune(model: nn.Module, log_alpha: float = 3.0) -> Sparse:
    """Zero the weights that are mostly noise, as sparse variational dropout does: log alpha above a threshold.

    Behind a phase transition this destroys the network: there the noise is the information.
    """
    layers = {path: layer for path, layer in stochastic_layers(model) if isinstance(layer, VarianceLayer)}
    scores = {path: -layer.log_alpha.detach().expand(layer.base.weight.shape) for path, layer in layers.items()}
    return sparsify(model, scores, -log_alpha)


@torch.no_grad()
def additive(layer: VarianceLayer) -> VarianceLayer:
    """Return the same distribution with free deviations, in tensors of its own."""
    make = layer.family.plain  # of a layer whose weight is computed: one that stores it
    base: Any = copy.deepcopy(layer.base if make is None else make(layer.base, {"weight": layer.weight_now}))
    base.weight.copy_(torch.zeros_like(base.weight) if layer.means is None else layer.means)
    twin = VarianceLayer(base, replace(layer.method, parameterization="additive"))
    twin.posterior.log_sigma.copy_(layer.scales.abs().log())
    twin.state, twin.path, twin.likelihood = layer.state, layer.path, layer.likelihood
    return twin.train(layer.training)


def put(model: nn.Module, path: str, layer: nn.Module) -> None:
    """Register a layer in the place of another."""
    if not path:
        raise ValueError("the model is itself a variance layer; put it into an nn.Sequential, and convert that")
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner), name, layer)
