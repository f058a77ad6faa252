"""Which streams of a network can be ordered, and why others cannot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from leanbayes.layers.channels import Channels

FIRST = "it is that of the first linear map, which NestedDropout(first=True) orders"
NOT_INNER = "it is no inner one, and streams='inner'"
MOST_NAMED = 4


def obstacles(channels: Channels, left_out: Iterable[str], *, first: bool, inner: bool) -> dict[int, str]:
    """Return what keeps each stream that a linear map begins from being ordered; nothing keeps those with "".

    Args:
        channels: the streams of a network.
        left_out: paths of layers that would fill dropped channels again.
        first: whether the stream of the first linear map may be ordered.
        inner: whether only inner streams may be: those that a depthwise convolution passes on, or in networks without,
            those that no sum passes through.
    """
    begun = [_roots(channels, path)[0] for path in channels.makers]
    found = {root: channels.stream(root).held for root in begun}
    without = {root: f"'{path}' is not converted" for path in left_out for root in _roots(channels, path)}
    if not first:
        without |= dict.fromkeys(begun[:1], FIRST)
    found = {root: why or without.get(root, "") for root, why in found.items()}
    if inner:
        times = Counter(begun)
        single = [root for root, why in found.items() if not why and times[root] == 1]
        kept = [root for root in single if channels.stream(root).filtered] or single
        found = {root: why or ("" if root in kept else NOT_INNER) for root, why in found.items()}
    return found


def unordered(channels: Channels, found: dict[int, str]) -> str:
    """Say what keeps the streams of a network from being ordered, by the first linear map that each obstacle meets."""
    makers = {why: path for path in reversed(channels.makers) if (why := found[_roots(channels, path)[0]])}
    named = [f"that of '{path}', since {why}" for why, path in reversed(makers.items())]
    more = f"; and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    return f"no stream of channels of this network can be ordered: not {'; not '.join(named[:MOST_NAMED])}{more}"


def _roots(channels: Channels, path: str) -> list[int]:
    return [channels.root(part.stream) for part in channels.outputs.get(path) or ()]
