"""Find out where each layer sees the rows of a batch: run a copy of the network on a few rows, in another order.

A layer follows the rows along an axis if its input is permuted there as the batch is. A layer whose input does not
change and does not grow with the batch sees no rows. Where an input changes in no such way, rows are mixed (a graph,
attention over the batch); then rows are no independent examples, and one draw serves the whole batch.

The copy is in eval mode, with posterior means, without hooks, with buffers of its own; random numbers are restored.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn, Tensor
from torch.nn.utils.rnn import PackedSequence

from leanbayes.layers.hooks import HOOKS
from leanbayes.runtime.batches import Inputs, row_axis, rows_of, tensors_in
from leanbayes.runtime.distributed import is_shard
from leanbayes.runtime.passes import draws, members_in, PassState, states_of
from leanbayes.runtime.rows import Layout, ONE_DRAW, ROWS

FEW = 3
"""Rows of a probe; all rows of the batch where a network does not take so few."""

EXPLAINED = 0.1
"""Largest error of a layout, relative to the change of the input that it has to explain."""

SAME = 1e-6
"""Largest change of an input that did not change, relative to its size."""

Calls = dict[str, list[Tensor]]
"""Inputs of every call of every layer, by path."""


class LearnRows:
    """A hook of a converted root: before the first pass over several rows, find out where its layers see them."""

    def __init__(self, state: PassState) -> None:
        """Take the state that the layers share."""
        self.state = state

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Look at the arguments of a call."""
        if not (self.state.rows_known or self.state.fixed or torch.compiler.is_compiling()):
            learn_rows(module, args, kwargs)


def learn_rows_from(model: nn.Module, x: Inputs) -> None:
    """Find out where the layers of a converted model see the rows of x; do nothing if that is known."""
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
    """Find out where the layers of a converted model see the rows of a call, and tell them.

    A network that cannot be probed is left alone: its layers then take only inputs with as many entries on their first
    axis as the batch has rows.
    """
    rows = rows_of(model, (args, kwargs))
    if rows is None or rows < 2 or any(map(_transformed, tensors_in((args, dict(kwargs))))):
        return
    if any(map(is_shard, model.parameters())):  # of `fully_shard`: a copy would not have them
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
        _warn_of_mixed(mixed)
    for path, layer in layers.items():
        layer.layout, layer.used = ONE_DRAW if mixed else found.get(path), path in used


def _warn_of_mixed(paths: Sequence[str]) -> None:
    others = f" and {len(paths) - 1} other layers" if len(paths) > 1 else ""
    warnings.warn(
        f"the rows of the batch are mixed or left out before layer '{paths[0]}'{others}: they are no independent "
        "examples, so one draw serves the whole batch. If they are, pass lb.convert(..., batch_axis={'*': 0})",
        stacklevel=4,
    )


def place_known_rows(model: nn.Module) -> None:
    """Tell the layers of a converted model that rows are on the first axis, if its classes are known to keep them."""
    if all(map(_keeps_rows_first, model.modules())):
        for layer in _waiting(model).values():
            layer.layout = ROWS


def _waiting(model: nn.Module) -> dict[str, Any]:
    """Return the stochastic layers that do not know where their rows are, by path."""
    return {path: layer for path, layer in model.named_modules() if _waits(layer)}


def _waits(module: nn.Module) -> bool:
    """Return whether a module is a stochastic layer that does not know where its rows are."""
    return getattr(type(module), "layout", ROWS) is None and getattr(module, "layout", ROWS) is None


def _keeps_rows_first(module: nn.Module) -> bool:
    """Return whether a module is of torch's own layers, or of leanbayes."""
    home = type(module).__module__
    return home.startswith("torch.nn.") or home.split(".")[0] == "leanbayes"


