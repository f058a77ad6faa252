"""Classic networks: MLPs, LeNets (LeCun et al., 1998), VGGs, a U-Net, and an LSTM over health records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import torch
from torch import nn, Tensor
from torch.fx import Proxy

from leanbayes.models._blocks import (
    Chain,
    check_factor,
    check_features,
    check_image,
    check_positive,
    choose_scale,
    conv_norm,
    global_average,
    init_convolutions,
    Scale,
    scaled,
)

# Number and width of the convolutions of each stage
_VGG11 = ((1, 64), (1, 128), (2, 256), (2, 512), (2, 512))
_VGG16 = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))

FIRST_RATE, LATER_RATE, HEAD_RATE = 0.3, 0.4, 0.5
"""Dropout rates of `VGGLike`: in the first stage, in the others, in front of both linear layers."""

START = 0.05
"""Initial std of the embeddings of `EHRNet`; with torch's default of 1, the network memorises rare bins."""

REMEMBER = 3.0
"""Initial bias of its forget gates, so that the last state still depends on the first day."""


class SmallConvNet(Chain):
    """Three 3x3 convolutions with batch norm, a global average and a linear layer.

    Args:
        input_shape: Channels, height and width of an image, at least 2 x 2 pixels.
    """

    def __init__(self, num_outputs: int = 10, input_shape: tuple[int, ...] = (1, 8, 8)) -> None:
        super().__init__()
        channels, _, _ = check_image("SmallConvNet", num_outputs, input_shape, smallest=2)
        first, second, third = conv_norm(channels, 16), conv_norm(16, 32), conv_norm(32, 32)
        self.features = nn.Sequential(*first, nn.ReLU(), *second, nn.ReLU(), nn.MaxPool2d(2), *third, nn.ReLU())
        self.features.extend(global_average())
        self.head = nn.Linear(32, num_outputs)


class LeNet5(Chain):
    """The LeNet of Caffe; its only activation is between the two linear layers.

    Args:
        input_shape: Channels, height and width of an image, at least 16 x 16 pixels.
    """

    def __init__(self, num_outputs: int = 10, input_shape: tuple[int, ...] = (1, 28, 28)) -> None:
        super().__init__()
        channels, height, width = check_image("LeNet5", num_outputs, input_shape, smallest=16)
        self.features = nn.Sequential(
            nn.Conv2d(channels, 20, 5), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.MaxPool2d(2), nn.Flatten(-3)
        )
        self.head = _head(50 * _pooled(height) * _pooled(width), 500, num_outputs)


