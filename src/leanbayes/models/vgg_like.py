"""The VGG-like network for CIFAR (Zagoruyko, 2015, 92.45 %) that papers on stochastic layers use: norms everywhere."""

from __future__ import annotations

from torch import nn, Tensor

from leanbayes.models._checks import check_factor, check_image, check_positive, scaled
from leanbayes.models._conv import conv_norm, init_convolutions

STAGES = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))
"""Number and width of the 3x3 convolutions of a stage, which pooling ends."""

HIDDEN = 512
FIRST_RATE, LATER_RATE, HEAD_RATE = 0.3, 0.4, 0.5
"""Rates of dropout: in the first stage, in the others, in front of both linear layers."""


class VGGLike(nn.Module):
    """Thirteen 3x3 convolutions and a hidden linear layer, with a batch norm and a ReLU behind each, and no biases.

    With dropout it is the network as published: dropout behind every convolution of a stage but the last, and in front
    of both linear layers.

    Args:
        num_outputs: Number of classes or regression outputs.
        input_shape: Channels, height and width of an image, at least 32 x 32 pixels.
        width: Factor on every hidden width; the products are rounded.
        dropout: Whether dropout layers are there.
    """

    def __init__(
        self,
        num_outputs: int = 10,
        input_shape: tuple[int, ...] = (3, 32, 32),
        *,
        width: float = 1,
        dropout: bool = False,
    ) -> None:
        """Build the layers."""
        super().__init__()
        check_positive("VGGLike", num_outputs=num_outputs)
        check_factor("VGGLike", width=width)
        channels, _, _ = check_image("VGGLike", input_shape, smallest=2 ** len(STAGES))
        self.features = nn.Sequential()
        for stage, (depth, plain_width) in enumerate(STAGES):
            outputs, rate = scaled(plain_width, width), LATER_RATE if stage else FIRST_RATE
            for position in range(depth):
                self.features.extend([*conv_norm(channels, outputs), nn.ReLU()])
                if dropout and position < depth - 1:
                    self.features.append(nn.Dropout(rate))
                channels = outputs
            self.features.append(nn.MaxPool2d(2))
        self.features.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(-3)])  # one pixel is left of 32
        hidden = scaled(HIDDEN, width)
        self.head = nn.Sequential(nn.Linear(channels, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU())
        self.head.append(nn.Linear(hidden, num_outputs))
        if dropout:
            self.head.insert(3, nn.Dropout(HEAD_RATE))
            self.head.insert(0, nn.Dropout(HEAD_RATE))
        init_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``(B, C, H, W)`` to ``(B, num_outputs)``."""
        output: Tensor = self.head(self.features(x))
        return output


def vgg_like(
    num_outputs: int = 10,
    input_shape: tuple[int, ...] = (3, 32, 32),
    *,
    width: float = 1,
    dropout: bool = False,
) -> VGGLike:
    """Make the VGG-like network for CIFAR with norms and no biases; see ``VGGLike`` for the arguments."""
    return VGGLike(num_outputs, input_shape, width=width, dropout=dropout)
