"""Where the channel axis goes when a function turns, cuts or merges axes, for graphs that know shapes.

Shapes come from a recorded pass (`leanbayes.layers.recording`). A graph that was traced on proxies knows none, and
nothing here applies to it.
"""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from leanbayes.layers.streams import Layout, UNKNOWN_REPEAT

Shape = tuple[int, ...]
VIEWS = ("view", "reshape", "flatten", "unflatten", "viewas")
OVER_AXES = ("mean", "sum")


def shapes(node: fx.Node) -> tuple[Shape, Shape] | None:
    """Return the shapes of the first argument and of the result; None where they are unknown."""
    first = node.args[0] if node.args else None
    old, new = first.meta.get("shape") if isinstance(first, fx.Node) else None, node.meta.get("shape")
    return None if old is None or new is None else (old, new)


def rearranged(node: fx.Node, name: str, x: Layout | None) -> Layout | None:
    """Return the layout after a function that rearranges axes; None where the channels cannot be followed."""
    known = shapes(node)
    if x is None or known is None or any(part.repeat == UNKNOWN_REPEAT for part in x):
        return None
    old, new = known
    channels = len(old) - 1 - x[0].pixels
    if name in VIEWS:
        return _viewed(x, channels, old, new)
    order = moved(node, name, len(old))
    if order is not None:
        return _behind(x, len(new) - 1 - order.index(channels))
    if name == "getitem":
        behind = _indexed(node.args[1], channels, len(old))
        return None if behind is None else _behind(x, behind)
    if name in OVER_AXES:
        axes = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        return _reduced(x, channels, axes, old, new)
    return None


def _behind(x: Layout, pixels: int) -> Layout:
    return tuple(part._replace(pixels=pixels) for part in x)


def _viewed(x: Layout, channels: int, old: Shape, new: Shape) -> Layout | None:
    """Find the channels in the same memory: with as many numbers in front of them, alone or with all their pixels."""
    for axis in range(len(new)):
        if math.prod(new[:axis]) != math.prod(old[:channels]):
            continue
        if new[axis] == old[channels]:
            return _behind(x, len(new) - 1 - axis)
        pixels = math.prod(old[channels + 1 :])
        if new[axis] == old[channels] * pixels:
            flat = tuple(part._replace(repeat=part.repeat * pixels) for part in x)
            return _behind(flat, len(new) - 1 - axis)
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
    """Return the whole numbers in arguments, given one by one or as a list."""
    flat = values[0] if len(values) == 1 and isinstance(values[0], (tuple, list)) else values
    return [value for value in flat if isinstance(value, int)]


def _indexed(index: Any, channels: int, count: int) -> int | None:
    """Return the number of axes behind the channels after slices and numbers; None if an index is of another kind."""
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
    return _behind(x, x[0].pixels - gone)
