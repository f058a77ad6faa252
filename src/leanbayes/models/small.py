"""A small convolutional network for small images, such as the 8x8 digits of scikit-learn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod

from torch import nn, Tensor

from leanbayes.models._checks import check_factor, check_features, check_image, check_positive, scaled
from leanbayes.models._conv import conv_norm


class SmallConvNet(nn.Module):
    """Three 3x3 convolutions with batch norm, a global average and a linear layer.

    Args:
        num_outputs: Number of classes or regression outputs.
        input_shape: Channels, height and width of an image, at least 2 x 2 pixels.
    """

    def __init__(self, num_outputs: int = 10, input_shape: tuple[int, ...] = (1, 8, 8)) -> None:
        """Build the layers."""
        super().__init__()
        check_positive("SmallConvNet", num_outputs=num_outputs)
        channels, _, _ = check_image("SmallConvNet", input_shape, smallest=2)
        self.features = nn.Sequential(
            *conv_norm(channels, 16),
            nn.ReLU(),
            *conv_norm(16, 32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            *conv_norm(32, 32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(-3),
        )
        self.head = nn.Linear(32, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``(B, C, H, W)`` of any size to ``(B, num_outputs)``."""
        output: Tensor = self.head(self.features(x))
        return output


# -------------------- lenet
# LeNets: small convolutional networks for digits (LeCun et al., 1998), in two later sizes.


class LeNet5(nn.Module):
    """The version of Caffe, whose only activation stands between the two linear layers.

    Args:
        num_outputs: Number of classes or regression outputs.
        input_shape: Channels, height and width of an image, at least 16 x 16 pixels.
    """

    def __init__(self, num_outputs: int = 10, input_shape: tuple[int, ...] = (1, 28, 28)) -> None:
        """Build the layers."""
        super().__init__()
        check_positive("LeNet5", num_outputs=num_outputs)
        channels, height, width = check_image("LeNet5", input_shape, smallest=16)
        self.features = nn.Sequential(
            nn.Conv2d(channels, 20, 5),
            nn.MaxPool2d(2),
            nn.Conv2d(20, 50, 5),
            nn.MaxPool2d(2),
            nn.Flatten(-3),
        )
        self.head = _head(50 * _pooled(height) * _pooled(width), 500, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``(B, C, H, W)`` to ``(B, num_outputs)``."""
        output: Tensor = self.head(self.features(x))
        return output


class NormLeNet5(nn.Module):
    """The LeNet-5 of Caffe with a batch norm and a ReLU behind every layer but the last, and no biases before norms.

    Args:
        num_outputs: Number of classes or regression outputs.
        input_shape: Channels, height and width of an image, at least 16 x 16 pixels.
        dropout: Probability of dropping a unit in front of each linear layer in training; 0 leaves dropout out.
    """

    def __init__(
        self,
        num_outputs: int = 10,
        input_shape: tuple[int, ...] = (1, 28, 28),
        *,
        dropout: float = 0.0,
    ) -> None:
        """Build the layers."""
        super().__init__()
        check_positive("NormLeNet5", num_outputs=num_outputs)
        channels, height, width = check_image("NormLeNet5", input_shape, smallest=16)
        self.features = nn.Sequential()
        for inputs, outputs in ((channels, 20), (20, 50)):
            self.features.extend([nn.Conv2d(inputs, outputs, 5, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()])
            self.features.append(nn.MaxPool2d(2))
        self.features.append(nn.Flatten(-3))
        drop = [nn.Dropout(dropout)] if dropout > 0 else []
        hidden = [nn.Linear(50 * _pooled(height) * _pooled(width), 500, bias=False), nn.BatchNorm1d(500), nn.ReLU()]
        self.head = nn.Sequential(*drop, *hidden, *(nn.Dropout(one.p) for one in drop), nn.Linear(500, num_outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``(B, C, H, W)`` to ``(B, num_outputs)``."""
        output: Tensor = self.head(self.features(x))
        return output


class LeNet(nn.Module):
    """Three convolutions with 6, 16 and 120 channels, all multiplied by ``width``.

    Args:
        num_outputs: Number of classes or regression outputs.
        input_shape: Channels, height and width of an image, at least 28 x 28 pixels.
        width: Factor on every hidden width; the products are rounded.
    """

    def __init__(
        self,
        num_outputs: int = 10,
        input_shape: tuple[int, ...] = (1, 28, 28),
        width: float = 1,
    ) -> None:
        """Build the layers."""
        super().__init__()
        check_positive("LeNet", num_outputs=num_outputs)
        check_factor("LeNet", width=width)
        channels, rows, columns = check_image("LeNet", input_shape, smallest=28)
        first, second, third, hidden = (scaled(size, width) for size in (6, 16, 120, 64))
        self.features = nn.Sequential(
            nn.Conv2d(channels, first, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(first, second, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(second, third, 4),
            nn.ReLU(),
            nn.Flatten(-3),
        )
        pixels = (_pooled(rows) - 3) * (_pooled(columns) - 3)
        self.head = _head(third * pixels, hidden, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``(B, C, H, W)`` to ``(B, num_outputs)``."""
        output: Tensor = self.head(self.features(x))
        return output


def _pooled(size: int) -> int:
    """Side length that two rounds of 5x5 convolution and 2x2 pooling leave."""
    return ((size - 4) // 2 - 4) // 2


def _head(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


# -------------------- mlp
# A multi-layer perceptron: linear layers with an activation, and maybe a norm, between each two.


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


# -------------------- regression
# A small network for tables of numbers, with a batch norm in front of each of its two linear layers.


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
