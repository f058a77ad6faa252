"""Table of layer families: channels and linear maps of each layer class. Methods read this table only.

A `Family` record defines input channels, output channels and the linear map of a Linear, a convolution, a transposed
convolution, an embedding, a norm or a dropout. No method knows a layer class. An embedding is the linear map of unit
vectors; its input channels are the words.

A layer with its own forward belongs to a family if `recognise` finds that it computes the same map. `register` adds a
family for another class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, Tensor

from leanbayes.layers.forms import call_own, plain_like, plain_same, pool_own, pool_same, same_conv, standardised
from leanbayes.layers.recognise import (
    by_name,
    Finding,
    looks_like_norm,
    looks_linear,
    recognise,
    STANDARDISED,
    STANDARDISED_SAME,
)


class _ByName(type):
    """Lets a class represent one of the same name in a library that may not be installed."""

    def __instancecheck__(cls, layer: object) -> bool:
        return _namesake(layer, cls) is not cls


class Conv1D(nn.Module, metaclass=_ByName):
    """Represents transformers' `Conv1D` (GPT-2): y = x W + b with W of shape (inputs, outputs)."""

    library = "transformers"


class _ByMap(type):
    """Lets a class represent all layers with the parameters and the map of one kind of layer."""

    def __instancecheck__(cls, layer: object) -> bool:
        kind = _registered(layer)
        if kind is not None:
            return isinstance(_TABLE[kind], LinearFamily) == (cls is LinearLike)
        return isinstance(layer, nn.Module) and (_is_linear if cls is LinearLike else looks_like_norm)(layer)


class LinearLike(nn.Module, metaclass=_ByMap):
    """Represents layers y = W x + b of any class, W of shape (outputs, inputs), and registered linear maps."""


class NormLike(nn.Module, metaclass=_ByMap):
    """Represents layers that scale channels, with a class name that ends in Norm, and registered norms."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Channels of one kind of layer.

    Attributes:
        kind: the layer type that this record describes.
        inputs: number of input channels of a layer.
        outputs: number of output channels of a layer.
        axis: the channel axis of inputs and outputs, counted from the right (from the left for batch-like norms).
        weight: `layer -> weight`, the effective weight as a function of the stored one; None: the stored one.
        plain: `(layer, tensors) -> layer'`, a plain layer with these tensors; None: the same class can hold them.
        form: how a layer with its own forward computes the map; empty for layers of the kind itself.
        way: how such a layer was recognised.
        by_channel: whether a norm treats every channel alone and scales with its weight and bias.
    """

    kind: type[nn.Module]
    inputs: Callable[[Any], int]
    outputs: Callable[[Any], int]
    axis: int
    weight: Callable[[Any], Tensor] | None = None
    plain: Callable[[Any, Mapping[str, Tensor]], nn.Module] | None = None
    form: str = ""
    way: str = ""
    by_channel: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Family:
        """Return the record itself, which cannot change: copies of models share it."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _record, (self.kind, Finding(self.form, self.way, "", self.by_channel))


@dataclass(frozen=True, kw_only=True)
class LinearFamily(Family):
    """A kind of layer with a linear map between its channels.

    Attributes:
        linear: `(layer, x, weight, *args) -> y`, the map with that weight and without bias.
        scale: `(layer, weight, s, r) -> weight'` such that `linear(x, weight') == linear(x * s, weight) * r`.
        pool: `(layer, x, *args) -> t`, the sum of the input channels under the kernel, one output per group.
    """

    linear: Callable[..., Tensor]
    scale: Callable[[Any, Tensor, Tensor, Tensor], Tensor]
    pool: Callable[..., Tensor]

    __reduce__ = Family.__reduce__

    def scaled(self, layer: Any, weight: Tensor, s: Tensor | None = None, r: Tensor | None = None) -> Tensor:
        """Return the weight with its input channels multiplied by s and its output channels by r; None is one."""
        s = weight.new_ones(self.inputs(layer)) if s is None else s
        r = weight.new_ones(self.outputs(layer)) if r is None else r
        return self.scale(layer, weight, s, r)

    def masked(self, layer: Any, weight: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Return weight and bias of a layer whose output channels are multiplied by a mask."""
        found = {"weight": self.scaled(layer, weight, r=mask.to(weight.dtype))}
        return found if layer.bias is None else found | {"bias": (layer.bias * mask).to(weight.dtype)}


