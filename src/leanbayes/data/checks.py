"""Checks of data sets; each error has one sentence: expected, got, what to do."""

from __future__ import annotations

import warnings

import numpy as np

from leanbayes.data.dataset import Array, Raw, Task

MOST_CLASSES = 20  # whole numbers with more distinct values are quantities
EXACT = 2**53  # larger whole numbers are rounded in float64
_MOST_LOST = 1e-3  # share of a column's standard deviation that rounding to float32 may change
_ROUNDING = 1e-12  # relative error of sums in float64
_SPREADS = (1e-15, 1e15)  # standard deviations of targets
REGRESSION = "task='regression' (--task regression)"
CLASSIFICATION = "task='classification' (--task classification)"


def check(raw: Raw, *, name: str, task: Task, count: int = 0) -> None:
    """Raise ``ValueError`` at the first fault; warn when a class is missing from the test split only.

    Args:
        raw: Images (N, C, H, W) or features (N, d), with labels (N,), or targets (N,) or (N, D).
        name: Name of the set, for the message.
        task: Kind of the targets.
        count: Number of classes; 0 goes by the largest training label.
    """
    for split, x, y in (("train", raw.x_train, raw.y_train), ("test", raw.x_test, raw.y_test)):
        check_inputs(x, f"{name}: x_{split}")
        check_targets(y, f"{name}: y_{split}", task)
        if len(x) != len(y):
            raise ValueError(
                f"{name}: x_{split} and y_{split} differ in length, {len(x)} and {len(y)}. Give every row one target."
            )
    for what, train, test in (("x", raw.x_train, raw.x_test), ("y", raw.y_train, raw.y_test)):
        if train.shape[1:] != test.shape[1:]:
            raise ValueError(
                f"{name}: {what}_train has rows of shape {train.shape[1:]}, {what}_test of shape {test.shape[1:]}. "
                "Bring both to one size."
            )
    train_type, test_type = raw.x_train.dtype, raw.x_test.dtype
    if raw.x_train.ndim == 4 and (train_type == np.uint8) != (test_type == np.uint8):
        raise ValueError(f"{name}: x_train is {train_type}, x_test {test_type}. Save both as uint8 or as floats.")
    if task == "classification":
        _check_classes(raw.y_train, raw.y_test, name, count)
    else:
        check_precision(raw.y_train, f"{name}: y_train")
        _check_variation(raw.y_train, name)
    check_precision(raw.x_train, f"{name}: x_train")


def check_task(task: str | None, *, infer: Task) -> Task:
    """Return the wanted task, or the inferred one for None."""
    match task:
        case None:
            return infer
        case "classification" | "regression":
            return task
    raise ValueError(f"expected task 'classification' or 'regression' (or None, to go by the targets), got {task!r}")


def check_not_one_hot(y: Array, where: str) -> None:
    """Raise ``ValueError`` for one-hot rows: they may be labels or real targets."""
    if y.ndim == 2 and y.shape[1] > 1 and len(y) and ((y == 0) | (y == 1)).all() and (y.sum(1) == 1).all():
        raise ValueError(
            f"{where} has shape {y.shape} with a single one in every row; expected labels or real targets. Turn "
            f"one-hot rows into labels, argmax(1), or say {REGRESSION} if they are targets."
        )


