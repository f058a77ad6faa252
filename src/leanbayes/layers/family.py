"""Where each kind of layer keeps its channels: the one table that methods read.

A method speaks of input channels, output channels and a linear map. A `Family` record says what these are for a
Linear, a convolution, a transposed convolution, an embedding, a norm or a dropout, so that no method knows a layer
type. An embedding is the linear map of words that are written as unit vectors; its input channels are the words.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, Tensor


class _ByName(type):
    """Makes a class stand for one of the same name in a library that need not be installed."""

    def __instancecheck__(cls, layer: object) -> bool:
        return _namesake(layer, cls) is not cls


class Conv1D(nn.Module, metaclass=_ByName):
    """Stands for transformers' `Conv1D` (GPT-2): y = x W + b with W of shape (inputs, outputs)."""

    library = "transformers"


@dataclass(frozen=True, kw_only=True)
class Family:
    """Where one kind of layer keeps its channels, and how to apply its linear map.

    Attributes:
        kind: the layer type that this record describes.
        inputs: number of input channels of a layer.
        outputs: number of output channels of a layer.
        axis: the channel axis of inputs and outputs, counted from the right (from the left for batch-like norms).
        linear: `(layer, x, weight, *args) -> y`, the map with that weight and without bias; None for norms.
        scale: `(layer, weight, s, r) -> weight'` such that `linear(x, weight') == linear(x * s, weight) * r`.
        pool: `(layer, x, *args) -> t`, the sum of the input channels under the kernel, one output per group.
    """

    kind: type[nn.Module]
    inputs: Callable[[Any], int]
    outputs: Callable[[Any], int]
    axis: int
    linear: Callable[..., Tensor] | None = None
    scale: Callable[[Any, Tensor, Tensor, Tensor], Tensor] | None = None
    pool: Callable[..., Tensor] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a record by the layer type it describes."""
        return _record, (self.kind,)


def family_of(layer: nn.Module) -> Family | None:
    """Return the family of a layer, or None where there is none.

    A subclass counts as its parent only if it computes what its parent computes: one that overrides `forward`
    (a LoRA layer, a fake-quantised layer) is somebody else's map. Parametrised layers do not override it.
    """
    for kind, family in _TABLE.items():
        if isinstance(layer, kind) and _same_map(layer, kind):
            return family
    return None


def _record(kind: type[nn.Module]) -> Family:
    return _TABLE[kind]


def refusal(layer: nn.Module) -> str | None:
    """Say why a layer that looks like a member of a family is not treated as one; None where all is well."""
    kind = next((kind for kind in _TABLE if isinstance(layer, kind)), None)
    if kind is None or kind in DROPOUTS:
        return None
    if any(nn.parameter.is_lazy(p) for p in layer.parameters()):
        return f"its parameters are not initialised yet ({type(layer).__name__}): run one batch through the network"
    if not _same_map(layer, kind):
        return f"{type(layer).__name__} is a {kind.__name__} with a forward of its own"
    if isinstance(layer, nn.Embedding) and layer.max_norm is not None:
        return "max_norm changes its vectors in place whenever they are read; give it up, or clip them after each step"
    return _weight_refusal(layer, kind)


def _weight_refusal(layer: Any, kind: type[nn.Module]) -> str | None:
    if "weight" not in layer._parameters and not nn.utils.parametrize.is_parametrized(layer, "weight"):
        if kind in NORMS:
            return "it has no scale"
        return "a hook computes its weight; use torch.nn.utils.parametrizations instead (weight_norm, spectral_norm)"
    return "it has no scale" if layer._parameters.get("weight", layer.weight) is None else None


def _same_map(layer: nn.Module, kind: type) -> bool:
    """Say whether a layer computes what the layers of a kind do."""
    parent, names = _namesake(layer, kind), ("forward", "_conv_forward")
    return all(getattr(type(layer), name, None) is getattr(parent, name, None) for name in names)


def _namesake(layer: object, kind: type) -> type:
    """Return the class, among those of a layer, that a class found by name stands for; others stand for themselves."""
    if not isinstance(kind, _ByName):
        return kind
    library: str = getattr(kind, "library", "")
    own = (c for c in type(layer).__mro__ if c.__name__ == kind.__name__ and c.__module__.split(".")[0] == library)
    return next(own, kind)


def _scale_linear(layer: nn.Linear, weight: Tensor, s: Tensor, r: Tensor) -> Tensor:
    return weight * torch.outer(r, s)


def _scale_transposed(layer: nn.Module, weight: Tensor, s: Tensor, r: Tensor) -> Tensor:
    return weight * torch.outer(s, r)


def _scale_conv(layer: Any, weight: Tensor, s: Tensor, r: Tensor) -> Tensor:
    outer = r.view(layer.groups, -1, 1) * s.view(layer.groups, 1, -1)  # (groups, outputs, inputs) of a group
    return weight * outer.view(*weight.shape[:2], *[1] * (weight.dim() - 2))


def _scale_transpose(layer: Any, weight: Tensor, s: Tensor, r: Tensor) -> Tensor:
    outer = s.view(layer.groups, -1, 1) * r.view(layer.groups, 1, -1)  # (groups, inputs, outputs) of a group
    return weight * outer.view(*weight.shape[:2], *[1] * (weight.dim() - 2))


def _pool_conv(layer: Any, x: Tensor) -> Tensor:
    # One output channel a group: a kernel of ones whose first axis is the group.
    return _conv(layer, x, layer.weight.new_ones(layer.groups, *layer.weight.shape[1:]))


def _conv(layer: Any, x: Tensor, weight: Tensor) -> Tensor:
    y: Tensor = layer._conv_forward(x, weight, None)
    return y


def _embed(layer: nn.Embedding, x: Tensor, weight: Tensor) -> Tensor:
    # Never sparse: a divergence gives every vector a gradient.
    return F.embedding(x, weight, layer.padding_idx, scale_grad_by_freq=layer.scale_grad_by_freq)


def _convolution(kind: type[nn.Module], spatial: int) -> Family:
    return Family(
        kind=kind,
        inputs=lambda layer: layer.in_channels,
        outputs=lambda layer: layer.out_channels,
        axis=-1 - spatial,
        linear=_conv,
        scale=_scale_conv,
        pool=_pool_conv,
    )


def _transposed(kind: type[nn.Module], spatial: int, function: Callable[..., Tensor]) -> Family:
    def linear(layer: Any, x: Tensor, weight: Tensor, output_size: list[int] | None = None) -> Tensor:
        extra = layer._output_padding(
            x, output_size, layer.stride, layer.padding, layer.kernel_size, spatial, layer.dilation
        )
        return function(x, weight, None, layer.stride, layer.padding, extra, layer.groups, layer.dilation)

    def pool(layer: Any, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        ones = layer.weight.new_ones(layer.weight.shape[0], 1, *layer.weight.shape[2:])
        return linear(layer, x, ones, output_size)

    return Family(
        kind=kind,
        inputs=lambda layer: layer.in_channels,
        outputs=lambda layer: layer.out_channels,
        axis=-1 - spatial,
        linear=linear,
        scale=_scale_transpose,
        pool=pool,
    )


def _norm(kind: type[nn.Module], features: Callable[[Any], int], axis: int) -> Family:
    return Family(kind=kind, inputs=features, outputs=features, axis=axis)


def _dropout(kind: type[nn.Module], axis: int) -> Family:
    return Family(kind=kind, inputs=lambda layer: 0, outputs=lambda layer: 0, axis=axis)


_LINEAR = Family(
    kind=nn.Linear,
    inputs=lambda layer: layer.in_features,
    outputs=lambda layer: layer.out_features,
    axis=-1,
    linear=lambda layer, x, weight: F.linear(x, weight),
    scale=_scale_linear,
    pool=lambda layer, x: x.sum(-1, keepdim=True),
)

_CONV1D = Family(
    kind=Conv1D,
    inputs=lambda layer: layer.weight.shape[0],
    outputs=lambda layer: layer.weight.shape[1],
    axis=-1,
    linear=lambda layer, x, weight: x @ weight,
    scale=_scale_transposed,
    pool=lambda layer, x: x.sum(-1, keepdim=True),
)

_EMBEDDING = Family(
    kind=nn.Embedding,
    inputs=lambda layer: layer.num_embeddings,
    outputs=lambda layer: layer.embedding_dim,
    axis=-1,
    linear=_embed,
    scale=_scale_transposed,
)

CHANNEL_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
"""Norms that treat every channel by itself, so that the others may leave."""

_FAMILIES = (
    _LINEAR,
    _CONV1D,
    _EMBEDDING,
    _convolution(nn.Conv1d, 1),
    _convolution(nn.Conv2d, 2),
    _convolution(nn.Conv3d, 3),
    _transposed(nn.ConvTranspose1d, 1, F.conv_transpose1d),
    _transposed(nn.ConvTranspose2d, 2, F.conv_transpose2d),
    _transposed(nn.ConvTranspose3d, 3, F.conv_transpose3d),
    *(_norm(kind, lambda layer: layer.num_features, 1) for kind in CHANNEL_NORMS),
    _norm(nn.GroupNorm, lambda layer: layer.num_channels, 1),
    *(_norm(kind, lambda layer: math.prod(layer.normalized_shape), -1) for kind in (nn.LayerNorm, nn.RMSNorm)),
    _dropout(nn.Dropout, -1),
    *(_dropout(kind, 1) for kind in (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)),
)

_TABLE: dict[type[nn.Module], Family] = {family.kind: family for family in _FAMILIES}

EMBEDDINGS: tuple[type[nn.Module], ...] = (nn.Embedding,)
"""The layers that look vectors up; their inputs are numbers of words, which no factor can multiply."""

LINEAR_MAPS: tuple[type[nn.Module], ...] = tuple(
    family.kind for family in _FAMILIES if family.linear and family.kind not in EMBEDDINGS
)
"""The layers with a linear map between channels: what factor methods target."""

TRANSPOSED: tuple[type[nn.Module], ...] = (Conv1D, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
"""The linear maps whose weight is (inputs, outputs of a group, ...)."""

DROPOUTS: tuple[type[nn.Module], ...] = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
"""The layers that drop what passes; how many channels they see, only the input tells."""

NORMS: tuple[type[nn.Module], ...] = tuple(
    family.kind for family in _FAMILIES if not family.linear and family.kind not in DROPOUTS
)
"""The layers that scale and shift channels."""
