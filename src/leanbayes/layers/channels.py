"""Follow channels through a network: which layers make, pass on, add up, join and read the same ones.

A *stream* is a set of channels that can only be dropped together: the outputs of a linear map, and whatever else is
added to them, normalised with them or convolved depthwise. A network is traced by `torch.fx` and read as such:

* a linear map reads the streams of its input and begins one of its own;
* a depthwise convolution and a norm pass a stream on; sums and products make one stream of two;
* a concatenation puts streams side by side; flattening repeats every channel once for each pixel;
* a grouped convolution reads and makes streams in *lanes*, equal blocks that can be narrowed only alike;
* what nobody here understands holds its streams fast, and so does the output of the network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx, nn

from leanbayes.layers.family import family_of, LINEAR_MAPS, NORMS

CHANNEL_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
"""Norms that treat every channel by itself, so that the others may leave."""

PASSED_BY = frozenset(  # a list of words, written as such
    "relu relu_ relu6 leaky_relu elu selu celu gelu silu mish hardswish hardtanh tanh abs dropout dropout1d dropout2d "  # noqa: SIM905
    "dropout3d max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d "
    "adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d interpolate "
    "contiguous clone detach float half bfloat16 to square sqrt neg".split()
)
"""Functions and methods, by name, that treat every channel by itself and make nothing of zeros."""

PASSING_MODULES = frozenset(
    "ReLU ReLU6 LeakyReLU ELU SELU CELU GELU SiLU Mish Hardswish Hardtanh Tanh Abs Dropout Dropout1d Dropout2d "  # noqa: SIM905
    "Dropout3d Identity MaxPool1d MaxPool2d MaxPool3d AvgPool1d AvgPool2d AvgPool3d AdaptiveAvgPool1d "
    "AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d Upsample "
    "UpsamplingBilinear2d UpsamplingNearest2d ZeroPad1d ZeroPad2d ZeroPad3d".split()
)
"""The same, as modules. A sigmoid is not here: what was dropped would come back as one half."""

SUMS, PRODUCTS = frozenset("add add_ iadd sub sub_ isub".split()), frozenset("mul mul_ imul div div_ truediv".split())  # noqa: SIM905
UNKNOWN_REPEAT = 0


@dataclass
class Stream:
    """Channels that stay or go together.

    Attributes:
        size: how many they are.
        lanes: equal blocks of them that are narrowed alike; channel c is at position c mod (size / lanes) of its lane.
        held: why none of them may go; empty where they may.
    """

    size: int
    lanes: int = 1
    held: str = ""


class Segment(NamedTuple):
    """A part of a channel axis: a stream whose channels are repeated so many times, one after the other."""

    stream: int
    repeat: int = 1


Layout = tuple[Segment, ...]


@dataclass
class Channels:
    """What `follow` found.

    Attributes:
        inputs: the layout of what each linear map, norm and per-channel layer reads, by path; None where it is unknown.
        outputs: the layout of what it returns.
        makers: the linear maps that begin streams, in the order of the forward pass.
        normed: paths of linear maps whose output goes straight into a norm, and nowhere else.
    """

    inputs: dict[str, Layout | None] = field(default_factory=dict)
    outputs: dict[str, Layout | None] = field(default_factory=dict)
    makers: list[str] = field(default_factory=list)
    normed: set[str] = field(default_factory=set)
    _streams: list[Stream] = field(default_factory=list)
    _parents: list[int] = field(default_factory=list)

    def stream(self, number: int) -> Stream:
        """Return a stream by any of its numbers."""
        return self._streams[self.root(number)]

    def root(self, number: int) -> int:
        """Return the number by which a stream is known after all merging."""
        while self._parents[number] != number:
            number = self._parents[number]
        return number

    def size(self, layout: Layout) -> int:
        """Return the length of a channel axis."""
        return sum(self.stream(part.stream).size * part.repeat for part in layout)

    def new(self, size: int, lanes: int = 1) -> Layout:
        """Begin a stream."""
        self._streams.append(Stream(size, lanes))
        self._parents.append(len(self._parents))
        return (Segment(len(self._parents) - 1),)

    def merge(self, one: Layout | None, other: Layout | None) -> Layout | None:
        """Make one layout of two that are added; both are held where they do not match part by part."""
        if one is None or other is None or not self._match(one, other):
            self.hold(one, "it is added to something of another layout")
            self.hold(other, "it is added to something of another layout")
            return one or other
        for a, b in zip(one, other, strict=True):
            self._unite(self.root(a.stream), self.root(b.stream))
        return one

    def hold(self, layout: Layout | None, reason: str) -> None:
        """Let no channel of these streams go."""
        for part in layout or ():
            stream = self.stream(part.stream)
            stream.held = stream.held or reason

    def in_lanes(self, layout: Layout | None, lanes: int) -> None:
        """Narrow a stream only by equal parts of so many blocks, as a grouped convolution reads it."""
        if layout is None or len(layout) != 1 or layout[0].repeat != 1 or self.stream(layout[0].stream).lanes == lanes:
            if layout is not None and len(layout) != 1:
                self.hold(layout, "a grouped convolution reads several streams")
            return
        stream = self.stream(layout[0].stream)
        if stream.lanes != 1:
            stream.held = stream.held or f"it is read in {stream.lanes} and in {lanes} lanes"
        stream.lanes = lanes

    def _match(self, one: Layout, other: Layout) -> bool:
        def sizes(layout: Layout) -> list[tuple[int, int]]:
            return [(self.stream(part.stream).size, part.repeat) for part in layout]

        return sizes(one) == sizes(other)

    def _unite(self, a: int, b: int) -> None:
        if a == b:
            return
        kept, gone = self._streams[min(a, b)], self._streams[max(a, b)]
        self._parents[max(a, b)] = min(a, b)
        kept.held = kept.held or gone.held
        if gone.lanes != kept.lanes and 1 not in (gone.lanes, kept.lanes):
            kept.held = kept.held or f"it is read in {kept.lanes} and in {gone.lanes} lanes"
        kept.lanes = max(kept.lanes, gone.lanes)


def follow(model: nn.Module, *, base_of: Callable[[nn.Module], nn.Module] = lambda layer: layer) -> Channels:
    """Follow the channels of a network from its input to its output.

    Args:
        model: any network that `torch.fx` can trace; layers with noise around them count as what they are made of.
        base_of: returns the plain layer inside a layer.

    Raises:
        ValueError: if the network cannot be traced.
    """
    found = Channels()
    if base_of(model) is not model or family_of(model) is not None:  # the root itself is a layer: its output is held
        layer = base_of(model)
        if isinstance(layer, LINEAR_MAPS):
            _linear(found, "", layer, None)
            found.hold(found.outputs[""], "it is an output of the network")
        return found
    tracer = _Tracer(base_of)
    try:
        graph = tracer.trace(model)
    except Exception as error:  # user code meets proxies: anything may happen
        raise ValueError(
            f"the channels of {type(model).__name__} cannot be followed: torch.fx cannot trace its forward "
            f"({type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}); give it a forward without "
            "control flow that depends on tensors"
        ) from error
    _Walk(found, {path: base_of(layer) for path, layer in model.named_modules()}).run(graph)
    return found


class _Tracer(fx.Tracer):
    """Traces into everything but torch's own layers and layers with noise."""

    def __init__(self, base_of: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.base_of = base_of

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        known = self.base_of(m) is not m or type(m).__name__ in PASSING_MODULES or family_of(m) is not None
        return known or super().is_leaf_module(m, module_qualified_name)


class _Walk:
    """One walk over a traced graph, with the layout of every value."""

    def __init__(self, found: Channels, layers: dict[str, nn.Module]) -> None:
        self.found, self.layers = found, layers
        self.layouts: dict[fx.Node, Layout | None] = {}

    def run(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            self.layouts[node] = self.visit(node)

    def visit(self, node: fx.Node) -> Layout | None:
        if node.op == "output":
            for layout in self.arguments(node):
                self.found.hold(layout, "it is an output of the network")
            return None
        if node.op in ("placeholder", "get_attr"):
            return None
        if node.op == "call_module":
            return self.module(node, str(node.target))
        return self.function(node)

    def arguments(self, node: fx.Node) -> list[Layout | None]:
        return [self.layouts[argument] for argument in node.all_input_nodes]

    def module(self, node: fx.Node, path: str) -> Layout | None:
        layer, x = self.layers[path], next(iter(self.arguments(node)), None)
        if isinstance(layer, LINEAR_MAPS) and family_of(layer) is not None and len(node.all_input_nodes) == 1:
            if _goes_into_norm(node, self.layers):
                self.found.normed.add(path)
            return _linear(self.found, path, layer, x)
        if isinstance(layer, (*CHANNEL_NORMS, nn.PReLU)):
            return self.each_channel(path, x)
        if isinstance(layer, nn.Flatten) and layer.start_dim in (1, -3) and layer.end_dim == -1:
            return _flattened(x)
        if type(layer).__name__ in PASSING_MODULES:
            return x
        kind = "a norm over several channels" if isinstance(layer, NORMS) else f"{type(layer).__name__} '{path}'"
        return self.unknown(node, f"{kind} reads it")

    def each_channel(self, path: str, x: Layout | None) -> Layout | None:
        """A layer with numbers for every channel: a norm, a PReLU."""
        if path in self.found.inputs:  # called twice: what it reads has to stay alike
            x = self.found.merge(self.found.inputs[path], x)
        self.found.inputs[path] = self.found.outputs[path] = x
        return x

    def function(self, node: fx.Node) -> Layout | None:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        arguments = self.arguments(node)
        if not any(arguments) or name in ("size", "dim", "getattr"):
            return None
        if name in SUMS | PRODUCTS:
            return self.merged(node, is_sum=name in SUMS)
        if name in ("cat", "concat"):
            return self.joined(node)
        if _flattens(name, node):
            return _flattened(arguments[0])
        if name in PASSED_BY or (name == "mean" and _pools(_argument(node, 1, "dim", None))):
            return arguments[0]
        return self.unknown(node, f"the function {name} reads it")

    def merged(self, node: fx.Node, *, is_sum: bool) -> Layout | None:
        """A sum or product of two values; a number that is added would fill what was dropped."""
        values = [self.layouts[value] for value in node.args if isinstance(value, fx.Node)]
        if len(values) == 2:
            return self.found.merge(values[0], values[1])
        return self.unknown(node, "a number is added to it") if is_sum else values[0]

    def joined(self, node: fx.Node) -> Layout | None:
        """A concatenation over channels."""
        parts = [self.layouts[value] for value in node.all_input_nodes]
        if _argument(node, 1, "dim", 0) != 1 or any(part is None for part in parts):
            return self.unknown(node, "it is joined to something that cannot be followed")
        return tuple(segment for part in parts if part for segment in part)

    def unknown(self, node: fx.Node, reason: str) -> Layout | None:
        for layout in self.arguments(node):
            self.found.hold(layout, reason)
        return None


def _linear(found: Channels, path: str, layer: Any, x: Layout | None) -> Layout:
    """Let a linear map read a layout, and begin a stream unless it is depthwise."""
    family, groups = family_of(layer), getattr(layer, "groups", 1)
    assert family is not None
    inputs, outputs = family.inputs(layer), family.outputs(layer)
    x = _resolved(found, x, inputs)
    if path in found.inputs:
        found.merge(found.inputs[path], x)
        known = found.outputs[path]
        assert known is not None
        return known
    found.inputs[path] = x
    if groups == inputs == outputs and groups > 1 and x is not None:
        found.outputs[path] = x
        return x
    if groups > 1:
        if groups == inputs:
            found.hold(x, "a depthwise convolution makes several channels of each")
        found.in_lanes(x, groups)
    y = found.outputs[path] = found.new(outputs, groups)
    found.makers.append(path)
    return y


def _resolved(found: Channels, x: Layout | None, inputs: int) -> Layout | None:
    """Find out how often flattening has repeated every channel, now that the number of inputs is known."""
    if x is None or all(part.repeat != UNKNOWN_REPEAT for part in x):
        return x
    channels = sum(found.stream(part.stream).size for part in x)
    repeat, rest = divmod(inputs, channels)
    if rest:
        found.hold(x, "it is flattened in a way that cannot be followed")
        return None
    return tuple(part._replace(repeat=repeat) for part in x)


def _flattens(name: str, node: fx.Node) -> bool:
    """Say whether a function makes rows of images."""
    if name == "flatten":
        return bool(_argument(node, 1, "start_dim", 0) == 1)
    return name in ("view", "reshape") and node.args[2:] == (-1,)


def _flattened(x: Layout | None) -> Layout | None:
    return None if x is None else tuple(part._replace(repeat=UNKNOWN_REPEAT) for part in x)


def _goes_into_norm(node: fx.Node, layers: dict[str, nn.Module]) -> bool:
    users = [user for user in node.users if user.op == "call_module"]
    return len(users) == len(node.users) == 1 and isinstance(layers[str(users[0].target)], CHANNEL_NORMS)


def _argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _pools(dims: Any) -> bool:
    """Say whether a mean over these axes is one over pixels."""
    found = dims if isinstance(dims, (tuple, list)) else (dims,)
    return all(isinstance(dim, int) and (dim >= 2 or dim in (-1, -2)) for dim in found)


def positions(stream: Stream) -> Iterator[int]:
    """Yield the position of every channel in its lane: what stays is decided by position."""
    per_lane = math.ceil(stream.size / stream.lanes)
    return (channel % per_lane for channel in range(stream.size))
