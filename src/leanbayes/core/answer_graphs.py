"""Answers as replayed CUDA graphs: from inputs of one shape to the finished tensors of a `Prediction`.

A graph is captured at the first call with inputs of its signature: structure, shapes, strides and types of the inputs,
and other arguments. Warm-up passes on a side stream fill every cache first, since a tensor that is made during the
capture has no values before a replay. Autocast keeps no cast weights then: they would be freed before the graph is.

A replay copies the inputs to fixed places, and its results out of them. All graphs of a predictor share one pool of
memory, and run one after the other.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from leanbayes.runtime.batches import Inputs, map_leaves, tensors_in

MOST_GRAPHS = 4
"""Graphs that are kept, of the signatures that were called last."""

WARM_UP = 3
"""Passes before a capture: the first ones choose kernels and fill caches."""

READS = frozenset((
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique_consecutive"),
    *("_unique", "_unique2", "unique_dim", "repeat_interleave.Tensor", "bincount", "histc", "allclose"),
))  # fmt: skip
"""Operations whose result, or its shape, is needed on the host."""

Run = Callable[[Inputs], dict[str, Tensor]]
"""Computes the tensors of a prediction from inputs."""


class NotCapturableError(BaseException):
    """The calls of a network cannot be a CUDA graph; the message says why.

    It is no `Exception`: a way to run draws that fails is replaced by another one, and this one must not be.
    """


_cuda: Any = torch.cuda  # its streams and events have no types


class _Graph(NamedTuple):
    graph: Any
    inputs: list[Tensor]
    outputs: dict[str, Tensor]
    alive: list[Tensor]


class Source(NamedTuple):
    """The functions that are captured, and those around them.

    Attributes:
        run: the answer; a second call must not fill caches that the first one has filled.
        rest: drops what must not be kept between calls.
        caches: returns the tensors that are kept between calls: a graph reads them, so it keeps them alive.
    """

    run: Run
    rest: Callable[[], None]
    caches: Callable[[], Iterable[Tensor]]


class Graphs:
    """The captured answers of one predictor, by the signature of their inputs."""

    def __init__(self) -> None:
        self.graphs: OrderedDict[Hashable, _Graph] = OrderedDict()
        self.pool: Any = None
        self.last: Any = None

    def __call__(self, x: Inputs, source: Source) -> dict[str, Tensor]:
        """Return the tensors of the answer, which later calls do not change.

        Raises:
            NotCapturableError: if the network cannot be captured.
        """
        given = list(tensors_in(x))
        if len(given) != _count(x) or any(tensor.device.type != "cuda" for tensor in given):
            raise NotCapturableError("the inputs are not tensors alone")
        key, device = signature(x), given[0].device
        with torch.cuda.device(device):
            found = self.graphs.get(key)
            if found is None:
                found = self.graphs[key] = self._capture(x, source, device)
                while len(self.graphs) > MOST_GRAPHS:
                    self.graphs.popitem(last=False)
            self.graphs.move_to_end(key)
            return self._replay(found, given)

    @property
    def nbytes(self) -> int:
        """The bytes of the pool and of the fixed inputs; of the results, if torch does not say what a pool has."""
        if not self.graphs:
            return 0
        every = self.graphs.values()
        inputs = sum(tensor.untyped_storage().nbytes() for found in every for tensor in found.inputs)
        outputs = sum(tensor.nbytes for found in every for tensor in found.outputs.values())
        return inputs + max(_bytes_of_pool(self.pool), outputs)

    def _replay(self, found: _Graph, given: list[Tensor]) -> dict[str, Tensor]:
        """Run a graph on the current stream, after the last replay on any other."""
        stream = _cuda.current_stream()
        if self.last is not None:
            stream.wait_event(self.last)
        torch._foreach_copy_(found.inputs, given)
        found.graph.replay()
        results = {name: torch.empty_like(tensor) for name, tensor in found.outputs.items()}
        torch._foreach_copy_(list(results.values()), list(found.outputs.values()))
        self.last = _cuda.Event() if self.last is None else self.last
        self.last.record(stream)
        return results

    def _capture(self, x: Inputs, source: Source, device: torch.device) -> _Graph:
        fixed = map_leaves(x, lambda leaf: _at_fixed_place(leaf) if isinstance(leaf, Tensor) else leaf)
        stream, current = _cuda.Stream(), _cuda.current_stream()
        stream.wait_stream(current)
        if self.last is not None:
            stream.wait_event(self.last)
        try:
            with _cuda.stream(stream), without_cast_cache():
                for _ in range(WARM_UP):
                    source.run(fixed)
                    source.rest()
                alive = list(source.caches())
                self.pool = self.pool or _cuda.graph_pool_handle()
                graph: Any = _cuda.CUDAGraph()
                outputs = self._record(graph, fixed, source, device)
        finally:
            source.rest()
            current.wait_stream(stream)
        return _Graph(graph, list(tensors_in(fixed)), outputs, alive)

    def _record(self, graph: Any, fixed: Inputs, source: Source, device: torch.device) -> dict[str, Tensor]:
        """Capture one answer on the current stream; an operation that needs the host stops it before it runs."""
        before = {id(tensor) for tensor in source.caches()}
        try:
            with capturing(graph, device, self.pool), no_reads():
                outputs = source.run(fixed)
        except Exception as error:
            raise NotCapturableError(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}") from error
        source.rest()
        if any(id(tensor) not in before for tensor in source.caches()):
            raise NotCapturableError("its second call keeps other tensors than the first")
        return outputs


@contextmanager
def capturing(graph: Any, device: torch.device, pool: Any = None) -> Iterator[None]:
    """Capture what runs inside the context on the current stream; if that fails, drop the graph.

    After a failed capture, torch's generator would wait for the end of it, and `torch.cuda.graph` would leave its
    stream current.
    """
    _cuda.synchronize(device)
    gc.collect()
    _cuda.empty_cache()
    generator = _cuda.default_generators[device.index or 0]
    before = generator.clone_state()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        yield
        graph.capture_end()
    except BaseException:
        with suppress(RuntimeError):  # an operation has invalidated it
            graph.capture_end()
        generator.graphsafe_set_state(before)
        graph.reset()
        raise


class _NoReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations that wait for the device or copy from the host: a replay would not repeat them."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        overload = f"{name}.{func._schema.overload_name}"
        if (name in READS or overload in READS) and _on_device(args):
            raise NotCapturableError(f"the network reads values on the host ({name})")
        if name in ("copy_", "_to_copy") and _crosses(name, args, kwargs or {}):
            raise NotCapturableError("tensors are copied between the host and the device")
        if name.startswith("index") and any(tensor.dtype in (torch.bool, torch.uint8) for tensor in _indices(args)):
            raise NotCapturableError("the network selects entries by a mask, whose number is needed on the host")
        return func(*args, **(kwargs or {}))


no_reads: Any = _NoReads


def signature(x: Inputs) -> Hashable:
    """Return what a graph depends on: structure and tensors of the inputs, other arguments, and autocast."""
    kinds: list[Hashable] = [torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")]

    def note(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            kinds.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.device))
        elif leaf is None or isinstance(leaf, (bool, int, float, str, torch.dtype)):
            kinds.append((type(leaf), leaf))
        else:
            raise NotCapturableError(f"an argument is a {type(leaf).__name__}")
        return leaf

    kinds.append(str(map_leaves(x, lambda leaf: type(leaf).__name__)))
    map_leaves(x, note)
    return tuple(kinds)


def _count(x: Inputs) -> int:
    """Return the number of tensors in nested inputs, packed sequences excluded."""
    found: list[Tensor] = []
    map_leaves(x, lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else leaf)
    return len(found)


def _at_fixed_place(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides where they are dense, as kernels are chosen by them."""
    fixed = torch.empty_like(tensor, requires_grad=False)
    return fixed.copy_(tensor)


@contextmanager
def without_cast_cache() -> Iterator[None]:
    """Run without autocast's cache of cast weights, which does not outlive the context of the caller."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _bytes_of_pool(pool: Any) -> int:
    """Return the bytes that torch has reserved for a pool; 0 if its snapshot does not say."""
    segments = _cuda.memory_snapshot()
    return sum(one["total_size"] for one in segments if tuple(one.get("segment_pool_id", ())) == tuple(pool))


def _on_device(args: Any) -> bool:
    return any(tensor.device.type == "cuda" for tensor in tensors_in(args))


def _crosses(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a copy goes from the host to the device, or back."""
    source = args[1] if name == "copy_" else args[0]
    target = args[0].device if name == "copy_" else kwargs.get("device")
    return target is not None and torch.device(target).type != source.device.type


def _indices(args: Any) -> Iterator[Tensor]:
    yield from (tensor for tensor in tensors_in(args[1:2]) if tensor.device.type == "cuda")
