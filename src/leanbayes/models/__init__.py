"""Plain reference networks that know nothing of Bayes; ``convert`` makes Bayesian ones of them."""

from __future__ import annotations

import re
from functools import partial
from typing import Protocol

from torch import nn

from leanbayes.models.dropout import dropout_before_norms
from leanbayes.models.lenet import LeNet, LeNet5, NormLeNet5
from leanbayes.models.mlp import deep_mlp, MLP
from leanbayes.models.pyramidnet import PyramidNet
from leanbayes.models.regression import RegressionNet
from leanbayes.models.resnet import ResNet, resnet18, resnet50
from leanbayes.models.small import SmallConvNet
from leanbayes.models.vgg import VGG, vgg11, vgg16
from leanbayes.models.vgg_like import vgg_like, VGGLike
from leanbayes.models.wide_resnet import WideResNet

__all__ = [
    "MLP",
    "VGG",
    "LeNet",
    "LeNet5",
    "NormLeNet5",
    "PyramidNet",
    "RegressionNet",
    "ResNet",
    "SmallConvNet",
    "VGGLike",
    "WideResNet",
    "build",
    "deep_mlp",
    "describe",
    "dropout_before_norms",
    "names",
    "resnet18",
    "resnet50",
    "vgg11",
    "vgg16",
    "vgg_like",
]


class _Maker(Protocol):
    def __call__(self, *, num_outputs: int, input_shape: tuple[int, ...]) -> nn.Module: ...


def _mlp(*, num_outputs: int, input_shape: tuple[int, ...]) -> MLP:
    """Fully connected network."""
    return MLP(input_shape, num_outputs)


def _regression(*, num_outputs: int, input_shape: tuple[int, ...]) -> RegressionNet:
    """One hidden layer of 50 ReLUs, with a batch norm after the input and after the hidden units."""
    return RegressionNet(input_shape, num_outputs)


_MAKERS: tuple[tuple[str, _Maker], ...] = (
    ("regression", _regression),
    ("mlp", _mlp),
    ("small", SmallConvNet),
    ("lenet", LeNet),
    ("lenet5", LeNet5),
    ("lenet5-bn", NormLeNet5),
    ("mlp-100-100", partial(deep_mlp, 100, 100)),
    ("vgg11", vgg11),
    ("vgg16", vgg16),
    ("vgg-like", vgg_like),
    ("resnet18", resnet18),
    ("resnet50", resnet50),
    ("wrn-16-2", partial(WideResNet, 16, 2)),
    ("wrn-16-4", partial(WideResNet, 16, 4)),
    ("wrn-28-10", partial(WideResNet, 28, 10)),
    ("pyramidnet-110-270", partial(PyramidNet, 110, 270)),
)


_LENET_DROPOUT = 0.5
_NUMBER = r"(\d+(?:\.\d+)?)"


def names() -> list[str]:
    """Return the names that ``build`` knows, small networks first."""
    return [name for name, _ in _MAKERS]


def describe() -> dict[str, str]:
    """Return a line for every name: what its class or function says of itself."""
    makers = {name: make.func if isinstance(make, partial) else make for name, make in _MAKERS}
    return {name: make.__doc__.splitlines()[0] for name, make in makers.items()}  # type: ignore[union-attr]


def build(name: str, *, num_outputs: int, input_shape: tuple[int, ...]) -> nn.Module:
    """Make a reference network by name.

    VGG and ResNet take their CIFAR form for images of at most 64 pixels, else the ImageNet form.

    Args:
        name: One of ``names()``; or of any width, ``wrn-DEPTH-WIDTH``, ``lenet-wWIDTH``, ``pyramidnet-DEPTH-ALPHA``
            and ``mlp-DEPTH-WIDTH``, such as ``wrn-28-5`` or ``lenet-w0.5``. With ``+dropout`` or ``+dropoutRATE``
            behind it, such as ``wrn-16-4+dropout0.01``, there is a dropout (of rate 0.005) before every norm.
            ``vgg-like-dropout`` (``vgg-like-wWIDTH``, ``vgg-like-wWIDTH-dropout``) and ``lenet5-bn-dropout`` have
            theirs where the published networks have it.
        num_outputs: Number of classes or regression outputs.
        input_shape: Shape of one example, without the batch axis.

    Raises:
        ValueError: The name is unknown, or the network cannot take such inputs or has no norms for dropout.
    """
    if found := re.fullmatch(rf"(.+)\+dropout{_NUMBER}?", name):
        plain = build(found[1], num_outputs=num_outputs, input_shape=input_shape)
        return dropout_before_norms(plain, **({} if found[2] is None else {"rate": float(found[2])}))
    make = dict(_MAKERS).get(name) or _of_any_width(name)
    if make is None:
        raise ValueError(
            f"expected a network among {', '.join(names())}, got {name!r}. Pick one of them, or a width of your own: "
            "wrn-DEPTH-WIDTH, lenet-wWIDTH, pyramidnet-DEPTH-ALPHA, mlp-DEPTH-WIDTH; with +dropout or +dropoutRATE "
            "behind the name for dropout before every norm."
        )
    return make(num_outputs=num_outputs, input_shape=input_shape)


def _of_any_width(name: str) -> _Maker | None:
    if found := re.fullmatch(rf"wrn-(\d+)-{_NUMBER}", name):
        return partial(WideResNet, int(found[1]), float(found[2]))
    if found := re.fullmatch(rf"lenet-w{_NUMBER}", name):
        return partial(LeNet, width=float(found[1]))
    if found := re.fullmatch(rf"pyramidnet-(\d+)-{_NUMBER}", name):
        return partial(PyramidNet, int(found[1]), float(found[2]))
    if found := re.fullmatch(rf"vgg-like(?:-w{_NUMBER})?(-dropout)?", name):
        return partial(VGGLike, width=float(found[1] or 1), dropout=found[2] is not None)
    if name == "lenet5-bn-dropout":
        return partial(NormLeNet5, dropout=_LENET_DROPOUT)
    if found := re.fullmatch(r"mlp-(\d+)-(\d+)", name):
        return partial(deep_mlp, int(found[1]), int(found[2]))
    return None