def family_of(layer: nn.Module) -> Family | None:
    """Return the family of a layer, or None.

    A subclass belongs to the family of its parent if it computes the same map. If it has its own `forward`, it is run
    to find out: a LoRA or fake-quantised layer computes another map. Parametrised layers keep the parent's `forward`.
    """
    kind: Any = _kind_of(layer)
    if kind is None:
        return None
    finding = _finding(layer, kind)
    return None if finding.reason else _record(kind, finding)


def register(
    kind: type[nn.Module],
    *,
    like: type[nn.Module],
    weight: Callable[[Any], Tensor] | None = None,
    linear: Callable[..., Tensor] | None = None,
) -> Family:
    """Register a layer class, so that methods convert its layers like those of a torch class.

    The layer has a parameter `weight`, optionally a `bias`, and the channels of `like`. Conversion runs it on random
    inputs and rejects a layer that computes another map, with the reason.

    Args:
        kind: the class, subclasses included.
        like: the torch class whose channels it has: `nn.Linear`, a convolution, or a norm.
        weight: `layer -> weight`, the effective weight as a function of the stored one. Noise is added to the effective
            weight, and a draw is a layer of class `like` with the drawn weight.
        linear: `(layer, x, weight) -> y`, the map with an effective weight and without bias; by default that of `like`
            if `weight` is given, else the layer's own forward.

    Returns:
        The record of the class.

    Example:
        >>> lb.layers.register(ScaledLinear, like=nn.Linear, weight=lambda layer: layer.weight * layer.scale)
    """
    known = _TABLE.get(like)
    if known is None or known.kind in (*EMBEDDINGS, *DROPOUTS) or isinstance(like, (_ByMap, _ByName)):
        names = ", ".join(family.kind.__name__ for family in _FAMILIES if family.kind in (*TORCH_MAPS, *TORCH_NORMS))
        raise ValueError(f"expected like to be one of torch's classes {names}, got {like!r}")
    family = replace(known, kind=kind, weight=weight)
    if isinstance(family, LinearFamily):
        family = replace(family, linear=linear or family.linear)
    elif weight is not None or linear is not None:
        raise ValueError(f"a norm such as {like.__name__} has no linear map; give neither weight nor linear")
    if like is nn.Linear:
        family = replace(
            family, inputs=lambda layer: layer.weight.shape[1], outputs=lambda layer: layer.weight.shape[0]
        )
    if weight is not None:
        family = replace(family, plain=lambda layer, tensors: plain_like(like, layer, tensors))
    if linear is not None and weight is None:
        family = replace(family, weight=lambda layer: layer.weight, plain=None)
    _TABLE[kind] = family
    _REGISTERED[kind] = like
    _record.cache_clear()
    return family


def refusal(layer: nn.Module) -> str | None:
    """Return why a layer that resembles a family is not treated as a member; None if it is."""
    kind = _kind_of(layer)
    if kind is None or kind in DROPOUTS:
        return None
    if any(nn.parameter.is_lazy(p) for p in layer.parameters()):
        return f"its parameters are not initialised yet ({type(layer).__name__}): run one batch through the network"
    if isinstance(layer, nn.Embedding) and layer.max_norm is not None:
        return "max_norm changes its vectors in place whenever they are read; give it up, or clip them after each step"
    reason = _weight_refusal(layer, kind)
    return reason if reason is not None else _finding_refusal(layer, kind)


def _weight_refusal(layer: Any, kind: type[nn.Module]) -> str | None:
    if "weight" not in layer._parameters and not nn.utils.parametrize.is_parametrized(layer, "weight"):
        if kind in NORMS:
            return "it has no scale"
        return "a hook computes its weight; use torch.nn.utils.parametrizations instead (weight_norm, spectral_norm)"
    return "it has no scale" if layer._parameters.get("weight", layer.weight) is None else None


