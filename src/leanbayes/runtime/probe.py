"""Find the axis of the rows in each layer's input: run a copy of the network on a few rows, in another order.

An axis holds the rows if the input is permuted there like the batch. A layer whose input neither changes nor grows with
the batch has no rows. Any other change means that rows are mixed (a graph, attention over the batch): they are no
independent examples, and one draw serves the whole batch.

The copy is in eval mode, with posterior means, without hooks, with its own buffers; the random state is restored.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn, Tensor
from torch.nn.utils.rnn import PackedSequence

from leanbayes.layers.hooks import HOOKS
from leanbayes.runtime.batches import Inputs, map_leaves, map_rows, row_axis, rows_of, tensors_in
from leanbayes.runtime.distributed import is_shard
from leanbayes.runtime.passes import draws, members_in, PassState, states_of
from leanbayes.runtime.rows import Layout, ONE_DRAW, ROWS

FEW = 3  # rows of a probe; all rows of the batch for a network that needs more
EXPLAINED = 0.1  # largest error of a layout, relative to the change of the input that it has to explain
SAME = 1e-6  # largest relative change of an input that counts as unchanged
Calls = dict[str, list[Tensor]]  # inputs of every call of every layer, by path


class LearnRows:
    """A hook of a converted root: before the first pass over several rows, find their axis in each layer."""

    def __init__(self, state: PassState) -> None:
        self.state = state

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not (self.state.rows_known or self.state.fixed or torch.compiler.is_compiling()):
            learn_rows(module, args, kwargs)


def learn_rows_from(model: nn.Module, x: Inputs) -> None:
    """Find the axis of the rows of x in each layer of a converted model, unless it is known."""
    if torch.compiler.is_compiling() or all(state.rows_known for state, _ in states_of(model)):
        return
    members = members_in(model)
    if members is not None:
        for member in members:  # of an ensemble, each with rows of its own
            learn_rows_from(member, x)
    elif isinstance(x, Mapping):
        learn_rows(model, (), x)
    else:
        learn_rows(model, x if type(x) is tuple else (x,), {})


def learn_rows(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Find the axis of the rows of a call in each layer of a converted model, and set it.

    If the network cannot be probed, its layers accept only inputs with the rows of the batch on their first axis.
    """
    rows = rows_of(model, (args, kwargs))
    is_transformed = torch._C._functorch.is_functorch_wrapped_tensor
    if rows is None or rows < 2 or any(map(is_transformed, tensors_in((args, dict(kwargs))))):
        return
    if any(map(is_shard, model.parameters())):  # of `fully_shard`: a copy cannot share them
        return
    for state, _ in states_of(model):
        state.rows_known = True
    layers = _waiting(model)
    if not layers:
        return
    try:
        found, used = probe(model, args, kwargs, list(layers))
    except Exception:  # user code on other inputs: anything may happen
        return
    mixed = [path for path, layout in found.items() if layout is None]
    if mixed:
        others = f" and {len(mixed) - 1} other layers" if len(mixed) > 1 else ""
        warnings.warn(
            f"the rows of the batch are mixed or left out before layer '{mixed[0]}'{others}: they are no independent "
            "examples, so one draw serves the whole batch. If they are, pass lb.convert(..., batch_axis={'*': 0})",
            stacklevel=3,
        )
    for path, layer in layers.items():
        layer.layout, layer.used = ONE_DRAW if mixed else found.get(path), path in used


def place_known_rows(model: nn.Module) -> None:
    """Set the first axis as that of the rows if all classes of a model are known to keep it."""
    homes = {type(module).__module__ for module in model.modules()}
    if all(home.startswith("torch.nn.") or home.split(".")[0] == "leanbayes" for home in homes):
        for layer in _waiting(model).values():
            layer.layout = ROWS


def _waiting(model: nn.Module) -> dict[str, Any]:
    """Return the layers with an unknown layout, by path."""
    layers = ((path, module) for path, module in model.named_modules() if getattr(type(module), "layout", ROWS) is None)
    return {path: layer for path, layer in layers if getattr(layer, "layout", ROWS) is None}


