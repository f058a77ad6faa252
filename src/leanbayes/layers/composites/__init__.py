"""A torch module that hides its linear maps inside one function, taken apart into layers that a method can wrap."""

from __future__ import annotations

import abc

from torch import nn


class Composite(nn.Module, abc.ABC):
    """A recurrent or attention module made of ordinary layers, with the outputs and gradients of torch's own.

    It is called as the original is, keeps its public attributes (`hidden_size`, `batch_first`, ...), and loads its
    state dict. Rows lie on the first axis wherever a layer inside is called, so that each has its own draw.
    """

    @abc.abstractmethod
    def raised(self) -> nn.Module:
        """Return torch's own module again, with the current weights; the layers inside must be ordinary ones."""
