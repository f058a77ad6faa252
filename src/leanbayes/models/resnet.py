"""Residual networks ``x -> x + body(x)``: ResNet, ResNeXt, wide ResNet, PyramidNet and MobileNetV2.

ResNet: He et al. (2016). ResNeXt: Xie et al. (2017). Wide ResNet: Zagoruyko & Komodakis (2016). PyramidNet: Han et al.
(2017). MobileNetV2: Sandler et al. (2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from torch import nn, Tensor
from torch.nn.functional import pad

from leanbayes.models._blocks import (
    check_depth,
    check_factor,
    check_image,
    check_positive,
    choose_scale,
    conv,
    conv_norm,
    norm_relu,
    PooledChain,
    Scale,
    scaled,
    stage,
)

# Of a block: channels of its input, width of its 3x3 convolutions, channels of its outputs, stride of the first of them

_EXPANSION = 4  # of a ResNet bottleneck: output channels for each inner channel
_RESNEXT_OUTPUTS = 256  # of the first stage
_PYRAMID_STEM = 16

_MOBILE_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""Expansion, width, number of blocks and stride of each stage; on ImageNet the stem and the second stage halve too."""

_MOBILE_STEM, _MOBILE_LAST = 32, 1280


class Residual(nn.Module):
    """One step ``relu(body(x) + shortcut(x))``; the shortcut is a 1x1 projection with norm where the shape changes."""

    def __init__(self, body: nn.Module, channels: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = body
        same = stride == 1 and channels == outputs
        self.shortcut = nn.Identity() if same else conv_norm(channels, outputs, 1, stride)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return output


class ResidualBlock(Residual):
    """Residual step of ResNet: basic (3x3, 3x3), or bottleneck (1x1, 3x3, 1x1 to four times the width)."""

    def __init__(self, channels: int, width: int, *, stride: int, bottleneck: bool) -> None:
        outputs = _EXPANSION * width if bottleneck else width
        if bottleneck:
            body = _bottleneck(channels, width, outputs, stride)
        else:
            body = nn.Sequential(*conv_norm(channels, width, 3, stride), nn.ReLU(), *conv_norm(width, width))
        super().__init__(body, channels, outputs, stride)


class GroupedBottleneck(Residual):
    """Residual step of ResNeXt: 1x1, 3x3 in groups of the inner channels, and 1x1 convolutions."""

    def __init__(self, channels: int, inner: int, outputs: int, *, groups: int, stride: int) -> None:
        super().__init__(_bottleneck(channels, inner, outputs, stride, groups), channels, outputs, stride)


def _bottleneck(channels: int, inner: int, outputs: int, stride: int, groups: int = 1) -> nn.Sequential:
    narrow, filtered = conv_norm(channels, inner, 1), conv_norm(inner, inner, 3, stride, groups=groups)
    return nn.Sequential(*narrow, nn.ReLU(), *filtered, nn.ReLU(), *conv_norm(inner, outputs, 1))


class ResNet(PooledChain):
    """Stem, stages of residual blocks, global average and a linear layer, for images of any size.

    Args:
        depths: Number of blocks in each stage; every later stage halves the image.
        bottleneck: Whether the blocks are bottlenecks.
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
        super().__init__()
        check_positive("ResNet", **{f"depths[{i}]": depth for i, depth in enumerate(depths)})
        channels, _, _ = check_image("ResNet", num_outputs, input_shape)
        self.stem = _stem(choose_scale("ResNet", stem, input_shape), channels)
        self.stages = nn.Sequential()
        channels = 64
        for index, depth in enumerate(depths):
            width = 64 * 2**index
            outputs = _EXPANSION * width if bottleneck else width
            block = partial(ResidualBlock, width=width, bottleneck=bottleneck)
            self.stages.append(stage(block, channels, outputs, depth=depth, stride=2 if index else 1))
            channels = outputs
        self.add_head(channels, num_outputs)


def _stem(scale: Scale, channels: int) -> nn.Sequential:
    if scale == "cifar":
        return nn.Sequential(*conv_norm(channels, 64), nn.ReLU())
    shrink = nn.MaxPool2d(3, stride=2, padding=1)
    return nn.Sequential(*conv_norm(channels, 64, 7, stride=2), nn.ReLU(), shrink)


def resnet18(num_outputs: int = 10, input_shape: tuple[int, ...] = (3, 32, 32), stem: Scale | None = None) -> ResNet:
    """Make the ResNet of 8 basic blocks."""
    return ResNet((2, 2, 2, 2), num_outputs=num_outputs, input_shape=input_shape, stem=stem)


def resnet50(num_outputs: int = 10, input_shape: tuple[int, ...] = (3, 32, 32), stem: Scale | None = None) -> ResNet:
    """Make the ResNet of 16 bottleneck blocks."""
    depths = (3, 4, 6, 3)
    return ResNet(depths, bottleneck=True, num_outputs=num_outputs, input_shape=input_shape, stem=stem)


class ResNeXt(PooledChain):
    """ResNeXt-depth of grouped bottlenecks for small images: three stages of ``(depth - 2) / 9`` blocks.

    Stage ``s = 0, 1, 2`` has ``256 * 2**s`` output channels and ``base_width * 2**s`` inner channels in each group. The
    second and the third stage halve the image.

    Args:
        depth: Number of convolutions along the longest path, plus the linear layer; ``9n + 2``.
        cardinality: Number of groups of the 3x3 convolutions.
        base_width: Inner channels of a group in the first stage.
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
        super().__init__()
        blocks = check_depth("ResNeXt", depth, per_block=9, extra=2)
        check_positive("ResNeXt", cardinality=cardinality, base_width=base_width)
        image_channels, _, _ = check_image("ResNeXt", num_outputs, input_shape)
        self.stem = _stem("cifar", image_channels)
        self.stages = nn.Sequential()
        channels = 64
        for index in range(3):
            inner, outputs = cardinality * base_width * 2**index, _RESNEXT_OUTPUTS * 2**index
            block = partial(GroupedBottleneck, inner=inner, outputs=outputs, groups=cardinality)
            self.stages.append(stage(block, channels, outputs, depth=blocks, stride=2 if index else 1))
            channels = outputs
        self.add_head(channels, num_outputs)


class PreactBlock(nn.Module):
    """One pre-activation step: with ``a = relu(norm(x))``, ``body(a) + x``.

    Where the shape changes, a 1x1 convolution of ``a`` takes the place of ``x``.
    """

    def __init__(self, channels: int, width: int, *, stride: int) -> None:
        super().__init__()
        same = stride == 1 and channels == width
        self.activate = norm_relu(channels)
        self.body = nn.Sequential(conv(channels, width, 3, stride), *norm_relu(width), conv(width, width))
        self.shortcut = None if same else conv(channels, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        activated = self.activate(x)
        skipped = x if self.shortcut is None else self.shortcut(activated)
        output: Tensor = self.body(activated) + skipped
        return output


class WideResNet(PooledChain):
    """WRN-depth-widen: three stages of ``(depth - 4) / 6`` blocks, with 16, 32 and 64 times ``widen`` channels.

    Args:
        depth: Number of convolutions along the longest path, plus the linear layer; ``6n + 4``.
        widen: Factor on the width of the three stages; the products are rounded.
    """

    parts = ("stem", "stages", "activate", "pool", "head")

    def __init__(
        self, depth: int = 28, widen: float = 10, num_outputs: int = 10, input_shape: tuple[int, ...] = (3, 32, 32)
    ) -> None:
        super().__init__()
        blocks = check_depth("WideResNet", depth, per_block=6, extra=4)
        check_factor("WideResNet", widen=widen)
        image_channels, _, _ = check_image("WideResNet", num_outputs, input_shape)
        channels = 16
        self.stem = conv(image_channels, channels)
        self.stages = nn.Sequential()
        for index, plain_width in enumerate((16, 32, 64)):
            width = scaled(plain_width, widen)
            block = partial(PreactBlock, width=width)
            self.stages.append(stage(block, channels, width, depth=blocks, stride=2 if index else 1))
            channels = width
        self.activate = norm_relu(channels)
        self.add_head(channels, num_outputs)


class PyramidBlock(nn.Module):
    """One step ``body(x) + shortcut(x)``, with a norm before each convolution and after the last, and a single ReLU.

    The shortcut has no parameters. It averages where the image shrinks, and fills new channels with zeros.
    """

    def __init__(self, channels: int, width: int, *, stride: int) -> None:
        super().__init__()
        first = conv_norm(channels, width, 3, stride)
        self.body = nn.Sequential(nn.BatchNorm2d(channels), *first, nn.ReLU(), *conv_norm(width, width))
        # Images of an odd size round up, as the convolution does.
        self.shortcut = nn.Identity() if stride == 1 else nn.AvgPool2d(stride, ceil_mode=True)
        self.new_channels = width - channels

    def forward(self, x: Tensor) -> Tensor:
        widened = pad(self.shortcut(x), (0, 0, 0, 0, 0, self.new_channels))
        output: Tensor = self.body(x) + widened
        return output


class PyramidNet(PooledChain):
    """PyramidNet-depth(alpha) of basic blocks, whose widths grow in equal steps from 16 to 16 + alpha.

    With ``N = (depth - 2) / 2`` blocks in three equal stages, block ``k = 1..N`` has ``16 + alpha k / N`` channels,
    rounded. The second and the third stage halve the image.

    Args:
        depth: Number of convolutions along the longest path, plus the linear layer; ``6n + 2``.
        alpha: Number of channels that the last block has above the 16 of the first convolution.
    """

    parts = ("stem", "stages", "activate", "pool", "head")

    def __init__(
        self, depth: int = 110, alpha: float = 270, *, num_outputs: int = 10, input_shape: tuple[int, ...] = (3, 32, 32)
    ) -> None:
        super().__init__()
        per_stage = check_depth("PyramidNet", depth, per_block=6, extra=2)
        check_factor("PyramidNet", alpha=alpha)
        channels, _, _ = check_image("PyramidNet", num_outputs, input_shape)
        blocks = 3 * per_stage
        widths = [round(_PYRAMID_STEM + alpha * k / blocks) for k in range(blocks + 1)]
        self.stem = conv_norm(channels, _PYRAMID_STEM)
        stages = [nn.Sequential() for _ in range(3)]
        for index, (inputs, outputs) in enumerate(pairwise(widths)):
            stride = 2 if index in (per_stage, 2 * per_stage) else 1
            stages[index // per_stage].append(PyramidBlock(inputs, outputs, stride=stride))
        self.stages = nn.Sequential(*stages)
        self.activate = norm_relu(widths[-1])
        self.add_head(widths[-1], num_outputs)


class InvertedResidual(nn.Module):
    """One step: widen by a 1x1 convolution, filter each channel by a 3x3 one, narrow by a 1x1 one without ReLU.

    The step returns ``x + body(x)``, or ``body(x)`` where the shape changes. The inner width is `expansion` times the
    input channels; 1 leaves out the widening convolution.
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
        width: Factor on every hidden width, the last convolution's too; the products are rounded.
    """

    parts = ("stem", "stages", "last", "pool", "head")

    def __init__(self, num_outputs: int = 10, input_shape: tuple[int, ...] = (3, 32, 32), *, width: float = 1) -> None:
        super().__init__()
        check_factor("MobileNetV2", width=width)
        image_channels, _, _ = check_image("MobileNetV2", num_outputs, input_shape)
        channels, last = scaled(_MOBILE_STEM, width), scaled(_MOBILE_LAST, width)
        self.stem = nn.Sequential(*conv_norm(image_channels, channels), nn.ReLU6())
        self.stages = nn.Sequential()
        for expansion, plain_width, depth, stride in _MOBILE_STAGES:
            outputs = scaled(plain_width, width)
            block = partial(InvertedResidual, width=outputs, expansion=expansion)
            self.stages.append(stage(block, channels, outputs, depth=depth, stride=stride))
            channels = outputs
        self.last = nn.Sequential(*conv_norm(channels, last, 1), nn.ReLU6())
        self.add_head(last, num_outputs)
