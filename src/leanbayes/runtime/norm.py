"""Re-collect the running statistics of batch norms, after weights, factors or widths have changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import nn, Tensor

from leanbayes.runtime.batches import call, leading_rows, to_device
from leanbayes.runtime.twins import in_eval_mode

BatchNorm = nn.modules.batchnorm._BatchNorm


def update_norm(
    model: nn.Module, data: Tensor | tuple[Any, Any] | Mapping[str, Any] | Iterable[Any], *, batches: int | None = None
) -> None:
    """Replace the running statistics of every batch norm by averages over the batches of `data`.

    Every batch counts the same, so give batches of about one size. Use it after converting a trained network with a
    wide spread, before training.

    Args:
        model: changed in place; its modes are restored.
        data: inputs (a tensor or a mapping), a pair `(inputs, target)`, or an iterable of such batches (a DataLoader).
        batches: number of batches to use; default all.

    Raises:
        ValueError: if there is no batch, as of an iterator that was read before. The statistics then stay.
    """
    norms = [m for m in model.modules() if isinstance(m, BatchNorm) and m.track_running_stats]
    if not norms:
        return
    device = next(model.parameters()).device
    source: Iterable[Any] = [data] if isinstance(data, (Tensor, tuple, Mapping)) else data
    with torch.no_grad(), _collecting(model, norms):
        rows = 0
        for batch in islice(source, batches):
            inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
            inputs = tuple(inputs) if isinstance(inputs, list) else inputs  # a loader collects several in a list
            call(model, to_device(inputs, device), output=lambda result: torch.empty(0))
            rows += 1 if (own := leading_rows(inputs)) is None else own
        if not rows:
            raise ValueError(
                "expected rows to collect the statistics of norms over, got none; an iterator can be read only once: "
                "pass a tensor, a list of batches or a DataLoader"
            )


@contextmanager
def _collecting(model: nn.Module, norms: list[Any]) -> Iterator[None]:
    """Switch only norms to train mode, with plain averages over batches; restore modes and momenta.

    After an error, restore the statistics, too.
    """
    momenta = [norm.momentum for norm in norms]
    before = [{name: buffer.clone() for name, buffer in norm.named_buffers()} for norm in norms]
    with in_eval_mode(model):
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None
            norm.train()
        try:
            yield
        except BaseException:
            for norm, buffers in zip(norms, before, strict=True):
                for name, buffer in buffers.items():
                    getattr(norm, name).copy_(buffer)
            raise
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
