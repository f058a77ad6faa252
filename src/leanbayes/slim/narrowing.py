"""Cut a network whose channels are ordered down to a width: fewer parameters, less work, the same function.

Channels are dropped in the layers that make, normalise and read them, through sums, concatenations, flattening, grouped
and depthwise convolutions (`leanbayes.layers.channels`). torch-pruning does this for plain networks, but needs example
inputs, has no stochastic layers, and would choose other channels.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn, Tensor

from leanbayes.core.conversion import attach_likelihood, own_likelihood, unwrap
from leanbayes.core.plain import mean
from leanbayes.layers.channels import Channels, Layout
from leanbayes.layers.family import CHANNEL_NORMS, Conv1D, LINEAR_MAPS, LinearLike, TRANSPOSED
from leanbayes.methods._base import plain_copy, StochasticLayer
from leanbayes.methods.nested.eligibility import unordered
from leanbayes.methods.nested.layer import channels_of, NestedLayer, NestedNorm, plain_layer
from leanbayes.methods.nested.units import OrderingUnit
from leanbayes.runtime.norm import update_norm

NormData = Tensor | tuple[Any, Any] | Iterable[Any]


def extract(
    model: nn.Module, width: float | int, *, data: NormData | None = None, batches: int | None = None
) -> nn.Module:
    """Return a plain, physically narrower network of posterior means.

    Args:
        model: converted with `lb.NestedDropout`.
        width: the share of channel groups to keep (a float), or their number (an int).
        data: training inputs over which batch norm statistics are collected again; two batches of 512 suffice (C.2).
            None keeps the trained ones, and the result equals the masked network exactly.
        batches: number of batches of `data` to use; None uses all.

    Example:
        >>> small = lb.slim.extract(bnn, width=0.25, data=loader, batches=2)
    """
    small = mean(narrow(model, width))
    if data is not None:
        update_norm(small, data, batches=batches)
    return small


def narrow(
    model: nn.Module, width: float | int, *, data: NormData | None = None, batches: int | None = None
) -> nn.Module:
    """Return a narrower network of a fixed width that is still stochastic: its weights keep their noise.

    It is a converted model like any other (`predict`, `evaluate`, `draw`, `fit`). Arguments as of `extract`.
    """
    small = copy.deepcopy(unwrap(model))
    channels = channels_of(small)
    units = units_of(small, channels)
    if not units:
        raise ValueError(
            f"expected a model whose channels are ordered, got one without ordering units; {_remedy(small, channels)}"
        )
    kept = {root: unit.kept(width) for root, unit in units.items()}
    likelihood = own_likelihood(small)
    with torch.no_grad():
        _settle(small, width)
        for path, module in list(small.named_modules()):
            if path in channels.outputs:
                inputs, outputs = (_kept(channels, where[path], kept) for where in (channels.inputs, channels.outputs))
                if inputs is not None or outputs is not None:
                    _cut(path, module, inputs, outputs)
    if likelihood is not None:
        attach_likelihood(small, likelihood)  # the layer that stored it may be plain now
    if data is not None:
        update_norm(small, data, batches=batches)
    return small


def _remedy(model: nn.Module, channels: Channels) -> str:
    """Return why no channels of a model are ordered, or how to order them."""
    nested = next((layer for layer in model.modules() if isinstance(layer, NestedLayer)), None)
    if nested is None:
        return "convert it with lb.NestedDropout() and train it"
    left_out = {path for path, layer in model.named_modules() if isinstance(layer, LINEAR_MAPS)}
    found = nested.method.obstacles(channels, left_out & set(channels.outputs))
    if all(found.values()):
        return unordered(channels, found)
    return "if it was narrowed already, narrow the original network; otherwise, convert more of its layers"


def units_of(model: nn.Module, channels: Channels) -> dict[int, OrderingUnit]:
    """Return the ordering unit of every ordered stream, by stream number."""
    found: dict[int, OrderingUnit] = {}
    for path, layer in model.named_modules():
        layout = channels.outputs.get(path)
        if isinstance(layer, NestedLayer) and layer.posterior.order is not None and layout:
            found[channels.root(layout[0].stream)] = layer.posterior.order
    return found


def _settle(model: nn.Module, width: float | int) -> None:
    """Fold the factors of a width into weights and norms, and remove the ordering units."""
    for layer in list(model.modules()):
        if isinstance(layer, NestedLayer) and layer.posterior.order is not None:
            layer.base = plain_copy(layer.base, layer.at_width(width)) if layer.masked else layer.base
            layer.leave()
    plain = {id(layer): found for layer in model.modules() if (found := _plain(layer, width)) is not None}
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if id(child) in plain:
                module._modules[name] = plain[id(child)]


def _plain(layer: Any, width: float | int) -> nn.Module | None:
    """Return the replacement of a layer whose weight depends on an order or a parametrisation; None keeps it."""
    if isinstance(layer, NestedNorm):
        return layer.at_width(width)
    if isinstance(layer, NestedLayer):
        return None if layer.method.weight_noise else layer.freeze()
    if nn.utils.parametrize.is_parametrized(layer, "weight"):
        return plain_copy(layer, {"weight": layer.weight})
    return None


def _kept(channels: Channels, layout: Layout | None, kept: dict[int, Tensor]) -> Tensor | None:
    """Return the kept indices of a channel axis; None for all."""
    if layout is None:
        return None
    parts = []
    for part in layout:
        root = channels.root(part.stream)
        every = torch.ones(channels.stream(root).size, dtype=torch.bool)
        parts.append(kept.get(root, every).cpu().repeat_interleave(part.repeat))
    mask = torch.cat(parts)
    return None if bool(mask.all()) else torch.nonzero(mask).flatten()


def _cut(path: str, module: nn.Module, inputs: Tensor | None, outputs: Tensor | None) -> None:
    layer = plain_layer(module)
    if isinstance(module, NestedLayer):
        old = module.posterior.log_alpha
        new = cut_like_weight(layer, old.detach(), inputs, outputs)
        module.posterior.log_alpha = nn.Parameter(new.clone(), requires_grad=old.requires_grad)
        module.nodes = new.numel()
    elif isinstance(module, StochasticLayer):
        raise ValueError(
            f"layer '{path}' touches channels that are dropped, but {type(module.method).__name__} cannot be narrowed; "
            "leave it out of that conversion, or keep it away from ordered channels with where="
        )
    cut(layer, inputs, outputs)


def cut(layer: Any, inputs: Tensor | None, outputs: Tensor | None) -> None:
    """Keep the given input and output channels of a layer, in place; None keeps all.

    Args:
        layer: a linear map, a norm of single channels, or a PReLU with a slope for each.
        inputs: rising indices of the kept input channels, the same number in each group of a grouped convolution.
        outputs: the same of output channels.
    """
    if _maps_vectors(layer):
        _cut_linear(layer, inputs, outputs)
    elif isinstance(layer, Conv1D):
        _keep(layer, "weight", inputs, 0)
        _keep(layer, "weight", outputs, 1)
        _keep(layer, "bias", outputs, 0)
        inside: Any = layer
        inside.nx, inside.nf = inside.weight.shape
    elif isinstance(layer, (*CHANNEL_NORMS, nn.PReLU)):
        for name in ("weight", "bias", "running_mean", "running_var"):
            _keep(layer, name, outputs, 0)
        if isinstance(layer, nn.PReLU):
            layer.num_parameters = len(layer.weight)
        elif outputs is not None:
            layer.num_features = len(outputs)
    else:
        _cut_convolution(layer, inputs, outputs)


def cut_like_weight(layer: Any, tensor: Tensor, inputs: Tensor | None, outputs: Tensor | None) -> Tensor:
    """Return the part of a tensor in the shape of the weight that `cut` will keep."""
    first, second = _weight_indices(layer, inputs, outputs)
    tensor = tensor if first is None else tensor[first]
    return tensor if second is None else tensor[:, second]


def _cut_linear(layer: Any, inputs: Tensor | None, outputs: Tensor | None) -> None:
    _keep(layer, "weight", outputs, 0)
    _keep(layer, "weight", inputs, 1)
    _keep(layer, "bias", outputs, 0)
    sizes = dict(zip(("out", "in"), layer.weight.shape, strict=True))
    for name in ("out_features", "in_features", "out_channels", "in_channels"):
        if name in vars(layer):
            setattr(layer, name, sizes[name.partition("_")[0]])


def _cut_convolution(layer: Any, inputs: Tensor | None, outputs: Tensor | None) -> None:
    depthwise = layer.groups == layer.in_channels == layer.out_channels and layer.groups > 1
    first, second = _weight_indices(layer, inputs, outputs)
    _keep(layer, "weight", first, 0)
    _keep(layer, "weight", second, 1)
    _keep(layer, "bias", outputs, 0)
    layer.in_channels = layer.in_channels if inputs is None else len(inputs)
    layer.out_channels = layer.out_channels if outputs is None else len(outputs)
    if depthwise:
        layer.groups = layer.out_channels


def _weight_indices(layer: Any, inputs: Tensor | None, outputs: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the kept indices of the weight's first two axes: (out, in / groups), transposed (in, out / groups)."""
    if _maps_vectors(layer):
        return outputs, inputs
    if isinstance(layer, Conv1D):
        return inputs, outputs
    first, second = (inputs, outputs) if isinstance(layer, TRANSPOSED) else (outputs, inputs)
    size = layer.out_channels if isinstance(layer, TRANSPOSED) else layer.in_channels
    if second is not None and layer.groups > 1:  # every group keeps the same channels
        second = second[second < size // layer.groups]
    return first, second


def _maps_vectors(layer: Any) -> bool:
    weight: Tensor = layer.weight
    return isinstance(layer, nn.Linear) or (weight.dim() == 2 and isinstance(layer, LinearLike))


def _keep(layer: Any, name: str, index: Tensor | None, axis: int) -> None:
    tensor: Tensor | None = getattr(layer, name, None)
    if tensor is None or index is None:
        return
    kept = tensor.detach().index_select(axis, index.to(tensor.device)).clone()
    if isinstance(tensor, nn.Parameter):
        kept = nn.Parameter(kept, requires_grad=tensor.requires_grad)
    setattr(layer, name, kept)
