"""Streams of channels that can be ordered, obstacles of others, and the share of the weights that widths remove."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn, Tensor

from leanbayes.layers.streams import Channels, Layout
from leanbayes.methods.nested.units import OrderingUnit

FIRST = "it is that of the first linear map, which NestedDropout(first=True) orders"
NOT_INNER = "it is no inner one, and streams='inner'"
OUTPUT = "it is an output of the network"
MOST_NAMED = 4
WIDTHS = (0.25, 0.5, 0.75)
LEAST = 1e-9  # a width below that of one group: the groups that are always on stay


def obstacles(channels: Channels, left_out: Iterable[str], *, first: bool, inner: bool) -> dict[int, str]:
    """Return the obstacle that keeps each stream of a linear map from being ordered; "" for none.

    Layers at the paths `left_out` would fill dropped channels again; `first` and `inner` are as in `NestedDropout`.
    """
    begun = [_roots(channels, path)[0] for path in channels.makers]
    found = {root: channels.stream(root).held for root in begun}
    without = {root: f"'{path}' is not converted" for path in left_out for root in _roots(channels, path)}
    if not first and channels.first is not None:
        without |= dict.fromkeys(_roots(channels, channels.first), FIRST)
    found = {root: why or without.get(root, "") for root, why in found.items()}
    if inner:
        times = Counter(begun)
        single = [root for root, why in found.items() if not why and times[root] == 1]
        kept = [root for root in single if channels.stream(root).filtered] or single
        found = {root: why or ("" if root in kept else NOT_INNER) for root, why in found.items()}
    return found


def unordered(channels: Channels, found: dict[int, str]) -> str:
    """Return a message with each obstacle and the first linear map that it meets."""
    makers = {why: path for path in reversed(channels.makers) if (why := found[_roots(channels, path)[0]])}
    named = [f"that of '{path}', since {why}" for why, path in reversed(makers.items())]
    more = f"; and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    return f"no stream of channels of this network can be ordered: not {'; not '.join(named[:MOST_NAMED])}{more}"


def _roots(channels: Channels, path: str) -> list[int]:
    return [channels.root(part.stream) for part in channels.outputs.get(path) or ()]


@dataclass(frozen=True)
class Shares:
    """The share of a network's weights that the narrowest width and some other widths remove."""

    weights: int
    narrowest: float
    of_widths: dict[float, float]


def removable(layers: Mapping[str, nn.Module], channels: Channels, units: Mapping[int, OrderingUnit]) -> Shares:
    """Count the weights that widths remove, given the plain modules by path and the units by number of stream."""
    plain = {id(p): p.numel() for layer in layers.values() for p in layer._parameters.values() if p is not None}
    weights = sum(plain.values())

    def share(width: float) -> float:
        kept = {root: float(unit.kept(width).float().mean()) for root, unit in units.items()}
        gone = sum(_gone(layers[path], path, channels, kept) for path in channels.outputs)
        return gone / max(1, weights)

    return Shares(weights, share(LEAST), {width: share(width) for width in WIDTHS})


def _gone(layer: Any, path: str, channels: Channels, kept: Mapping[int, float]) -> float:
    """Return the number of removed weights of a layer, given the kept share of each stream."""
    inputs, outputs = channels.inputs[path], channels.outputs[path]
    of_outputs = kept_share(channels, outputs, kept)
    of_inputs = 1.0 if inputs == outputs else kept_share(channels, inputs, kept)  # one weight per channel
    tensors = {name: getattr(layer, name, None) for name in ("weight", "bias")}  # a parametrised weight, too
    sizes = {name: tensor.numel() for name, tensor in tensors.items() if tensor is not None}
    gone: float = sum(n * (1 - of_outputs * (of_inputs if name == "weight" else 1.0)) for name, n in sizes.items())
    return gone


def kept_share(channels: Channels, layout: Layout | None, kept: Mapping[int, float]) -> float:
    """Return the kept share of a channel axis, given that of each stream."""
    if not layout:
        return 1.0
    sizes = [channels.stream(part.stream).size * max(1, part.repeat) for part in layout]
    shares = [kept.get(channels.root(part.stream), 1.0) for part in layout]
    return sum(size * share for size, share in zip(sizes, shares, strict=True)) / sum(sizes)


