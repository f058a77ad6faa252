"""Example inputs as names, shapes and dtypes, which a file can hold, and inputs made of them again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

Inputs = tuple[tuple[str, tuple[int, ...], str], ...]
"""Name ("" for a positional one), shape and dtype of each input."""


def describe_example(example: Any) -> Inputs:
    """Return name, shape and dtype of example inputs: a tensor, a tuple of tensors or a mapping of them by name.

    Raises:
        TypeError: if there is anything else among them.
    """
    items = example.items() if isinstance(example, Mapping) else [("", one) for one in _several(example)]
    described = []
    for name, tensor in items:
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"expected example inputs of tensors alone, a tensor, a tuple or a mapping by name, got "
                f"{type(tensor).__name__}; leave optional inputs out"
            )
        described.append((str(name), tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
    return tuple(described)


def build_example(inputs: Inputs, device: torch.device) -> Any:
    """Return inputs of these shapes: ones, which are words of any vocabulary and hide nothing in a mask."""
    tensors = [(name, torch.ones(shape, dtype=getattr(torch, dtype), device=device)) for name, shape, dtype in inputs]
    if any(name for name, _ in tensors):
        return dict(tensors)
    return tuple(tensor for _, tensor in tensors)


def as_inputs(values: Iterable[Iterable[Any]]) -> Inputs:
    """Return a description as tuples, whatever a file made of it.

    Raises:
        ValueError: if it is none.
    """
    try:
        found = tuple((str(name), tuple(int(n) for n in shape), str(dtype)) for name, shape, dtype in values)
        if not all(isinstance(getattr(torch, dtype, None), torch.dtype) for _, _, dtype in found):
            raise TypeError("no dtype")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f'expected inputs such as (("pixel_values", (1, 3, 32, 32), "float32"),), got {values!r}'
        ) from error
    return found


def _several(example: Any) -> tuple[Any, ...]:
    return example if isinstance(example, tuple) else (example,)
