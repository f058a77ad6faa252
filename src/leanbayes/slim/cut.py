"""Cut channels out of layers: which numbers each kind of layer keeps for each channel."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn, Tensor

from leanbayes.layers.family import CHANNEL_NORMS, Conv1D, LinearLike, TRANSPOSED


def cut(layer: Any, inputs: Tensor | None, outputs: Tensor | None) -> None:
    """Keep the given input and output channels of a layer, in place; None keeps all.

    Args:
        layer: a linear map, a norm of single channels, or a PReLU with a slope for each.
        inputs: indices of the input channels that stay, rising; of a grouped convolution, equally many of each group.
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
    """Return the part of a tensor of the shape of a layer's weight that `cut` keeps; call it before cutting."""
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
    """Return what is kept along the first two axes of the weight: (out, in / groups), transposed (in, out / groups)."""
    if _maps_vectors(layer):
        return outputs, inputs
    if isinstance(layer, Conv1D):
        return inputs, outputs
    first, second = (inputs, outputs) if isinstance(layer, TRANSPOSED) else (outputs, inputs)
    size = layer.out_channels if isinstance(layer, TRANSPOSED) else layer.in_channels
    if second is not None and layer.groups > 1:  # every group keeps the same of its channels
        second = second[second < size // layer.groups]
    return first, second


def _maps_vectors(layer: Any) -> bool:
    """Say whether a layer is a Linear, of torch or of another library."""
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


def indices(kept: Tensor) -> Tensor | None:
    """Return where a mask is true, None where it is everywhere: there is nothing to cut."""
    return None if bool(kept.all()) else torch.nonzero(kept).flatten()
