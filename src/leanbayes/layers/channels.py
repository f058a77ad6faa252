"""Follow channels through a network: find the layers that make, pass, add, join and read the same channels.

A *stream* is a set of channels that can only be dropped together: the outputs of a linear map, and all channels that
are added to them, normalised with them or convolved depthwise. The walk over a `torch.fx` graph applies these rules:

* a linear map reads the streams of its input and begins a new one;
* a depthwise convolution and a norm pass a stream; sums and products make one stream of two;
* a concatenation joins streams; flattening repeats every channel once for each pixel;
* a grouped convolution reads and makes streams in *lanes*, equal blocks that can only be narrowed alike;
* an unknown operation holds its streams: no channel of them may go. The output of the network holds its streams, too.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn, Tensor

from leanbayes.layers.composites import Composite
from leanbayes.layers.family import CHANNEL_NORMS, family_of, LINEAR_MAPS, LinearFamily, NORMS
from leanbayes.layers.streams import (
    Channels,
    ELEMENTWISE,
    Heads,
    Layout,
    OVER_PIXELS,
    PRODUCTS,
    QUOTIENTS,
    rearranged,
    SUMS,
    UNKNOWN_REPEAT,
    word,
)
from leanbayes.layers.tracing import HIDDEN, names_in, record, trace, Traced

# Probes: run modules of unknown classes to see whether they keep zeros.


def keeps_zeros(module: nn.Module) -> bool:
    """Return whether another library's module is elementwise and maps zero to zero: an activation.

    It must have no parameter, buffer or submodule. It runs in eval mode on inputs of two, three and four axes.
    """
    if type(module).__module__.startswith("torch.") or any(True for _ in module.children()):
        return False
    if module._parameters or module._buffers or type(module).forward is nn.Module.forward:
        return False
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            tried = copy.deepcopy(module).eval()
            return all(_elementwise(tried, rank) for rank in (2, 3, 4))
    except Exception:  # user code: anything may happen
        return False


def _elementwise(module: nn.Module, rank: int) -> bool:
    shape = (2, 3, 4, 5)[:rank]
    generator = torch.Generator().manual_seed(rank)
    x, other = (torch.randn(shape, generator=generator) for _ in range(2))
    some = torch.rand(shape, generator=generator) < 0.5
    y = module.forward(x.clone())
    if not isinstance(y, Tensor) or y.shape != x.shape or not torch.equal(module.forward(torch.zeros(shape)), x * 0):
        return False
    # Each result depends on the number in its place alone.
    return torch.allclose(module.forward(torch.where(some, x, other))[some], y[some], rtol=1e-5, atol=1e-6)


def quiet(norm: Any) -> bool:
    """Return whether a norm returns zeros for zero scale and shift; torch's norms do.

    A copy of a subclass with its own forward is run in eval mode: its activation must keep zeros.
    """
    if type(norm).forward in [kind.forward for kind in CHANNEL_NORMS]:
        return True
    try:
        with torch.no_grad():
            tried = copy.deepcopy(norm).eval().cpu()
            for parameter in (tried.weight, tried.bias):
                parameter.zero_()
            axes = 2 if "3d" not in type(norm).__name__.lower() else 3
            y = tried.forward(torch.randn(2, norm.num_features, *[3] * axes))
            return isinstance(y, Tensor) and not y.any()
    except Exception:  # user code: anything may happen
        return False


def activates(norm: Any) -> bool:
    """Return whether a norm has its own forward; a factor of its output is then no factor of scale and shift."""
    return type(norm).forward not in [kind.forward for kind in CHANNEL_NORMS]


def follow(
    model: nn.Module, *, base_of: Callable[[nn.Module], nn.Module] = lambda layer: layer, example: Any = None
) -> Channels:
    """Follow the channels of a network from its input to its output.

    Without an example the forward runs on proxies. `Channels.untraced` names parts that cannot be traced; their inputs
    and outputs are held, and each module inside them is followed alone.

    Args:
        model: any network; a stochastic layer counts as its plain layer.
        base_of: returns the plain layer inside a layer.
        example: inputs to call the network with: a tensor, a tuple, or a mapping by name.
    """
    found = Channels()
    if base_of(model) is not model or family_of(model) is not None:  # the root itself is a layer: its output is held
        layer = base_of(model)
        if isinstance(layer, LINEAR_MAPS):
            _linear(found, "", layer, None)
            found.first = ""
            found.hold(found.outputs[""], "it is an output of the network")
        return found

    def is_leaf(module: nn.Module) -> bool:
        if base_of(module) is not module or family_of(module) is not None or isinstance(module, Composite):
            return True
        return module.__module__.startswith(("torch.nn", "torch.ao.nn")) and not isinstance(module, nn.Sequential)

    if example is None:
        traced = trace(model, is_leaf, keeps_zeros)
    else:
        graph = record(model, example, lambda module: is_leaf(module) or keeps_zeros(module), base_of)
        traced = Traced([graph])
    found.untraced = traced.failed
    walk = _Walk(found, {path: base_of(layer) for path, layer in model.named_modules()})
    for graph in traced.graphs:
        walk.run(graph)
    walk.finish()
    if traced.failed:
        _beware(found, model)
    return found


def follows_channels(layer: nn.Module) -> bool:
    """Return whether channels can be removed from a layer: its weight is stored, and a norm treats each alone."""
    family = family_of(layer)
    if family is None or family.weight is not None:
        return False
    return isinstance(family, LinearFamily) or not family.form or family.by_channel


def _beware(found: Channels, model: nn.Module) -> None:
    """Hold makers inside parts that were followed alone: the order of calls is unknown, other code may use them."""
    maps = (path for path, layer in model.named_modules() if isinstance(layer, LINEAR_MAPS))
    found.first = next((path.removesuffix(".base") for path in maps), None)  # as registered
    for path in found.untraced:
        names, start = names_in(model.get_submodule(path)), f"{path}." if path else ""
        for maker in found.makers:
            inside = maker.removeprefix(start).split(".")
            if maker.startswith(start) and len(inside) > 1 and inside[-1] in names:
                found.hold(found.outputs[maker], f"the code of '{path}', which cannot be traced, may use it")


class _Walk:
    """One walk over traced graphs; `layouts` has the layout of every value."""

    def __init__(self, found: Channels, layers: dict[str, nn.Module]) -> None:
        self.found, self.layers = found, layers
        self.layouts: dict[fx.Node, Layout | None] = {}
        self.heads = Heads(found)
        self.without_norm: set[str] = set()
        self.opened: set[str] = set()
        self.hidden = False

    def run(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            self.layouts[node] = self.visit(node)

    def finish(self) -> None:
        """Hold streams for reasons that only the whole walk shows."""
        self.found.first = next(iter(self.found.makers), None)
        if self.hidden:
            self.found.hold_all("code that torch cannot watch, such as an autograd.Function, may read it")
        self.found.normed -= self.without_norm  # a layer that is called twice may meet a norm only once
        for path in sorted(self.opened & set(self.found.outputs)):
            for layout in (self.found.inputs[path], self.found.outputs[path]):
                self.found.hold(layout, f"the weights of '{path}' are used outside of it")

    def visit(self, node: fx.Node) -> Layout | None:
        if node.op == "output":
            end = "a part that cannot be traced reads it" if self.found.untraced else "it is an output of the network"
            self.unknown(node, end)
        elif node.op == "get_attr":
            self.opened.add(str(node.target).rpartition(".")[0].removesuffix(".base"))
        elif node.op == "call_module":
            return self.module(node, str(node.target))
        elif node.op == "placeholder":
            self.hidden = self.hidden or node.target == HIDDEN
        else:
            return self.function(node)
        return None

    def arguments(self, node: fx.Node) -> list[Layout | None]:
        return [self.layouts[argument] for argument in node.all_input_nodes]

    def module(self, node: fx.Node, path: str) -> Layout | None:
        layer, x = self.layers[path], next(iter(self.arguments(node)), None)
        if self.heads.among(node):
            return self.unknown(node, f"{type(layer).__name__} '{path}' reads heads of attention")
        if isinstance(layer, LINEAR_MAPS) and follows_channels(layer) and len(node.all_input_nodes) == 1:
            (self.found.normed if _goes_into_norm(node, self.layers) else self.without_norm).add(path)
            y = _linear(self.found, path, layer, x)
            if path in self.found.makers:
                self.found.first_readers.update(str(user.target) for user in node.users)
            return y
        if isinstance(layer, CHANNEL_NORMS) and quiet(layer):
            return self.each_channel(path, x, layer.num_features)
        if isinstance(layer, nn.PReLU):
            return x if layer.num_parameters == 1 else self.each_channel(path, x, layer.num_parameters)
        if isinstance(layer, nn.Flatten) and _flattens(x, layer.start_dim, layer.end_dim):
            return _flattened(x)
        if _passes(word(type(layer)), x) or keeps_zeros(layer):
            return x
        kind = "a norm over several channels" if isinstance(layer, NORMS) else f"{type(layer).__name__} '{path}'"
        return self.unknown(node, f"{kind} reads it")

    def each_channel(self, path: str, x: Layout | None, channels: int) -> Layout | None:
        """Return the layout after a layer with numbers for every channel: a norm, a PReLU."""
        x = _resolved(self.found, x, channels)
        if path in self.found.inputs:  # called twice: both inputs must keep the same channels
            x = self.found.merge(self.found.inputs[path], x)
        self.found.inputs[path] = self.found.outputs[path] = x
        return x

    def function(self, node: fx.Node) -> Layout | None:
        name, arguments = word(node.target), self.arguments(node)
        if self.heads.among(node):
            return self.heads.function(node, name)
        if not any(arguments) or name in ("size", "dim", "getattr"):
            return None
        x = arguments[0]
        if name in SUMS | PRODUCTS | QUOTIENTS:
            return self.merged(node, name)
        if name in ("cat", "concat"):
            return self.joined(node, _argument(node, 0, "tensors", ()), _argument(node, 1, "dim", 0))
        if name == "mean":
            return self.averaged(node, x, _argument(node, 1, "dim", None), _argument(node, 2, "keepdim", False))
        if _makes_rows(name, node, x):
            return _flattened(x)
        if self.heads.begin(node, name, x):
            return None
        return (x if _passes(name, x) else rearranged(node, name, x)) or self.unknown(
            node, f"the function {name} reads it"
        )

    def merged(self, node: fx.Node, name: str) -> Layout | None:
        """Return the layout of a sum or product of two values; an added number would fill dropped channels."""
        operands = [*node.args, *node.kwargs.values()]
        values = [self.layouts[value] for value in operands if isinstance(value, fx.Node)]
        if name in QUOTIENTS and (len(values) > 1 or not isinstance(operands[0], fx.Node)):
            return self.unknown(node, "something is divided by it")
        if len(values) == 2 and name in PRODUCTS and (known := self.weighed(operands)):
            return known
        if len(values) == 2:
            return self.found.merge(values[0], values[1])
        return self.unknown(node, "a number is added to it") if name in SUMS else values[0]

    def weighed(self, operands: list[Any]) -> Layout | None:
        """Return the layout of a product with a tensor of known shape that has one number for all channels."""
        for value, other in (operands, reversed(operands)):
            x, shape = self.layouts[value], other.meta.get("shape")
            if x is not None and self.layouts[other] is None and shape is not None and not self.heads.among(other):
                axis = x[0].pixels + 1  # of the channels, from the right
                if len(shape) < axis or shape[-axis] == 1:
                    return x
        return None

    def joined(self, node: fx.Node, tensors: Any, axis: Any) -> Layout | None:
        """Return the layout of a concatenation over channels."""
        parts = [self.layouts[value] for value in tensors] if isinstance(tensors, (list, tuple)) else [None]
        if all(parts) and self.is_row_axis(tensors[0], axis):
            return functools.reduce(self.found.merge, parts)
        segments = tuple(segment for part in parts for segment in part or ())
        alike = len({segment.pixels for segment in segments}) == 1 and axis in (1, -1 - segments[0].pixels)
        if not all(parts) or not alike or any(segment.repeat == UNKNOWN_REPEAT for segment in segments):
            return self.unknown(node, "it is joined to something in a way that cannot be followed")
        return segments

    def is_row_axis(self, value: fx.Node, axis: Any) -> bool:
        """Return whether an axis is known not to be the channel axis: steps or rows are joined there."""
        shape, x = value.meta.get("shape"), self.layouts[value]
        return shape is not None and x is not None and axis % len(shape) != len(shape) - 1 - x[0].pixels

    def averaged(self, node: fx.Node, x: Layout | None, axes: Any, kept: bool) -> Layout | None:
        """Return the layout of a mean over pixel axes, which vanish unless `kept`."""
        pixels = x[0].pixels if x else 0
        axes = axes if isinstance(axes, (tuple, list)) else (axes,)
        if x is None or not all(isinstance(a, int) and (2 <= a < 2 + pixels or -pixels <= a < 0) for a in axes):
            return rearranged(node, "mean", x) or self.unknown(node, "the function mean reads it")
        return x if kept else tuple(part._replace(pixels=pixels - len(axes)) for part in x)

    def unknown(self, node: fx.Node, reason: str) -> Layout | None:
        for layout in self.arguments(node):
            self.found.hold(layout, reason)
        self.heads.hold(node, reason)
        return None


def _linear(found: Channels, path: str, layer: Any, x: Layout | None) -> Layout:
    """Record that a linear map reads a layout; begin a stream unless the map is depthwise."""
    family, groups = family_of(layer), getattr(layer, "groups", 1)
    assert family is not None
    inputs, outputs, pixels = family.inputs(layer), family.outputs(layer), -1 - family.axis
    x = _resolved(found, x, inputs, pixels)
    if path in found.inputs:
        found.merge(found.inputs[path], x)
        known = found.outputs[path]
        assert known is not None
        return known
    found.inputs[path] = x
    if groups == inputs == outputs and groups > 1 and x is not None:
        return _depthwise(found, path, x)
    if groups > 1:
        if groups == inputs:
            found.hold(x, "a depthwise convolution makes several channels of each")
        found.in_lanes(x, groups)
    y = found.outputs[path] = found.new(outputs, groups, pixels)
    found.makers.append(path)
    return y


def _depthwise(found: Channels, path: str, x: Layout) -> Layout:
    """Pass the streams of a depthwise convolution."""
    if len(x) > 1:
        found.hold(x, "a depthwise convolution reads several streams")
    for part in x:
        found.stream(part.stream).filtered = True
    found.outputs[path] = x
    return x


def _resolved(found: Channels, x: Layout | None, inputs: int, pixels: int | None = None) -> Layout | None:
    """Compute how often flattening repeated every channel from the number of inputs.

    A layout is held if it cannot have this number of channels or of pixel axes.
    """
    if x is None:
        return None
    channels = sum(found.stream(part.stream).size for part in x)
    x = tuple(part._replace(repeat=inputs // channels if part.repeat == UNKNOWN_REPEAT else part.repeat) for part in x)
    if found.size(x) == inputs and pixels in (None, x[0].pixels):
        return x
    found.hold(x, "it is flattened or turned in a way that cannot be followed")
    return None


def _passes(name: str, x: Layout | None) -> bool:
    return name in ELEMENTWISE or (name in OVER_PIXELS and x is not None and x[0].pixels > 0)


def _makes_rows(name: str, node: fx.Node, x: Layout | None) -> bool:
    if name == "flatten":
        return _flattens(x, _argument(node, 1, "start_dim", 0), _argument(node, 2, "end_dim", -1))
    if name not in ("view", "reshape") or node.args[2:] != (-1,):
        return False
    size = node.args[1]  # the length of the first axis: `x.size(0)`, `x.shape[0]`
    return isinstance(size, fx.Node) and word(size.target) in ("size", "getitem") and size.args[1:] == (0,)


def _flattens(x: Layout | None, start: Any, end: Any) -> bool:
    pixels = x[0].pixels if x else 0
    return start in (1, -1 - pixels) and end in (-1, 1 + pixels)


def _flattened(x: Layout | None) -> Layout | None:
    if x is None or x[0].pixels == 0:
        return x
    return tuple(part._replace(repeat=UNKNOWN_REPEAT, pixels=0) for part in x)


def _goes_into_norm(node: fx.Node, layers: dict[str, nn.Module]) -> bool:
    users = [user for user in node.users if user.op == "call_module"]
    return len(users) == len(node.users) == 1 and isinstance(layers[str(users[0].target)], CHANNEL_NORMS)


def _argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)
