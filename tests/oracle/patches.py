"""Copies of patched tensors, and networks whose copies are chosen by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn, Tensor

from leanbayes.methods.patch import PatchLayer
from leanbayes.runtime.passes import draws


def copies_of(layer: PatchLayer, name: str) -> Tensor:
    """Return the K copies of the "weight" or the "bias" of a layer, flattened: (K, n)."""
    return dict(zip(layer.names, torch.split(layer.every_copy(), layer.sizes, 1), strict=True))[name]


@contextmanager
def patched(model: nn.Module, indices: Mapping[str, int | Tensor]) -> Iterator[nn.Module]:
    """Fix which copies a model uses while the context is open, by path of the patched layer.

    Args:
        model: a converted model.
        indices: for every patched layer the number of its copy (EMP), or one number for each element of its weight,
            then of its bias (ECMP).

    Example:
        >>> with patched(bnn, {"bn1": 3, "fc": 0}):
        ...     y = bnn(x)
    """
    layers = {layer.path: layer for layer in model.modules() if isinstance(layer, PatchLayer)}
    if set(indices) != set(layers):
        raise ValueError(f"expected an index for each of {', '.join(layers)}, got {', '.join(indices) or 'none'}")
    with draws(model, seed=0):
        for path, index in indices.items():
            layer = layers[path]
            layer.state.noise[path] = (_noise_of(layer, torch.as_tensor(index)),)
        yield model


def _noise_of(layer: PatchLayer, index: Tensor) -> Tensor:
    """Return the uniform numbers that `pick` turns into these indices: the middles of their shares."""
    if index.numel() not in (1, layer.nodes) or not 0 <= int(index.min()) <= int(index.max()) < layer.copies:
        raise ValueError(
            f"layer '{layer.path}' expected 1 or {layer.nodes} indices from 0 to {layer.copies - 1}, got "
            f"{index.numel()} from {int(index.min())} to {int(index.max())}"
        )
    shares = layer.probabilities.detach()
    middles = shares.cumsum(0) - shares / 2
    return middles[index.to(layer.device).flatten()].expand(layer.nodes)[None]
