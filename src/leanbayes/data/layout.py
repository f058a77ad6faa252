"""Where the channels of images are in an array: first (N, C, H, W), or last (N, H, W, C), which are turned."""

from __future__ import annotations

from typing import get_args

import numpy as np

from leanbayes.data.checks import Array
from leanbayes.data.dataset import Channels

# N rows, C channels, H height, W width

USUAL = (1, 3)
"""Numbers of channels of grey and colour images."""
ASK = "Say which: channels='first' or channels='last' (--channels first, --channels last)."


def check_channels(channels: str | None, x: Array, name: str) -> Channels | None:
    """Return where the caller says that channels are, None without a wish; refuse it where there are no channels."""
    if channels is None:
        return None
    for known in get_args(Channels):
        if channels == known and x.ndim == 4:
            chosen: Channels = known
            return chosen
    if channels not in get_args(Channels):
        raise ValueError(f"expected channels to be 'first' or 'last' (or None, to go by the shape), got {channels!r}")
    raise ValueError(
        f"{name}: channels={channels!r} is for images (rows, channels, height, width) or (rows, height, width, "
        f"channels), got x_train of shape {x.shape}. Leave it out."
    )


def reading(x: Array, where: str, channels: Channels | None = None, ask: str = ASK) -> Channels | None:
    """Return where the channels of an array are, None if it has no axis for them.

    A reading is possible with one channel, with three, or with fewer than the pixels of each side.

    Args:
        x: The array.
        where: What it is called, for the message.
        channels: What is known already.
        ask: What to do if it cannot be known.

    Raises:
        ValueError: Both readings are possible, or neither.
    """
    if x.ndim != 4 or channels is not None:
        return channels if x.ndim == 4 else None
    first, middle, last = x.shape[1:]
    possible: dict[Channels, bool] = {
        "first": first in USUAL or first < min(middle, last),
        "last": last in USUAL or last < min(first, middle),
    }
    found = [one for one, is_possible in possible.items() if is_possible]
    if len(found) == 1:
        return found[0]
    raise ValueError(
        f"{where} has shape {x.shape}, images of {first} channels and {middle} x {last} pixels, or of {last} channels "
        f"and {first} x {middle} pixels. {ask}"
    )


def reading_like(shape: tuple[int, ...], like: tuple[int, ...], channels: Channels | None) -> Channels | None:
    """Return where the channels of rows of a shape are, if they are images (C, H, W) of the shape `like`.

    Where channels, height and width are the same number, `channels` decides, as it did in training.
    """
    if len(shape) != 3 or len(like) != 3:
        return None
    matching: list[Channels] = []
    if shape == like:
        matching.append("first")
    if shape == (*like[1:], like[0]):
        matching.append("last")
    return channels if channels in matching else next(iter(matching), None)


def channels_first(x: Array, where: str, channels: Channels | None = None, ask: str = ASK) -> Array:
    """Return images as (N, C, H, W) and features as (N, d); whole-number pixels from 0 to 255 become uint8.

    The arguments are those of `reading`.
    """
    if x.ndim in (1, 3):
        x = x[:, None]
    elif reading(x, where, channels, ask) == "last":
        x = np.moveaxis(x, -1, 1)
    if x.ndim == 4 and x.dtype.kind in "ui" and x.size and x.min() >= 0 and x.max() <= 255:
        x = x.astype(np.uint8, copy=False)
    return x
