"""Where a variance network keeps its knowledge: take the means away, or shuffle the deviations, and look again."""

from __future__ import annotations

import copy

import torch
from torch import nn

from leanbayes.core.conversion import stochastic_layers
from leanbayes.methods.variance import VarianceLayer
from leanbayes.phase.sparse import additive, put


@torch.no_grad()
def zero_means(model: nn.Module) -> nn.Module:
    """Return a copy whose variance layers have the same deviations around zero.

    Behind the phase transition its ensemble is as good as before; a low-variance network is destroyed.
    """
    model = copy.deepcopy(model)
    for path, layer in _layers(model):
        twin = additive(layer)
        twin.base.weight.zero_()
        put(model, path, twin)
    return model


@torch.no_grad()
def permute_scales(model: nn.Module, *, seed: int = 0) -> nn.Module:
    """Return a copy whose variance layers have their deviations shuffled among the weights of each layer.

    Behind the phase transition its ensemble is a guess: the deviations were the knowledge.
    """
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for path, layer in _layers(model):
        twin = additive(layer)
        sigma = twin.posterior.log_sigma
        order = torch.randperm(sigma.numel(), generator=generator, device=generator.device).to(sigma.device)
        sigma.copy_(sigma.flatten()[order].view_as(sigma))
        put(model, path, twin)
    return model


def _layers(model: nn.Module) -> list[tuple[str, VarianceLayer]]:
    found = [(path, layer) for path, layer in stochastic_layers(model) if isinstance(layer, VarianceLayer)]
    if not found:
        raise ValueError("expected a model with variance layers, such as lb.VarianceLayers() makes, got none")
    return found
