"""A small network for tables of numbers, with a batch norm in front of each of its two linear layers."""

from __future__ import annotations

from math import prod

from torch import nn, Tensor

from leanbayes.models._checks import check_factor, check_features, check_positive


class RegressionNet(nn.Module):
    """One hidden layer of ReLUs, with a batch norm after the input and after the hidden units.

    The order is ``norm, linear, relu, norm, linear``; with small scales at the start, the first predictions stay
    near the bias of the last layer.

    Args:
        inputs: Number of input features, or the shape of one example, whose axes are flattened first.
        outputs: Number of regression outputs.
        hidden: Number of hidden units.
        scale: Initial scale of both norms.
    """

    def __init__(
        self,
        inputs: int | tuple[int, ...],
        outputs: int = 1,
        *,
        hidden: int = 50,
        scale: float = 0.2,
    ) -> None:
        """Build the layers."""
        super().__init__()
        shape = check_features("RegressionNet", inputs)
        check_positive("RegressionNet", outputs=outputs, hidden=hidden)
        check_factor("RegressionNet", scale=scale)
        features = prod(shape)
        self.flatten = nn.Flatten(-len(shape))
        self.layers = nn.Sequential(
            nn.BatchNorm1d(features),
            nn.Linear(features, hidden),
            nn.ReLU(),
            nn.BatchNorm1d(hidden),
            nn.Linear(hidden, outputs),
        )
        for layer in self.layers:
            if isinstance(layer, nn.BatchNorm1d):
                nn.init.constant_(layer.weight, scale)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, *inputs)`` to ``(B, outputs)``."""
        output: Tensor = self.layers(self.flatten(x))
        return output
