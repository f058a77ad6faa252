"""The encoder and the decoder of the paper: five convolutions with norms, for images of any size up to 64 pixels."""

from __future__ import annotations

from itertools import pairwise

from torch import nn, Tensor

WIDTHS = (32, 64, 128, 256, 512)


class ConvEncoder(nn.Sequential):
    """Five 3x3 convolutions of stride 2 with norms and leaky ReLUs, then one row of features for each image.

    Attributes:
        features: how many features there are.
    """

    def __init__(self, input_shape: tuple[int, ...], widths: tuple[int, ...] = WIDTHS) -> None:
        """Build the layers for images (C, H, W)."""
        channels, height, width = input_shape
        layers: list[nn.Module] = []
        for narrow, wide in pairwise((channels, *widths)):
            layers += [nn.Conv2d(narrow, wide, 3, 2, 1, bias=False), nn.BatchNorm2d(wide), nn.LeakyReLU()]
            height, width = (height + 1) // 2, (width + 1) // 2
        super().__init__(*layers, nn.Flatten())
        self.features = widths[-1] * height * width


class ConvDecoder(nn.Module):
    """Mirrors `ConvEncoder`: transposed convolutions up to the size of the image or more, of which it keeps the middle.

    Outputs are real numbers; what they mean is the likelihood's affair.
    """

    def __init__(self, dimensions: int, output_shape: tuple[int, ...], widths: tuple[int, ...] = WIDTHS) -> None:
        """Build the layers for images (C, H, W) out of codes (dimensions,)."""
        super().__init__()
        channels, self.height, self.width = output_shape
        factor = 2 ** len(widths)
        self.start = (widths[-1], -(-self.height // factor), -(-self.width // factor))
        self.first = nn.Linear(dimensions, self.start[0] * self.start[1] * self.start[2])
        layers: list[nn.Module] = []
        for wide, narrow in pairwise((*reversed(widths), widths[0])):
            layers += [nn.ConvTranspose2d(wide, narrow, 4, 2, 1, bias=False), nn.BatchNorm2d(narrow), nn.LeakyReLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(widths[0], channels, 3, padding=1))

    def forward(self, h: Tensor) -> Tensor:
        """Map codes (B, D) to images (B, C, H, W)."""
        y: Tensor = self.layers(self.first(h).view(-1, *self.start))
        top, left = (y.shape[-2] - self.height) // 2, (y.shape[-1] - self.width) // 2
        return y[..., top : top + self.height, left : left + self.width]
