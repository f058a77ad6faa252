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

from leanbayes.layers.composite import Composite
from leanbayes.layers.family import CHANNEL_NORMS, family_of, follows_channels, LINEAR_MAPS, NORMS
from leanbayes.layers.words import ELEMENTWISE, OVER_PIXELS, PRODUCTS, QUOTIENTS, SUMS, word

UNKNOWN_REPEAT = 0


@dataclass
class Stream:
    """Channels that stay or go together.

    Attributes:
        size: how many they are.
        lanes: equal blocks of them that are narrowed alike; channel c is at position c mod (size / lanes) of its lane.
        filtered: whether a depthwise convolution passes them on.
        held: why none of them may go; empty where they may.
    """

    size: int
    lanes: int = 1
    filtered: bool = False
    held: str = ""


class Segment(NamedTuple):
    """A part of a channel axis.

    Attributes:
        stream: the number of the stream that lies here.
        repeat: how often every channel is repeated, one after the other.
        pixels: number of axes behind the channel axis; none in the output of a Linear.
    """

    stream: int
    repeat: int = 1
    pixels: int = 0


Layout = tuple[Segment, ...]


@dataclass
class Channels:
    """What `follow` found.

    Attributes:
        inputs: the layout of what each linear map, norm and per-channel layer reads, by path; None where it is unknown.
        outputs: the layout of what it returns.
        makers: the linear maps that begin streams, in the order of the forward pass.
        normed: paths of linear maps whose output goes straight into a norm, and nowhere else.
        first_readers: what reads a stream directly behind a map that begins it.
    """

    inputs: dict[str, Layout | None] = field(default_factory=dict)
    outputs: dict[str, Layout | None] = field(default_factory=dict)
    makers: list[str] = field(default_factory=list)
    normed: set[str] = field(default_factory=set)
    first_readers: set[str] = field(default_factory=set)
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

    def new(self, size: int, lanes: int = 1, pixels: int = 0) -> Layout:
        """Begin a stream."""
        self._streams.append(Stream(size, lanes))
        self._parents.append(len(self._parents))
        return (Segment(len(self._parents) - 1, pixels=pixels),)

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
        if layout is None:
            return
        if len(layout) != 1:
            self.hold(layout, "a grouped convolution reads several streams")
            return
        stream = self.stream(layout[0].stream)
        if stream.lanes not in (1, lanes):
            stream.held = stream.held or f"it is read in {stream.lanes} and in {lanes} lanes"
        stream.lanes = lanes

    def _match(self, one: Layout, other: Layout) -> bool:
        def sizes(layout: Layout) -> list[tuple[int, ...]]:
            return [(self.stream(part.stream).size, part.repeat, part.pixels) for part in layout]

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
        kept.filtered = kept.filtered or gone.filtered


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
    """Traces into everything but torch's own layers, what was taken apart of them, and layers with noise."""

    def __init__(self, base_of: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.base_of = base_of

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        known = self.base_of(m) is not m or family_of(m) is not None or isinstance(m, Composite)
        return known or super().is_leaf_module(m, module_qualified_name)


class _Walk:
    """One walk over a traced graph, with the layout of every value."""

    def __init__(self, found: Channels, layers: dict[str, nn.Module]) -> None:
        self.found, self.layers = found, layers
        self.layouts: dict[fx.Node, Layout | None] = {}
        self.without_norm: set[str] = set()
        self.opened: set[str] = set()

    def run(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            self.layouts[node] = self.visit(node)
        self.found.normed -= self.without_norm  # a layer that is called twice may meet a norm only once
        for path in self.opened & set(self.found.outputs):
            for layout in (self.found.inputs[path], self.found.outputs[path]):
                self.found.hold(layout, f"the weights of '{path}' are used outside of it")

    def visit(self, node: fx.Node) -> Layout | None:
        if node.op == "output":
            for layout in self.arguments(node):
                self.found.hold(layout, "it is an output of the network")
        elif node.op == "get_attr":
            self.opened.add(str(node.target).rpartition(".")[0].removesuffix(".base"))
        elif node.op == "call_module":
            return self.module(node, str(node.target))
        elif node.op != "placeholder":
            return self.function(node)
        return None

    def arguments(self, node: fx.Node) -> list[Layout | None]:
        return [self.layouts[argument] for argument in node.all_input_nodes]

    def module(self, node: fx.Node, path: str) -> Layout | None:
        layer, x = self.layers[path], next(iter(self.arguments(node)), None)
        if isinstance(layer, LINEAR_MAPS) and follows_channels(layer) and len(node.all_input_nodes) == 1:
            (self.found.normed if _goes_into_norm(node, self.layers) else self.without_norm).add(path)
            y = _linear(self.found, path, layer, x)
            if path in self.found.makers:
                self.found.first_readers.update(str(user.target) for user in node.users)
            return y
        if isinstance(layer, CHANNEL_NORMS) and follows_channels(layer):
            return self.each_channel(path, x, layer.num_features)
        if isinstance(layer, nn.PReLU):
            return x if layer.num_parameters == 1 else self.each_channel(path, x, layer.num_parameters)
        if isinstance(layer, nn.Flatten) and _flattens(x, layer.start_dim, layer.end_dim):
            return _flattened(x)
        if _passes(word(type(layer)), x):
            return x
        kind = "a norm over several channels" if isinstance(layer, NORMS) else f"{type(layer).__name__} '{path}'"
        return self.unknown(node, f"{kind} reads it")

    def each_channel(self, path: str, x: Layout | None, channels: int) -> Layout | None:
        """A layer with numbers for every channel: a norm, a PReLU."""
        x = _resolved(self.found, x, channels)
        if path in self.found.inputs:  # called twice: what it reads has to stay alike
            x = self.found.merge(self.found.inputs[path], x)
        self.found.inputs[path] = self.found.outputs[path] = x
        return x

    def function(self, node: fx.Node) -> Layout | None:
        name, arguments = word(node.target), self.arguments(node)
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
        return x if _passes(name, x) else self.unknown(node, f"the function {name} reads it")

    def merged(self, node: fx.Node, name: str) -> Layout | None:
        """A sum or product of two values; a number that is added would fill what was dropped."""
        operands = [*node.args, *node.kwargs.values()]
        values = [self.layouts[value] for value in operands if isinstance(value, fx.Node)]
        if name in QUOTIENTS and (len(values) > 1 or not isinstance(operands[0], fx.Node)):
            return self.unknown(node, "something is divided by it")
        if len(values) == 2:
            return self.found.merge(values[0], values[1])
        return self.unknown(node, "a number is added to it") if name in SUMS else values[0]

    def joined(self, node: fx.Node, tensors: Any, axis: Any) -> Layout | None:
        """A concatenation over channels."""
        parts = [self.layouts[value] for value in tensors] if isinstance(tensors, (list, tuple)) else [None]
        segments = tuple(segment for part in parts for segment in part or ())
        alike = len({segment.pixels for segment in segments}) == 1 and axis in (1, -1 - segments[0].pixels)
        if not all(parts) or not alike or any(segment.repeat == UNKNOWN_REPEAT for segment in segments):
            return self.unknown(node, "it is joined to something in a way that cannot be followed")
        return segments

    def averaged(self, node: fx.Node, x: Layout | None, axes: Any, kept: bool) -> Layout | None:
        """A mean over axes of pixels, which are gone afterwards unless they are kept."""
        pixels = x[0].pixels if x else 0
        axes = axes if isinstance(axes, (tuple, list)) else (axes,)
        if x is None or not all(isinstance(a, int) and (2 <= a < 2 + pixels or -pixels <= a < 0) for a in axes):
            return self.unknown(node, "the function mean reads it")
        return x if kept else tuple(part._replace(pixels=pixels - len(axes)) for part in x)

    def unknown(self, node: fx.Node, reason: str) -> Layout | None:
        for layout in self.arguments(node):
            self.found.hold(layout, reason)
        return None


def _linear(found: Channels, path: str, layer: Any, x: Layout | None) -> Layout:
    """Let a linear map read a layout, and begin a stream unless it is depthwise."""
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
    """Pass channels on that are convolved each by itself."""
    if len(x) > 1:
        found.hold(x, "a depthwise convolution reads several streams")
    for part in x:
        found.stream(part.stream).filtered = True
    found.outputs[path] = x
    return x


def _resolved(found: Channels, x: Layout | None, inputs: int, pixels: int | None = None) -> Layout | None:
    """Find out how often flattening has repeated every channel, now that the number of inputs is known.

    What cannot be so many channels, or has other axes behind them than the reader thinks, is held.
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
    """Say whether a function passes on a layout as it is."""
    return name in ELEMENTWISE or (name in OVER_PIXELS and x is not None and x[0].pixels > 0)


def _makes_rows(name: str, node: fx.Node, x: Layout | None) -> bool:
    """Say whether a function makes rows of images."""
    if name == "flatten":
        return _flattens(x, _argument(node, 1, "start_dim", 0), _argument(node, 2, "end_dim", -1))
    return name in ("view", "reshape") and node.args[2:] == (-1,) and _is_batch(node.args[1])


def _is_batch(size: Any) -> bool:
    """Say whether a number is the length of the first axis of something: `x.size(0)`, `x.shape[0]`."""
    return isinstance(size, fx.Node) and word(size.target) in ("size", "getitem") and size.args[1:] == (0,)


def _flattens(x: Layout | None, start: Any, end: Any) -> bool:
    pixels = x[0].pixels if x else 0
    return start in (1, -1 - pixels) and end in (-1, 1 + pixels)


def _flattened(x: Layout | None) -> Layout | None:
    """Repeat every channel for each of its pixels; what has none stays as it is."""
    if x is None or x[0].pixels == 0:
        return x
    return tuple(part._replace(repeat=UNKNOWN_REPEAT, pixels=0) for part in x)


def _goes_into_norm(node: fx.Node, layers: dict[str, nn.Module]) -> bool:
    users = [user for user in node.users if user.op == "call_module"]
    return len(users) == len(node.users) == 1 and isinstance(layers[str(users[0].target)], CHANNEL_NORMS)


def _argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def positions(stream: Stream) -> Iterator[int]:
    """Yield the position of every channel in its lane: what stays is decided by position."""
    per_lane = math.ceil(stream.size / stream.lanes)
    return (channel % per_lane for channel in range(stream.size))
