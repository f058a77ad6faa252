"""VGG networks: stages of 3x3 convolutions, each ended by pooling (Simonyan & Zisserman, 2015)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn, Tensor

from leanbayes.models._checks import check_factor, check_image, check_positive, choose_scale, Scale, scaled
from leanbayes.models._conv import init_convolutions


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
        """Make the layers for so many feature channels and outputs."""
        head = nn.Sequential(nn.AdaptiveAvgPool2d(self.pooled), nn.Flatten(-3))
        inputs = channels * self.pooled**2
        for width in (inputs, self.hidden):
            head.extend([nn.Linear(width, self.hidden), nn.ReLU()])
            if self.dropout > 0:
                head.append(nn.Dropout(self.dropout))
        return head.append(nn.Linear(self.hidden, num_outputs))


CIFAR_HEAD = Head(pooled=1, hidden=512)
IMAGENET_HEAD = Head(pooled=7, hidden=4096, dropout=0.5)


class VGG(nn.Module):
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
        """Build the layers."""
        super().__init__()
        check_positive("VGG", num_outputs=num_outputs)
        check_factor("VGG", width=width)
        channels, _, _ = check_image("VGG", input_shape, smallest=2 ** len(stages))
        if not isinstance(head, Head):
            scale = choose_scale("VGG", head, input_shape)
            head = CIFAR_HEAD if scale == "cifar" else IMAGENET_HEAD
        self.features = nn.Sequential()
        for depth, plain_width in stages:
            outputs = scaled(plain_width, width)
            for _ in range(depth):
                self.features.append(nn.Conv2d(channels, outputs, 3, padding=1))
                if batch_norm:
                    self.features.append(nn.BatchNorm2d(outputs))
                self.features.append(nn.ReLU())
                channels = outputs
            self.features.append(nn.MaxPool2d(2))
        self.head = replace(head, hidden=scaled(head.hidden, width)).build(channels, num_outputs)
        init_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``(B, C, H, W)`` of at least ``2**len(stages)`` pixels to outputs."""
        output: Tensor = self.head(self.features(x))
        return output


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
