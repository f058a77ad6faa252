"""Inputs and outputs of networks: tensors, tuples, mappings, records with `.logits`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn, Tensor
from torch.nn.utils.rnn import PackedSequence

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any]  # called as model(x), model(*x) or model(**x)
Output = Callable[[Any], Tensor]  # picks the tensor out of the output of a model


def call(model: nn.Module, x: Inputs, output: Output | None = None) -> Tensor:
    """Call a model on its inputs and return the tensor in its output."""
    if isinstance(x, Mapping):
        result = run(model, **x)
    elif isinstance(x, tuple) and not isinstance(x, PackedSequence):
        result = run(model, *x)
    else:
        result = run(model, x)
    result = _picked(result) if output is None else output(result)
    if not isinstance(result, Tensor):
        kind = type(result).__name__
        came = f"{kind} with the keys {', '.join(map(str, result))}" if isinstance(result, Mapping) else kind
        raise TypeError(f"expected a tensor from the model, got {came}; pass output= to pick one")
    return result


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first tensor; the CPU if it has none."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def run(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a model; raise a ValueError if a layer gets inputs of the wrong width."""
    try:
        return model(*args, **kwargs)
    except RuntimeError as error:
        reason = None if torch.compiler.is_compiling() else _wrong_width(model, error)
        if reason is None:
            raise
        raise ValueError(reason) from error


def _wrong_width(model: nn.Module, error: RuntimeError) -> str | None:
    """Return a message with the layer that got a wrong width; None for any other error."""
    trace, found = error.__traceback__, None
    while trace is not None:  # the innermost layer is the last one
        names = trace.tb_frame.f_locals
        layer, given = names.get("self"), names.get("input", names.get("x"))
        if isinstance(layer, nn.Module) and isinstance(given, Tensor):
            found = layer, given
        trace = trace.tb_next
    if found is None:
        return None
    layer, given = found
    axis, expected = _width(layer, given)
    if expected is None or not -given.dim() <= axis < given.dim() or given.shape[axis] == expected:
        return None
    path = next((path for path, module in model.named_modules() if module is layer), "").removesuffix(".base")
    name = f"layer '{path}'" if path else "the network"
    return (
        f"{name} expected an input with {expected} features on axis {axis % given.dim()}, got one of shape "
        f"{tuple(given.shape)}; give inputs of the size that the network was made for"
    )


def _width(layer: nn.Module, given: Tensor) -> tuple[int, int | None]:
    """Return the axis and the number of the features of a layer's input; None if unknown."""
    convolves = getattr(layer, "in_channels", None)
    if isinstance(convolves, int):
        return given.dim() - 1 - len(getattr(layer, "kernel_size", ())), convolves
    maps, norms = getattr(layer, "in_features", None), getattr(layer, "num_features", None)
    if isinstance(maps, int):
        return -1, maps
    return 1, norms if isinstance(norms, int) else None


def _picked(result: Any) -> Any:
    """Return the output itself if it is a tensor, else its `.logits` or item 0, else the output."""
    if isinstance(result, Tensor):
        return result
    logits = getattr(result, "logits", None)
    if logits is not None:
        return logits
    if isinstance(result, Mapping):
        return result.get("logits", result)
    return result[0] if isinstance(result, (tuple, list)) and result else result


def map_leaves(inputs: Any, change: Callable[[Any], Any]) -> Any:
    """Change every leaf of nested inputs: all but mappings, tuples and lists; a packed sequence is a leaf."""
    if isinstance(inputs, Tensor):  # before Mapping, whose check dynamo of torch 2.4 does not follow
        return change(inputs)
    if isinstance(inputs, Mapping):
        return {name: map_leaves(item, change) for name, item in inputs.items()}
    if isinstance(inputs, (tuple, list)) and not isinstance(inputs, PackedSequence):
        return type(inputs)(map_leaves(item, change) for item in inputs)
    return change(inputs)


def map_rows(inputs: Any, rows: int, change: Callable[[Tensor], Tensor], axis: int = 0) -> Any:
    """Change every tensor in nested inputs that has the rows of the batch on an axis."""

    def of_rows(leaf: Any) -> Any:
        return change(leaf) if isinstance(leaf, Tensor) and leaf.dim() > axis and leaf.shape[axis] == rows else leaf

    return map_leaves(inputs, of_rows)


def repeat_rows(inputs: Any, rows: int, repeats: int) -> Any:
    """Repeat the batch as a whole: rows 0..B-1, then again."""
    return map_rows(inputs, rows, lambda tensor: tensor.repeat(repeats, *[1] * (tensor.dim() - 1)))


def slice_rows(inputs: Any, rows: int, start: int, stop: int) -> Any:
    """Take some rows of the batch."""
    return map_rows(inputs, rows, lambda tensor: tensor[start:stop])


