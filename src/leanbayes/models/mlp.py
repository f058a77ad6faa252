"""A multi-layer perceptron: linear layers with an activation between each two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod

from torch import nn, Tensor

from leanbayes.models._checks import check_positive


class MLP(nn.Module):
    """Fully connected network.

    An integer ``inputs`` acts on the last axis; a tuple is the shape of one example, whose axes
    are flattened first. Any leading axes are kept.

    Example:
        >>> import torch
        >>> MLP((1, 8, 8), 10, hidden=(64, 64))(torch.zeros(5, 1, 8, 8)).shape
        torch.Size([5, 10])

    Args:
        inputs: Number of input features, or the shape of one example.
        outputs: Number of output features.
        hidden: Width of each hidden layer; empty for a linear model.
        activation: Makes the module between two linear layers.
        bias: Whether the linear layers add a bias.
    """

    def __init__(
        self,
        inputs: int | tuple[int, ...],
        outputs: int,
        *,
        hidden: Sequence[int] = (100,),
        activation: Callable[[], nn.Module] = nn.ReLU,
        bias: bool = True,
    ) -> None:
        """Build the layers."""
        super().__init__()
        shape = (inputs,) if isinstance(inputs, int) else tuple(inputs)
        check_positive(
            "MLP",
            inputs=min(shape, default=0),
            outputs=outputs,
            **{f"hidden[{i}]": width for i, width in enumerate(hidden)},
        )
        first, *rest = pairwise((prod(shape), *hidden, outputs))
        self.flatten = nn.Flatten(-len(shape))
        self.layers = nn.Sequential(nn.Linear(*first, bias=bias))
        for sizes in rest:
            self.layers.extend([activation(), nn.Linear(*sizes, bias=bias)])

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., *inputs)`` to ``(..., outputs)``."""
        output: Tensor = self.layers(self.flatten(x))
        return output
