"""The two axes of the contract suite: every method with its examples, and every kind of layer with its options."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, Tensor

import leanbayes as lb
from leanbayes.methods import all_methods
from leanbayes.methods._base import Method

DOCS = Path(__file__).parents[2] / "docs"


@dataclass(frozen=True)
class Layer:
    """A layer to convert, and the shape of one row of its input: numbers, or words of a vocabulary."""

    name: str
    make: Callable[[], nn.Module]
    row: tuple[int, ...]
    words: int = 0

    def inputs(self, rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
        generator = torch.Generator().manual_seed(7)
        if self.words:
            return torch.randint(self.words, (rows, *self.row), generator=generator)
        return torch.randn(rows, *self.row, generator=generator).to(dtype)


def transposed_linear() -> nn.Module:
    """The linear map of GPT-2, whose weight is (inputs, outputs)."""
    return pytest.importorskip("transformers.pytorch_utils").Conv1D(4, 5)


LAYERS = [
    Layer("linear", lambda: nn.Linear(5, 4), (5,)),
    Layer("linear_tokens", lambda: nn.Linear(5, 4, bias=False), (3, 5)),
    Layer("conv1d", lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (4, 9)),
    Layer("conv2d", lambda: nn.Conv2d(3, 4, 3), (3, 6, 6)),
    Layer("conv2d_options", lambda: nn.Conv2d(4, 6, (3, 2), 2, 2, 1, 2, False, padding_mode="reflect"), (4, 7, 6)),
    Layer("conv2d_depthwise", lambda: nn.Conv2d(4, 4, 3, padding="same", groups=4, dilation=2), (4, 6, 6)),
    Layer("conv3d", lambda: nn.Conv3d(2, 4, (1, 2, 3), padding=1, padding_mode="circular"), (2, 3, 4, 5)),
    Layer("conv_transpose1d", lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1, groups=2), (4, 5)),
    Layer("conv_transpose2d", lambda: nn.ConvTranspose2d(4, 6, (2, 3), stride=2, groups=2, bias=False), (4, 3, 4)),
    Layer("conv_transpose3d", lambda: nn.ConvTranspose3d(2, 3, 2, stride=2, dilation=1), (2, 2, 3, 2)),
    Layer("linear_transposed", transposed_linear, (3, 5)),
    Layer("embedding", lambda: nn.Embedding(6, 4, padding_idx=1), (3,), words=6),
    Layer("batch_norm", lambda: nn.BatchNorm2d(3), (3, 4, 4)),
    Layer("layer_norm", lambda: nn.LayerNorm(5), (3, 5)),
    Layer("group_norm", lambda: nn.GroupNorm(2, 4), (4, 3)),
    Layer("instance_norm", lambda: nn.InstanceNorm1d(4, affine=True), (4, 6)),
    Layer("rms_norm", lambda: nn.RMSNorm(5), (5,)),
    Layer("dropout", lambda: nn.Dropout(0.3).eval(), (3, 5)),
    Layer("dropout2d", lambda: nn.Dropout2d(0.3).eval(), (6, 2, 2)),
]


def documented_method() -> type[Method]:
    """Run the method that docs/new_method.md shows, as a module of its own."""
    source = re.search(r"```python\n(.*?)```", (DOCS / "new_method.md").read_text(), re.DOTALL)
    assert source is not None
    module = sys.modules.setdefault("documented_method", types.ModuleType("documented_method"))
    exec(source.group(1), module.__dict__)  # our own documentation
    return module.__dict__["Damped"]


OPTIONS: dict[str, Method] = {
    "mean_field:weights": lb.MeanField(estimator="weights", init_std=0.05),
    "rank1:component": lb.Rank1(noise="component", components=3),
}
"""Options that change where noise is, and are no examples of their methods."""

METHODS: dict[str, Method] = {
    f"{name}:{example}": method
    for name, kind in (all_methods() | {"damped": documented_method()}).items()
    for example, method in kind.examples().items()
    if kind.targets  # an explicit ensemble wraps no layer: tests/methods/test_ensemble.py
} | OPTIONS


FEW_LAYERS = ("linear_tokens", "conv2d_options", "conv_transpose2d", "embedding", "batch_norm", "dropout")
"""Layers that every method meets in every check: one of each way in which layers keep their channels."""

FEW_METHODS = ("rank1:default", "mean_field:default", "patch:default", "mc_dropout:default")
"""Methods that meet every layer in every check: one of each way in which methods put their noise."""


@cache
def made(layer: Layer) -> nn.Module:
    """Return a layer to look at."""
    return layer.make()


@cache
def skips() -> list[tuple[str, str, str]]:
    """Read the table of skips: method, check, layer (or `example:layer`)."""
    rows = [line.split("|")[1:4] for line in (DOCS / "contract_skips.md").read_text().splitlines() if line[:1] == "|"]
    return [tuple(cell.strip() for cell in row) for row in rows[2:]]


def listed(method: str, check: str, layer: Layer) -> bool:
    """Return whether the documented table lists a pair for a check; every other pair must hold."""
    name, _, example = method.partition(":")
    return any(
        fnmatchcase(name, m)
        and fnmatchcase(check, c)
        and fnmatchcase(f"{example}:{layer.name}", where if ":" in where else f"*:{where}")
        for m, c, where in skips()
    )


def pairs_of(check: str, *, every: bool = False) -> dict[str, list[Layer]]:
    """Return the layers of a check for each method: every valid one, or all of one axis with a few of the other.

    The code of a method and that of a layer meet in the families alone, so a fault shows in one of the few.
    """
    return {
        method: [
            layer
            for layer in LAYERS
            if (every or layer.name in FEW_LAYERS or method in FEW_METHODS)
            and isinstance(made(layer), METHODS[method].targets)
            and not listed(method, check, layer)
        ]
        for method in METHODS
    }


def pairs(check: str, *, every: bool = False) -> Any:
    """Parametrise a check over pairs of a method and a layer."""
    chosen = [(method, layer) for method, layers in pairs_of(check, every=every).items() for layer in layers]
    return pytest.mark.parametrize(("method", "layer"), chosen, ids=[f"{m}-{layer.name}" for m, layer in chosen])


def converted(method: str, layer: Layer, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """Return a fresh layer, in a container, and its conversion."""
    torch.manual_seed(0)
    net = nn.Sequential(layer.make()).to(dtype)
    bnn = convert(method, net)
    if METHODS[method].post_hoc:  # it has no noise before
        x = layer.inputs(12, dtype)
        METHODS[method].after_training(bnn, (x, torch.zeros_like(net(x))), lb.Gaussian())
    return net, bnn


def convert(method: str, net: nn.Module) -> nn.Module:
    """Convert the one layer of a container; embeddings have to be named to some methods."""
    return lb.convert(net, METHODS[method], where="0" if isinstance(net[0], nn.Embedding) else None)
