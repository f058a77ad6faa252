"""The first step: what torch would say of wrong data, in a sentence that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn, Tensor
from torch.utils.data import DataLoader

from leanbayes.inputs import Inputs, Output, row_axis
from leanbayes.likelihoods import Categorical, check_classes
from leanbayes.objective import Loss

KINDS = {
    torch.uint8: (("Byte", "unsigned char", "uint8"), "x.float(), for pixels x.float() / 255"),
    torch.float64: (("Double", "double", "float64"), "x.float()"),
}
"""Types of inputs that few networks take: how torch calls them when it complains, and how to convert them."""

ROWS_AT_ONCE = 4096
"""Rows whose targets are compared together, as int64: small types cannot hold every number of classes."""


def check_layout(network: nn.Module, *data: object) -> None:
    """Refuse to cut rows off the first axis for a network that has them on the second; a DataLoader cuts its own."""
    if row_axis(network) and not all(isinstance(each, DataLoader | None) for each in data):
        raise ValueError(
            "expected a network that takes rows on the first axis, got one with batch_first=False; put it into a "
            "module that transposes them, or give a DataLoader of batches in its layout"
        )


@contextmanager
def explained(x: Inputs) -> Iterator[None]:
    """Say how to convert inputs, if their type is what the network cannot take."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(x, Tensor) or x.dtype not in KINDS:
            raise
        names, remedy = KINDS[x.dtype]
        if not any(name in str(error) for name in names):
            raise
        raise TypeError(
            f"expected inputs of a type that the network takes, got {x.dtype} ({error}); convert them: {remedy}"
        ) from error


@contextmanager
def watched(network: nn.Module, likelihood: Loss, y: Tensor, output: Output | None) -> Iterator[None]:
    """Compare class targets with the outputs of the network before the loss does, of which a GPU would not recover."""
    if not isinstance(likelihood, Categorical) or y.is_floating_point() or not y.numel():
        yield
        return

    def compare(module: nn.Module, args: Any, result: Any) -> None:
        picked = getattr(result, "logits", result) if output is None else output(result)
        if isinstance(picked, Tensor) and picked.dim() > 1:
            for some in torch.split(y, ROWS_AT_ONCE):
                check_classes(some.long(), picked.shape[likelihood.axis], likelihood.ignore_index)

    hook = network.register_forward_hook(compare)
    try:
        yield
    finally:
        hook.remove()
