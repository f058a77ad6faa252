"""Try modules of unknown classes out: which of them make nothing of zeros."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn, Tensor

from leanbayes.layers.family import CHANNEL_NORMS

RANKS = (2, 3, 4)
"""Numbers of axes of the inputs that are tried."""


def keeps_zeros(module: nn.Module) -> bool:
    """Say whether a module of another library treats every number by itself and makes zero of zero: an activation.

    It must have no parameter, no buffer and no part. It is tried on inputs of two, three and four axes, in eval mode.
    """
    if type(module).__module__.startswith("torch.") or any(True for _ in module.children()):
        return False
    if module._parameters or module._buffers or type(module).forward is nn.Module.forward:
        return False
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            tried = copy.deepcopy(module).eval()
            return all(_elementwise(tried, rank) for rank in RANKS)
    except Exception:  # user code: anything may happen
        return False


def _elementwise(module: nn.Module, rank: int) -> bool:
    shape = (2, 3, 4, 5)[:rank]
    generator = torch.Generator().manual_seed(rank)
    x, other = (torch.randn(shape, generator=generator) for _ in range(2))
    some = torch.rand(shape, generator=generator) < 0.5
    y = module.forward(x.clone())
    if not isinstance(y, Tensor) or y.shape != x.shape or not torch.equal(module.forward(torch.zeros(shape)), x * 0):
        return False
    # Each result depends on the number in its place alone.
    return torch.allclose(module.forward(torch.where(some, x, other))[some], y[some], rtol=1e-5, atol=1e-6)


def quiet(norm: Any) -> bool:
    """Say whether a norm returns zeros where its scale and shift are zero: one whose activation keeps zeros, if any.

    A subclass with a forward of its own is tried on a copy, in eval mode; torch's own norms do so.
    """
    if type(norm).forward in [kind.forward for kind in CHANNEL_NORMS]:
        return True
    try:
        with torch.no_grad():
            tried = copy.deepcopy(norm).eval().cpu()
            for parameter in (tried.weight, tried.bias):
                parameter.zero_()
            axes = 2 if "3d" not in type(norm).__name__.lower() else 3
            y = tried.forward(torch.randn(2, norm.num_features, *[3] * axes))
            return isinstance(y, Tensor) and not y.any()
    except Exception:  # user code: anything may happen
        return False


def activates(norm: Any) -> bool:
    """Say whether a norm has a forward of its own: a factor of its output is then none of its scale and shift."""
    return type(norm).forward not in [kind.forward for kind in CHANNEL_NORMS]
