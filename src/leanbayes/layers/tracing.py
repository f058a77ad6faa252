"""Trace a network into a `torch.fx` graph without a global patch: other threads may call networks meanwhile.

`torch.fx` replaces `nn.Module.__call__` for the whole process. Here a twin is traced: copies of the modules, whose
classes intercept calls and reads of parameters. `trace` runs the forward on proxies, as `torch.fx` does. A module that
cannot be traced becomes a leaf, and the modules inside it are traced one by one.

`record` serves networks that proxies cannot trace (sizes in conditions, loops over tensors, Hugging Face's models). It
runs on example tensors. A `TorchFunctionMode`, which is local to its thread, sees every call of a torch function. A
tensor with an unseen history comes from code that torch cannot watch (`autograd.Function`): a `HIDDEN` node.
"""

from __future__ import annotations

import ast
import builtins
import copy
import functools
import inspect
import operator
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn, Tensor
from torch.fx import _symbolic_trace
from torch.overrides import TorchFunctionMode
from typing_extensions import override

OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
"""Folders of torch and of the tracer; `blame` names no line in them."""

CURES = (
    ("'len' is not supported", "write x.shape[0] instead of len(x)"),
    ("cannot be iterated", "a loop over the sizes or rows of a tensor cannot be traced"),
    ("control flow", "a condition on values or sizes of tensors cannot be traced"),
)


def blame(error: BaseException) -> str:
    """Return the line that raised an error, the error, and the cure if known."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(OWN)]
    message = (str(error).splitlines() or ["no message"])[0]
    cure = next((f": {cure}" for words, cure in CURES if words in str(error)), "")
    said = f"{type(error).__name__}: {message[:80]}" if not cure else type(error).__name__
    if not frames:
        return f"{said}{cure}"
    last = frames[-1]
    return f"line {last.lineno} of {Path(last.filename).name}, `{last.line}` ({said}){cure}"


def names_in(module: nn.Module) -> set[str]:
    """Return the attribute names in the source of a module's class; none without source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(type(module))))
    except (OSError, TypeError, SyntaxError):
        return set()
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


IsLeaf = Callable[[nn.Module], bool]


@dataclass
class Traced:
    """Graphs of a network, and why parts of it have none; paths are those of the network."""

    graphs: list[fx.Graph] = field(default_factory=list)  # one of the whole network, or one for each traced part
    failed: dict[str, str] = field(default_factory=dict)  # reasons of modules that could not be traced, by path


