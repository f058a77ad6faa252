"""Train a generative model: `lb.fit` on a loss that the model computes itself."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, cast

import torch
from torch import nn, Tensor
from torch.utils.data import Dataset

from leanbayes.training import Recipe
from leanbayes.training.fit import fit as fit_network
from leanbayes.training.progress import History


def fit(
    model: nn.Module, inputs: Tensor | tuple[Tensor, ...] | Dataset[Any], recipe: Recipe, **options: Any
) -> History:
    """Train a model whose call returns the loss of each row.

    Args:
        model: an autoencoder of `lb.generative`, or any module that returns losses (B,).
        inputs: images, or a tuple of inputs; a Dataset yields those of each row. Its method `set_epoch`, if any, gets
            the epoch, as that of `lb.data.OneAnnotator` for a probabilistic U-Net.
        recipe: of the training; Adam at 1e-3 is usual.
        options: of `lb.fit`: folder, resume, callbacks, progress.

    Example:
        >>> lb.generative.fit(vae, x, lb.Recipe(epochs=20, optimizer="adam", lr=1e-3), folder="runs/vae", resume=True)
    """
    if isinstance(inputs, Dataset):
        return fit_network(model, _Untargeted(inputs), recipe, likelihood=_own_loss, **options)
    rows = len(inputs) if isinstance(inputs, Tensor) else len(inputs[0])
    return fit_network(model, (inputs, torch.zeros(rows)), recipe, likelihood=_own_loss, **options)


class _Untargeted(Dataset[tuple[Any, Tensor]]):
    """Rows of a Dataset as inputs, with an unused target."""

    def __init__(self, rows: Dataset[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(cast(Sized, self.rows))

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        return self.rows[index], torch.zeros(())

    def set_epoch(self, epoch: int) -> None:
        method = getattr(self.rows, "set_epoch", None)
        if method is not None:
            method(epoch)


def _own_loss(losses: Tensor, y: Tensor) -> Tensor:
    return losses  # computed by the model itself; there is no target
