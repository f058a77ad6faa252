"""From the arrays of a file to a `DataSet`: axes in order, labels as numbers, everything checked."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from leanbayes.data.checks import Array, check, check_not_one_hot, check_task
from leanbayes.data.dataset import DataSet, Split, Task

_CHANNELS = (1, 3)  # grey, colour


@dataclass(frozen=True, eq=False)
class Raw:
    """The arrays of a data set as a file has them."""

    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    classes: tuple[str, ...] = ()


def build(
    raw: Raw, *, name: str, sha256: str, task: str | None = None, augment: str = "none", count: int | None = None
) -> DataSet:
    """Make a `DataSet` of raw arrays, or say in one sentence what is wrong with them.

    Args:
        raw: The arrays; images may have their channels last, labels may be text.
        name: What to call the set.
        sha256: Digest of where the arrays come from.
        task: "classification" or "regression"; None goes by the targets: text and whole-number types are labels.
        augment: The augmentation that is usual for such data.
        count: Number of classes, where it is known beforehand.
    """
    chosen = check_task(task, infer=_infer_task(raw.y_train))
    if task is None and chosen == "regression":
        check_not_one_hot(raw.y_train, f"{name}: y_train")
    raw = replace(raw, x_train=channels_first(raw.x_train), x_test=channels_first(raw.x_test))
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
    )


def channels_first(x: Array) -> Array:
    """Return images as (N, C, H, W) and features as (N, d); whole-number pixels from 0 to 255 become uint8."""
    if x.ndim in (1, 3):
        x = x[:, None]
    elif x.ndim == 4 and x.shape[-1] in _CHANNELS and x.shape[1] not in _CHANNELS:
        x = np.moveaxis(x, -1, 1)
    if x.ndim == 4 and x.dtype.kind in "ui" and x.size and x.min() >= 0 and x.max() <= 255:
        x = x.astype(np.uint8, copy=False)
    return x


def tensor(x: Array) -> torch.Tensor:
    """Return uint8 as it is, anything else as float32."""
    kept = x if x.dtype == np.uint8 and x.ndim == 4 else x.astype(np.float32, copy=False)
    kept = np.ascontiguousarray(kept)
    return torch.from_numpy(kept if kept.flags.writeable else kept.copy())


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
    train, test = train.astype(str), test.astype(str)
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