def _finding_refusal(layer: nn.Module, kind: type[nn.Module]) -> str | None:
    reason = _finding(layer, kind).reason
    if not reason:
        return None
    name, like = type(layer).__name__, _REGISTERED.get(kind, kind)
    if kind in _REGISTERED:
        return f"{name} is registered as a {like.__name__}, but {reason}"
    if like is NormLike:
        return f"{name} is a norm of its own, but {reason}"
    return f"{name} is a {like.__name__} with a forward of its own: {reason}"


def follows_channels(layer: nn.Module) -> bool:
    """Return whether channels can be removed from a layer: its weight is stored, and a norm treats each alone."""
    family = family_of(layer)
    if family is None or family.weight is not None:
        return False
    return isinstance(family, LinearFamily) or not family.form or family.by_channel


def _kind_of(layer: object) -> type[nn.Module] | None:
    return _registered(layer) or next((kind for kind in _TABLE if isinstance(layer, kind)), None)


def _registered(layer: object) -> type[nn.Module] | None:
    """Return the most specific registered class of a layer."""
    return next((kind for kind in type(layer).__mro__ if kind in _REGISTERED), None) if _REGISTERED else None


_REGISTERED: dict[type[nn.Module], type[nn.Module]] = {}
"""Registered classes, with the torch class whose channels they have."""


def _finding(layer: nn.Module, kind: type[nn.Module]) -> Finding:
    """Return how a layer computes the map of its kind, or the reason why not."""
    if kind not in _REGISTERED and _same_map(layer, kind):
        return Finding()
    if kind in DROPOUTS:
        return Finding(reason="a dropout with a forward of its own")
    if nn.utils.parametrize.is_parametrized(layer):
        return Finding(reason="it is parametrised, too")
    if layer._parameters.get("weight") is None:
        return Finding(reason="it has no weight")
    standard = kind is nn.Conv2d and isinstance(vars(layer).get("eps"), float)
    return recognise(layer, _TABLE[kind], _STANDARDISED if standard else {})


@cache
def _record(kind: Any, finding: Finding) -> Family:
    """Return the record of layers of one kind and form."""
    family = _TABLE[kind]
    if not finding.form:
        return family
    if finding.form in _STANDARDISED:
        return replace(_STANDARDISED[finding.form], way=finding.way)
    family = replace(family, form=finding.form, way=finding.way, by_channel=finding.by_channel)
    if not isinstance(family, LinearFamily) or family.weight is not None or kind in EMBEDDINGS:
        return family
    own_pool = family.pool if family.axis == -1 else pool_own
    return replace(family, linear=call_own, pool=own_pool)


def _is_linear(layer: nn.Module) -> bool:
    """Return whether a layer of another class is a linear map of vectors."""
    if not looks_linear(layer) or any(isinstance(layer, kind) for kind in _TABLE if kind not in (LinearLike, NormLike)):
        return False
    if any(nn.parameter.is_lazy(p) for p in layer.parameters()):
        return not by_name(layer).reason
    return not recognise(layer, _LINEAR_LIKE, {}).reason


def _same_map(layer: nn.Module, kind: type) -> bool:
    parent, names = _namesake(layer, kind), ("forward", "_conv_forward")
    return all(getattr(type(layer), name, None) is getattr(parent, name, None) for name in names)


def _namesake(layer: object, kind: type) -> type:
    """Return the class of a layer that `kind` represents by name, else `kind`."""
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
    # A kernel of ones with one output channel per group.
    return _conv(layer, x, layer.weight.new_ones(layer.groups, *layer.weight.shape[1:]))


def _conv(layer: Any, x: Tensor, weight: Tensor) -> Tensor:
    y: Tensor = layer._conv_forward(x, weight, None)
    return y


def _embed(layer: nn.Embedding, x: Tensor, weight: Tensor) -> Tensor:
    # Never sparse: a divergence gives every vector a gradient.
    return F.embedding(x, weight, layer.padding_idx, scale_grad_by_freq=layer.scale_grad_by_freq)


def _convolution(kind: type[nn.Module], spatial: int) -> LinearFamily:
    return LinearFamily(
        kind=kind,
        inputs=lambda layer: layer.in_channels,
        outputs=lambda layer: layer.out_channels,
        axis=-1 - spatial,
        linear=_conv,
        scale=_scale_conv,
        pool=_pool_conv,
    )


