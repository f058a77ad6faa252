"""Small networks: a convolutional one for 8x8 digits, LeNets (LeCun et al., 1998), MLPs, one for regression."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod

from torch import nn

from leanbayes.models._blocks import Chain, conv_norm, global_average
from leanbayes.models._checks import check_factor, check_features, check_image, check_positive, scaled


class SmallConvNet(Chain):
    """Three 3x3 convolutions with batch norm, a global average and a linear layer.

    Args:
        num_outputs: Number of classes or regression outputs.
        input_shape: Channels, height and width of an image, at least 2 x 2 pixels.
    """

    def __init__(self, num_outputs: int = 10, input_shape: tuple[int, ...] = (1, 8, 8)) -> None:
        super().__init__()
        channels, _, _ = check_image("SmallConvNet", num_outputs, input_shape, smallest=2)
        self.features = nn.Sequential(
            *conv_norm(channels, 16),
            nn.ReLU(),
            *conv_norm(16, 32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            *conv_norm(32, 32),
            nn.ReLU(),
            *global_average(),
        )
        self.head = nn.Linear(32, num_outputs)


class LeNet5(Chain):
    """The LeNet of Caffe; its only activation is between the two linear layers.

    Args:
        num_outputs: Number of classes or regression outputs.
        input_shape: Channels, height and width of an image, at least 16 x 16 pixels.
    """

    def __init__(self, num_outputs: int = 10, input_shape: tuple[int, ...] = (1, 28, 28)) -> None:
        super().__init__()
        channels, height, width = check_image("LeNet5", num_outputs, input_shape, smallest=16)
        self.features = nn.Sequential(
            nn.Conv2d(channels, 20, 5), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.MaxPool2d(2), nn.Flatten(-3)
        )
        self.head = _head(50 * _pooled(height) * _pooled(width), 500, num_outputs)


class NormLeNet5(Chain):
    """The LeNet-5 of Caffe with a batch norm and a ReLU after every layer but the last, and no biases before norms.

    Args:
        num_outputs: Number of classes or regression outputs.
        input_shape: Channels, height and width of an image, at least 16 x 16 pixels.
        dropout: Probability of dropping a unit in front of each linear layer in training; 0 leaves dropout out.
    """

    def __init__(
        self, num_outputs: int = 10, input_shape: tuple[int, ...] = (1, 28, 28), *, dropout: float = 0.0
    ) -> None:
        super().__init__()
        channels, height, width = check_image("NormLeNet5", num_outputs, input_shape, smallest=16)
        self.features = nn.Sequential()
        for inputs, outputs in ((channels, 20), (20, 50)):
            self.features.extend([nn.Conv2d(inputs, outputs, 5, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()])
            self.features.append(nn.MaxPool2d(2))
        self.features.append(nn.Flatten(-3))
        drop = [nn.Dropout(dropout)] if dropout > 0 else []
        hidden = [nn.Linear(50 * _pooled(height) * _pooled(width), 500, bias=False), nn.BatchNorm1d(500), nn.ReLU()]
        self.head = nn.Sequential(*drop, *hidden, *(nn.Dropout(one.p) for one in drop), nn.Linear(500, num_outputs))


class LeNet(Chain):
    """Three convolutions with 6, 16 and 120 channels, all multiplied by ``width``.

    Args:
        num_outputs: Number of classes or regression outputs.
        input_shape: Channels, height and width of an image, at least 28 x 28 pixels.
        width: Factor on every hidden width; the products are rounded.
    """

    def __init__(self, num_outputs: int = 10, input_shape: tuple[int, ...] = (1, 28, 28), width: float = 1) -> None:
        super().__init__()
        check_factor("LeNet", width=width)
        channels, rows, columns = check_image("LeNet", num_outputs, input_shape, smallest=28)
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


def _pooled(size: int) -> int:
    """Return the side length after two rounds of 5x5 convolution and 2x2 pooling."""
    return ((size - 4) // 2 - 4) // 2


def _head(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


class MLP(Chain):
    """Fully connected network.

    It maps ``(..., *inputs)`` to ``(..., outputs)``: the axes of ``inputs`` are flattened, leading axes are kept.

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

    parts = ("flatten", "layers")

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


class RegressionNet(Chain):
    """One hidden layer of ReLUs: ``norm, linear, relu, norm, linear``.

    Because the scales of the norms start small, the first predictions stay near the bias of the last layer.

    Args:
        inputs: Number of input features, or the shape of one example, whose axes are flattened first.
        outputs: Number of regression outputs.
        hidden: Number of hidden units.
        scale: Initial scale of both norms.
    """

    parts = ("flatten", "layers")

    def __init__(
        self, inputs: int | tuple[int, ...], outputs: int = 1, *, hidden: int = 50, scale: float = 0.2
    ) -> None:
        super().__init__()
        shape = check_features("RegressionNet", inputs)
        check_positive("RegressionNet", outputs=outputs, hidden=hidden)
        check_factor("RegressionNet", scale=scale)
        features = prod(shape)
        self.flatten = nn.Flatten(-len(shape))
        first, second = nn.BatchNorm1d(features), nn.BatchNorm1d(hidden)
        self.layers = nn.Sequential(first, nn.Linear(features, hidden), nn.ReLU(), second, nn.Linear(hidden, outputs))
        for norm in (first, second):
            nn.init.constant_(norm.weight, scale)
