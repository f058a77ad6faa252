"""VGG networks: stages of 3x3 convolutions, each ended by pooling (Simonyan & Zisserman, 2015)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from leanbayes.models._blocks import Chain, conv_norm, global_average, init_convolutions
from leanbayes.models._checks import check_factor, check_image, choose_scale, Scale, scaled


@dataclass(frozen=True, kw_only=True)
class Head:
    """The classifier on top of a VGG: pool, two hidden linear layers, one linear output.

    Attributes:
        pooled: Side length, in pixels, that the features are averaged to.
        hidden: Width of the two hidden layers.
        dropout: Probability of dropping a hidden unit in training; 0 leaves dropout out.
    """

    pooled: int = 1
    hidden: int = 512
    dropout: float = 0.0

    def build(self, channels: int, num_outputs: int) -> nn.Sequential:
        """Return the layers for features of `channels` channels."""
        head = nn.Sequential(nn.AdaptiveAvgPool2d(self.pooled), nn.Flatten(-3))
        inputs = channels * self.pooled**2
        for width in (inputs, self.hidden):
            head.extend([nn.Linear(width, self.hidden), nn.ReLU()])
            if self.dropout > 0:
                head.append(nn.Dropout(self.dropout))
        return head.append(nn.Linear(self.hidden, num_outputs))


CIFAR_HEAD = Head(pooled=1, hidden=512)
IMAGENET_HEAD = Head(pooled=7, hidden=4096, dropout=0.5)


class VGG(Chain):
    """VGG with a chosen number of convolutions in each of its stages.

    Args:
        stages: For each stage the number of convolutions and their width.
        num_outputs: Number of classes or regression outputs.
        input_shape: Channels, height and width of an image; each stage halves the image.
        head: ``"cifar"`` (512 wide), ``"imagenet"`` (4096 wide on 7x7 features, dropout 0.5) or
            a ``Head``; ``None`` takes the first for images of at most 64 pixels, else the second.
        batch_norm: Whether a batch norm follows each convolution.
        width: Factor on every hidden width, the head's too; the products are rounded.
    """

    def __init__(
        self,
        stages: Sequence[tuple[int, int]],
        *,
        num_outputs: int = 10,
        input_shape: tuple[int, ...] = (3, 32, 32),
        head: Scale | Head | None = None,
        batch_norm: bool = False,
        width: float = 1,
    ) -> None:
        super().__init__()
        check_factor("VGG", width=width)
        channels, _, _ = check_image("VGG", num_outputs, input_shape, smallest=2 ** len(stages))
        if not isinstance(head, Head):
            head = CIFAR_HEAD if choose_scale("VGG", head, input_shape) == "cifar" else IMAGENET_HEAD
        self.features = nn.Sequential()
        for depth, plain_width in stages:
            outputs = scaled(plain_width, width)
            for _ in range(depth):
                norm = [nn.BatchNorm2d(outputs)] if batch_norm else []
                self.features.extend([nn.Conv2d(channels, outputs, 3, padding=1), *norm, nn.ReLU()])
                channels = outputs
            self.features.append(nn.MaxPool2d(2))
        self.head = replace(head, hidden=scaled(head.hidden, width)).build(channels, num_outputs)
        init_convolutions(self)


# Number and width of the convolutions of each stage
_VGG11 = ((1, 64), (1, 128), (2, 256), (2, 512), (2, 512))
_VGG16 = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))


def vgg11(
    num_outputs: int = 10,
    input_shape: tuple[int, ...] = (3, 32, 32),
    head: Scale | Head | None = None,
    batch_norm: bool = False,
) -> VGG:
    """Make the VGG of 8 convolutions and 3 linear layers; see ``VGG`` for the arguments."""
    return VGG(_VGG11, num_outputs=num_outputs, input_shape=input_shape, head=head, batch_norm=batch_norm)


def vgg11_bn(
    num_outputs: int = 10,
    input_shape: tuple[int, ...] = (3, 32, 32),
    head: Scale | Head | None = None,
    *,
    width: float = 1,
) -> VGG:
    """Make the VGG of 8 convolutions, each with a batch norm, and 3 linear layers; see ``VGG`` for the arguments."""
    return VGG(_VGG11, num_outputs=num_outputs, input_shape=input_shape, head=head, batch_norm=True, width=width)


def vgg16(
    num_outputs: int = 10,
    input_shape: tuple[int, ...] = (3, 32, 32),
    head: Scale | Head | None = None,
    batch_norm: bool = False,
) -> VGG:
    """Make the VGG of 13 convolutions and 3 linear layers; see ``VGG`` for the arguments."""
    return VGG(_VGG16, num_outputs=num_outputs, input_shape=input_shape, head=head, batch_norm=batch_norm)


HIDDEN = 512
FIRST_RATE, LATER_RATE, HEAD_RATE = 0.3, 0.4, 0.5
"""Dropout rates of `VGGLike`: in the first stage, in the others, in front of both linear layers."""


class VGGLike(Chain):
    """Thirteen 3x3 convolutions and a hidden linear layer, with a batch norm and a ReLU after each, and no biases.

    Zagoruyko (2015) published it for CIFAR with dropout: after every convolution of a stage but the last, and in front
    of both linear layers.

    Args:
        num_outputs: Number of classes or regression outputs.
        input_shape: Channels, height and width of an image, at least 32 x 32 pixels.
        width: Factor on every hidden width; the products are rounded.
        dropout: Whether the network has dropout layers.
    """

    def __init__(
        self,
        num_outputs: int = 10,
        input_shape: tuple[int, ...] = (3, 32, 32),
        *,
        width: float = 1,
        dropout: bool = False,
    ) -> None:
        super().__init__()
        check_factor("VGGLike", width=width)
        channels, _, _ = check_image("VGGLike", num_outputs, input_shape, smallest=2 ** len(_VGG16))
        self.features = nn.Sequential()
        for stage, (depth, plain_width) in enumerate(_VGG16):
            outputs, rate = scaled(plain_width, width), LATER_RATE if stage else FIRST_RATE
            for position in range(depth):
                self.features.extend([*conv_norm(channels, outputs), nn.ReLU()])
                if dropout and position < depth - 1:
                    self.features.append(nn.Dropout(rate))
                channels = outputs
            self.features.append(nn.MaxPool2d(2))
        self.features.extend(global_average())
        hidden = scaled(HIDDEN, width)
        self.head = nn.Sequential(nn.Linear(channels, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU())
        self.head.append(nn.Linear(hidden, num_outputs))
        if dropout:
            self.head.insert(3, nn.Dropout(HEAD_RATE))
            self.head.insert(0, nn.Dropout(HEAD_RATE))
        init_convolutions(self)


def vgg_like(
    num_outputs: int = 10, input_shape: tuple[int, ...] = (3, 32, 32), *, width: float = 1, dropout: bool = False
) -> VGGLike:
    """Make the VGG-like network for CIFAR with norms and no biases; see ``VGGLike`` for the arguments."""
    return VGGLike(num_outputs, input_shape, width=width, dropout=dropout)
