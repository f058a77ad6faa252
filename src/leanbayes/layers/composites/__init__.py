"""Composites: torch modules that hide linear maps in one function, lowered into layers that a method can wrap."""

from __future__ import annotations

import abc

from torch import nn


class Composite(nn.Module, abc.ABC):
    """A recurrent or attention module made of ordinary layers, with the outputs and gradients of torch's own.

    It has the call, the public attributes (`hidden_size`, `batch_first`, ...) and the state dict of the original.
    Layers inside see rows on the first axis, so that each row has its own draw.
    """

    @abc.abstractmethod
    def raised(self) -> nn.Module:
        """Return torch's own module with the current weights; the layers inside must be plain."""


def linear_of(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    """Return a Linear with given parameters; on the meta device nothing is initialised first."""
    outputs, inputs = weight.shape
    layer = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    layer.weight = weight
    layer.register_parameter("bias", bias)
    return layer
