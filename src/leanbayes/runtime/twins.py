"""Eval mode for a while, with every module's own mode restored afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Let norms use their running statistics for a while, so that no row depends on those beside it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
