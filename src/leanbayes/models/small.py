"""A small convolutional network for small images, such as the 8x8 digits of scikit-learn."""

from __future__ import annotations

from torch import nn, Tensor

from leanbayes.models._checks import check_image, check_positive
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
