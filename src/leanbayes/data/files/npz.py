"""Read arrays of `.npz` files: sizes are checked before data, nothing is executed, image channels become axis 1."""

from __future__ import annotations

import contextlib
import math
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from leanbayes.data.dataset import Array, Channels, Raw

# N rows, C channels, H height, W width, d columns

ARRAYS = ("x_train", "y_train", "x_test", "y_test")
USUAL = (1, 3)
"""Numbers of channels of grey and colour images."""
ASK = "Say which: channels='first' or channels='last' (--channels first, --channels last)."
_READERS = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}


class ArrayHeader(NamedTuple):
    """Shape and type of an array in a file."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def bytes(self) -> int:
        """Size in memory."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_npz(path: Path) -> Raw:
    """Read x_train, y_train, x_test, y_test and, if present, the names of the `classes`."""
    there = array_names(path)
    lacking = [name for name in ARRAYS if name not in there]
    if lacking:
        raise ValueError(
            f"{path} lacks {', '.join(lacking)}; expected the arrays {', '.join(ARRAYS)}, got "
            f"{', '.join(there) or 'none'}. Save them with numpy.savez."
        )
    for split in ("train", "test"):  # from the headers: the data may be large
        x, y = (array_header(path, f"{name}_{split}").shape for name in ("x", "y"))
        if x and y and x[0] != y[0]:
            raise ValueError(
                f"{path.resolve().stem}: x_{split} and y_{split} differ in length, {x[0]} and {y[0]}. Give every row "
                "one target."
            )
    classes = _read_classes(path) if "classes" in there else ()
    x_train, y_train, x_test, y_test = (read_array(path, name) for name in ARRAYS)
    return Raw(x_train, y_train, x_test, y_test, classes)


def _read_classes(path: Path) -> tuple[str, ...]:
    names = read_array(path, "classes")
    if names.ndim != 1 or names.dtype.kind not in "USui":
        raise ValueError(
            f"{path}: classes has shape {names.shape} and dtype {names.dtype}; expected one name for each class, such "
            "as numpy.array(['cat', 'dog']). Save it so, or leave it out."
        )
    return tuple(map(str, as_text(names, f"{path}: classes")))


def array_names(path: Path) -> list[str]:
    """Return the names of the arrays in an `.npz` file."""
    with readable(path), zipfile.ZipFile(path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist()]


def read_array(path: Path, name: str) -> Array:
    """Read one array of an `.npz` file; raise ``ValueError`` if memory cannot hold it."""
    array_header(path, name)
    with readable(path), np.load(path, allow_pickle=False) as arrays:
        array: Array = arrays[name]
        return array


def array_header(path: Path, name: str) -> ArrayHeader:
    """Read shape and type of one array, without its data; raise ``ValueError`` if file or memory cannot hold it."""
    with readable(path), zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as file:
        held = archive.getinfo(f"{name}.npy").file_size
        version, _ = np.lib.format.read_magic(file)
        shape, _, dtype = _READERS[min(version, 2)](file)
        held -= file.tell()
        header = ArrayHeader(shape, dtype)
        if header.bytes > held and not dtype.hasobject:
            raise ValueError(f"the array {name} has the shape {shape}, {header.bytes:,} bytes, but holds {held:,}")
    check_memory(header.bytes, f"{path} has the array {name}", f"in the shape {header.shape}")
    return header


def check_memory(needed: int, data: str, form: str) -> None:
    """Raise ``ValueError`` if `needed` bytes exceed the memory; `data` and their `form` are for the message."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError):  # not on this system
        return
    if needed > memory:
        raise ValueError(
            f"{data}, {needed / 2**30:,.0f} GiB {form}; this machine has {memory / 2**30:,.0f} GiB of memory. Use a "
            "part of them, or smaller ones."
        )


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn errors of zip readers and decompressors into ``ValueError`` with the name of the file."""
    try:
        yield
    except (FileNotFoundError, MemoryError):
        raise
    except KeyError as error:
        raise ValueError(f"{path} lacks an array: {error.args[0]}. Save it with that name.") from error
    except Exception as error:  # each decompressor has its own errors
        raise ValueError(
            f"{path} cannot be read as an .npz file of plain arrays ({error}). "
            "Save numbers or text with numpy.savez; copy or prepare the file again if it was cut short."
        ) from error


def as_text(values: Array, where: str) -> Array:
    """Return words as str; bytes are read as UTF-8."""
    if values.dtype.kind != "S":
        return values.astype(str)
    try:
        return np.char.decode(values, "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} has bytes that are not UTF-8 ({error.object!r}); expected text. Save it as str: "
            "values.astype(str), or numpy.char.decode(values, 'latin-1')."
        ) from error


def tensor(x: Array) -> torch.Tensor:
    """Return uint8 images as uint8, any other array as float32."""
    kept = x if x.dtype == np.uint8 and x.ndim == 4 else x.astype(np.float32, copy=False)
    kept = np.ascontiguousarray(kept)
    return torch.from_numpy(kept if kept.flags.writeable else kept.copy())


def check_channels(channels: str | None, x: Array, name: str) -> Channels | None:
    """Return the caller's choice of the channel axis; raise ``ValueError`` if it is unknown or `x` has no images."""
    match channels:
        case None:
            return None
        case "first" | "last":
            if x.ndim == 4:
                return channels
        case _:
            raise ValueError(f"expected channels 'first' or 'last' (or None, to go by the shape), got {channels!r}")
    raise ValueError(
        f"{name}: channels={channels!r} is for images (rows, channels, height, width) or (rows, height, width, "
        f"channels), got x_train of shape {x.shape}. Leave it out."
    )


def channel_axis(x: Array, where: str, channels: Channels | None = None, ask: str = ASK) -> Channels | None:
    """Return the position of the channels of an array, None if it has no axis for them.

    A position is possible with one channel, with three, or with fewer channels than pixels on each side. If both or
    neither are possible, and `channels` does not decide, a ``ValueError`` names the array (`where`) and asks (`ask`).
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


def channel_axis_like(shape: tuple[int, ...], like: tuple[int, ...], channels: Channels | None) -> Channels | None:
    """Return the position of the channels in rows of a shape, if they are images of the shape `like` (C, H, W).

    If C, H and W are equal, `channels` decides, as in training.
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

    The arguments are those of `channel_axis`.
    """
    if x.ndim in (1, 3):
        x = x[:, None]
    elif channel_axis(x, where, channels, ask) == "last":
        x = np.moveaxis(x, -1, 1)
    if x.ndim == 4 and x.dtype.kind in "ui" and x.size and x.min() >= 0 and x.max() <= 255:
        x = x.astype(np.uint8, copy=False)
    return x