def warn_of_whole_targets(y: Array, where: str, stacklevel: int = 5) -> None:
    """Warn of real targets with few distinct whole values: they may be labels; `stacklevel` as in `warnings.warn`."""
    if y.ndim > 2 or y[:1].size != 1 or y.dtype.kind != "f" or not np.isfinite(y).all():
        return
    values = np.unique(y)
    few = 2 <= len(values) <= min(MOST_CLASSES, len(y) // 2)
    if not few or (values != np.round(values)).any():
        return
    numbered = np.array_equal(values, np.arange(len(values)))
    named = ", ".join(f"{value:g}" for value in values)
    warnings.warn(
        f"{where} has the values {named} alone, and they are taken for real targets. If they are classes, "
        f"{'' if numbered else 'number them from 0 and '}say {CLASSIFICATION}; if not, {REGRESSION} ends this warning.",
        stacklevel=stacklevel,
    )


def check_inputs(x: Array, where: str) -> None:
    """Raise ``ValueError`` unless an array is a batch of images or features."""
    _check_numbers(x, where)
    if x.ndim not in (2, 4) or 0 in x.shape[1:]:
        raise ValueError(
            f"{where} has shape {x.shape}; expected features (rows, columns), or images (rows, height, width) "
            "or (rows, channels, height, width). Reshape it."
        )
    if x.ndim == 4 and x.dtype != np.uint8 and not (x.min() >= 0 and x.max() <= 1):
        raise ValueError(
            f"{where} has {x.dtype} pixels from {x.min():g} to {x.max():g}; expected uint8, or floats from 0 to 1. "
            "Save x.astype('uint8') or x / 255, or flatten images to (rows, columns) to have them taken as features."
        )


def check_precision(values: Array, where: str) -> None:
    """Raise ``ValueError`` if rounding to float32 loses the variation of features or targets, (n,) or (n, columns)."""
    if values.ndim > 2 or np.can_cast(values.dtype, np.float32):
        return
    columns = values.reshape(len(values), -1)
    with np.errstate(over="ignore", invalid="ignore"):  # another check rejects values that are not finite
        exact, rounded, noise = _from_offset(columns)
        lost, spread = (exact - rounded).std(0), exact.std(0)
        too_fine = (lost > _MOST_LOST * spread) & (spread > noise)
    if too_fine.any():
        column = int(np.argmax(too_fine))
        which = f", column {column}" if columns.shape[1] > 1 else ""
        raise ValueError(
            f"{where}{which} has values about {float(columns[:, column].mean()):.10g} with a standard deviation of "
            f"{spread[column]:.3g}; expected values that keep their differences as 32-bit floats. Subtract an offset, "
            "the same in all your files, or change the unit."
        )


def _from_offset(columns: Array) -> tuple[Array, Array, Array]:
    """Return columns minus an offset in float64, the same after rounding to float32, and the error of rounding alone.

    Whole numbers above 2^53 are subtracted before they become floats, which would round them.
    """
    if columns.dtype.kind == "f" or (columns.dtype.kind != "O" and np.abs(columns.astype(np.float64)).max() < EXACT):
        exact = columns.astype(np.float64)
        return exact, exact.astype(np.float32).astype(np.float64), _ROUNDING * np.abs(exact).max(0)
    whole = columns.astype(object)
    offset = whole.min(0)
    rounded = whole.astype(np.float64).astype(np.float32).astype(np.float64) - offset.astype(np.float64)
    return (whole - offset).astype(np.float64), rounded, np.zeros(columns.shape[1])


def _check_numbers(values: Array, where: str) -> None:
    """Raise ``ValueError`` for values that are empty, not numbers, or not finite as float32."""
    if values.dtype.kind not in "buif":
        raise ValueError(f"{where} has dtype {values.dtype}; expected numbers. Convert it before saving.")
    if values.ndim == 0 or len(values) == 0:
        raise ValueError(f"{where} is empty (shape {values.shape}); expected at least one row. Check how it was saved.")
    if values.dtype.kind != "f":
        return
    with np.errstate(over="ignore"):
        bad = ~np.isfinite(values.astype(np.float32, copy=False))
    if bad.any():
        row = int(np.argmax(bad.reshape(len(bad), -1).any(1)))
        raise ValueError(
            f"{where} has {int(bad.sum())} values that are NaN or infinite, the first in row {row}. "
            "Drop these rows, or fill the gaps before saving."
        )


def check_targets(y: Array, where: str, task: Task) -> None:
    """Raise ``ValueError`` for targets that are not numbers, or no labels where classes are expected."""
    _check_numbers(y, where)
    if task == "regression":
        if y.ndim > 2:
            raise ValueError(f"{where} has shape {y.shape}; expected (rows,) or (rows, targets). Reshape it.")
        return
    if y.ndim != 1:
        raise ValueError(
            f"{where} has shape {y.shape}; expected one label a row, (rows,). Turn one-hot rows into labels: "
            f"argmax(1); for targets that are quantities say {REGRESSION}."
        )
    if y.dtype.kind == "f" and (between := y != np.round(y)).any():
        row = int(np.argmax(between))
        raise ValueError(
            f"{where} has the label {y[row]:g} in row {row}; expected whole numbers "
            f"from 0. Renumber the labels, or say {REGRESSION} for real targets."
        )


def _check_classes(train: Array, test: Array, name: str, count: int) -> None:
    """Require a training example of every class from 0, and no other label."""
    count = count or int(train.max()) + 1
    for split, y in (("train", train), ("test", test)):
        outside = (y < 0) | (y >= count)
        if outside.any():
            raise ValueError(
                f"{name}: y_{split} has the label {int(y[np.argmax(outside)])} in row {int(np.argmax(outside))}; "
                f"expected labels from 0 to {count - 1}, the classes of training. Correct or drop these rows."
            )
    seen = np.unique(train)
    if len(seen) < count:
        empty = int(np.argmin(np.append(seen, -1) == np.arange(len(seen) + 1)))
        raise ValueError(
            f"{name}: class {empty} has no training example ({count - len(seen)} of {count} classes are empty). "
            f"Add examples, or number the labels from 0 to {len(seen) - 1} without gaps; "
            f"for targets that are quantities say {REGRESSION}."
        )
    if count < 2:
        raise ValueError(f"{name}: all training labels are {int(seen[0])}; expected at least two classes.")
    if missing := count - len(np.unique(test)):
        warnings.warn(f"{name}: {missing} of {count} classes have no test example", stacklevel=6)


def _check_variation(y: Array, name: str) -> None:
    """Raise ``ValueError`` for a target that is constant in float32."""
    columns = y.reshape(len(y), -1).astype(np.float32)
    constant = (columns == columns[0]).all(0)
    if constant.any():
        target = int(np.argmax(constant))
        which = f" in column {target}" if columns.shape[1] > 1 else ""
        raise ValueError(
            f"{name}: all training targets{which} are {columns[0, target]:g}; expected targets that vary. "
            "Choose another target."
        )
    spread = y.reshape(len(y), -1).astype(np.float64).std(0)
    if (extreme := (spread < _SPREADS[0]) | (spread > _SPREADS[1])).any():
        raise ValueError(
            f"{name}: training targets have a standard deviation of {spread[np.argmax(extreme)]:.3g}; expected "
            f"{_SPREADS[0]:g} to {_SPREADS[1]:g}, because variances are 32-bit floats. Change the unit."
        )
