"""MobileNetV2 for CIFAR: narrow blocks that work on many channels, one channel at a time (Sandler et al., 2018)."""

from __future__ import annotations

from torch import nn, Tensor

from leanbayes.models._checks import check_factor, check_image, check_positive, scaled
from leanbayes.models._conv import conv_norm, init_convolutions

STAGES = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""Expansion, width, number of blocks and stride of each stage; on ImageNet the stem and the second stage halve too."""

STEM, LAST = 32, 1280


class InvertedResidual(nn.Module):
    """One step: widen by a 1x1 convolution, filter each channel by a 3x3 one, narrow by a 1x1 one without ReLU.

    The stride is taken by the 3x3 convolution. The input is added where the shape stays.

    Args:
        channels: Number of input channels.
        width: Number of output channels.
        stride: Factor by which the image shrinks.
        expansion: Factor of the inner width to the input channels; 1 leaves the widening convolution out.
    """

    def __init__(self, channels: int, width: int, *, stride: int, expansion: int) -> None:
        """Build the layers."""
        super().__init__()
        inner = expansion * channels
        self.body = nn.Sequential()
        if expansion > 1:
            self.body.extend([*conv_norm(channels, inner, 1), nn.ReLU6()])
        self.body.extend([*conv_norm(inner, inner, 3, stride, groups=inner), nn.ReLU6(), *conv_norm(inner, width, 1)])
        self.same = stride == 1 and channels == width

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x + body(x)``, or ``body(x)`` where the shape changes."""
        output: Tensor = x + self.body(x) if self.same else self.body(x)
        return output


class MobileNetV2(nn.Module):
    """Seventeen inverted residuals between a 3x3 and a 1x1 convolution, for small images.

    Three of the stages halve the image, so that 4 x 4 pixels are left of 32 x 32.

    Args:
        num_outputs: Number of classes or regression outputs.
        input_shape: Channels, height and width of an image.
        width: Factor on every hidden width, the last convolution's too; the products are rounded.
    """

    def __init__(self, num_outputs: int = 10, input_shape: tuple[int, ...] = (3, 32, 32), *, width: float = 1) -> None:
        """Build the layers."""
        super().__init__()
        check_positive("MobileNetV2", num_outputs=num_outputs)
        check_factor("MobileNetV2", width=width)
        image_channels, _, _ = check_image("MobileNetV2", input_shape)
        channels, last = scaled(STEM, width), scaled(LAST, width)
        self.stem = nn.Sequential(*conv_norm(image_channels, channels), nn.ReLU6())
        self.stages = nn.Sequential()
        for expansion, plain_width, blocks, first_stride in STAGES:
            outputs, stage = scaled(plain_width, width), nn.Sequential()
            for stride in (first_stride, *[1] * (blocks - 1)):
                stage.append(InvertedResidual(channels, outputs, stride=stride, expansion=expansion))
                channels = outputs
            self.stages.append(stage)
        self.last = nn.Sequential(*conv_norm(channels, last, 1), nn.ReLU6())
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(-3))
        self.head = nn.Linear(last, num_outputs)
        init_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``(B, C, H, W)`` of any size to ``(B, num_outputs)``."""
        features = self.last(self.stages(self.stem(x)))
        output: Tensor = self.head(self.pool(features))
        return output
