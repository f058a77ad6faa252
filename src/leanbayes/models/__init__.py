"""Plain reference networks; ``lb.convert`` makes them Bayesian.

Every network takes ``num_outputs``, the number of classes or regression outputs, and ``input_shape``, the shape of one
example: channels, height and width of an image, unless its docstring says otherwise.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from functools import partial
from typing import Protocol

from torch import nn

from leanbayes.models._blocks import dropout_before_norms
from leanbayes.models.classic import (
    deep_mlp,
    EHRNet,
    LeNet,
    LeNet5,
    MLP,
    NormLeNet5,
    RegressionNet,
    SmallConvNet,
    UNet,
    VGG,
    vgg11,
    vgg11_bn,
    vgg11_dense,
    vgg16,
    vgg_like,
    VGGLike,
)
from leanbayes.models.resnet import MobileNetV2, PyramidNet, ResNet, resnet18, resnet50, ResNeXt, WideResNet
from leanbayes.models.table import EmbedCodes, TableNet

__all__ = [
    "MLP",
    "VGG",
    "EHRNet",
    "EmbedCodes",
    "LeNet",
    "LeNet5",
    "MobileNetV2",
    "NormLeNet5",
    "PyramidNet",
    "RegressionNet",
    "ResNeXt",
    "ResNet",
    "SmallConvNet",
    "TableNet",
    "UNet",
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
    "vgg11_bn",
    "vgg11_dense",
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
    ("mobilenetv2", MobileNetV2),
    ("vgg11", vgg11),
    ("vgg11-bn", vgg11_bn),
    ("vgg11-dense", vgg11_dense),
    ("vgg16", vgg16),
    ("vgg-like", vgg_like),
    ("resnet18", resnet18),
    ("resnet50", resnet50),
    ("resnext-29-2x64d", partial(ResNeXt, 29, 2, 64)),
    ("wrn-16-2", partial(WideResNet, 16, 2)),
    ("wrn-16-4", partial(WideResNet, 16, 4)),
    ("wrn-28-10", partial(WideResNet, 28, 10)),
    ("pyramidnet-110-270", partial(PyramidNet, 110, 270)),
    ("lstm-ehr", EHRNet),
)

_LENET_DROPOUT = 0.5
_NUMBER = r"(\d+(?:\.\d+)?)"

_FORMS: tuple[tuple[str, str, Callable[..., _Maker]], ...] = (
    ("wrn-DEPTH-WIDTH", rf"wrn-(\d+)-{_NUMBER}", lambda depth, width: partial(WideResNet, int(depth), float(width))),
    ("lenet-wWIDTH", rf"lenet-w{_NUMBER}", lambda width: partial(LeNet, width=float(width))),
    (
        "pyramidnet-DEPTH-ALPHA",
        rf"pyramidnet-(\d+)-{_NUMBER}",
        lambda depth, alpha: partial(PyramidNet, int(depth), float(alpha)),
    ),
    ("mlp-DEPTH-WIDTH", r"mlp-(\d+)-(\d+)", lambda depth, width: partial(deep_mlp, int(depth), int(width))),
    ("vgg11-bn-wWIDTH", rf"vgg11-bn-w{_NUMBER}", lambda width: partial(vgg11_bn, width=float(width))),
    ("vgg11-dense-wWIDTH", rf"vgg11-dense-w{_NUMBER}", lambda width: partial(vgg11_dense, width=float(width))),
    (
        "vgg-like-wWIDTH",
        rf"vgg-like(?:-w{_NUMBER})?(-dropout)?",
        lambda width, dropout: partial(VGGLike, width=float(width or 1), dropout=dropout is not None),
    ),
    ("mobilenetv2-wWIDTH", rf"mobilenetv2-w{_NUMBER}", lambda width: partial(MobileNetV2, width=float(width))),
    (
        "resnext-DEPTH-GROUPSxWIDTHd",
        r"resnext-(\d+)-(\d+)x(\d+)d",
        lambda depth, groups, width: partial(ResNeXt, int(depth), int(groups), int(width)),
    ),
    ("lenet5-bn-dropout", "lenet5-bn-dropout", lambda: partial(NormLeNet5, dropout=_LENET_DROPOUT)),
)
"""Names of any width: form for the reader, pattern, and function that makes the network from the pattern's groups."""


def names() -> list[str]:
    """Return the names that ``build`` knows, small networks first."""
    return [name for name, _ in _MAKERS]


def describe() -> dict[str, str]:
    """Return the first line of the docstring of every named network."""
    makers = {name: make.func if isinstance(make, partial) else make for name, make in _MAKERS}
    return {name: make.__doc__.splitlines()[0] for name, make in makers.items()}  # type: ignore[union-attr]


def build(name: str, *, num_outputs: int, input_shape: tuple[int, ...]) -> nn.Module:
    """Make a reference network by name.

    VGG and ResNet take their CIFAR form for images of at most 64 pixels, else the ImageNet form.

    Args:
        name: One of ``names()``; or of any width, ``wrn-DEPTH-WIDTH``, ``lenet-wWIDTH``, ``pyramidnet-DEPTH-ALPHA``,
            ``mlp-DEPTH-WIDTH``, ``vgg11-bn-wWIDTH``, ``vgg11-dense-wWIDTH``, ``mobilenetv2-wWIDTH`` and
            ``resnext-DEPTH-GROUPSxWIDTHd``, such as ``wrn-28-5``, ``lenet-w0.5`` or ``resnext-29-8x64d``. The suffix
            ``+dropout`` or ``+dropoutRATE``, as in ``wrn-16-4+dropout0.01``, puts a dropout (of rate 0.005) before
            every norm. ``vgg-like-dropout`` (``vgg-like-wWIDTH``, ``vgg-like-wWIDTH-dropout``) and
            ``lenet5-bn-dropout`` have the published dropouts.
        num_outputs: Number of classes or regression outputs.
        input_shape: Shape of one example, without the batch axis.
    """
    if found := re.fullmatch(rf"(.+)\+dropout{_NUMBER}?", name):
        plain = build(found[1], num_outputs=num_outputs, input_shape=input_shape)
        return dropout_before_norms(plain, **({} if found[2] is None else {"rate": float(found[2])}))
    of_any_width = (maker(*m.groups()) for _, pattern, maker in _FORMS if (m := re.fullmatch(pattern, name)))
    make = dict(_MAKERS).get(name) or next(of_any_width, None)
    if make is None:
        near = difflib.get_close_matches(name.lower(), names(), n=1)
        raise ValueError(
            f"expected a network among {', '.join(names())}, got {name!r}"
            f"{f'; did you mean {near[0]!r}?' if near else '.'} Pick one of them, or a size of your own: "
            f"{', '.join(form for form, _, _ in _FORMS)}; add +dropout or +dropoutRATE to the name for dropout "
            "before every norm."
        )
    return make(num_outputs=num_outputs, input_shape=input_shape)
