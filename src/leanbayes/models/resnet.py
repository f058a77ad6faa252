"""Residual networks: ``x -> relu(body(x) + shortcut(x))`` over and over (He et al., 2016)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn, Tensor

from leanbayes.models._checks import check_image, check_positive, choose_scale, Scale
from leanbayes.models._conv import bottleneck, conv_norm, init_convolutions, Residual
from leanbayes.models._conv import bottleneck as three_convolutions

_EXPANSION = 4


class ResidualBlock(Residual):
    """One residual step, basic (3x3, 3x3) or bottleneck (1x1, 3x3, 1x1 to four times the width).

    The stride is taken by the first 3x3 convolution. The shortcut is the identity, or a
    normalised 1x1 projection where the shape changes.

    Args:
        channels: Number of input channels.
        width: Channels of the 3x3 convolutions.
        stride: Factor by which the image shrinks.
        bottleneck: Whether the block is a bottleneck.
    """

    def __init__(self, channels: int, width: int, *, stride: int, bottleneck: bool) -> None:
        """Build the layers."""
        outputs = _EXPANSION * width if bottleneck else width
        body = (
            three_convolutions(channels, width, outputs, stride)
            if bottleneck
            else nn.Sequential(*conv_norm(channels, width, 3, stride), nn.ReLU(), *conv_norm(width, outputs))
        )
        super().__init__(body, channels, outputs, stride)


class ResNet(nn.Module):
    """Stem, four stages of residual blocks, global average and a linear layer.

    Args:
        depths: Number of blocks in each stage; every later stage halves the image.
        bottleneck: Whether the blocks are bottlenecks.
        num_outputs: Number of classes or regression outputs.
        input_shape: Channels, height and width of an image.
        stem: ``"cifar"`` (3x3 convolution), ``"imagenet"`` (7x7 and pooling, each halving the
            image); ``None`` takes the first for images of at most 64 pixels, else the second.
    """

    def __init__(
        self,
        depths: Sequence[int],
        *,
        bottleneck: bool = False,
        num_outputs: int = 10,
        input_shape: tuple[int, ...] = (3, 32, 32),
        stem: Scale | None = None,
    ) -> None:
        """Build the layers."""
        super().__init__()
        check_positive("ResNet", num_outputs=num_outputs)
        channels, _, _ = check_image("ResNet", input_shape)
        self.stem = _stem(choose_scale("ResNet", stem, input_shape), channels)
        self.stages = nn.Sequential()
        channels = 64
        for index, depth in enumerate(depths):
            width = 64 * 2**index
            stage = nn.Sequential()
            for step in range(depth):
                stride = 2 if index > 0 and step == 0 else 1
                stage.append(ResidualBlock(channels, width, stride=stride, bottleneck=bottleneck))
                channels = _EXPANSION * width if bottleneck else width
            self.stages.append(stage)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(-3))
        self.head = nn.Linear(channels, num_outputs)
        init_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``(B, C, H, W)`` of any size to ``(B, num_outputs)``."""
        output: Tensor = self.head(self.pool(self.stages(self.stem(x))))
        return output


def _stem(scale: Scale, channels: int) -> nn.Sequential:
    if scale == "cifar":
        return nn.Sequential(*conv_norm(channels, 64), nn.ReLU())
    shrink = nn.MaxPool2d(3, stride=2, padding=1)
    return nn.Sequential(*conv_norm(channels, 64, 7, stride=2), nn.ReLU(), shrink)


def resnet18(
    num_outputs: int = 10,
    input_shape: tuple[int, ...] = (3, 32, 32),
    stem: Scale | None = None,
) -> ResNet:
    """Make the ResNet of 8 basic blocks; see ``ResNet`` for the arguments."""
    return ResNet((2, 2, 2, 2), num_outputs=num_outputs, input_shape=input_shape, stem=stem)


def resnet50(
    num_outputs: int = 10,
    input_shape: tuple[int, ...] = (3, 32, 32),
    stem: Scale | None = None,
) -> ResNet:
    """Make the ResNet of 16 bottleneck blocks; see ``ResNet`` for the arguments."""
    depths = (3, 4, 6, 3)
    return ResNet(depths, bottleneck=True, num_outputs=num_outputs, input_shape=input_shape, stem=stem)


# -------------------- resnext
# ResNeXt for CIFAR: residual bottlenecks whose 3x3 convolution works in separate groups (Xie et al., 2017).


_STEM = 64
_OUTPUTS = 256
_STAGES = 3


class GroupedBottleneck(Residual):
    """One step ``relu(body(x) + shortcut(x))`` with a body of 1x1, grouped 3x3 and 1x1 convolutions.

    The stride is taken by the 3x3 convolution. The shortcut is the identity, or a normalised 1x1 projection where the
    shape changes.

    Args:
        channels: Number of input channels.
        inner: Channels of the grouped convolution.
        outputs: Number of output channels.
        groups: Number of groups, among which the inner channels are shared out.
        stride: Factor by which the image shrinks.
    """

    def __init__(self, channels: int, inner: int, outputs: int, *, groups: int, stride: int) -> None:
        """Build the layers."""
        super().__init__(bottleneck(channels, inner, outputs, stride, groups=groups), channels, outputs, stride)


class ResNeXt(nn.Module):
    """ResNeXt-depth of grouped bottlenecks for small images: three stages of ``(depth - 2) / 9`` blocks.

    Stage ``s = 0, 1, 2`` has ``256 * 2**s`` output channels and ``base_width * 2**s`` inner channels in each group. The
    second and the third stage halve the image.

    Args:
        depth: Number of convolutions along the longest path, plus the linear layer; ``9n + 2``.
        cardinality: Number of groups of the 3x3 convolutions.
        base_width: Inner channels of a group in the first stage.
        num_outputs: Number of classes or regression outputs.
        input_shape: Channels, height and width of an image.
    """

    def __init__(
        self,
        depth: int = 29,
        cardinality: int = 2,
        base_width: int = 64,
        *,
        num_outputs: int = 10,
        input_shape: tuple[int, ...] = (3, 32, 32),
    ) -> None:
        """Build the layers."""
        super().__init__()
        blocks, rest = divmod(depth - 2, 3 * _STAGES)
        if rest or blocks < 1:
            suggestion = 3 * _STAGES * max(blocks, 1) + 2
            raise ValueError(
                f"ResNeXt expected depth = 9n + 2 with n >= 1 (11, 20, 29, 38, ...), "
                f"got {depth}. Try depth={suggestion}."
            )
        check_positive("ResNeXt", cardinality=cardinality, base_width=base_width, num_outputs=num_outputs)
        image_channels, _, _ = check_image("ResNeXt", input_shape)
        channels = _STEM
        self.stem = nn.Sequential(*conv_norm(image_channels, channels), nn.ReLU())
        self.stages = nn.Sequential()
        for index in range(_STAGES):
            inner, outputs = cardinality * base_width * 2**index, _OUTPUTS * 2**index
            stage = nn.Sequential()
            for step in range(blocks):
                stride = 2 if index > 0 and step == 0 else 1
                stage.append(GroupedBottleneck(channels, inner, outputs, groups=cardinality, stride=stride))
                channels = outputs
            self.stages.append(stage)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(-3))
        self.head = nn.Linear(channels, num_outputs)
        init_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``(B, C, H, W)`` of any size to ``(B, num_outputs)``."""
        output: Tensor = self.head(self.pool(self.stages(self.stem(x))))
        return output