def report(shares: Shares, channels: Channels, found: Mapping[int, str]) -> str:
    """Return a message with the share of the weights that each width removes, and the reasons of unordered streams."""
    widths = ", ".join(f"width {width:g} removes {share:.0%}" for width, share in shares.of_widths.items())
    reasons = Counter(why for why in found.values() if why and why != OUTPUT)
    text = f"NestedDropout: of {shares.weights:,} weights {widths}"
    if reasons:
        text += f"; {sum(reasons.values())} of {len(found)} streams are not ordered: {_counted(reasons)}"
    return text + _untraced(channels)


def too_little(shares: Shares, least: float, channels: Channels, found: dict[int, str]) -> str:
    """Return a message for a network with too little to cut: how much, why, and what to do."""
    most = f"the narrowest width would remove {shares.narrowest:.1%} of the {shares.weights:,} weights"
    reasons = Counter(why for why in found.values() if why)
    streams = f"{sum(reasons.values())} of {len(found)} streams cannot be ordered"
    why = f": {streams} ({_counted(reasons)})" if reasons else ""
    return (
        f"expected a network from which NestedDropout can cut {least:.0%} of the weights, but {most}{why}"
        f"{_untraced(channels)}; "
        "NestedDropout(min_cut=0) converts it for the noise alone; other methods, such as lb.Rank1(), need no order"
    )


def _counted(reasons: Counter[str]) -> str:
    reasons = _alike(reasons)
    named = [f"{count} because {why}" for why, count in reasons.most_common(MOST_NAMED)]
    left = sum(reasons.values()) - sum(count for _, count in reasons.most_common(MOST_NAMED))
    return ", ".join(named) + (f", {left} for other reasons" if left else "")


def _alike(reasons: Counter[str]) -> Counter[str]:
    """Count reasons that differ only in the named layer as one: the first of them, "(and others)"."""
    forms: dict[str, list[str]] = {}
    for why in reasons:
        forms.setdefault(re.sub(r"'[^']*'", "''", why), []).append(why)
    said = {
        form: re.sub(r"('[^']*')", r"\1 (and others)", whys[0], count=1) if len(whys) > 1 else whys[0]
        for form, whys in forms.items()
    }
    return Counter({said[form]: sum(reasons[why] for why in whys) for form, whys in forms.items()})


def _untraced(channels: Channels) -> str:
    """Return a message about a line that cannot be traced, preferably one with a known remedy; "" for none."""
    failed = channels.untraced
    if not failed:
        return ""
    path = next((path for path, why in failed.items() if "): " in why), next(iter(failed)))
    name = f"'{path}'" if path else "the network"
    more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
    return (
        f"; the forward of {name}{more} cannot be traced, see {failed[path]}; "
        "lb.convert(..., example=inputs) follows the network by a pass instead"
    )


Inputs = tuple[tuple[str, tuple[int, ...], str], ...]
"""Name ("" for a positional one), shape and dtype of each example input, as a file can hold them."""


def describe_example(example: Any) -> Inputs:
    """Return name, shape and dtype of example inputs: a tensor, a tuple of tensors or a mapping by name."""
    several = example if isinstance(example, tuple) else (example,)
    items = example.items() if isinstance(example, Mapping) else [("", one) for one in several]
    described = []
    for name, tensor in items:
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"expected example inputs of tensors alone, a tensor, a tuple or a mapping by name, got "
                f"{type(tensor).__name__}; leave optional inputs out"
            )
        described.append((str(name), tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
    return tuple(described)


def build_example(inputs: Inputs, device: torch.device) -> Any:
    """Return inputs of ones in these shapes: a word of any vocabulary, and a mask that hides nothing."""
    tensors = [(name, torch.ones(shape, dtype=getattr(torch, dtype), device=device)) for name, shape, dtype in inputs]
    if any(name for name, _ in tensors):
        return dict(tensors)
    return tuple(tensor for _, tensor in tensors)


def as_inputs(values: Iterable[Iterable[Any]]) -> Inputs:
    """Return a description of inputs as tuples; JSON has lists."""
    try:
        found = tuple((str(name), tuple(int(n) for n in shape), str(dtype)) for name, shape, dtype in values)
        if not all(isinstance(getattr(torch, dtype, None), torch.dtype) for _, _, dtype in found):
            raise TypeError("no dtype")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f'expected inputs such as (("pixel_values", (1, 3, 32, 32), "float32"),), got {values!r}'
        ) from error
    return found
