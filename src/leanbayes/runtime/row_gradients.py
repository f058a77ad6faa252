"""Products with factors of rows, z = y * r + b, whose gradients are sums over the positions of each row and channel.

For activations y of N rows, P positions and C channels, and factors and offsets (N, C),

    dr = sum_p dz y = (sum_p dy y) / r,      db = sum_p dz = (sum_p dy) / r,      dy = dz * r.

Both sums use y and dy alone. The linear map before or after the product keeps these tensors in any case. So compiled
code stores nothing else, computes dy and z inside its other kernels, and reads y and dy once more for the sums.

`row_sums` is a Triton kernel on a GPU, and plain torch elsewhere.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from leanbayes.distributions.factor import LARGE_ENOUGH

FEW = 8
"""Positions of a row below which the sum is left to torch: its input is hardly larger than its result."""

COMPILED = ("cuda",)
"""Devices for which compiled code uses these functions."""


@torch.library.custom_op("leanbayes::row_sums", mutates_args=())
def row_sums(a: Tensor, b: Tensor, axis: int, both: bool) -> Tensor:
    """Return the sums of a * b, and of a if `both`, for each row and channel: (1 or 2, N, C).

    Args:
        a: activations, rows on the first axis.
        b: others of the same shape.
        axis: the axis of the channels.
        both: whether to return the second sum, too.
    """
    return sums_of(a, b, axis, both=both)


@row_sums.register_fake
def _(a: Tensor, b: Tensor, axis: int, both: bool) -> Tensor:
    return a.new_empty((1 + both, a.shape[0], a.shape[axis]), dtype=_wide(a))


def sums_of(a: Tensor, b: Tensor, axis: int, *, both: bool = False) -> Tensor:
    """Return what `row_sums` does, without torch's dispatcher: for the backward pass of eager code."""
    a, b = by_position(a, axis), by_position(b, axis)
    if a.device.type == "cuda" and a.dtype != torch.float64 and _has_triton():
        from leanbayes.runtime import row_kernels

        return row_kernels.launch(a, b, both=both)
    wide = _wide(a)
    products = (a.to(wide) * b.to(wide)).sum(1)
    return torch.stack([products, a.to(wide).sum(1)] if both else [products])


def by_position(x: Tensor, axis: int) -> Tensor:
    """Return activations as (N, P, C), without a copy if their positions follow each other in memory."""
    return x.movedim(axis, -1).reshape(x.shape[0], -1, x.shape[axis])


def serves(x: Tensor, factor: Tensor, axis: int) -> bool:
    """Return whether factors that broadcast against x are one for each row and channel, and positions are many."""
    rows, channels = x.shape[0], x.shape[axis]
    by_row = factor.shape[0] == rows and factor.shape[axis] == channels and factor.numel() == rows * channels
    return by_row and x.dim() > 2 and x.numel() >= FEW * max(1, factor.numel())


def compiled_for(x: Tensor, factor: Tensor, axis: int) -> bool:
    """Return whether compiled training code shall use `scaled_input` and `scaled_output`; no factor may be zero."""
    if not (torch.compiler.is_compiling() and torch.is_grad_enabled() and x.device.type in COMPILED):
        return False
    return factor.dtype in LARGE_ENOUGH and serves(x, factor, axis)


def scaled_input(x: Tensor, s: Tensor, axis: int, dtype: torch.dtype) -> Tensor:
    """Return x * s in the dtype of the linear map after it."""
    product: Tensor = _ScaledInput.apply(x, s, axis, dtype)  # type: ignore[no-untyped-call]
    return product


def scaled_output(y: Tensor, r: Tensor, bias: Tensor | None, axis: int) -> Tensor:
    """Return y * r + b for the output y of a linear map; the bias, too, has a number for each row and channel."""
    z: Tensor = _ScaledOutput.apply(y, r, bias, axis)  # type: ignore[no-untyped-call]
    return z


class _ScaledInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, s: Tensor, axis: int, dtype: torch.dtype) -> Tensor:
        scaled = x * s
        if scaled.dtype != dtype:  # torch 2.11 compiles a forward that ends in a conversion to the same type wrongly
            scaled = scaled.to(dtype)
        ctx.axis, ctx.dtype = axis, x.dtype
        ctx.save_for_backward(scaled, s)
        return scaled

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        scaled, s = ctx.saved_tensors
        sums = row_sums(d, scaled, ctx.axis, False)[0].view(s.shape)
        return (d * s).to(ctx.dtype), (sums / s).to(s.dtype), None, None


class _ScaledOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, r: Tensor, bias: Tensor | None, axis: int) -> Tensor:
        ctx.axis, ctx.offset = axis, None if bias is None else bias.dtype
        ctx.save_for_backward(y, r)
        return y * r if bias is None else torch.addcmul(bias, y, r)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> Any:
        y, r = ctx.saved_tensors
        dy = (dz * r).to(y.dtype)
        sums = row_sums(dy, y, ctx.axis, ctx.offset is not None)
        gradients = sums.view(len(sums), *r.shape) / r
        return dy, gradients[0].to(r.dtype), None if ctx.offset is None else gradients[1].to(ctx.offset), None


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@cache
def _has_triton() -> bool:
    try:
        import triton  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        return False
    return True