def probe(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], paths: Sequence[str]
) -> tuple[dict[str, Layout | None], set[str]]:
    """Return the layouts of the called layers, None for mixed rows, and the paths of all used layers.

    The arguments are those of a call with at least two rows. Errors are those of the network.
    """
    rows, axis = rows_of(model, (args, kwargs)), row_axis(model)
    if rows is None or rows < 2 or any(isinstance(x, PackedSequence) for x in (*args, *kwargs.values())):
        raise ValueError("expected inputs with at least two rows that can be put in another order")
    twin = _twin(model)
    attempts = [_Runs(twin, (args, dict(kwargs)), rows, axis, paths, square=square) for square in (True, False)]
    with draws(twin, mean=True):
        for state, _ in states_of(twin):
            state.live = True  # reads of a weight count as use
        found = _first_without_mixed([(runs, n) for runs in attempts for n in dict.fromkeys((min(rows, FEW), rows))])
    return found, {path for path in paths if path in found or getattr(twin.get_submodule(path), "used", False)}


def _first_without_mixed(attempts: Sequence[tuple[_Runs, int]]) -> dict[str, Layout | None]:
    """Return the layouts of the first attempt without mixed rows, else those of the first that runs."""
    results: list[dict[str, Layout | None]] = []
    failure: Exception | None = None
    for runs, count in attempts:
        try:
            results.append(_compare(runs, count))
        except Exception as error:  # user code on other inputs: anything may happen
            failure = error
        else:
            if None not in results[-1].values():
                return results[-1]
    if not results:
        assert failure is not None
        raise failure
    return results[0]


