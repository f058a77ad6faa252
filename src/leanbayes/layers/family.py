"""Table of layer families: channels and linear maps of each layer class. Methods read this table only.

A `Family` record defines input channels, output channels and the linear map of a Linear, a convolution, a transposed
convolution, an embedding, a norm or a dropout. No method knows a layer class. An embedding is the linear map of unit
vectors; its input channels are the words. A layer with its own forward belongs to a family if `recognise` finds that it
computes the same map. `register` adds a family for another class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn, Tensor
from torch.func import functional_call

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
        inputs, outputs: numbers of input and output channels of a layer.
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
        return self  # it cannot change: copies of models share it

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
        if r is None and s is not None and weight.dim() == 2 and self.scale is _scale:
            return weight * s  # an outer product would be as large as the weight
        s = weight.new_ones(self.inputs(layer)) if s is None else s
        return self.scale(layer, weight, s, weight.new_ones(self.outputs(layer)) if r is None else r)

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
        names = ", ".join(torch_kind.__name__ for torch_kind in (*TORCH_MAPS, *TORCH_NORMS))
        raise ValueError(f"expected like to be one of torch's classes {names}, got {like!r}")
    family = replace(known, kind=kind, weight=weight)
    if isinstance(family, LinearFamily):
        family = replace(family, linear=linear or family.linear)
    elif weight is not None or linear is not None:
        raise ValueError(f"a norm such as {like.__name__} has no linear map; give neither weight nor linear")
    if like is nn.Linear:
        family = replace(family, inputs=_LINEAR_LIKE.inputs, outputs=_LINEAR_LIKE.outputs)
    if weight is not None:
        family = replace(family, plain=partial(_plain_like, like))
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
    stored = layer._parameters.get("weight")
    if stored is None and not nn.utils.parametrize.is_parametrized(layer, "weight"):
        if kind in NORMS or "weight" in layer._parameters:
            return "it has no scale"
        return "a hook computes its weight; use torch.nn.utils.parametrizations instead (weight_norm, spectral_norm)"
    reason = _finding(layer, kind).reason
    return f"{type(layer).__name__} {_kinship(kind)} {reason}" if reason else None


def _kinship(kind: type[nn.Module]) -> str:
    if kind in _REGISTERED:
        return f"is registered as a {_REGISTERED[kind].__name__}, but"
    return "is a norm of its own, but" if kind is NormLike else f"is a {kind.__name__} with a forward of its own:"


def _kind_of(layer: object) -> type[nn.Module] | None:
    return _registered(layer) or next((kind for kind in _TABLE if isinstance(layer, kind)), None)


def _registered(layer: object) -> type[nn.Module] | None:
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
    return replace(family, linear=_call_own, pool=family.pool if family.axis == -1 else _pool_own)


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


# Linear maps of torch's classes


def _scale(layer: Any, weight: Tensor, s: Tensor, r: Tensor) -> Tensor:
    groups = layer.groups if weight.dim() > 2 else 1
    outer = r.view(groups, -1, 1) * s.view(groups, 1, -1)  # (groups, outputs, inputs) of a group
    return weight * outer.view(*weight.shape[:2], *[1] * (weight.dim() - 2))


def _scale_transposed(layer: Any, weight: Tensor, s: Tensor, r: Tensor) -> Tensor:
    return _scale(layer, weight, r, s)


def _embed(layer: nn.Embedding, x: Tensor, weight: Tensor) -> Tensor:
    # Never sparse: a divergence gives every vector a gradient.
    return F.embedding(x, weight, layer.padding_idx, scale_grad_by_freq=layer.scale_grad_by_freq)


def _attribute(name: str) -> Callable[[Any], int]:
    return lambda layer: getattr(layer, name)


def _vectors(
    kind: type[nn.Module], sizes: tuple[str, str], linear: Callable[..., Tensor], scale: Callable[..., Tensor] = _scale
) -> LinearFamily:
    inputs, outputs = map(_attribute, sizes)
    return LinearFamily(
        kind=kind,
        inputs=inputs,
        outputs=outputs,
        axis=-1,
        linear=linear,
        scale=scale,
        pool=lambda layer, x: x.sum(-1, keepdim=True),
    )


def _convolution(
    kind: type[nn.Module],
    spatial: int,
    linear: Callable[..., Tensor] = lambda layer, x, weight: layer._conv_forward(x, weight, None),
    **form: Any,
) -> LinearFamily:
    def pool(layer: Any, x: Tensor) -> Tensor:
        # A kernel of ones with one output channel per group.
        return linear(layer, x, layer.weight.new_ones(layer.groups, *layer.weight.shape[1:]))

    return replace(_vectors(kind, ("in_channels", "out_channels"), linear), axis=-1 - spatial, pool=pool, **form)


def _transposed(kind: type[nn.Module], spatial: int, function: Callable[..., Tensor]) -> LinearFamily:
    def linear(layer: Any, x: Tensor, weight: Tensor, output_size: list[int] | None = None) -> Tensor:
        extra = layer._output_padding(
            x, output_size, layer.stride, layer.padding, layer.kernel_size, spatial, layer.dilation
        )
        return function(x, weight, None, layer.stride, layer.padding, extra, layer.groups, layer.dilation)

    def pool(layer: Any, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        ones = layer.weight.new_ones(layer.weight.shape[0], 1, *layer.weight.shape[2:])
        return linear(layer, x, ones, output_size)

    return replace(_convolution(kind, spatial, linear), scale=_scale_transposed, pool=pool)


# Layers with their own forward: run it with another weight, or compute an effective weight. In convolutions with
# standardised weights (Qiao et al., 2019; Brock et al., 2021) that is
#
#     y = W' * x + b,      W'_o = g_o c (W_o - mean(W_o)) / sqrt(var(W_o) + eps)        g_o c = 1 without a gain
#
# Noise is added to W'. A draw is a plain convolution with the drawn W', since no stored weight standardises to it.


def _call_own(layer: nn.Module, x: Tensor, weight: Tensor, *args: Any) -> Tensor:
    """Call a layer's own forward with another weight and no bias."""
    bias = layer._parameters.get("bias")
    given = {"weight": weight} | ({} if bias is None else {"bias": torch.zeros_like(bias, dtype=weight.dtype)})
    y: Tensor = functional_call(layer, given, (x, *args))
    return y