def pairs_of(data: Any, size: int) -> Iterator[tuple[Any, Tensor]]:
    """Yield batches `(inputs, targets)`: those of an iterable, or `size` rows at a time of one pair of tensors.

    Raises:
        TypeError: if the data are neither.
    """
    if not isinstance(data, tuple):
        for batch in data:
            if not (isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[1], Tensor)):
                raise TypeError(f"expected batches (inputs, targets), got {type(batch).__name__}; give a DataLoader")
            yield tuple(batch[0]) if isinstance(batch[0], list) else batch[0], batch[1]
        return
    if not (len(data) == 2 and isinstance(data[1], Tensor)):
        raise TypeError(f"expected one pair (inputs, targets) of tensors, got a tuple of {len(data)}")
    x, y = data
    for start in range(0, len(y), size):
        yield slice_rows(x, len(y), start, start + size), y[start : start + size]


def leading_rows(inputs: Any) -> int | None:
    """Return the size of the first axis of the first tensor in nested inputs; None without a tensor."""
    first = _first(inputs)
    if isinstance(first, PackedSequence):
        return int(first.batch_sizes[0])
    return None if first is None else first.shape[0]


def rows_of(module: nn.Module, inputs: Any) -> int | None:
    """Return the number of rows of a call along `row_axis`; a sequence without a batch axis is one row."""
    first, says = _first(inputs), _batch_first(module)
    if first is None or says is None or isinstance(first, PackedSequence):
        return leading_rows(inputs)
    if first.is_floating_point() and first.dim() < 3:
        return 1
    return first.shape[row_axis(module)]


def row_axis(module: nn.Module) -> int:
    """Return the axis of the rows in a module's inputs: 1 under `batch_first=False` (torch's default), else 0."""
    return 1 if _batch_first(module) is False else 0


def divisible(module: nn.Module, inputs: Any) -> bool:
    """Return whether a batch can be cut along its first axis: it is not packed, and its rows are there."""
    return row_axis(module) == 0 and not isinstance(_first(inputs), PackedSequence)


def _batch_first(module: nn.Module) -> bool | None:
    """Return `batch_first` of a module or of torch's stack of layers; None if it has none."""
    if isinstance(module, (nn.TransformerEncoder, nn.TransformerDecoder)):
        module = module.layers[0]
    if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        module = module.self_attn
    says = getattr(module, "batch_first", None)
    return says if isinstance(says, bool) else None


def _first(inputs: Any) -> Tensor | PackedSequence | None:
    """Return the first tensor with an axis in nested inputs."""
    if isinstance(inputs, PackedSequence):
        return inputs
    if isinstance(inputs, Tensor):
        return inputs if inputs.dim() else None
    if isinstance(inputs, (tuple, list)):  # before Mapping, whose check dynamo of torch 2.4 does not follow
        for item in inputs:  # a loop: up to torch 2.11, dynamo does not follow a generator here
            if (first := _first(item)) is not None:
                return first
    return _first(tuple(inputs.values())) if isinstance(inputs, Mapping) else None


def to_device(inputs: Any, device: torch.device) -> Any:
    """Move every tensor in nested inputs."""
    kinds: Any = (Tensor, PackedSequence)
    return map_leaves(inputs, lambda leaf: leaf.to(device) if isinstance(leaf, kinds) else leaf)


def without_arrays(inputs: Any, dtype: torch.dtype) -> Any:
    """Convert every NumPy array in nested inputs to a tensor; real numbers get the given dtype."""

    def converted(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray):
            return leaf
        if leaf.dtype.kind not in "biufc":
            raise TypeError(f"expected an array of numbers, got one of {leaf.dtype}; convert it before")
        own = np.array(leaf, dtype=leaf.dtype.newbyteorder("="), order="C")  # a copy: it may be read-only
        return torch.from_numpy(own).to(dtype) if own.dtype.kind == "f" else torch.from_numpy(own)

    return map_leaves(inputs, converted)


def cloned(inputs: Any) -> Any:
    """Copy every tensor in nested inputs."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            return leaf._replace(data=leaf.data.clone())
        return leaf.clone() if isinstance(leaf, Tensor) else leaf

    return map_leaves(inputs, copied)


def versions(inputs: Any) -> list[int]:
    """Return the number of changes in place of every tensor in nested inputs; 0 for inference mode."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors_in(inputs)]


def tensors_in(inputs: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested inputs."""
    if isinstance(inputs, Tensor):
        yield inputs
    elif isinstance(inputs, Mapping):
        yield from tensors_in(tuple(inputs.values()))
    elif isinstance(inputs, (tuple, list)):
        for item in inputs:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(inputs):
        yield from tensors_in(tuple(vars(inputs).values()))
