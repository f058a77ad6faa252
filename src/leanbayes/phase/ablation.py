"""Copies of a variance network with other weights: sparse ensembles, zero means, shuffled deviations.

In a sparse ensemble (Neklyudov et al., 2019, section 6.4, Figure 5), weights with a small kappa are replaced by their
means or by zero. Their layers are variance layers in the additive parameterisation with zero deviations there. Sparse
variational dropout prunes by log alpha instead (Molchanov et al., 2017).
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
        model: the network, with fewer random weights.
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
        """Ratio of all weights to those that are still sampled."""
        return self.total / max(self.kept, 1)


@torch.no_grad()
def sparsify(model: nn.Module, scores: Mapping[str, Tensor], threshold: float, *, instead: Instead = "zero") -> Sparse:
    """Return a copy in which weights with a score below the threshold are replaced, and the others are sampled.

    Args:
        model: a network with variance layers.
        scores: a number for each weight, by path of the layer: `lb.phase.kappa`.
        threshold: scores below it are replaced.
        instead: replacement, the "mean" or "zero".

    Example:
        >>> sparse = lb.phase.sparsify(bnn, lb.phase.kappa(bnn, (x, y)), threshold=30.0)
    """
    if instead not in ("mean", "zero"):
        raise ValueError(f"expected instead to be one of mean, zero, got {instead!r}")
    model = copy.deepcopy(model)
    layers = variance_layers(model)
    if not layers or not set(scores) <= set(layers):
        raise ValueError(
            f"expected scores of variance layers among {', '.join(layers) or 'none'}, got {', '.join(scores)}"
        )
    kept = 0
    for path, score in scores.items():
        shape = layers[path].base.weight.shape
        if score.shape != shape or score.isnan().any():
            raise ValueError(
                f"expected a score for each weight of layer '{path}', {tuple(shape)}, got shape {tuple(score.shape)} "
                f"with {int(score.isnan().sum())} NaN"
            )
        keep = score.to(layers[path].device) >= threshold
        kept += int(keep.sum())
        twin = _replaced(model, path, layers[path])
        twin.posterior.log_sigma[~keep] = -torch.inf
        if instead == "zero":
            twin.base.weight[~keep] = 0.0
    return Sparse(model, kept, sum(score.numel() for score in scores.values()))


def prune(model: nn.Module, log_alpha: float = 3.0) -> Sparse:
    """Zero the weights that are mostly noise, as sparse variational dropout does: log alpha above a threshold.

    After a phase transition this destroys the network, since the noise is its information.
    """
    scores = {path: -_log_alpha_of_weights(layer) for path, layer in _some_layers(model).items()}
    return sparsify(model, scores, -log_alpha)


def _log_alpha_of_weights(layer: VarianceLayer) -> Tensor:
    """Return log alpha for each weight; that of a neuron holds for the weights of its output."""
    log_alpha, weight = layer.log_alpha.detach(), layer.base.weight
    if layer.method.parameterization != "neuron":
        return log_alpha.expand(weight.shape)
    return layer.family.scaled(layer.base, torch.ones_like(weight, dtype=log_alpha.dtype), r=log_alpha)


@torch.no_grad()
def zero_means(model: nn.Module) -> nn.Module:
    """Return a copy whose variance layers have the same deviations around zero.

    After the phase transition its ensemble predicts as well as before; a low-variance network is destroyed.
    """
    model = copy.deepcopy(model)
    for path, layer in _some_layers(model).items():
        _replaced(model, path, layer).base.weight.zero_()
    return model


@torch.no_grad()
def permute_scales(model: nn.Module, *, seed: int = 0) -> nn.Module:
    """Return a copy whose variance layers have their deviations shuffled among the weights of each layer.

    After the phase transition its ensemble predicts at chance, since the deviations hold the information.
    """
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for path, layer in _some_layers(model).items():
        sigma = _replaced(model, path, layer).posterior.log_sigma
        order = torch.randperm(sigma.numel(), generator=generator, device=generator.device).to(sigma.device)
        sigma.copy_(sigma.flatten()[order].view_as(sigma))
    return model


def variance_layers(model: nn.Module) -> dict[str, VarianceLayer]:
    """Return the variance layers of a model, by path."""
    return {path: layer for path, layer in stochastic_layers(model) if isinstance(layer, VarianceLayer)}


def _some_layers(model: nn.Module) -> dict[str, VarianceLayer]:
    found = variance_layers(model)
    if not found:
        raise ValueError("expected a model with variance layers, such as lb.VarianceLayers() makes, got none")
    return found


def _replaced(model: nn.Module, path: str, layer: VarianceLayer) -> VarianceLayer:
    """Put a layer of the same distribution with free deviations, in its own tensors, into a model; return it."""
    if not path:
        raise ValueError("the model is itself a variance layer; put it into an nn.Sequential, and convert that")
    make = layer.family.plain  # for a layer with a computed weight: one that stores it
    base: Any = copy.deepcopy(layer.base if make is None else make(layer.base, {"weight": layer.weight_now}))
    base.weight.copy_(torch.zeros_like(base.weight) if layer.means is None else layer.means)
    twin = VarianceLayer(base, replace(layer.method, parameterization="additive"))
    twin.posterior.log_sigma.copy_(layer.scales.abs().log())
    twin.state, twin.path, twin.likelihood = layer.state, layer.path, layer.likelihood
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner), name, twin.train(layer.training))
    return twin
