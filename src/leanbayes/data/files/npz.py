"""From the arrays of a file to a `DataSet`: axes in order, labels as numbers, everything checked."""

from __future__ import annotations

import math
import os
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from leanbayes.data.checks import Array, check, check_not_one_hot, check_task, warn_of_whole_targets
from leanbayes.data.dataset import DataSet, Split, Task
from leanbayes.data.layout import channels_first, check_channels, reading


@dataclass(frozen=True, eq=False)
class Raw:
    """The arrays of a data set as a file has them."""

    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    classes: tuple[str, ...] = ()


def build(
    raw: Raw,
    *,
    name: str,
    sha256: str,
    task: str | None = None,
    augment: str = "none",
    count: int | None = None,
    channels: str | None = None,
) -> DataSet:
    """Make a `DataSet` of raw arrays, or say in one sentence what is wrong with them.

    Args:
        raw: The arrays; images may have their channels last, labels may be text.
        name: What to call the set.
        sha256: Digest of where the arrays come from.
        task: "classification" or "regression"; None goes by the targets: text and whole-number types are labels.
        augment: The augmentation that is usual for such data.
        count: Number of classes, where it is known beforehand.
        channels: "first" or "last" for images with channels; None goes by the shape.
    """
    chosen = check_task(task, infer=_infer_task(raw.y_train))
    if task is None and chosen == "regression":
        check_not_one_hot(raw.y_train, f"{name}: y_train")
        warn_of_whole_targets(raw.y_train, f"{name}: y_train")
    wanted = check_channels(channels, raw.x_train, name)
    read = reading(raw.x_train, f"{name}: x_train", wanted)
    x_train = channels_first(raw.x_train, f"{name}: x_train", wanted)
    raw = replace(raw, x_train=x_train, x_test=channels_first(raw.x_test, f"{name}: x_test", wanted))
    if chosen == "classification":
        raw = _label(raw, name)
    check(raw.x_train, raw.y_train, raw.x_test, raw.y_test, name=name, task=chosen, count=count or len(raw.classes))
    classes = raw.classes
    if chosen == "classification" and not classes:
        classes = tuple(str(label) for label in range(count or int(raw.y_train.max()) + 1))
    return DataSet(
        name=name,
        task=chosen,
        train=Split(tensor(raw.x_train), _targets(raw.y_train, chosen)),
        test=Split(tensor(raw.x_test), _targets(raw.y_test, chosen)),
        classes=classes if chosen == "classification" else (),
        sha256=sha256,
        augment=augment,
        channels=read,
    )


def tensor(x: Array) -> torch.Tensor:
    """Return uint8 as it is, anything else as float32."""
    kept = x if x.dtype == np.uint8 and x.ndim == 4 else x.astype(np.float32, copy=False)
    kept = np.ascontiguousarray(kept)
    return torch.from_numpy(kept if kept.flags.writeable else kept.copy())


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


def _targets(y: Array, task: Task) -> torch.Tensor:
    if task == "classification":
        return torch.from_numpy(y.astype(np.int64))
    return torch.from_numpy(y.astype(np.float32).reshape(len(y), -1))


def _infer_task(y: Array) -> Task:
    return "regression" if y.dtype.kind == "f" else "classification"


def _label(raw: Raw, name: str) -> Raw:
    """Flatten a column of labels, and turn text into numbers: the classes in sorted order."""
    train, test = (y.reshape(-1) if y.ndim == 2 and y.shape[1] == 1 else y for y in (raw.y_train, raw.y_test))
    if train.dtype.kind not in "US":
        return replace(raw, y_train=train, y_test=test)
    train, test = as_text(train, f"{name}: y_train"), as_text(test, f"{name}: y_test")
    classes = np.unique(train)
    unknown = np.setdiff1d(test, classes)
    if len(unknown):
        raise ValueError(
            f"{name}: the test label {str(unknown[0])!r} does not occur in training, where the labels are "
            f"{', '.join(map(str, classes[:10]))}. Give both splits the same labels."
        )
    return replace(
        raw,
        y_train=np.searchsorted(classes, train),
        y_test=np.searchsorted(classes, test),
        classes=tuple(map(str, classes)),
    )


# -------------------- sizes
# Sizes before data: what the headers of `.npz` files claim, compared with the file and with the machine's memory.


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
