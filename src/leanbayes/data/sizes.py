"""Sizes before data: what the headers of `.npz` files claim, compared with the file and with the machine's memory."""

from __future__ import annotations

import math
import os
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_READERS = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}


class ArrayHeader(NamedTuple):
    """Shape and type of an array in a file."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def bytes(self) -> int:
        """Size in memory."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_array_header(path: Path, name: str) -> ArrayHeader:
    """Read shape and type of an array in an `.npz` file, without its data.

    Raises:
        KeyError: The file has no such array.
        ValueError: The array is larger than what the file holds.
    """
    with zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as file:
        held = archive.getinfo(f"{name}.npy").file_size
        version, _ = np.lib.format.read_magic(file)
        shape, _, dtype = _READERS[min(version, 2)](file)
        held -= file.tell()
    header = ArrayHeader(shape, dtype)
    if header.bytes > held and not dtype.hasobject:
        raise ValueError(f"the array {name} has the shape {shape}, {header.bytes:,} bytes, but holds {held:,}")
    return header


def check_memory(needed: int, what: str, form: str) -> None:
    """Refuse data that cannot fit into memory, before the machine grinds to a halt.

    Args:
        needed: Bytes.
        what: The data, for the message.
        form: In which shape they need these bytes.
    """
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError):  # no such question on this system
        return
    if needed > memory:
        raise ValueError(
            f"{what}, {needed / 2**30:,.0f} GiB {form}; this machine has {memory / 2**30:,.0f} GiB of memory. Use a "
            "part of them, or smaller ones."
        )
