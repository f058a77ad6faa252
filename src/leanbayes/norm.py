"""Re-collect the running statistics of batch norms, after weights, factors or widths have changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn, Tensor

from leanbayes.inputs import call, to_device


def update_norm(model: nn.Module, data: Iterable[Any] | Tensor, *, batches: int | None = None) -> None:
    """Replace the running statistics of every batch norm by averages over `data`.

    Args:
        model: changed in place; its modes are restored.
        data: a tensor, or an iterable (a DataLoader) of `(inputs, target)`.
        batches: use only so many batches.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    if not norms:
        return
    modes = [(module, module.training) for module in model.modules()]
    momenta = [norm.momentum for norm in norms]
    model.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain average over batches
        norm.train()
    device = next(model.parameters()).device
    with torch.no_grad():
        for number, batch in enumerate([data] if isinstance(data, Tensor) else data):
            if batches is not None and number >= batches:
                break
            inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
            call(model, to_device(inputs, device))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    for module, training in modes:
        module.training = training
