"""MobileNetV2 for CIFAR: inverted residuals with depthwise convolutions (Sandler et al., 2018)."""

from __future__ import annotations

from functools import partial

from torch import nn, Tensor

from leanbayes.models._blocks import conv_norm, PooledChain, stage
from leanbayes.models._checks import check_factor, check_image, scaled

STAGES = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""Expansion, width, number of blocks and stride of each stage; on ImageNet the stem and the second stage halve too."""

STEM, LAST = 32, 1280


class InvertedResidual(nn.Module):
    """One step: widen by a 1x1 convolution, filter each channel by a 3x3 one, narrow by a 1x1 one without ReLU.

    The step returns ``x + body(x)``, or ``body(x)`` where the shape changes.

    Args:
        channels: Number of input channels.
        width: Number of output channels.
        stride: Factor by which the 3x3 convolution shrinks the image.
        expansion: Factor of the inner width to the input channels; 1 leaves out the widening convolution.
    """

    def __init__(self, channels: int, width: int, *, stride: int, expansion: int) -> None:
        super().__init__()
        inner = expansion * channels
        self.body = nn.Sequential()
        if expansion > 1:
            self.body.extend([*conv_norm(channels, inner, 1), nn.ReLU6()])
        self.body.extend([*conv_norm(inner, inner, 3, stride, groups=inner), nn.ReLU6(), *conv_norm(inner, width, 1)])
        self.same = stride == 1 and channels == width

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.body(x) if self.same else self.body(x)
        return output


class MobileNetV2(PooledChain):
    """Seventeen inverted residuals between a 3x3 and a 1x1 convolution, for small images.

    Three of the stages halve the image: 32 x 32 pixels become 4 x 4.

    Args:
        num_outputs: Number of classes or regression outputs.
        input_shape: Channels, height and width of an image.
        width: Factor on every hidden width, the last convolution's too; the products are rounded.
    """

    parts = ("stem", "stages", "last", "pool", "head")

    def __init__(self, num_outputs: int = 10, input_shape: tuple[int, ...] = (3, 32, 32), *, width: float = 1) -> None:
        super().__init__()
        check_factor("MobileNetV2", width=width)
        image_channels, _, _ = check_image("MobileNetV2", num_outputs, input_shape)
        channels, last = scaled(STEM, width), scaled(LAST, width)
        self.stem = nn.Sequential(*conv_norm(image_channels, channels), nn.ReLU6())
        self.stages = nn.Sequential()
        for expansion, plain_width, depth, stride in STAGES:
            outputs = scaled(plain_width, width)
            block = partial(InvertedResidual, width=outputs, expansion=expansion)
            self.stages.append(stage(block, channels, outputs, depth=depth, stride=stride))
            channels = outputs
        self.last = nn.Sequential(*conv_norm(channels, last, 1), nn.ReLU6())
        self.add_head(last, num_outputs)
