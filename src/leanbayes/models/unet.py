"""U-Net: an encoder, a decoder, and a skip between them at every resolution (Ronneberger et al., 2015)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn, Tensor
from torch.fx import Proxy

from leanbayes.models._blocks import conv_norm, init_convolutions
from leanbayes.models._checks import check_image, check_positive

WIDTHS = (32, 64, 128, 192)
"""Channels of the levels, from the finest to the coarsest."""


class UNet(nn.Module):
    """Outputs for every pixel, from features of all resolutions.

    A level is two 3x3 convolutions, each with a batch norm and a ReLU. Max pooling halves the image between two levels
    of the encoder. In the decoder an up-convolution doubles it, and the encoder's level is concatenated. The
    up-convolution is a bilinear enlargement and a 3x3 convolution: a transposed one tends to draw chequered patterns.

    Example:
        >>> import torch
        >>> UNet(num_outputs=2, input_shape=(1, 24, 40))(torch.zeros(5, 1, 24, 40)).shape
        torch.Size([5, 2, 24, 40])

    Args:
        num_outputs: Number of classes or regression outputs of a pixel.
        input_shape: Channels, height and width of an image; both sides are multiples of ``2**(len(widths) - 1)``.
        widths: Channels of the levels, from the finest to the coarsest.
    """

    def __init__(
        self, num_outputs: int = 2, input_shape: tuple[int, ...] = (3, 32, 32), *, widths: Sequence[int] = WIDTHS
    ) -> None:
        super().__init__()
        check_positive("UNet", **{"len(widths)": len(widths)} | {f"widths[{i}]": w for i, w in enumerate(widths)})
        channels, height, width = check_image("UNet", num_outputs, input_shape)
        self.multiple: int = 2 ** (len(widths) - 1)
        _check_sides(height, width, self.multiple)
        self.encoder = nn.ModuleList([_level(channels, widths[0])])
        self.enlarge, self.decoder = nn.ModuleList(), nn.ModuleList()
        for fine, coarse in pairwise(widths):
            self.encoder.append(nn.Sequential(nn.MaxPool2d(2), *_level(fine, coarse)))
        for coarse, fine in pairwise(reversed(widths)):
            self.enlarge.append(_up_convolution(coarse, fine))
            self.decoder.append(_level(2 * fine, fine))
        self.head = nn.Conv2d(widths[0], num_outputs, 1)
        init_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, Proxy):  # while torch.fx traces, x has no size
            _check_sides(x.shape[-2], x.shape[-1], self.multiple)
        features = []
        for level in self.encoder:
            x = level(x)
            features.append(x)
        x = features.pop()
        for enlarge, level in zip(self.enlarge, self.decoder, strict=True):
            x = level(torch.cat((features.pop(), enlarge(x)), 1))
        output: Tensor = self.head(x)
        return output


def _level(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(*conv_norm(channels, width), nn.ReLU(), *conv_norm(width, width), nn.ReLU())


def _up_convolution(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), *conv_norm(channels, width), nn.ReLU())


def _check_sides(height: int, width: int, multiple: int) -> None:
    if height % multiple or width % multiple:
        raise ValueError(
            f"UNet expected images whose height and width are multiples of {multiple}, got {height} x {width}. "
            "Pad or crop the images, or choose fewer widths."
        )
