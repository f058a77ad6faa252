"""A linear map between two scalings, whose backward pass keeps fewer activations than autograd.

    z = (W (x * s)) * r + b,      s and r one factor for each row and channel

Autograd keeps x, x * s, W (x * s) and z. Here, without a bias,

    dr = sum dz W (x * s) = (sum dz z) / r,

where z is kept by most layers after this one. If a layer overwrites z, W (x * s) is computed again. With a bias,
W (x * s) is kept. On a GPU x * s is computed again; on a CPU it is kept, which takes less time.

The function is for eager training on large ordinary tensors. Compiled training on a GPU uses the functions of
`row_gradients`. Transforms of `torch.func`, exports, small inputs, and layers whose map is not that of a torch class
use the same expression by autograd.

A convolution of the network's inputs needs no gradient of x, but ds by autograd would compute it. With few weights for
an output, the weight's gradient of each row, G_n = dL_n / d(W * s_n), is smaller and gives both:

    dW = sum_n G_n s_n,      ds_n = sum_outputs,taps G_n W.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn, Tensor
from torch.autograd import forward_ad

from leanbayes.distributions.factor import away_from_zero, LARGE_ENOUGH
from leanbayes.layers.family import Family
from leanbayes.methods._base import StochasticLayer
from leanbayes.runtime import row_gradients
from leanbayes.runtime.row_gradients import compiled_for, scaled_input, scaled_output

CONVOLUTIONS: tuple[type[nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED: tuple[type[nn.Module], ...] = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

FEW = 2**20
"""Numbers of an input below which memory does not matter; autograd has less to do in Python."""

MANY = 128
"""Numbers of a channel from which the kernel of a batch norm is faster than two operations."""


TAPS = 256
"""Weights of an output up to which a convolution may compute its gradient row by row."""


@dataclass(frozen=True)
class Dense:
    """The map of `nn.Linear`: y = x W^T + b; `axis` has the channels."""

    axis: ClassVar[int] = -1

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the outputs."""
        return F.linear(x, weight, bias)

    def backward(self, dy: Tensor, x: Tensor, weight: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
        """Return the gradients of x, weight and bias that are needed."""
        rows = dy.reshape(-1, dy.shape[-1])
        return [
            (rows @ weight).view(x.shape) if needed[0] else None,
            rows.t() @ x.reshape(-1, x.shape[-1]) if needed[1] else None,
            rows.sum(0) if needed[2] else None,
        ]


@dataclass(frozen=True)
class Convolution:
    """The map of a convolution or a transposed one; the fields are torch's arguments. `axis` has the channels."""

    axis: ClassVar[int] = 1

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    def _settings(self) -> tuple[Any, ...]:
        return self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the outputs."""
        y: Tensor = torch.convolution(x, weight, bias, *self._settings())
        return y

    def backward(self, dy: Tensor, x: Tensor, weight: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
        """Return the gradients of x, weight and bias that are needed."""
        sizes = [weight.shape[1] * self.groups if self.transposed else weight.shape[0]] if needed[2] else None
        back = torch.ops.aten.convolution_backward
        return list(back(dy, x, weight, sizes, *self._settings(), list(needed)))

    def goes_by_row(self, x: Tensor, weight: Tensor, s: Tensor) -> bool:
        """Return whether the gradients of the weight and of s are computed from those of the rows, on a GPU."""
        ordinary = x.dim() == 4 and self.groups == 1 and not self.transposed and x.device.type in row_gradients.COMPILED
        return ordinary and len(s) == len(x) and weight[0].numel() <= TAPS

    def by_row(self, dy: Tensor, x: Tensor, weight: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the weight and of s, for y = W (x * s)."""
        patches = F.unfold(x, weight.shape[2:], self.dilation, self.padding, self.stride)
        each = (dy.flatten(2) @ patches.transpose(1, 2)).view(len(x), *weight.shape[:2], -1).to(s)
        dw = (each * s.view(len(s), 1, -1, 1)).sum(0).view_as(weight)
        return dw.to(weight.dtype), (each * weight.flatten(2)).sum((1, 3)).view_as(s)


Map = Dense | Convolution


def map_of(family: Family, layer: Any, x: Tensor, args: Sequence[Any]) -> Map | None:
    """Return the map of a layer of a torch class for this input; None for another one."""
    if family.form or family.weight is not None or x.dim() < 2:
        return None
    if family.kind is nn.Linear:
        return Dense()
    if family.kind not in CONVOLUTIONS + TRANSPOSED or x.dim() != layer.weight.dim():
        return None
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        return None
    extra: Sequence[int] = layer.output_padding
    if family.kind in TRANSPOSED:
        spatial, output_size = x.dim() - 2, args[0] if args else None
        extra = layer._output_padding(
            x, output_size, layer.stride, layer.padding, layer.kernel_size, spatial, layer.dilation
        )
    return Convolution(
        layer.stride, layer.padding, layer.dilation, family.kind in TRANSPOSED, tuple(extra), layer.groups
    )


def pays(x: Tensor, r: Tensor | None) -> bool:
    """Return whether the function is worth its calls: for large inputs; on a CPU only with r, where it saves time."""
    return x.numel() >= FEW and (r is not None or x.device.type != "cpu")


def is_ordinary(*tensors: Tensor) -> bool:
    """Return whether a custom autograd function may be used: eager training on plain tensors."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or torch._C._is_tracing():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return False
    return all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors)


def scaled_map(
    layer: StochasticLayer, x: Tensor, s: Tensor | None, r: Tensor | None, bias: Tensor | None, args: Sequence[Any]
) -> Tensor | None:
    """Return (W (x * s)) * r + b for factors and biases of rows (R, n); None if the layer must use autograd.

    Without r, the bias is a vector (n,) for all rows.
    """
    if not pays(x, r):
        return None
    weight = layer.weight_now
    linear = map_of(layer.family, layer.base, x, args) if is_ordinary(x, weight) else None
    if linear is None:
        return None
    dtype = computed_in(x)
    x, weight = x.to(dtype), weight.to(dtype)
    if x.dtype != weight.dtype:
        return None
    s, r = (None if factor is None else layer.spread(factor, x) for factor in (s, r))
    if bias is not None:
        bias = bias.to(dtype) if r is None else layer.spread(bias, x)
    safe = r is not None and bias is None and layer.is_sampled_ahead
    return apply(linear, x, weight, s, away_from_zero(r) if safe and r is not None else r, bias, safe=safe)


def times_inputs(layer: StochasticLayer, x: Tensor, s: Tensor) -> Tensor:
    """Return x * s for factors of rows (R, n)."""
    factor = layer.spread(s, x)
    if layer.is_sampled_ahead and compiled_for(x, factor, layer.family.axis):
        return scaled_input(x, away_from_zero(factor), layer.family.axis, computed_in(x))
    return x * factor


def times_outputs(layer: StochasticLayer, y: Tensor, r: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return y * r + b for factors and biases of rows (R, n)."""
    offset = None if bias is None else layer.spread(bias, y)
    if r is None:
        return y if offset is None else y + offset
    factor = layer.spread(r, y)
    fits = offset is None or offset.shape == factor.shape
    if fits and layer.is_sampled_ahead and compiled_for(y, factor, layer.family.axis):
        return scaled_output(y, away_from_zero(factor), offset, layer.family.axis)
    return y * factor if offset is None else torch.addcmul(offset, y, factor)


def first_map(layer: StochasticLayer, x: Tensor, s: Tensor, bias: Tensor | None, args: Sequence[Any]) -> Tensor | None:
    """Return W (x * s) + b in compiled training if x is an input of the network that needs no gradient; else None."""
    if not torch.compiler.is_compiling() or x.requires_grad or not torch.is_grad_enabled():
        return None
    linear, weight = map_of(layer.family, layer.base, x, args), layer.weight_now
    if not isinstance(linear, Convolution) or not linear.goes_by_row(x, weight, s):
        return None
    factor, dtype = layer.spread(s, x), computed_in(x)
    if not (layer.is_sampled_ahead and compiled_for(x, factor, layer.family.axis)):
        return None
    y: Tensor = _FirstMap.apply(x.to(dtype), weight.to(dtype), factor, linear)  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias.to(dtype).view(-1, 1, 1)


class _FirstMap(torch.autograd.Function):
    """W (x * s) for x without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, s: Tensor, linear: Convolution) -> Tensor:
        ctx.linear = linear
        ctx.save_for_backward(x, weight, s)
        return linear.forward((x * s).to(x.dtype), weight, None)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return None, *ctx.linear.by_row(dy, *ctx.saved_tensors), None


def computed_in(x: Tensor) -> torch.dtype:
    """Return the dtype in which a linear map computes: that of autocast, or that of its input."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if x.dtype != torch.float64 and torch.is_autocast_enabled(kind) else x.dtype


def apply(
    linear: Map, x: Tensor, weight: Tensor, s: Tensor | None, r: Tensor | None, bias: Tensor | None, *, safe: bool
) -> Tensor:
    """Return (W (x * s)) * r + b.

    Args:
        linear: the map.
        x: inputs.
        weight: weights of the map.
        s: factors that broadcast against x; None is one.
        r: factors that broadcast against the outputs; None is one.
        bias: with r, a tensor that broadcasts against the outputs; without, a vector.
        safe: whether no r is zero or as good as zero (`away_from_zero`).
    """
    z: Tensor = _ScaledMap.apply(x, weight, s, r, bias, (linear, safe))  # type: ignore[no-untyped-call]
    return z


class _ScaledMap(torch.autograd.Function):
    """The expression above. `ctx.after` is z, if dr is computed from it, and `ctx.version` that of its contents."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        s: Tensor | None,
        r: Tensor | None,
        bias: Tensor | None,
        settings: tuple[Map, bool],
    ) -> Tensor:
        linear, safe = settings
        ctx.linear, ctx.after, kept = linear, None, None
        wants_r = ctx.needs_input_grad[3]
        scaled = _times(x, s)
        y = linear.forward(scaled, weight, bias if r is None else None)
        if r is None:
            z = y
        elif bias is None and not (wants_r and (not safe or r.dtype not in LARGE_ENOUGH or _has_hooks())):
            z = y.mul_(r)
            ctx.after, ctx.version = (z.detach(), z._version) if wants_r else (None, 0)
        else:
            z = y * r if bias is None else torch.addcmul(bias, y, r)
            kept = y if wants_r else None
        ctx.save_for_backward(x, weight, s, r, bias, kept, scaled if x.device.type == "cpu" else None)
        return z

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> Any:
        x, weight, s, r, bias, kept, scaled = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: the gradient has a gradient
            return *_by_autograd(ctx, (x, weight, s, r, bias), dz), None
        for_x, for_weight, for_s, for_r, for_bias = ctx.needs_input_grad[:5]
        scaled = _times(x, s) if scaled is None else scaled
        dy, dr, ds, db = dz, None, None, None
        if r is not None:
            db = dz.sum_to_size(bias.shape) if for_bias else None
            dy, dr = _through_factor(dz, r, _before(ctx, scaled, weight, kept), sums=for_r)
            dr = dr.div_(r) if dr is not None and ctx.after is not None else dr
            ctx.after = None  # freed; a second backward computes W (x * s) again
        if for_s and not for_x and isinstance(ctx.linear, Convolution) and ctx.linear.goes_by_row(x, weight, s):
            dw, ds = ctx.linear.by_row(dy, x, weight, s)
            return None, dw, ds, dr, dy.sum((0, 2, 3)) if r is None and for_bias else db, None
        dx, dw, own = ctx.linear.backward(dy, scaled, weight, (for_x or for_s, for_weight, r is None and for_bias))
        if s is not None and dx is not None:
            dx, ds = _through_factor(dx, s, x, sums=for_s)
        return dx if for_x else None, dw, ds, dr, own if r is None else db, None


def _before(ctx: Any, scaled: Tensor, weight: Tensor, kept: Tensor | None) -> Tensor | None:
    """Return W (x * s), or z in its place (`ctx.after`) if it still has its values; None if dr is not needed."""
    if kept is not None or not ctx.needs_input_grad[3]:
        return kept
    if ctx.after is not None and ctx.after._version == ctx.version:
        after: Tensor = ctx.after
        return after
    ctx.after = None
    y: Tensor = ctx.linear.forward(scaled, weight, None)
    return y


def _through_factor(dz: Tensor, factor: Tensor, y: Tensor | None, *, sums: bool) -> tuple[Tensor, Tensor | None]:
    """Return dz * factor, and the sum of dz * y for each factor.

    The backward pass of a batch norm with fixed statistics, each row and channel a channel of its own, computes both in
    one pass over dz and y. Torch's kernel for it is faster on a CPU if a channel has many numbers.
    """
    if not sums or y is None:
        return dz * factor, None
    channels, size = factor.numel(), dz.numel() // max(1, factor.numel())
    by_channel = dz.dim() > 2 and factor.shape[:2] == dz.shape[:2] and factor[0, 0].numel() == 1
    if not (by_channel and size >= MANY and dz.device.type == "cpu" and dz.dtype in (torch.float32, torch.float64)):
        return dz * factor, (dz * y).sum_to_size(factor.shape)
    flat, zero, one = (1, channels, size), dz.new_zeros(channels), dz.new_ones(channels)
    back = torch.ops.aten.native_batch_norm_backward
    given = (dz.reshape(flat), y.reshape(flat), factor.reshape(channels), zero, one)
    dy, dfactor, _ = back(*given, None, None, False, 0.0, [True, True, False])
    return dy.view(dz.shape), dfactor.view(factor.shape)


def _by_autograd(ctx: Any, inputs: Sequence[Tensor | None], dz: Tensor) -> list[Tensor | None]:
    x, weight, s, r, bias = inputs
    assert x is not None
    assert weight is not None
    y = ctx.linear.forward(_times(x, s), weight, bias if r is None else None)
    z = y if r is None else y * r if bias is None else torch.addcmul(bias, y, r)
    needed = ctx.needs_input_grad[:5]
    wanted = [value for value, need in zip(inputs, needed, strict=True) if need and value is not None]
    found = iter(torch.autograd.grad(z, wanted, dz, create_graph=True))
    return [next(found) if need else None for need in needed]


def _times(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor


def _has_hooks() -> bool:
    """Return whether hooks take what autograd saves: they see tensors of `save_for_backward` alone."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
