"""LeNets: small convolutional networks for digits (LeCun et al., 1998), in two later sizes."""

from __future__ import annotations

from torch import nn, Tensor

from leanbayes.models._checks import check_factor, check_image, check_positive, scaled


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
