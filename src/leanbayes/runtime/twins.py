"""Modes of a model for a while: each module's own mode is restored afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def modes_restored(model: nn.Module) -> Iterator[None]:
    """Restore the mode (train or eval) of each module when the context ends."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch to eval mode inside the context; restore each module's mode afterwards."""
    with modes_restored(model):
        model.eval()
        yield