def _transposed(kind: type[nn.Module], spatial: int, function: Callable[..., Tensor]) -> LinearFamily:
    def linear(layer: Any, x: Tensor, weight: Tensor, output_size: list[int] | None = None) -> Tensor:
        extra = layer._output_padding(
            x, output_size, layer.stride, layer.padding, layer.kernel_size, spatial, layer.dilation
        )
        return function(x, weight, None, layer.stride, layer.padding, extra, layer.groups, layer.dilation)

    def pool(layer: Any, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        ones = layer.weight.new_ones(layer.weight.shape[0], 1, *layer.weight.shape[2:])
        return linear(layer, x, ones, output_size)

    return LinearFamily(
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


_LINEAR = LinearFamily(
    kind=nn.Linear,
    inputs=lambda layer: layer.in_features,
    outputs=lambda layer: layer.out_features,
    axis=-1,
    linear=lambda layer, x, weight: F.linear(x, weight),
    scale=_scale_linear,
    pool=lambda layer, x: x.sum(-1, keepdim=True),
)

_CONV1D = LinearFamily(
    kind=Conv1D,
    inputs=lambda layer: layer.weight.shape[0],
    outputs=lambda layer: layer.weight.shape[1],
    axis=-1,
    linear=lambda layer, x, weight: x @ weight,
    scale=_scale_transposed,
    pool=lambda layer, x: x.sum(-1, keepdim=True),
)

_LINEAR_LIKE = replace(
    _LINEAR,
    kind=LinearLike,
    inputs=lambda layer: layer.weight.shape[1],
    outputs=lambda layer: layer.weight.shape[0],
)

_EMBEDDING = LinearFamily(
    kind=nn.Embedding,
    inputs=lambda layer: layer.num_embeddings,
    outputs=lambda layer: layer.embedding_dim,
    axis=-1,
    linear=_embed,
    scale=_scale_transposed,
    pool=lambda layer, x: layer.weight.new_ones(*x.shape, 1),  # a word is a unit vector
)

CHANNEL_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
"""Norms that treat every channel alone, so that channels can be dropped."""

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
    _LINEAR_LIKE,
    _norm(NormLike, lambda layer: layer.weight.numel(), -1),
)

_TABLE: dict[type[nn.Module], Family] = {family.kind: family for family in _FAMILIES}

EMBEDDINGS: tuple[type[nn.Module], ...] = (nn.Embedding,)
"""Layers that look up vectors; no factor can multiply their inputs, which are indices."""

LINEAR_MAPS: tuple[type[nn.Module], ...] = tuple(
    family.kind for family in _FAMILIES if isinstance(family, LinearFamily) and family.kind not in EMBEDDINGS
)
"""Layers with a linear map between channels, the targets of factor methods."""

TRANSPOSED: tuple[type[nn.Module], ...] = (Conv1D, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
"""Linear maps whose weight has the shape (inputs, outputs of a group, ...)."""

DROPOUTS: tuple[type[nn.Module], ...] = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
"""Layers that drop activations; only the input shows their number of channels."""

NORMS: tuple[type[nn.Module], ...] = tuple(
    family.kind for family in _FAMILIES if not isinstance(family, LinearFamily) and family.kind not in DROPOUTS
)
"""Layers that scale and shift channels."""

TORCH_MAPS = tuple(kind for kind in LINEAR_MAPS if not isinstance(kind, (_ByMap, _ByName)))
TORCH_NORMS = tuple(kind for kind in NORMS if not isinstance(kind, _ByMap))

_CONV2D = _convolution(nn.Conv2d, 2)
_STANDARDISED = {
    STANDARDISED: replace(
        _CONV2D,
        weight=standardised,
        plain=lambda layer, tensors: plain_like(nn.Conv2d, layer, tensors),
        form=STANDARDISED,
    ),
    STANDARDISED_SAME: replace(
        _CONV2D, weight=standardised, linear=same_conv, pool=pool_same, plain=plain_same, form=STANDARDISED_SAME
    ),
}
"""Convolutions with standardised weights, by form."""
