"""Streams: sets of channels that stay or go together, and their places on an axis."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx

UNKNOWN_REPEAT = 0


@dataclass
class Stream:
    """Channels that stay or go together."""

    size: int  # number of channels
    lanes: int = 1  # equal blocks that are narrowed alike; channel c has position c mod (size / lanes) in its lane
    block: int = 1  # neighbours that are dropped together: the channels of an attention head
    filtered: bool = False  # whether a depthwise convolution passes them
    held: str = ""  # why no channel may go; empty if they may

    def hold(self, reason: str) -> None:
        """Keep all channels, for the first reason that was found."""
        self.held = self.held or reason


class Segment(NamedTuple):
    """A part of a channel axis."""

    stream: int  # its number
    repeat: int = 1  # how often every channel is repeated, one after the other
    pixels: int = 0  # number of axes after the channel axis; 0 in the output of a Linear


Layout = tuple[Segment, ...]


@dataclass
class Channels:
    """Result of `follow`; layers are named by path."""

    inputs: dict[str, Layout | None] = field(default_factory=dict)  # of linear maps, norms and per-channel layers
    outputs: dict[str, Layout | None] = field(default_factory=dict)  # of the same layers; None if unknown
    makers: list[str] = field(default_factory=list)  # linear maps that begin streams, in the order of the pass
    first: str | None = None  # the linear map that reads the input
    normed: set[str] = field(default_factory=set)  # linear maps whose output goes into a norm only
    first_readers: set[str] = field(default_factory=set)  # nodes that read a stream directly after its maker
    scores: set[str] = field(default_factory=set)  # makers of queries and keys, which only weigh other channels
    untraced: dict[str, str] = field(default_factory=dict)  # reasons why modules could not be traced
    _streams: list[Stream] = field(default_factory=list)
    _parents: list[int] = field(default_factory=list)

    def stream(self, number: int) -> Stream:
        """Return a stream by any of its numbers."""
        return self._streams[self.root(number)]

    def root(self, number: int) -> int:
        """Return the number of a stream after all merges."""
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
        """Make one layout of two that are added; hold both if they do not match part by part."""
        if one is None or other is None or not self._match(one, other):
            self.hold(one, "it is added to something of another layout")
            self.hold(other, "it is added to something of another layout")
            return one or other
        for a, b in zip(one, other, strict=True):
            self.unite(a.stream, b.stream)
        return one

    def hold_all(self, reason: str) -> None:
        """Hold all streams."""
        for stream in self._streams:
            stream.hold(reason)

    def hold(self, layout: Layout | None, reason: str) -> None:
        """Hold the streams of a layout: no channel may go."""
        for part in layout or ():
            self.stream(part.stream).hold(reason)

    def in_lanes(self, layout: Layout | None, lanes: int) -> None:
        """Narrow a stream only by equal parts of n lanes, as a grouped convolution reads it."""
        if layout is None or len(layout) != 1:
            self.hold(layout, "a grouped convolution reads several streams")
            return
        stream = self.stream(layout[0].stream)
        if stream.lanes not in (1, lanes):
            stream.hold(f"it is read in {stream.lanes} and in {lanes} lanes")
        stream.lanes = lanes

    def _match(self, one: Layout, other: Layout) -> bool:
        def sizes(layout: Layout) -> list[tuple[int, ...]]:
            return [(self.stream(part.stream).size, part.repeat, part.pixels) for part in layout]

        return sizes(one) == sizes(other)

    def in_blocks(self, number: int, block: int) -> None:
        """Drop the channels of a stream only in blocks of neighbours, the attention heads."""
        stream = self.stream(number)
        if stream.lanes > 1 or stream.block not in (1, block):
            stream.hold("its blocks do not fit the heads of attention")
        stream.block = block

    def unite(self, one: int, other: int) -> None:
        """Make one stream of two."""
        a, b = self.root(one), self.root(other)
        if a == b:
            return
        kept, gone = self._streams[min(a, b)], self._streams[max(a, b)]
        self._parents[max(a, b)] = min(a, b)
        kept.hold(gone.held)
        if gone.lanes != kept.lanes and 1 not in (gone.lanes, kept.lanes):
            kept.hold(f"it is read in {kept.lanes} and in {gone.lanes} lanes")
        kept.lanes = max(kept.lanes, gone.lanes)
        if gone.block != 1:
            self.in_blocks(a, gone.block)
        kept.filtered = kept.filtered or gone.filtered


def positions(stream: Stream) -> Iterator[int]:
    """Yield the position of every channel in its lane, which decides whether it stays."""
    per_lane = math.ceil(stream.size / stream.lanes)
    return (channel % per_lane // stream.block for channel in range(stream.size))


# Axes: follow the channel axis through functions that permute, split or merge axes. Shapes come from a recorded pass
# (`leanbayes.layers.tracing.record`). A graph traced on proxies has no shapes, and these functions do not apply.

Shape = tuple[int, ...]
VIEWS = ("view", "reshape", "flatten", "unflatten", "viewas")
OVER_AXES = ("mean", "sum")


def shapes(node: fx.Node) -> tuple[Shape, Shape] | None:
    """Return the shapes of the first argument and of the result; None if unknown."""
    first = node.args[0] if node.args else None
    old, new = first.meta.get("shape") if isinstance(first, fx.Node) else None, node.meta.get("shape")
    return None if old is None or new is None else (old, new)


def rearranged(node: fx.Node, name: str, x: Layout | None) -> Layout | None:
    """Return the layout after a function that rearranges axes; None if the channels cannot be followed."""
    known = shapes(node)
    if x is None or known is None or any(part.repeat == UNKNOWN_REPEAT for part in x):
        return None
    old, new = known
    channels = len(old) - 1 - x[0].pixels
    if name in VIEWS:
        return _viewed(x, channels, old, new)
    order = moved(node, name, len(old))
    if order is not None:
        return _with_pixels(x, len(new) - 1 - order.index(channels))
    if name == "getitem":
        pixels = _indexed(node.args[1], channels, len(old))
        return None if pixels is None else _with_pixels(x, pixels)
    if name in OVER_AXES:
        axes = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        return _reduced(x, channels, axes, old, new)
    return None


def _with_pixels(x: Layout, pixels: int) -> Layout:
    return tuple(part._replace(pixels=pixels) for part in x)


def _viewed(x: Layout, channels: int, old: Shape, new: Shape) -> Layout | None:
    """Find the channels in the same memory: equally many numbers before them, alone or with all their pixels."""
    for axis in range(len(new)):
        if math.prod(new[:axis]) != math.prod(old[:channels]):
            continue
        if new[axis] == old[channels]:
            return _with_pixels(x, len(new) - 1 - axis)
        pixels = math.prod(old[channels + 1 :])
        if new[axis] == old[channels] * pixels:
            flat = tuple(part._replace(repeat=part.repeat * pixels) for part in x)
            return _with_pixels(flat, len(new) - 1 - axis)
    return None


def moved(node: fx.Node, name: str, count: int) -> list[int] | None:
    """Return the order of the old axes after a transposition or permutation; None for other functions."""
    numbers = _numbers(node.args[1:]) or _numbers(tuple(node.kwargs.values()))
    order = list(range(count))
    if name in ("transpose", "swapaxes", "swapdims") and len(numbers) == 2:
        a, b = (number % count for number in numbers)
        order[a], order[b] = b, a
        return order
    if name == "permute" and len(numbers) == count:
        return [number % count for number in numbers]
    return None


def _numbers(values: Any) -> list[int]:
    flat = values[0] if len(values) == 1 and isinstance(values[0], (tuple, list)) else values
    return [value for value in flat if isinstance(value, int)]


def _indexed(index: Any, channels: int, count: int) -> int | None:
    """Return the number of axes after the channels once slices and numbers apply; None for other indices."""
    index = index if isinstance(index, tuple) else (index,)
    if not all(type(one) in (int, slice) for one in index):
        return None
    if len(index) > channels and index[channels] != slice(None):
        return None
    return count - 1 - channels - sum(type(one) is int for one in index[channels + 1 :])


def _reduced(x: Layout, channels: int, axes: Any, old: Shape, new: Shape) -> Layout | None:
    """Sum or average over axes that are not the channels."""
    axes = axes if isinstance(axes, (tuple, list)) else (axes,)
    if not all(isinstance(axis, int) for axis in axes) or channels in [axis % len(old) for axis in axes]:
        return None
    gone = sum(axis % len(old) > channels for axis in axes) if len(new) < len(old) else 0
    return _with_pixels(x, x[0].pixels - gone)


# Effects of torch's functions, methods and modules on channels, by `word`.

ELEMENTWISE = frozenset(  # a list of words, written as such
    "relu relu6 leakyrelu elu selu celu gelu silu mish hardswish hardtanh tanh abs square sqrt neg identity dropout "  # noqa: SIM905
    "dropout1d dropout2d dropout3d contiguous clone detach float half bfloat16 to".split()
)
"""Elementwise and zero at zero. A sigmoid is not: it turns dropped channels into one half."""

OVER_PIXELS = frozenset(
    "maxpool1d maxpool2d maxpool3d avgpool1d avgpool2d avgpool3d adaptiveavgpool1d adaptiveavgpool2d adaptiveavgpool3d "  # noqa: SIM905
    "adaptivemaxpool1d adaptivemaxpool2d adaptivemaxpool3d interpolate upsample upsamplingbilinear2d "
    "upsamplingnearest2d zeropad1d zeropad2d zeropad3d".split()
)
"""The same for every channel alone, if it has pixel axes."""

SUMS, PRODUCTS, QUOTIENTS = {"add", "iadd", "sub", "isub"}, {"mul", "imul"}, {"div", "truediv", "itruediv"}


def word(target: Any) -> str:
    """Return the name of a torch function, method or module, as one word for all spellings."""
    if isinstance(target, str):
        return target.replace("_", "").lower()
    module = getattr(target, "__module__", None) or "torch"
    library = module.removeprefix("torch._ops.") if module.startswith("torch._ops.") else ""
    home = library if library not in ("", "aten") else module.partition(".")[0]
    own = "" if home in ("torch", "_operator", "builtins") else f"{home}."  # another library's relu may be anything
    return own + str(getattr(target, "__name__", target)).replace("_", "").lower()


# Attention heads: the queries, keys, values and outputs of a head stay or go together:
#
#     (B, T, H d) -> (B, T, H, d) -> (B, H, T, d) -> attention -> (B, T, H, d) -> (B, T, H d)
#
# A head with zero values gives zeros for any queries and keys. Shapes must be known, and attention must be
# `F.scaled_dot_product_attention`; any other function that reads heads holds them.

ATTENTION = "scaleddotproductattention"


class _Split(NamedTuple):
    """A stream on two axes: its number, and the axis of the heads from the left."""

    stream: int
    axis: int


class Heads:
    """The values of a graph that are split into heads."""

    def __init__(self, found: Channels) -> None:
        self.found = found
        self.splits: dict[fx.Node, _Split] = {}

    def among(self, node: fx.Node) -> bool:
        """Return whether a node reads a value that is split into heads, or is one."""
        return node in self.splits or any(argument in self.splits for argument in node.all_input_nodes)

    def hold(self, node: fx.Node, reason: str) -> None:
        """Hold the heads that a node reads."""
        for argument in node.all_input_nodes:
            if argument in self.splits:
                self.found.hold((Segment(self.splits[argument].stream),), reason)

    def begin(self, node: fx.Node, name: str, x: Layout | None) -> bool:
        """Split a stream if a view splits the last axis into two; return whether it did."""
        known = shapes(node)
        if name not in VIEWS or known is None or x is None or len(x) != 1 or x[0].pixels or x[0].repeat != 1:
            return False
        old, new = known
        if len(new) < 3 or new[:-2] != old[:-1] or new[-2] * new[-1] != old[-1] or new[-2] == 1:
            return False
        self.found.in_blocks(x[0].stream, new[-1])
        self.splits[node] = _Split(x[0].stream, len(new) - 2)
        return True

    def function(self, node: fx.Node, name: str) -> Layout | None:
        """Follow heads through a function; return the layout of the result if they are joined again."""
        first: Any = node.args[0] if node.args else None
        known, split = shapes(node), self.splits.get(first)
        if name == ATTENTION and self._attention(node):
            return None
        if known is None or split is None or len(node.all_input_nodes) != 1:
            return self._unknown(node, name)
        old, new = known
        order = moved(node, name, len(old))
        if order is not None:
            self.splits[node] = split._replace(axis=order.index(split.axis))
            return None
        if name in ELEMENTWISE:
            self.splits[node] = split
            return None
        together = old[split.axis] * old[-1]
        if name in VIEWS and split.axis == len(old) - 2 and new[-1] == together and math.prod(new) == math.prod(old):
            return (Segment(split.stream),)
        return self._unknown(node, name)

    def _attention(self, node: fx.Node) -> bool:
        """Make one stream of queries, keys and values; return whether that is sound."""
        names = ("query", "key", "value")
        values: list[Any] = [*node.args[:3], *(node.kwargs[name] for name in names if name in node.kwargs)]
        splits = [self.splits.get(value) for value in values if isinstance(value, fx.Node)]
        mask: Any = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        found = [split for split in splits if split is not None]
        if len(found) != 3 or node.kwargs.get("enable_gqa") or not _same_for_heads(mask):
            return False
        ranks = {len(value.meta["shape"]) - split.axis for value, split in zip(values, found, strict=True)}
        counts = {value.meta["shape"][split.axis] for value, split in zip(values, found, strict=True)}
        if ranks != {3} or len(counts) != 1 or len({self.found.stream(split.stream).size for split in found}) != 1:
            return False
        weighing = {self.found.root(split.stream) for split in found[:2]}
        for path in self.found.makers:
            made = self.found.outputs[path]
            if made is not None and self.found.root(made[0].stream) in weighing:
                self.found.scores.add(path)
        for split in found[:2]:
            self.found.unite(split.stream, found[2].stream)
        self.splits[node] = found[2]
        return True

    def _unknown(self, node: fx.Node, name: str) -> Layout | None:
        self.hold(node, f"the function {name} reads heads of attention")
        return None


def _same_for_heads(mask: Any) -> bool:
    """Return whether an attention mask is None, or the same for all heads."""
    if mask is None:
        return True
    shape = mask.meta.get("shape") if isinstance(mask, fx.Node) else None
    return shape is not None and (len(shape) < 3 or shape[-3] == 1)
