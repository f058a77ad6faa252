"""What goes into a network and what comes out: tensors, tuples, mappings, records with `.logits`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn, Tensor

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any]
"""Called as model(x), model(*x) or model(**x)."""

Output = Callable[[Any], Tensor]
"""Picks the tensor out of what a model returns."""


def call(model: nn.Module, x: Inputs, output: Output | None = None) -> Tensor:
    """Call a model on its inputs and pick the tensor out of what it returns."""
    if isinstance(x, Mapping):
        result = model(**x)
    elif isinstance(x, tuple):
        result = model(*x)
    else:
        result = model(x)
    if output is not None:
        result = output(result)
    elif not isinstance(result, Tensor):
        logits = getattr(result, "logits", None)
        if logits is None:
            logits = result.get("logits") if isinstance(result, Mapping) else result[0]
        result = logits
    if not isinstance(result, Tensor):
        raise TypeError(f"expected a tensor from the model, got {type(result).__name__}; pass output= to pick one")
    return result


def map_rows(inputs: Any, rows: int, change: Callable[[Tensor], Tensor]) -> Any:
    """Change every tensor that has the batch on its first axis, anywhere in nested inputs."""
    if isinstance(inputs, Tensor):
        return change(inputs) if inputs.dim() and inputs.shape[0] == rows else inputs
    if isinstance(inputs, Mapping):
        return {name: map_rows(item, rows, change) for name, item in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        return type(inputs)(map_rows(item, rows, change) for item in inputs)
    return inputs


def repeat_rows(inputs: Any, rows: int, repeats: int) -> Any:
    """Repeat the batch as a whole: rows 0..B-1, then again."""
    return map_rows(inputs, rows, lambda tensor: tensor.repeat(repeats, *[1] * (tensor.dim() - 1)))


def slice_rows(inputs: Any, rows: int, start: int, stop: int) -> Any:
    """Take some rows of the batch."""
    return map_rows(inputs, rows, lambda tensor: tensor[start:stop])


def leading_rows(inputs: Any) -> int | None:
    """Return the size of the first axis of the first tensor in nested inputs; None where there is no tensor."""
    if isinstance(inputs, Tensor):
        return inputs.shape[0] if inputs.dim() else None
    if isinstance(inputs, Mapping):
        inputs = tuple(inputs.values())
    if isinstance(inputs, (tuple, list)):
        for item in inputs:
            rows = leading_rows(item)
            if rows is not None:
                return rows
    return None


def to_device(inputs: Any, device: torch.device) -> Any:
    """Move every tensor in nested inputs."""
    if isinstance(inputs, Tensor):
        return inputs.to(device)
    if isinstance(inputs, Mapping):
        return {name: to_device(item, device) for name, item in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        return type(inputs)(to_device(item, device) for item in inputs)
    return inputs
