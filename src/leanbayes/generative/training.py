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
    """Train a model whose call returns the loss of every row.

    Args:
        model: an autoencoder of `lb.generative`, or any module like it.
        inputs: images, or what the model is called with; a Dataset yields that of each row, and is told the epoch if it
            has a method `set_epoch`, as `lb.data.OneAnnotator` for a probabilistic U-Net.
        recipe: how to train; Adam at 1e-3 is usual.
        options: of `lb.fit`: folder, resume, callbacks, progress.

    Example:
        >>> lb.generative.fit(vae, x, lb.Recipe(epochs=20, optimizer="adam", lr=1e-3), folder="runs/vae", resume=True)
    """
    if isinstance(inputs, Dataset):
        return fit_network(model, _Untargeted(inputs), recipe, likelihood=_own_loss, **options)
    rows = len(inputs) if isinstance(inputs, Tensor) else len(inputs[0])
    return fit_network(model, (inputs, torch.zeros(rows)), recipe, likelihood=_own_loss, **options)


class _Untargeted(Dataset[tuple[Any, Tensor]]):
    """Rows of a Dataset as inputs, with a target that nobody reads."""

    def __init__(self, rows: Dataset[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(cast(Sized, self.rows))

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        return self.rows[index], torch.zeros(())

    def set_epoch(self, epoch: int) -> None:
        tell = getattr(self.rows, "set_epoch", None)
        if tell is not None:
            tell(epoch)


def _own_loss(losses: Tensor, y: Tensor) -> Tensor:
    """Return what the model has computed; there is no target."""
    return losses
