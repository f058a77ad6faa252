"""Train a generative model: `lb.fit` on a loss that the model computes itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn, Tensor

from leanbayes.training import fit as fit_network
from leanbayes.training import Recipe
from leanbayes.training.history import History


def fit(model: nn.Module, inputs: Tensor | tuple[Tensor, ...], recipe: Recipe, **options: Any) -> History:
    """Train a model whose call returns the loss of every row.

    Args:
        model: an autoencoder of `lb.generative`, or any module like it.
        inputs: images, or what the model is called with.
        recipe: how to train; Adam at 1e-3 is usual.
        options: of `lb.fit`: folder, resume, callbacks, progress.

    Example:
        >>> lb.generative.fit(vae, x, lb.Recipe(epochs=20, optimizer="adam", lr=1e-3), folder="runs/vae", resume=True)
    """
    rows = len(inputs) if isinstance(inputs, Tensor) else len(inputs[0])
    return fit_network(model, (inputs, torch.zeros(rows)), recipe, likelihood=_own_loss, **options)


def _own_loss(losses: Tensor, y: Tensor) -> Tensor:
    """Return what the model has computed; there is no target."""
    return losses