def _pool_own(layer: Any, x: Tensor, *args: Any) -> Tensor:
    """Return the sum of input channels under the kernel, one output per group, by the layer's own forward."""
    # All outputs of a group are the same sum: one of each is kept.
    axis = -1 - (layer.weight.dim() - 2)
    y = _call_own(layer, x, torch.ones_like(layer.weight), *args)
    grouped: Tensor = y.reshape(*y.shape[:axis], layer.groups, -1, *y.shape[axis + 1 :])
    return grouped.select(axis, 0)


def _plain_like(kind: Any, layer: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a layer of a torch class with these tensors and the settings of the given layer."""
    plain: nn.Module = kind.__new__(kind)
    plain.__dict__.update(layer.__dict__)
    plain._parameters, plain._buffers, plain._modules = {}, {}, {}
    _give(plain, layer, tensors)
    if isinstance(plain, nn.Linear):
        plain.out_features, plain.in_features = plain.weight.shape
    return plain


def _standardised(layer: Any) -> Tensor:
    """Return the effective weight, by the operation of these layers."""
    gain = layer._parameters.get("gain")
    rows = layer.weight.reshape(1, layer.weight.shape[0], -1)
    scale = None if gain is None else (gain * layer.scale).view(-1)
    normed = F.batch_norm(rows, None, None, weight=scale, training=True, momentum=0.0, eps=layer.eps)
    return normed.reshape_as(layer.weight)


def _same_conv(layer: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    """Pad an image with zeros so that a convolution gives ceil(size / stride) outputs; torch.fx can trace it."""
    pads: list[Any] = []
    sym_max: Any = torch.sym_max  # `max` of Python cannot be traced
    for axis in range(len(layer.kernel_size) - 1, -1, -1):  # F.pad begins with the last axis
        size, stride = x.shape[2 + axis], layer.stride[axis]
        reach = (-(-size // stride) - 1) * stride + (layer.kernel_size[axis] - 1) * layer.dilation[axis] + 1
        needed = sym_max(reach - size, 0)
        pads += [needed // 2, needed - needed // 2]
    return F.conv2d(F.pad(x, pads), weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)


def _plain_same(layer: Any, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a convolution with "same" padding as a traced graph: torch has no such class."""
    graph = fx.Graph()
    names = ("weight",) if layer.bias is None else ("weight", "bias")
    nodes = [graph.placeholder("input"), *map(graph.get_attr, names)]
    tracer = fx.proxy.GraphAppendingTracer(graph)
    graph.output(_same_conv(layer, *(fx.Proxy(node, tracer) for node in nodes)).node)
    plain = fx.GraphModule(layer, graph, "Conv2dSame")
    for name in ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups"):
        setattr(plain, name, getattr(layer, name))
    _give(plain, layer, tensors)
    return plain


def _give(plain: nn.Module, layer: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Set weight and bias of a plain layer; a bias that is not given is shared."""
    for name in ("weight", "bias"):
        old = layer._parameters.get(name)
        if name in tensors:
            old = nn.Parameter(tensors[name], requires_grad=old is None or old.requires_grad)
        plain._parameters[name] = old


# The table


def _channels(kind: type[nn.Module], features: Callable[[Any], int], axis: int) -> Family:
    return Family(kind=kind, inputs=features, outputs=features, axis=axis)


_LINEAR = _vectors(nn.Linear, ("in_features", "out_features"), lambda layer, x, weight: F.linear(x, weight))
_LINEAR_LIKE = replace(
    _LINEAR,
    kind=LinearLike,
    inputs=lambda layer: layer.weight.shape[1],
    outputs=lambda layer: layer.weight.shape[0],
)
_CONV1D = replace(
    _LINEAR,
    kind=Conv1D,
    inputs=_LINEAR_LIKE.outputs,
    outputs=_LINEAR_LIKE.inputs,
    linear=lambda layer, x, weight: x @ weight,
    scale=_scale_transposed,
)
_EMBEDDING = replace(
    _vectors(nn.Embedding, ("num_embeddings", "embedding_dim"), _embed, _scale_transposed),
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
    *(_channels(kind, lambda layer: layer.num_features, 1) for kind in CHANNEL_NORMS),
    _channels(nn.GroupNorm, lambda layer: layer.num_channels, 1),
    *(_channels(kind, lambda layer: math.prod(layer.normalized_shape), -1) for kind in (nn.LayerNorm, nn.RMSNorm)),
    _channels(nn.Dropout, lambda layer: 0, -1),
    *(_channels(kind, lambda layer: 0, 1) for kind in (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)),
    _LINEAR_LIKE,
    _channels(NormLike, lambda layer: layer.weight.numel(), -1),
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

_STANDARDISED = {
    STANDARDISED: _convolution(
        nn.Conv2d, 2, weight=_standardised, plain=partial(_plain_like, nn.Conv2d), form=STANDARDISED
    ),
    STANDARDISED_SAME: _convolution(
        nn.Conv2d, 2, _same_conv, weight=_standardised, plain=_plain_same, form=STANDARDISED_SAME
    ),
}
"""Convolutions with standardised weights, by form."""
