"""Local reparameterisation on a CPU: a linear map with sampled outputs, in fewer passes over memory than autograd.

    z = M x + b + eps sqrt(v),      v = V x^2 + 1e-16,      eps standard normal for each number of z

V has the variances of the weights. With q = eps / sqrt(v) and g the gradient of z,

    dx = M^T g + x * V^T (g q),      dM = g x^T,      dV = 1/2 (g q) (x^2)^T.

Autograd keeps x, x^2, eps and sqrt(v), and each of its operations reads and writes memory. Here x, x^2 and q are kept.
Noise, square root, z and q are computed in pieces that stay in the cache. z has the bits of autograd's.

The function is for eager training on large ordinary tensors of one type. Other passes use the same expression by
autograd, with the same noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from leanbayes.methods._scaled_map import Map
from leanbayes.runtime.distributed import rank_and_world

FEW = 2**16
"""Numbers of an input below which autograd has less to do in Python."""

PIECE = 2**16
"""Numbers of a piece; a multiple of 16, since torch draws normal numbers in blocks of 16."""

SMALLEST_VARIANCE = 1e-16
"""Under the square root, whose gradient at zero is infinite."""

Named = Callable[[Tensor], torch.Generator | None]
"""Returns the generator of the noise of a tensor; None is torch's own."""


def pays(x: Tensor, weight: Tensor) -> bool:
    """Return whether the function is worth its calls: for large inputs on a CPU, in one process."""
    if x.numel() < FEW or x.device.type != "cpu" or rank_and_world()[1] > 1:
        return False
    return x.is_contiguous() and weight.is_contiguous()


def apply(linear: Map, x: Tensor, means: Tensor, variances: Tensor, bias: Tensor | None, named: Named) -> Tensor:
    """Return M x + b + eps sqrt(V x^2 + 1e-16).

    Args:
        linear: the map.
        x: inputs.
        means: M, means of the weights.
        variances: V, variances of the weights.
        bias: a vector, or None.
        named: returns the generator for an output; it draws eps as `torch.randn` does for the whole output.
    """
    z: Tensor = _LocalMap.apply(x, means, variances, bias, (linear, named))  # type: ignore[no-untyped-call]
    return z


class _LocalMap(torch.autograd.Function):
    """The expression above; `ctx.linear` is the map."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, means: Tensor, variances: Tensor, bias: Tensor | None, settings: tuple[Map, Named]
    ) -> Tensor:
        ctx.linear, named = settings
        squares = x.square()
        z = ctx.linear.forward(x, means, bias).contiguous()
        std = ctx.linear.forward(squares, variances, _smallest(ctx.linear, z)).contiguous()
        ratio, generator = torch.empty_like(z), named(z)
        for own_z, own_std, own in zip(*map(_pieces, (z, std, ratio)), strict=True):
            _draw(own, generator)
            own_z.addcmul_(own, own_std.sqrt_())
            own.div_(own_std)
        ctx.save_for_backward(x, squares, means, variances, bias, ratio)
        result: Tensor = z
        return result

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> Any:
        x, squares, means, variances, bias, ratio = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: the gradient has a gradient
            return *_by_autograd(ctx, (x, means, variances, bias), ratio, dz), None
        for_x, for_means, for_variances, for_bias = ctx.needs_input_grad[:4]
        dx, dm, db = ctx.linear.backward(dz, x, means, (for_x, for_means, for_bias))
        through, dv, _ = ctx.linear.backward(dz * ratio, squares, variances, (for_x, for_variances, False))
        if dx is not None:
            dx.addcmul_(x, through)
        return dx, dm, None if dv is None else dv.mul_(0.5), db, None


def _smallest(linear: Map, z: Tensor) -> Tensor:
    """Return the smallest variance for each output channel, as a bias: a map adds it without another pass."""
    return z.new_full((z.shape[linear.axis],), SMALLEST_VARIANCE)


def _pieces(x: Tensor) -> Iterator[Tensor]:
    """Yield the numbers of a contiguous tensor in pieces; the last has at least 16, a block of normal numbers."""
    flat = x.view(-1)
    starts = range(0, max(1, flat.numel() - 15), PIECE)
    for start in starts:
        yield flat[start : start + PIECE if start < starts[-1] else None]


def _draw(piece: Tensor, generator: torch.Generator | None) -> None:
    """Fill a piece with normal numbers of torch's default type, as `runtime.noise` draws them."""
    if piece.dtype == torch.get_default_dtype():
        piece.normal_(generator=generator)
    else:
        piece.copy_(torch.randn(piece.shape, generator=generator))


def _by_autograd(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None], ratio: Tensor, dz: Tensor) -> Any:
    x, means, variances, bias = inputs
    std = (ctx.linear.forward(x.square(), variances, None) + SMALLEST_VARIANCE).sqrt()
    z = ctx.linear.forward(x, means, bias) + (ratio * std).detach() * std
    needed = ctx.needs_input_grad[:4]
    wanted = [value for value, need in zip(inputs, needed, strict=True) if need and value is not None]
    found = iter(torch.autograd.grad(z, wanted, dz, create_graph=True))
    return [next(found) if need else None for need in needed]
