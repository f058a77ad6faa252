"""The first convolution of a network: the gradient of its input factors without that of the images.

    y = W * (x s) + b,      ds_c = sum_ok W_ock P_ock,      P_ock = sum_l dy_ol U_ckl,      for each row

U has the patches of the row's image (`unfold`), o output channels, c input channels, k the pixels of the kernel and l
those of the output. Images need no gradient, and have few channels: their gradient alone takes more time on a GPU than
this product, for which matrix units are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, Tensor

from leanbayes.methods._base import StochasticLayer
from leanbayes.methods._scaled_map import computed_in, is_ordinary

DEVICE = "cuda"
"""The kind of device that it pays on."""

MOST = 256
"""Numbers in a patch (channels times kernel) up to which the product pays."""


def first_map(layer: StochasticLayer, x: Tensor, s: Tensor, args: Sequence[Any]) -> Tensor | None:
    """Return W * (x s) for factors of rows (R, c); None if the layer must use autograd for both gradients."""
    base = layer.base
    if x.device.type != DEVICE or x.requires_grad or not s.requires_grad or args or not is_plain(layer, x):
        return None
    weight = layer.weight_now
    if not (torch.compiler.is_compiling() or is_ordinary(x, weight)):
        return None
    dtype = computed_in(x)
    x, weight = x.to(dtype), weight.to(dtype)
    return None if x.dtype != weight.dtype else apply(x, layer.spread(s, x), weight, base)


def is_plain(layer: StochasticLayer, x: Tensor) -> bool:
    """Return whether a layer is an ordinary 2-d convolution of few channels, without groups."""
    base, family = layer.base, layer.family
    if family.kind is not nn.Conv2d or family.form or family.weight is not None or x.dim() != 4:
        return False
    if base.padding_mode != "zeros" or isinstance(base.padding, str) or base.groups != 1:
        return False
    return bool(base.weight[0].numel() <= MOST)


def apply(x: Tensor, s: Tensor, weight: Tensor, base: Any) -> Tensor:
    """Return W * (x s), for factors that broadcast against x and the settings of the convolution `base`."""
    settings = (tuple(base.stride), tuple(base.padding), tuple(base.dilation))
    y: Tensor = _FirstMap.apply(x, s, weight, *settings)  # type: ignore[no-untyped-call]
    return y


class _FirstMap(torch.autograd.Function):
    """The expression above; x gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, s: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any) -> Tensor:
        ctx.save_for_backward(x, s, weight)
        ctx.settings = stride, padding, dilation
        return F.conv2d(x * s, weight, None, stride, padding, dilation)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, s, weight = ctx.saved_tensors
        stride, padding, dilation = ctx.settings
        back = torch.ops.aten.convolution_backward
        dw = ds = None
        if ctx.needs_input_grad[2]:
            whole = stride, padding, dilation, False, (0, 0), 1, (False, True, False)
            dw = back(dy, x * s, weight, None, *whole)[1]
        if ctx.needs_input_grad[1]:
            patches = F.unfold(x, weight.shape[2:], dilation, padding, stride)
            products = torch.bmm(dy.flatten(2), patches.transpose(1, 2))
            wide = torch.promote_types(weight.dtype, torch.float32)
            each = (products.to(wide) * weight.flatten(1).to(wide)).sum(1)
            ds = each.view(*x.shape[:2], -1).sum(2)[:, :, None, None].to(s.dtype).sum_to_size(s.shape)
        return None, ds, dw, None, None, None