class Interceptor:
    """Decides about calls of modules and reads of parameters in a twin; knows paths and names by identity."""

    def watch(self, model: nn.Module, is_leaf: IsLeaf, own: Callable[[Tensor], Tensor] = lambda p: p) -> None:
        """Make the twin; the originals, whose classes are unchanged, decide whether they are leaves."""
        self.twin = twin_of(model, self, own)
        self.paths = {id(module): path for path, module in self.twin.named_modules()}
        tensors = [*self.twin.named_parameters(), *self.twin.named_buffers()]
        self.names = {id(tensor): name for name, tensor in tensors}
        originals = dict(model.named_modules())
        self._leaves = {key for key, path in self.paths.items() if is_leaf(originals[path])}

    def is_leaf(self, module: nn.Module) -> bool:
        """Return whether a call of a module is one node of the graph."""
        return id(module) in self._leaves

    def call(self, module: nn.Module, proceed: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Answer a call; `proceed` is the module's own `__call__`."""

    def read(self, value: Any) -> Any:
        """Answer a read of an attribute that `nn.Module` keeps: a parameter, a buffer, a module."""
        return value


class _Intercepted:
    """Base before a module's class; the class made of both sets `interceptor`."""

    interceptor: Interceptor

    def __init_subclass__(cls, **options: Any) -> None:
        """Skip the subclass hooks of the module's own class."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        proceed: Callable[..., Any] = super().__call__  # type: ignore[misc]
        module: Any = self
        return self.interceptor.call(module, proceed, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)  # type: ignore[misc]
        return self.interceptor.read(value)


def twin_of(model: nn.Module, interceptor: Interceptor, own: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a twin whose modules ask an interceptor; it has its own buffers and the parameters `own(p)`."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        memo.update((id(p), own(p)) for p in module._parameters.values() if p is not None and id(p) not in memo)
        memo.update((id(b), b.detach().clone()) for b in module._buffers.values() if b is not None)
        memo.update((id(v), v) for v in module.__dict__.values() if isinstance(v, Tensor))
    twin = copy.deepcopy(model, memo)
    kinds: dict[Any, Any] = {}
    for module in twin.modules():
        kind: Any = type(module)
        if isinstance(module, torch.jit.ScriptModule):  # compiled: it has no calls to intercept
            continue
        if kind not in kinds:
            names = {"interceptor": interceptor, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
            kinds[kind] = type(kind)(kind.__name__, (_Intercepted, kind), names)
        object.__setattr__(module, "__class__", kinds[kind])
    return twin


_LOCK = threading.RLock()


@contextmanager
def _wrapped_functions() -> Iterator[None]:
    """Make each call of a function registered by `torch.fx.wrap` one node.

    The wrappers replace names in the calling modules, for all threads; without proxies they call the function.
    """
    registry: dict[Any, dict[str, Any]] = getattr(_symbolic_trace, "_wrapped_fns_to_patch", {})
    with _LOCK:
        before = [(space, name, space.get(name)) for (_, name), space in registry.items()]
        for space, name, function in before:
            space[name] = _wrapped(function or getattr(builtins, name))
        try:
            yield
        finally:
            for space, name, function in before:
                if function is None:
                    del space[name]
                else:
                    space[name] = function


def _wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        proxy = next((one for one in (*args, *kwargs.values()) if isinstance(one, _Proxy)), None)
        if proxy is None:
            return function(*args, **kwargs)
        return proxy.tracer.create_proxy("call_function", function, args, kwargs)

    return called


@_wrapped_functions()
def trace(model: nn.Module, is_leaf: IsLeaf, is_simple: IsLeaf) -> Traced:
    """Trace a network whole, or in parts if that fails; then `is_simple` modules are leaves, too."""
    any_number = any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(model.forward).parameters.values())
    for extra in range(1, 4 if any_number else 2):
        tracer = _Tracer(model, is_leaf)
        try:
            return Traced([tracer.trace("", every=True, extra=extra)])
        except Exception:  # user code meets proxies: anything may happen
            continue
    found = Traced()
    tracer = _Tracer(model, lambda module: is_leaf(module) or is_simple(module), found.failed)
    _trace_parts(tracer, found, "")
    return found


def _trace_parts(tracer: _Tracer, found: Traced, path: str) -> None:
    """Trace a module; if that fails, trace the modules inside it, also inside new leaves."""
    module = tracer.twin.get_submodule(path)
    holder = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    if path and not holder and tracer.is_leaf(module):
        return
    before = set(found.failed)
    if not holder:
        for every in (False, True):  # optional arguments at their defaults, or given
            try:
                found.graphs.append(tracer.trace(path, every=every))
                found.failed.pop(path, None)
                break
            except Exception as error:  # as above
                found.failed[path] = blame(error)
    inside = [path] if holder or path in found.failed else [name for name in found.failed if name not in before]
    for name in inside:
        for child, part in tracer.twin.get_submodule(name).named_children():
            place = f"{name}.{child}" if name else child
            if tracer.paths.get(id(part)) == place:  # a module with several names has one place
                _trace_parts(tracer, found, place)


class _Proxy(fx.Proxy):
    """A proxy that converts to a number if it is a size: `math.sqrt(x.size(1))`. Its value has no effect."""

    def __float__(self) -> float:
        if not _is_size(self.node):
            raise TypeError(f"float() of the value of {self.node.name}, which tracing does not know")
        return 1.0


def _is_size(node: Any) -> bool:
    """Return whether a value is computed from sizes and numbers alone."""
    if not isinstance(node, fx.Node):
        return isinstance(node, (int, float))
    name = str(getattr(node.target, "__name__", node.target)).strip("_")
    if name in ("size", "dim", "numel") or (name == "getattr" and node.args[1:] == ("shape",)):
        return True
    return node.op == "call_function" and bool(node.all_input_nodes) and all(map(_is_size, node.all_input_nodes))


class _Tracer(fx.proxy.GraphAppendingTracer, Interceptor):
    """Runs forwards on proxies; with `failed`, a module that cannot be traced becomes a leaf, with its reason."""

    def __init__(self, model: nn.Module, is_leaf: IsLeaf, failed: dict[str, str] | None = None) -> None:
        super().__init__(fx.Graph())
        self.failed = failed
        self.watch(model, is_leaf)
        self.known: dict[str, fx.Proxy] = {}

    def trace(self, path: str, *, every: bool, extra: int = 1) -> fx.Graph:
        """Trace a module's forward with proxies for `every` argument, or for those without default."""
        self.graph, self.known = fx.Graph(), {}
        forward: Any = self.twin.get_submodule(path).forward
        args: list[Any] = []
        named: dict[str, Any] = {}
        skipped = False
        for parameter in inspect.signature(forward).parameters.values():
            if parameter.kind is parameter.VAR_POSITIONAL and not skipped:
                args += [self.placeholder(f"{parameter.name}_{k}") for k in range(extra)]
            elif parameter.kind is parameter.VAR_KEYWORD or not (every or parameter.default is parameter.empty):
                skipped = True
            elif skipped or parameter.kind is parameter.KEYWORD_ONLY:
                named[parameter.name] = self.placeholder(parameter.name)
            else:
                args.append(self.placeholder(parameter.name))
        self.create_node("output", "output", (self.create_arg(forward(*args, **named)),), {})
        return self.graph

    def placeholder(self, name: str) -> fx.Proxy:
        return self.create_proxy("placeholder", name, (), {})

    @override
    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    @override
    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor):
            return self.create_node("get_attr", self.names.get(id(a), "constant"), (), {})
        if isinstance(a, nn.Module):
            return self.create_node("get_attr", self.paths[id(a)], (), {})
        return super().create_arg(a)

    @override
    def read(self, value: Any) -> Any:
        if not isinstance(value, nn.Parameter) or id(value) not in self.names:
            return value
        name = self.names[id(value)]
        if name not in self.known:
            self.known[name] = self.create_proxy("get_attr", name, (), {})
        return self.known[name]

    @override
    def call(self, module: nn.Module, proceed: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        path = self.paths[id(module)]
        if self.is_leaf(module):
            return self.create_proxy("call_module", path, args, kwargs)
        if self.failed is None:
            return proceed(*args, **kwargs)
        start = len(self.graph.nodes)
        try:
            return proceed(*args, **kwargs)
        except Exception as error:  # user code meets proxies: anything may happen
            self.failed[path] = blame(error)
            self.forget(start)
        return self.create_proxy("call_module", path, args, kwargs)

    def forget(self, start: int) -> None:
        """Remove the nodes after the first `start`."""
        for node in reversed(list(self.graph.nodes)[start:]):
            self.graph.erase_node(node)
        kept = set(self.graph.nodes)
        self.known = {name: proxy for name, proxy in self.known.items() if proxy.node in kept}


HIDDEN = "<hidden>"  # name of the placeholder for tensors of unseen functions

QUERIES = frozenset(
    "__get__ __len__ __hash__ __repr__ __format__ size dim ndimension numel nelement stride storage_offset "  # noqa: SIM905
    "element_size is_contiguous is_floating_point is_complex get_device type".split()
)
"""Functions that do not read the values of a tensor."""


def record(model: nn.Module, example: Any, is_leaf: IsLeaf, base_of: Callable[[nn.Module], nn.Module]) -> fx.Graph:
    """Run a network on example inputs, in eval mode, and return the graph of its calls.

    The network stays unchanged: a twin with its own buffers runs, and the random state is restored.
    """
    recorder = _Recorder(model, is_leaf, base_of)
    args, kwargs = ((), dict(example)) if isinstance(example, Mapping) else (example, {})
    args = args if isinstance(args, tuple) else (args,)
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices)), torch.enable_grad():
        for number, tensor in enumerate(_tensors((args, kwargs))):
            recorder.know(tensor, recorder.graph.placeholder(f"input_{number}"))
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


class _Recorder(TorchFunctionMode, Interceptor):
    """Watches one pass of a twin."""

    def __init__(self, model: nn.Module, is_leaf: IsLeaf, base_of: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.graph, self.base_of = fx.Graph(), base_of
        # Own parameters with a gradient, in the same memory: results of computations then have a history.
        self.watch(model, is_leaf, lambda p: nn.Parameter(p.detach(), requires_grad=p.is_floating_point()))
        self.twin.eval()
        self.nodes: dict[int, fx.Node] = {}
        self.alive: list[Any] = []  # ids are unique among objects that live
        self.inside = 0

    def know(self, tensor: Tensor, node: fx.Node) -> None:
        node.meta["shape"] = tuple(tensor.shape)
        self.nodes[id(tensor)] = node
        self.alive.append(tensor)

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
        self.inside += 1  # record nothing in here
        try:
            symbols = self.symbols(args), self.symbols(kwargs)
            result = proceed(*args, **kwargs)
            self.made("call_module", self.paths[id(module)], *symbols, result)
        finally:
            self.inside -= 1
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


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (tensor for item in value.values() for tensor in _tensors(item))
    elif isinstance(value, (tuple, list)):
        yield from (tensor for item in value for tensor in _tensors(item))
