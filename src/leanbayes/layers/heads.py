"""Heads of attention: streams whose channels are split into heads, weighed and put together again.

The queries, keys and values of a head, and what the output projection reads of it, stay or go together:

    (B, T, H d) -> (B, T, H, d) -> (B, H, T, d) -> attention -> (B, T, H, d) -> (B, T, H d)

A head whose values are zero gives zeros, whatever its queries and keys are. Shapes must be known, and attention be
`F.scaled_dot_product_attention`; any other function that reads heads holds them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import fx

from leanbayes.layers.axes import moved, shapes, VIEWS
from leanbayes.layers.streams import Channels, Layout, Segment
from leanbayes.layers.words import ELEMENTWISE

ATTENTION = "scaleddotproductattention"


class _Split(NamedTuple):
    """A stream on two axes.

    Attributes:
        stream: its number.
        axis: the axis of the heads, from the left.
    """

    stream: int
    axis: int


class Heads:
    """The values of a graph that are split into heads."""

    def __init__(self, found: Channels) -> None:
        """Begin with none."""
        self.found = found
        self.splits: dict[fx.Node, _Split] = {}

    def among(self, node: fx.Node) -> bool:
        """Say whether a node reads a value that is split into heads, or is one."""
        return node in self.splits or any(argument in self.splits for argument in node.all_input_nodes)

    def hold(self, node: fx.Node, reason: str) -> None:
        """Let no head go that a node reads."""
        for argument in node.all_input_nodes:
            if argument in self.splits:
                self.found.hold((Segment(self.splits[argument].stream),), reason)

    def begin(self, node: fx.Node, name: str, x: Layout | None) -> bool:
        """Split a stream, where a view cuts the last axis into two; say whether it did."""
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
        """Follow heads through a function; the layout of the result where they are put together again."""
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
        """Make one stream of queries, keys and values; say whether that is sound."""
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
    """Say whether a mask of attention is none, or one for all heads."""
    if mask is None:
        return True
    shape = mask.meta.get("shape") if isinstance(mask, fx.Node) else None
    return shape is not None and (len(shape) < 3 or shape[-3] == 1)