class _Runs:
    """Runs of a copy of the network on chosen rows; a (R, R) tensor has rows only if it is `square`."""

    def __init__(
        self, twin: nn.Module, inputs: Any, rows: int, axis: int, paths: Sequence[str], *, square: bool
    ) -> None:
        self.twin, self.rows, self.axis, self.paths, self.square = twin, rows, axis, paths, square
        self.inputs = self._changed(inputs, _distinct(axis))

    def run(self, order: Sequence[int]) -> Calls:
        """Return the inputs of all layers in a pass over these rows, with a fixed random state."""
        chosen = list(order)
        inputs = self._changed(self.inputs, lambda x: x.index_select(self.axis, torch.tensor(chosen, device=x.device)))
        calls: Calls = {}
        layers = {path: self.twin.get_submodule(path) for path in self.paths}
        handles = [layer.register_forward_pre_hook(_recorder(calls, path)) for path, layer in layers.items()]
        args, kwargs = copy.deepcopy(inputs)
        devices = sorted({x.device.index or 0 for x in tensors_in((args, kwargs)) if x.is_cuda})
        try:
            with torch.no_grad(), torch.random.fork_rng(devices):
                torch.manual_seed(0)
                self.twin(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        return calls

    def _changed(self, inputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """Change all tensors with the rows of the batch on their axis, anywhere in nested inputs."""

        def own(x: Tensor) -> Tensor:
            return x if tuple(x.shape) == (self.rows, self.rows) and not self.square else change(x)

        detached = map_leaves(inputs, lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf)
        return map_rows(detached, self.rows, own, self.axis)


def _compare(runs: _Runs, count: int) -> dict[str, Layout | None]:
    """Compare passes over rows in order, in another order, and over fewer rows; None for mixed rows."""
    order = [*range(1, count), 0]
    straight, turned = runs.run(range(count)), runs.run(order)
    fewer: Calls = {}
    with suppress(Exception):  # user code on a smaller batch: anything may happen
        fewer = runs.run(range(count - 1))
    found: dict[str, Layout | None] = {}
    for path, calls in straight.items():
        others, shorter = turned.get(path, []), list[Tensor | None](fewer.get(path, []))
        shorter += [None] * (len(calls) - len(shorter))
        each = [_layout(a, b, count, order, c) for a, b, c in zip(calls, others, shorter, strict=False)]
        found[path] = _agreed(each) if len(calls) == len(others) else None
    if any(layout is None for layout in found.values()):
        found |= _local(runs, count, straight, [path for path, layout in found.items() if layout is None])
    return found


def _layout(a: Tensor, b: Tensor, count: int, order: Sequence[int], fewer: Tensor | None) -> Layout | None:
    """Return the layout under which `b` is `a` with its rows in another order; None if there is none."""
    if a.shape != b.shape:
        return None
    change = _distance(a, b)
    if change <= SAME * max(float(a.abs().max()) if a.numel() else 0.0, 1e-30):
        return ONE_DRAW if fewer is None or fewer.shape == a.shape else _grown(a, fewer)
    fits = [
        layout
        for layout in _candidates(a, count)
        if _distance(_permuted(a, layout, count, order), b) <= EXPLAINED * change
    ]
    return fits[0] if fits else None


def _local(runs: _Runs, count: int, straight: Calls, paths: Sequence[str]) -> dict[str, Layout | None]:
    """Find the layouts of a network that draws random numbers: change one row and compare entries."""
    changed = []
    for row in range(2):
        content = list(range(count))
        content[row] = count - 1 if count > 2 else 1 - row
        changed.append(runs.run(content))
    found: dict[str, Layout | None] = {}
    for path in paths:
        others = [calls.get(path, []) for calls in changed]
        if any(len(calls) != len(straight[path]) for calls in others):
            continue
        each = [_confined(a, [calls[k] for calls in others], count) for k, a in enumerate(straight[path])]
        found[path] = _agreed(each)
    return found


def _confined(a: Tensor, changed: Sequence[Tensor], count: int) -> Layout | None:
    """Return the layout under which a change of row r changes entries of row r alone."""
    if any(b.shape != a.shape for b in changed):
        return None
    moved = [a != b for b in changed]
    if not any(bool(m.any()) for m in moved):
        return ONE_DRAW
    for layout in _candidates(a, count):
        assert layout.axis is not None
        entries = torch.arange(a.shape[layout.axis], device=a.device)
        of_row = entries % count if layout.tiled else entries // (len(entries) // count)
        others = (m.index_select(layout.axis, (of_row != row).nonzero().flatten()) for row, m in enumerate(moved))
        if not any(bool(other.any()) for other in others):
            return layout
    return None


def _candidates(a: Tensor, count: int) -> Iterator[Layout]:
    """Yield the layouts that an activation may have by its shape, the usual one first."""
    if a.dim() and a.shape[0] and a.shape[0] % count == 0:
        yield ROWS
    for axis in range(1, a.dim() - 1):
        if a.shape[axis] == count:
            yield Layout(axis)
    if a.dim() and a.shape[0] > count and a.shape[0] % count == 0:
        yield Layout(0, tiled=True)


def _permuted(a: Tensor, layout: Layout, count: int, order: Sequence[int]) -> Tensor:
    """Return an activation with its rows in another order."""
    assert layout.axis is not None
    entries = torch.arange(a.shape[layout.axis], device=a.device)
    turned = entries.view(-1, count)[:, order] if layout.tiled else entries.view(count, -1)[order]
    return a.index_select(layout.axis, turned.flatten())


def _grown(a: Tensor, fewer: Tensor) -> Layout:
    """Return the layout of an input that is the same for all rows but has an axis that grows with them."""
    if fewer.dim() != a.dim():
        return ONE_DRAW
    axes = [axis for axis in range(a.dim() - 1) if a.shape[axis] != fewer.shape[axis]]
    return Layout(axes[0]) if axes else ONE_DRAW


def _agreed(layouts: Sequence[Layout | None]) -> Layout | None:
    """Return the layout of a layer that is called several times: one draw per batch if calls differ."""
    if None in layouts:
        return None
    return layouts[0] if len(set(layouts)) == 1 else ONE_DRAW


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max()) if a.numel() else 0.0


def _recorder(calls: Calls, path: str) -> Callable[..., None]:
    """Return a hook that keeps a copy of the first tensor of every call."""

    def record(layer: nn.Module, args: Any) -> None:
        first = next(tensors_in(args), None)
        if first is not None:
            copied = first.detach().to(torch.float64, copy=True)
            words = not first.is_floating_point()  # numbers of words have no axis of channels
            calls.setdefault(path, []).append(copied[..., None] if words else copied)

    return record


def _twin(model: nn.Module) -> nn.Module:
    """Return a copy of a network in eval mode, without hooks, which shares its parameters but no buffer."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for holder in (module._parameters, module.__dict__):
            memo.update((id(value), value) for value in holder.values() if isinstance(value, Tensor))
    twin: nn.Module = copy.deepcopy(model, memo)
    for module in twin.modules():
        for name in HOOKS:
            getattr(module, name).clear()
    return twin.eval()


def _distinct(axis: int) -> Callable[[Tensor], Tensor]:
    """Return a function that makes rows differ: numbers get noise, words that are equal in all rows are shifted."""
    generator = torch.Generator().manual_seed(0)

    def change(x: Tensor) -> Tensor:
        if x.is_floating_point():
            size = x.float().abs().mean().item() or 1.0
            return x + 0.1 * size * torch.randn(x.shape, generator=generator).to(x.device, x.dtype)
        first = x.select(axis, 0).unsqueeze(axis)
        if x.dtype == torch.bool or x.dim() < 2 or not bool((x == first).all()):
            return x
        return torch.stack([part.roll(k, -1) for k, part in enumerate(x.unbind(axis))], axis)

    return change
