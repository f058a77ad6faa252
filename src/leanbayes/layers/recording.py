"""Record the functions that a network calls on example inputs, as a `torch.fx` graph with the shapes of results.

Networks that proxies cannot trace (sizes in conditions, loops over tensors, Hugging Face's models) run on tensors. A
`TorchFunctionMode`, which is local to its thread, sees every call of a torch function. A tensor with an unseen history
comes from code that torch cannot watch (`autograd.Function`). It becomes a `hidden` node, and no channel may go.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn, Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from leanbayes.layers.tracing import asked_of_originals, blame, Interceptor, IsLeaf, twin_of

HIDDEN = "<hidden>"
"""Name of the placeholder for tensors of unseen functions."""

QUERIES = frozenset(
    "__get__ __len__ __hash__ __repr__ __format__ size dim ndimension numel nelement stride storage_offset "  # noqa: SIM905
    "element_size is_contiguous is_floating_point is_complex get_device type".split()
)
"""Functions that do not read the values of a tensor."""


def record(model: nn.Module, example: Any, is_leaf: IsLeaf, base_of: Callable[[nn.Module], nn.Module]) -> fx.Graph:
    """Run a network on example inputs, in eval mode, and return the graph of its calls.

    The network stays unchanged: a twin with its own buffers runs, and the random state is restored.

    Raises:
        ValueError: if the network does not run on the example.
    """
    recorder = _Recorder(model, is_leaf, base_of)
    args, kwargs = _arguments(example)
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices)), torch.enable_grad():
        recorder.begin((args, kwargs))
        try:
            with recorder:
                output = recorder.twin.forward(*args, **kwargs)
        except Exception as error:  # user code: anything may happen
            raise ValueError(
                f"{type(model).__name__} does not run on the example inputs: {blame(error)}; pass as example= what the "
                "network is called with, a tensor, a tuple of them or a mapping by name"
            ) from error
    recorder.graph.output(recorder.symbols(output))
    return recorder.graph


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example if isinstance(example, tuple) else (example,)), {}


class _Recorder(TorchFunctionMode, Interceptor):
    """Watches one pass of a twin."""

    def __init__(self, model: nn.Module, is_leaf: IsLeaf, base_of: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.graph, self.base_of = fx.Graph(), base_of
        self.twin = twin_of(model, self, own=_own_parameter).eval()
        self.is_leaf = asked_of_originals(is_leaf, model, self.twin)
        self.paths = {id(module): path for path, module in self.twin.named_modules()}
        tensors = [*self.twin.named_parameters(), *self.twin.named_buffers()]
        self.names = {id(tensor): name for name, tensor in tensors}
        self.nodes: dict[int, fx.Node] = {}
        self.alive: list[Any] = []  # ids are unique among objects that live
        self.inside = 0

    def begin(self, inputs: Any) -> None:
        """Name the inputs."""
        for number, tensor in enumerate(_tensors(inputs)):
            self.know(tensor, self.graph.placeholder(f"input_{number}"))

    def know(self, tensor: Tensor, node: fx.Node) -> None:
        """Store the node of a tensor."""
        node.meta["shape"] = tuple(tensor.shape)
        self.nodes[id(tensor)] = node
        self.alive.append(tensor)

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Record nothing inside the context."""
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, query = kwargs or {}, getattr(func, "__name__", "") in QUERIES
        symbols = None if self.inside or query else (self.symbols(args), self.symbols(kwargs))
        result = func(*args, **kwargs)
        if query and not self.inside and isinstance(result, Tensor):  # x.T, x.data
            symbols = self.symbols(args), self.symbols(kwargs)
        if symbols is not None:  # made before the call, which may change its arguments in place
            self.made("call_function", func, *symbols, result)
        return result

    @override
    def call(self, module: nn.Module, proceed: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        base = self.base_of(module)
        if base is not module:
            proceed = base
        if self.inside or not self.is_leaf(module):
            return proceed(*args, **kwargs)
        with self.closed():
            symbols = self.symbols(args), self.symbols(kwargs)
            result = proceed(*args, **kwargs)
            self.made("call_module", self.paths[id(module)], *symbols, result)
        return result

    def made(self, kind: str, target: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record a call; each of several results is an item."""
        node = self.graph.create_node(kind, target, args, kwargs)
        if isinstance(result, Tensor):
            self.know(result, node)
            return
        items = result.values() if isinstance(result, Mapping) else result if isinstance(result, (tuple, list)) else ()
        for number, item in enumerate(items):
            if isinstance(item, Tensor):
                self.know(item, self.graph.call_function(operator.getitem, (node, number)))

    def symbols(self, value: Any) -> Any:
        """Replace tensors by nodes."""
        if isinstance(value, Tensor):
            return self.node_of(value)
        if isinstance(value, Mapping):
            return {str(name): self.symbols(item) for name, item in value.items()}
        if isinstance(value, (tuple, list)):
            return tuple(self.symbols(item) for item in value)
        return value if isinstance(value, (int, float, str, slice, type(...))) or value is None else repr(value)

    def node_of(self, tensor: Tensor) -> fx.Node:
        """Return the node of a tensor: an attribute for parameters and constants, HIDDEN for unseen functions."""
        known = self.nodes.get(id(tensor))
        if known is not None:
            return known
        name = self.names.get(id(tensor))
        if name is None and tensor.grad_fn is not None:
            self.know(tensor, self.graph.placeholder(HIDDEN))
        else:
            self.know(tensor, self.graph.create_node("get_attr", name or "constant", (), {}))
        return self.nodes[id(tensor)]


def _own_parameter(parameter: Tensor) -> Tensor:
    """Return a parameter of the same memory with a gradient: results of computations then have a history."""
    return nn.Parameter(parameter.detach(), requires_grad=parameter.is_floating_point())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (tensor for item in value.values() for tensor in _tensors(item))
    elif isinstance(value, (tuple, list)):
        yield from (tensor for item in value for tensor in _tensors(item))
