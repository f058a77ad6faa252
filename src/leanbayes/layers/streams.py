"""Streams of channels: which of them stay or go together, and where they are on an axis."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

UNKNOWN_REPEAT = 0


@dataclass
class Stream:
    """Channels that stay or go together.

    Attributes:
        size: how many they are.
        lanes: equal blocks of them that are narrowed alike; channel c is at position c mod (size / lanes) of its lane.
        block: neighbours that are dropped together: the channels of an attention head.
        filtered: whether a depthwise convolution passes them on.
        held: why none of them may go; empty where they may.
    """

    size: int
    lanes: int = 1
    block: int = 1
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
        first: path of the linear map that reads the input.
        normed: paths of linear maps whose output goes straight into a norm, and nowhere else.
        first_readers: what reads a stream directly behind a map that begins it.
        scores: paths of makers whose channels only weigh those of others: the queries and keys of attention heads.
        untraced: why modules could not be traced, by path.
    """

    inputs: dict[str, Layout | None] = field(default_factory=dict)
    outputs: dict[str, Layout | None] = field(default_factory=dict)
    makers: list[str] = field(default_factory=list)
    first: str | None = None
    normed: set[str] = field(default_factory=set)
    first_readers: set[str] = field(default_factory=set)
    scores: set[str] = field(default_factory=set)
    untraced: dict[str, str] = field(default_factory=dict)
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
            self.unite(a.stream, b.stream)
        return one

    def hold_all(self, reason: str) -> None:
        """Let no channel of any stream go."""
        for stream in self._streams:
            stream.held = stream.held or reason

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

    def in_blocks(self, number: int, block: int) -> None:
        """Drop the channels of a stream only in blocks of neighbours, as attention heads have them."""
        stream = self.stream(number)
        if stream.lanes > 1 or stream.block not in (1, block):
            stream.held = stream.held or "its blocks do not fit the heads of attention"
        stream.block = block

    def unite(self, one: int, other: int) -> None:
        """Make one stream of two."""
        a, b = self.root(one), self.root(other)
        if a == b:
            return
        kept, gone = self._streams[min(a, b)], self._streams[max(a, b)]
        self._parents[max(a, b)] = min(a, b)
        kept.held = kept.held or gone.held
        if gone.lanes != kept.lanes and 1 not in (gone.lanes, kept.lanes):
            kept.held = kept.held or f"it is read in {kept.lanes} and in {gone.lanes} lanes"
        kept.lanes = max(kept.lanes, gone.lanes)
        if gone.block != 1:
            self.in_blocks(a, gone.block)
        kept.filtered = kept.filtered or gone.filtered


def positions(stream: Stream) -> Iterator[int]:
    """Yield the position of every channel in its lane: what stays is decided by position."""
    per_lane = math.ceil(stream.size / stream.lanes)
    return (channel % per_lane // stream.block for channel in range(stream.size))
