"""Layers with their own forward: run it with another weight, or compute an effective weight.

Convolutions with standardised weights (Qiao et al., 2019; Brock et al., 2021) have an effective weight W',

    y = W' * x + b,      W'_o = g_o c (W_o - mean(W_o)) / sqrt(var(W_o) + eps)        g_o c = 1 without a gain

which is a function of the stored weight. Noise is added to W'. A draw is a plain convolution with the drawn W', since
no stored weight standardises to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn, Tensor
from torch.func import functional_call

SYM_MAX: Any = torch.sym_max  # untyped
"""The larger of two sizes; torch.fx can trace it, unlike `max`."""


def call_own(layer: nn.Module, x: Tensor, weight: Tensor, *args: Any) -> Tensor:
    """Call a layer's own forward with another weight and no bias."""
    bias = layer._parameters.get("bias")
    given = {"weight": weight} | ({} if bias is None else {"bias": torch.zeros_like(bias, dtype=weight.dtype)})
    y: Tensor = functional_call(layer, given, (x, *args))
    return y


def pool_own(layer: Any, x: Tensor, *args: Any) -> Tensor:
    """Return the sum of input channels under the kernel, one output per group, by the layer's own forward."""
    # All outputs of a group are the same sum: one of each is kept.
    axis = -1 - (layer.weight.dim() - 2)
    y = call_own(layer, x, torch.ones_like(layer.weight), *args)
    grouped: Tensor = y.reshape(*y.shape[:axis], layer.groups, -1, *y.shape[axis + 1 :])
    return grouped.select(axis, 0)


def plain_like(kind: Any, layer: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a layer of a torch class with these tensors and the settings of the given layer."""
    plain: nn.Module = kind.__new__(kind)
    plain.__dict__.update(layer.__dict__)
    plain._parameters, plain._buffers, plain._modules = {}, {}, {}
    give(plain, layer, tensors)
    if isinstance(plain, nn.Linear):
        plain.out_features, plain.in_features = plain.weight.shape
    return plain


def standardised(layer: Any) -> Tensor:
    """Return the effective weight, by the operation of these layers."""
    gain = layer._parameters.get("gain")
    rows = layer.weight.reshape(1, layer.weight.shape[0], -1)
    scale = None if gain is None else (gain * layer.scale).view(-1)
    normed = F.batch_norm(rows, None, None, weight=scale, training=True, momentum=0.0, eps=layer.eps)
    return normed.reshape_as(layer.weight)


def pad_same(x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]) -> Tensor:
    """Pad an image with zeros so that a convolution gives ceil(size / stride) outputs; torch.fx can trace it."""
    pads: list[Any] = []
    for axis in range(len(kernel) - 1, -1, -1):  # F.pad begins with the last axis
        size = x.shape[2 + axis]
        outputs = -(-size // stride[axis])
        needed: Any = SYM_MAX((outputs - 1) * stride[axis] + (kernel[axis] - 1) * dilation[axis] + 1 - size, 0)
        pads += [needed // 2, needed - needed // 2]
    return F.pad(x, pads)


def same_conv(layer: Any, x: Tensor, weight: Tensor) -> Tensor:
    """Apply a convolution without bias to a padded image."""
    x = pad_same(x, layer.kernel_size, layer.stride, layer.dilation)
    return F.conv2d(x, weight, None, layer.stride, layer.padding, layer.dilation, layer.groups)


def pool_same(layer: Any, x: Tensor) -> Tensor:
    """Return the sum of the input channels under the kernel of a padded image, one output per group."""
    return same_conv(layer, x, layer.weight.new_ones(layer.groups, *layer.weight.shape[1:]))


def plain_same(layer: Any, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a convolution with "same" padding as a traced graph: torch has no such class."""
    module = _SameConv(layer)
    graph = fx.Tracer().trace(module)
    for node in graph.nodes:
        node.type = None  # annotations are strings here, and a graph with strings cannot be pickled
    plain = fx.GraphModule(module, graph, "Conv2dSame")
    for name in ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups"):
        setattr(plain, name, getattr(layer, name))
    give(plain, layer, tensors)
    return plain


def give(plain: nn.Module, layer: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Set weight and bias of a plain layer; a bias that is not given is shared."""
    for name in ("weight", "bias"):
        old = layer._parameters.get(name)
        if name in tensors:
            old = nn.Parameter(tensors[name], requires_grad=old is None or old.requires_grad)
        plain._parameters[name] = old


class _SameConv(nn.Module):
    """A plain convolution with "same" padding, to be traced."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.sizes = (layer.kernel_size, layer.stride, layer.dilation)
        self.settings = (layer.stride, layer.padding, layer.dilation, layer.groups)

    def forward(self, input: Tensor) -> Tensor:  # as torch's convolutions call it
        return F.conv2d(pad_same(input, *self.sizes), self.weight, self.bias, *self.settings)