def _transformed(x: Tensor) -> bool:
    """Return whether a tensor belongs to a function transform such as vmap."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(x))


def probe(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], paths: Sequence[str]
) -> tuple[dict[str, Layout | None], set[str]]:
    """Return the layouts of the layers that are called, None where rows are mixed, and the paths of all that are used.

    Args:
        model: the network; it stays unchanged.
        args: the arguments of a call, with at least two rows.
        kwargs: its named arguments.
        paths: the layers to look at.

    Raises:
        ValueError: if the inputs have no rows that can be put in another order.
        Exception: as the network raises it.
    """
    rows, axis = rows_of(model, (args, kwargs)), row_axis(model)
    if rows is None or rows < 2 or any(isinstance(x, PackedSequence) for x in (*args, *kwargs.values())):
        raise ValueError("expected inputs with at least two rows that can be put in another order")
    twin = _twin(model)
    attempts = [_Runs(twin, (args, dict(kwargs)), rows, axis, paths, square=square) for square in (True, False)]
    with draws(twin, mean=True):
        for state, _ in states_of(twin):
            state.live = True  # a weight that is read is that of the pass
        found = _first_without_mixed([(runs, n) for runs in attempts for n in dict.fromkeys((min(rows, FEW), rows))])
    return found, {path for path in paths if path in found or getattr(twin.get_submodule(path), "used", False)}


def _first_without_mixed(attempts: Sequence[tuple[_Runs, int]]) -> dict[str, Layout | None]:
    """Return the layouts of the first attempt that finds one for every layer, else those of the first that runs."""
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
        self.twin, self.rows, self.axis, self.paths = twin, rows, axis, paths
        self.square = square
        self.inputs = self._mapped(inputs, _Distinct(axis))

    def run(self, order: Sequence[int]) -> Calls:
        """Return the inputs of all layers in a pass over these rows."""
        chosen = list(order)
        inputs = self._mapped(self.inputs, lambda x: x.index_select(self.axis, torch.tensor(chosen, device=x.device)))
        calls: Calls = {}
        layers = {path: self.twin.get_submodule(path) for path in self.paths}
        handles = [layer.register_forward_pre_hook(_recorder(calls, path)) for path, layer in layers.items()]
        args, kwargs = copy.deepcopy(inputs)
        try:
            with torch.no_grad(), _random_state_kept(args, kwargs):
                self.twin(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        return calls

    def _mapped(self, inputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """Change all tensors with the rows of the batch on their axis, anywhere in nested inputs."""
        if isinstance(inputs, Tensor):
            inputs = inputs.detach()
            has_rows = inputs.dim() > self.axis and inputs.shape[self.axis] == self.rows
            square = tuple(inputs.shape) == (self.rows, self.rows) and not self.square
            return change(inputs) if has_rows and not square else inputs
        if isinstance(inputs, Mapping):
            return {name: self._mapped(item, change) for name, item in inputs.items()}
        if type(inputs) in (tuple, list):
            return type(inputs)(self._mapped(item, change) for item in inputs)
        return inputs


def _compare(runs: _Runs, count: int) -> dict[str, Layout | None]:
    """Compare passes over rows in their order, in another order, and over fewer rows; None where rows are mixed."""
    order = [*range(1, count), 0]
    straight, turned = runs.run(range(count)), runs.run(order)
    fewer = _attempt(lambda: runs.run(range(count - 1)))
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
    """Find layouts where a network draws random numbers: change one row, and see which entries change."""
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
    index = torch.tensor(order, device=a.device)
    if layout.axis:
        return a.index_select(layout.axis, index)
    if layout.tiled:
        return a.view(-1, count, *a.shape[1:])[:, index].flatten(0, 1)
    return a.view(count, -1, *a.shape[1:])[index].flatten(0, 1)


def _grown(a: Tensor, fewer: Tensor) -> Layout:
    """Return the layout of an input that is the same for all rows but has an axis that grows with them."""
    if fewer.dim() != a.dim():
        return ONE_DRAW
    axes = [axis for axis in range(a.dim() - 1) if a.shape[axis] != fewer.shape[axis]]
    return Layout(axes[0]) if axes else ONE_DRAW


def _agreed(layouts: Sequence[Layout | None]) -> Layout | None:
    """Return the layout of a layer that is called several times: one draw per batch where calls differ."""
    if None in layouts:
        return None
    return layouts[0] if len(set(layouts)) == 1 else ONE_DRAW


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max()) if a.numel() else 0.0


def _attempt(run: Callable[[], Calls]) -> Calls:
    """Return the calls of a run, none where the network does not take so few rows."""
    try:
        return run()
    except Exception:  # user code on a smaller batch: anything may happen
        return {}


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


class _Distinct:
    """Makes rows differ: numbers get a small noise, and words that are alike in all rows are shifted."""

    def __init__(self, axis: int) -> None:
        self.axis, self.generator = axis, torch.Generator().manual_seed(0)

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_floating_point():
            size = x.float().abs().mean().item() or 1.0
            noise = torch.randn(x.shape, generator=self.generator).to(x.device, x.dtype)
            return x + 0.1 * size * noise
        first = x.select(self.axis, 0).unsqueeze(self.axis)
        if x.dtype == torch.bool or x.dim() < 2 or not bool((x == first).all()):
            return x
        return torch.stack([part.roll(k, -1) for k, part in enumerate(x.unbind(self.axis))], self.axis)


@contextmanager
def _random_state_kept(*inputs: Any) -> Iterator[None]:
    """Run with a fixed random state, and restore the user's."""
    devices = sorted({x.device.index or 0 for x in tensors_in(inputs) if x.is_cuda})
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        yield
