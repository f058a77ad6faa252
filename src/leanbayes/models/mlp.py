"""A multi-layer perceptron: linear layers with an activation, and maybe a norm, between each two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod

from torch import nn, Tensor

from leanbayes.models._checks import check_features, check_positive


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
        norm: Makes the module in front of each activation from the width there, such as ``nn.LayerNorm``;
            ``nn.BatchNorm1d`` takes a single leading axis. ``None`` for no norms.
    """

    def __init__(
        self,
        inputs: int | tuple[int, ...],
        outputs: int,
        *,
        hidden: Sequence[int] = (100,),
        activation: Callable[[], nn.Module] = nn.ReLU,
        bias: bool = True,
        norm: Callable[[int], nn.Module] | None = None,
    ) -> None:
        """Build the layers."""
        super().__init__()
        shape = check_features("MLP", inputs)
        check_positive("MLP", outputs=outputs, **{f"hidden[{i}]": width for i, width in enumerate(hidden)})
        first, *rest = pairwise((prod(shape), *hidden, outputs))
        self.flatten = nn.Flatten(-len(shape))
        self.layers = nn.Sequential(nn.Linear(*first, bias=bias))
        for width, after in rest:
            if norm is not None:
                self.layers.append(norm(width))
            self.layers.extend([activation(), nn.Linear(width, after, bias=bias)])

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., *inputs)`` to ``(..., outputs)``."""
        output: Tensor = self.layers(self.flatten(x))
        return output


def deep_mlp(depth: int = 100, width: int = 100, *, num_outputs: int = 100, input_shape: tuple[int, ...] = (1,)) -> MLP:
    """Make an MLP of ``depth`` linear layers without biases, a batch norm and a ReLU between each two.

    Args:
        depth: Number of linear layers.
        width: Number of units of every hidden layer.
        num_outputs: Number of output features.
        input_shape: Shape of one example, whose axes are flattened first.
    """
    check_positive("deep_mlp", depth=depth)
    return MLP(input_shape, num_outputs, hidden=[width] * (depth - 1), bias=False, norm=nn.BatchNorm1d)