class NormLeNet5(Chain):
    """The LeNet-5 of Caffe with a batch norm and a ReLU after every layer but the last, and no biases before norms.

    Args:
        input_shape: Channels, height and width of an image, at least 16 x 16 pixels.
        dropout: Probability of dropping a unit in front of each linear layer in training; 0 leaves dropout out.
    """

    def __init__(
        self, num_outputs: int = 10, input_shape: tuple[int, ...] = (1, 28, 28), *, dropout: float = 0.0
    ) -> None:
        super().__init__()
        channels, height, width = check_image("NormLeNet5", num_outputs, input_shape, smallest=16)
        self.features = nn.Sequential()
        for inputs, outputs in ((channels, 20), (20, 50)):
            self.features.extend([nn.Conv2d(inputs, outputs, 5, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()])
            self.features.append(nn.MaxPool2d(2))
        self.features.append(nn.Flatten(-3))
        drop = [nn.Dropout(dropout)] if dropout > 0 else []
        hidden = [nn.Linear(50 * _pooled(height) * _pooled(width), 500, bias=False), nn.BatchNorm1d(500), nn.ReLU()]
        self.head = nn.Sequential(*drop, *hidden, *(nn.Dropout(one.p) for one in drop), nn.Linear(500, num_outputs))


class LeNet(Chain):
    """Three convolutions with 6, 16 and 120 channels, all multiplied by ``width``.

    Args:
        input_shape: Channels, height and width of an image, at least 28 x 28 pixels.
        width: Factor on every hidden width; the products are rounded.
    """

    def __init__(self, num_outputs: int = 10, input_shape: tuple[int, ...] = (1, 28, 28), width: float = 1) -> None:
        super().__init__()
        check_factor("LeNet", width=width)
        channels, rows, columns = check_image("LeNet", num_outputs, input_shape, smallest=28)
        first, second, third, hidden = (scaled(size, width) for size in (6, 16, 120, 64))
        self.features = nn.Sequential(nn.Conv2d(channels, first, 5), nn.ReLU(), nn.MaxPool2d(2))
        self.features.extend([nn.Conv2d(first, second, 5), nn.ReLU(), nn.MaxPool2d(2)])
        self.features.extend([nn.Conv2d(second, third, 4), nn.ReLU(), nn.Flatten(-3)])
        pixels = (_pooled(rows) - 3) * (_pooled(columns) - 3)
        self.head = _head(third * pixels, hidden, num_outputs)


def _pooled(size: int) -> int:
    """Return the side length after two rounds of 5x5 convolution and 2x2 pooling."""
    return ((size - 4) // 2 - 4) // 2


def _head(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


class MLP(Chain):
    """Fully connected network.

    It maps ``(..., *inputs)`` to ``(..., outputs)``: the axes of ``inputs`` are flattened, leading axes are kept.

    Example:
        >>> import torch
        >>> MLP((1, 8, 8), 10, hidden=(64, 64))(torch.zeros(5, 1, 8, 8)).shape
        torch.Size([5, 10])

    Args:
        inputs: Number of input features, or the shape of one example.
        outputs: Number of output features.
        hidden: Width of each hidden layer; empty for a linear model.
        activation: Makes the module between two linear layers.
        bias: Whether the linear layers add a bias.
        norm: Makes the module in front of each activation from the width there, such as ``nn.LayerNorm``;
            ``nn.BatchNorm1d`` takes a single leading axis. ``None`` for no norms.
    """

    parts = ("flatten", "layers")

    def __init__(
        self,
        inputs: int | tuple[int, ...],
        outputs: int,
        *,
        hidden: Sequence[int] = (100,),
        activation: Callable[[], nn.Module] = nn.ReLU,
        bias: bool = True,
        norm: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        shape = check_features("MLP", inputs)
        check_positive("MLP", outputs=outputs, **{f"hidden[{i}]": width for i, width in enumerate(hidden)})
        first, *rest = pairwise((prod(shape), *hidden, outputs))
        self.flatten = nn.Flatten(-len(shape))
        self.layers = nn.Sequential(nn.Linear(*first, bias=bias))
        for width, after in rest:
            if norm is not None:
                self.layers.append(norm(width))
            self.layers.extend([activation(), nn.Linear(width, after, bias=bias)])


def deep_mlp(depth: int = 100, width: int = 100, *, num_outputs: int = 100, input_shape: tuple[int, ...] = (1,)) -> MLP:
    """Make an MLP of 100 linear layers (``depth``) without biases, with a batch norm and a ReLU between them.

    Every hidden layer has ``width`` units. The axes of an example are flattened first.
    """
    check_positive("deep_mlp", depth=depth)
    return MLP(input_shape, num_outputs, hidden=[width] * (depth - 1), bias=False, norm=nn.BatchNorm1d)


class RegressionNet(Chain):
    """One hidden layer of ReLUs: ``norm, linear, relu, norm, linear``.

    Because the scales of the norms start small, the first predictions stay near the bias of the last layer.

    Args:
        inputs: Number of input features, or the shape of one example, whose axes are flattened first.
        outputs: Number of regression outputs.
        hidden: Number of hidden units.
        scale: Initial scale of both norms.
    """

    parts = ("flatten", "layers")

    def __init__(
        self, inputs: int | tuple[int, ...], outputs: int = 1, *, hidden: int = 50, scale: float = 0.2
    ) -> None:
        super().__init__()
        shape = check_features("RegressionNet", inputs)
        check_positive("RegressionNet", outputs=outputs, hidden=hidden)
        check_factor("RegressionNet", scale=scale)
        features = prod(shape)
        self.flatten = nn.Flatten(-len(shape))
        first, second = nn.BatchNorm1d(features), nn.BatchNorm1d(hidden)
        self.layers = nn.Sequential(first, nn.Linear(features, hidden), nn.ReLU(), second, nn.Linear(hidden, outputs))
        for norm in (first, second):
            nn.init.constant_(norm.weight, scale)


@dataclass(frozen=True, kw_only=True)
class Head:
    """The classifier on top of a VGG: pool, hidden linear layers, one linear output.

    Attributes:
        pooled: Side length, in pixels, that the features are averaged to.
        hidden: Width of the hidden layers.
        dropout: Probability of dropping a hidden unit in training; 0 leaves dropout out.
        layers: Number of hidden layers.
        norm: Whether a batch norm follows each of them.
        widened: Whether the width factor of the network is one of the hidden layers, too.
    """

    pooled: int = 1
    hidden: int = 512
    dropout: float = 0.0
    layers: int = 2
    norm: bool = False
    widened: bool = True

    def build(self, channels: int, num_outputs: int) -> nn.Sequential:
        """Return the layers for features of `channels` channels."""
        head = nn.Sequential(nn.AdaptiveAvgPool2d(self.pooled), nn.Flatten(-3))
        inputs = channels * self.pooled**2
        for width in (inputs, *[self.hidden] * (self.layers - 1)):
            norm = [nn.BatchNorm1d(self.hidden)] if self.norm else []
            head.extend([nn.Linear(width, self.hidden), *norm, nn.ReLU()])
            if self.dropout > 0:
                head.append(nn.Dropout(self.dropout))
        return head.append(nn.Linear(self.hidden, num_outputs))


CIFAR_HEAD = Head(pooled=1, hidden=512)
IMAGENET_HEAD = Head(pooled=7, hidden=4096, dropout=0.5)
DENSE_HEAD = Head(hidden=256, layers=1, norm=True, widened=False)


class VGG(Chain):
    """VGG with a chosen number of convolutions in each of its stages.

    Args:
        stages: For each stage the number of convolutions and their width.
        input_shape: Channels, height and width of an image; each stage halves the image.
        head: ``"cifar"`` (512 wide), ``"imagenet"`` (4096 wide on 7x7 features, dropout 0.5) or
            a ``Head``; ``None`` takes the first for images of at most 64 pixels, else the second.
        batch_norm: Whether a batch norm follows each convolution.
        width: Factor on every hidden width, the head's too unless it is not ``widened``; the products are rounded.
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
        hidden = scaled(head.hidden, width) if head.widened else head.hidden
        self.head = replace(head, hidden=hidden).build(channels, num_outputs)
        init_convolutions(self)


def vgg11(
    num_outputs: int = 10,
    input_shape: tuple[int, ...] = (3, 32, 32),
    head: Scale | Head | None = None,
    batch_norm: bool = False,
) -> VGG:
    """Make the VGG of 8 convolutions and 3 linear layers."""
    return VGG(_VGG11, num_outputs=num_outputs, input_shape=input_shape, head=head, batch_norm=batch_norm)


def vgg11_bn(
    num_outputs: int = 10,
    input_shape: tuple[int, ...] = (3, 32, 32),
    head: Scale | Head | None = None,
    *,
    width: float = 1,
) -> VGG:
    """Make the VGG of 8 convolutions, each with a batch norm, and 3 linear layers."""
    return VGG(_VGG11, num_outputs=num_outputs, input_shape=input_shape, head=head, batch_norm=True, width=width)


def vgg11_dense(num_outputs: int = 10, input_shape: tuple[int, ...] = (3, 32, 32), *, width: float = 1) -> VGG:
    """Make the VGG of 8 convolutions, a linear layer of 256 units, all with norms, and the output layer."""
    return vgg11_bn(num_outputs, input_shape, DENSE_HEAD, width=width)


def vgg16(
    num_outputs: int = 10,
    input_shape: tuple[int, ...] = (3, 32, 32),
    head: Scale | Head | None = None,
    batch_norm: bool = False,
) -> VGG:
    """Make the VGG of 13 convolutions and 3 linear layers."""
    return VGG(_VGG16, num_outputs=num_outputs, input_shape=input_shape, head=head, batch_norm=batch_norm)


class VGGLike(Chain):
    """Thirteen 3x3 convolutions and a hidden linear layer, with a batch norm and a ReLU after each, and no biases.

    Zagoruyko (2015) published it for CIFAR with dropout: after every convolution of a stage but the last, and in front
    of both linear layers.

    Args:
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
        hidden = scaled(512, width)
        self.head = nn.Sequential(nn.Linear(channels, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU())
        self.head.append(nn.Linear(hidden, num_outputs))
        if dropout:
            self.head.insert(3, nn.Dropout(HEAD_RATE))
            self.head.insert(0, nn.Dropout(HEAD_RATE))
        init_convolutions(self)


def vgg_like(
    num_outputs: int = 10, input_shape: tuple[int, ...] = (3, 32, 32), *, width: float = 1, dropout: bool = False
) -> VGGLike:
    """Make the VGG-like network for CIFAR, with norms and without biases."""
    return VGGLike(num_outputs, input_shape, width=width, dropout=dropout)


class UNet(nn.Module):
    """Outputs for every pixel, from features of all resolutions.

    A level is two 3x3 convolutions, each with a batch norm and a ReLU. Max pooling halves the image between two levels
    of the encoder. In the decoder an up-convolution doubles it, and the encoder's level is concatenated. The
    up-convolution is a bilinear enlargement and a 3x3 convolution: a transposed one tends to draw chequered patterns.

    Example:
        >>> UNet(num_outputs=2, input_shape=(1, 24, 40))(torch.zeros(5, 1, 24, 40)).shape
        torch.Size([5, 2, 24, 40])

    Args:
        num_outputs: Number of classes or regression outputs of a pixel.
        input_shape: Channels, height and width of an image; both sides are multiples of ``2**(len(widths) - 1)``.
        widths: Channels of the levels, from the finest to the coarsest.
    """

    def __init__(
        self,
        num_outputs: int = 2,
        input_shape: tuple[int, ...] = (3, 32, 32),
        *,
        widths: Sequence[int] = (32, 64, 128, 192),
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
            enlarge = nn.Upsample(scale_factor=2, mode="bilinear")
            self.enlarge.append(nn.Sequential(enlarge, *conv_norm(coarse, fine), nn.ReLU()))
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


def _check_sides(height: int, width: int, multiple: int) -> None:
    if height % multiple or width % multiple:
        raise ValueError(
            f"UNet expected images whose height and width are multiples of {multiple}, got {height} x {width}. "
            "Pad or crop the images, or choose fewer widths."
        )


class EHRNet(nn.Module):
    r"""LSTM over hourly measurements, each looked up by variable and bin.

    Every bin of every variable has an embedding E. With :math:`x_{tv}` the bin of variable v in step t, 0 if it was not
    measured,

    .. math:: e_t = \sum_{v : x_{tv} > 0} E_{v, x_{tv}}

    An LSTM reads :math:`e_1, ..., e_T`, and a linear layer its last state. The embeddings are summed, not averaged:
    the number of measurements is informative. It is the simplest form of the network of Dusenberry et al. (2019).

    Example:
        >>> EHRNet(2, (48, 42))(torch.zeros(3, 48, 42, dtype=torch.int64)).shape
        torch.Size([3, 2])

    Args:
        input_shape: Steps and variables (T, V) of one stay.
        bins: Most bins of a variable.
        embedding: Length of an embedding.
        hidden: Units of the LSTM.
        dropout: Rate at which elements of the sums and of the last state are dropped in training.
    """

    offsets: Tensor

    def __init__(
        self,
        num_outputs: int,
        input_shape: tuple[int, ...],
        *,
        bins: int = 10,
        embedding: int = 32,
        hidden: int = 64,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        if len(input_shape) != 2:
            raise ValueError(
                f"EHRNet expected input_shape (steps, variables), got {input_shape}. Give it a series of bins, such as "
                "physionet2012."
            )
        steps, variables = input_shape
        check_positive("EHRNet", num_outputs=num_outputs, steps=steps, variables=variables)
        check_positive("EHRNet", bins=bins, embedding=embedding, hidden=hidden)
        self.register_buffer("offsets", bins * torch.arange(variables), persistent=False)
        self.embedding = nn.Embedding(1 + bins * variables, embedding, padding_idx=0)
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True)
        self.head = nn.Linear(hidden, num_outputs)
        with torch.no_grad():
            self.embedding.weight.mul_(START)
            for bias, start in (("bias_ih_l0", REMEMBER), ("bias_hh_l0", 0.0)):
                # torch's order of the gates is input, forget, cell, output
                self.lstm.get_parameter(bias)[hidden : 2 * hidden] = start

    def forward(self, x: Tensor) -> Tensor:
        if x.is_floating_point():
            raise ValueError(f"EHRNet expected whole numbers, the bins of values, got {x.dtype}. Give it a series.")
        measured = x > 0
        vectors = self.embedding((x + self.offsets) * measured)
        # A mask, not the zeros of the padding row alone: a method may give that row another value.
        total = (measured.to(vectors.dtype)[..., None, :] @ vectors).squeeze(-2)
        states, _ = self.lstm(self.dropout(total))
        logits: Tensor = self.head(self.dropout(states[:, -1]))
        return logits
