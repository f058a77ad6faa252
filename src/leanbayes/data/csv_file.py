"""A table in a `.csv` file: numbers in the columns, one of which is the target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from leanbayes.data.arrays import Raw
from leanbayes.data.checks import Array, check_precision, check_task, REGRESSION, warn_of_whole_targets
from leanbayes.data.csv_table import are_numbers, read_table, Table
from leanbayes.data.dataset import Task

_MOST_CLASSES = 20  # whole numbers with more distinct values are taken for quantities
_TEST_EVERY = 10
_FEWEST_ROWS = 3  # a header and an example for each split


def read_csv(
    path: Path, *, target: str | int | None = None, split: int = 0, task: str | None = None
) -> tuple[Raw, Task]:
    """Read features and target, and set every tenth row aside for testing.

    A first row with text over numbers is a header, and so are the numbers of pandas, see `is_header`. Separators are
    commas, semicolons or tabs, whichever the first line has most of outside quotes. Targets are labels if they are
    text, or whole numbers with at most 20 distinct values; `task` overrules. Rows are shuffled with `split` as the seed
    before every tenth (of each class) goes to the test split.

    Returns:
        The arrays, and the task.
    """
    table = read_table(path, _FEWEST_ROWS)
    column = _position(table, target)
    features = [i for i in range(len(table.header)) if i != column]
    if not features:
        raise ValueError(f"{path} has one column; expected features beside the target. Add columns.")
    x = np.stack([_quantities(table, i) for i in features], 1)
    y = table.cells[:, column]
    if (y == "").any():
        raise table.complain(int(np.argmax(y == "")), column, "a target")
    chosen = check_task(task, infer="classification" if _are_labels(y) else "regression")
    values = y if chosen == "classification" and not are_numbers(y) else _quantities(table, column)
    if task is None and chosen == "regression":
        warn_of_whole_targets(values, f"{path}, column {table.header[column]!r}")
    test = _held_out(values if chosen == "classification" else np.zeros(len(values)), split)
    if not test.any():
        raise ValueError(
            f"{path} has one row of each class; expected at least two, one to train and one to test. Add rows, or say "
            f"{REGRESSION} for targets that are quantities."
        )
    return Raw(x[~test], values[~test], x[test], values[test]), chosen


def read_features(path: Path, like: Path | None = None, target: str | int | None = None) -> Array:
    """Read rows (n, d) whose target is not asked for.

    With `like`, the file that the training data came from, and `target`, its column that is predicted, features are
    found by their names, whatever their order and what lies beside them; where one of the files has no header, by their
    positions, with the target or without. Otherwise every column is a feature.
    """
    table = read_table(path, 1)
    names = table.header
    if like is not None:
        known = read_table(like, _FEWEST_ROWS)
        names = [name for i, name in enumerate(known.header) if i != _position(known, target)]
        if not (known.titled and table.titled):
            table = _by_position(table, names, len(known.header), _position(known, target))
    lacking = [name for name in names if name not in table.header]
    if lacking:
        raise ValueError(
            f"{path} has no column {lacking[0]!r}, which the training data had; expected the columns "
            f"{', '.join(names)}, got {', '.join(table.header)}. Name them as in training."
        )
    if not len(table.cells):
        raise ValueError(f"{path} has a header and no row; expected at least one. Add rows.")
    return np.stack([table.numbers(table.header.index(name)) for name in names], 1)


def _by_position(table: Table, names: list[str], whole: int, target: int) -> Table:
    """Name columns as in the training file, which had `whole` of them, the target at its place."""
    there = len(table.header)
    if there == len(names):
        return replace(table, header=names)
    if there == whole:
        return replace(table, header=[*names[:target], "target", *names[target:]])
    raise ValueError(
        f"{table.path} has {there} columns; expected the {len(names)} features of the training data, or these and the "
        "target. Give it a header, or these columns."
    )


def _position(table: Table, target: str | int | None) -> int:
    """Return the position of the target column."""
    if target is None:
        return len(table.header) - 1
    if isinstance(target, str) and target in table.header:
        return table.header.index(target)
    try:
        return range(len(table.header))[int(target)]
    except (ValueError, IndexError):
        raise ValueError(
            f"{table.path} has no column {target!r}; expected one of {', '.join(table.header)}, or a position from 0 "
            f"to {len(table.header) - 1}. Name one of them as the target."
        ) from None


def _quantities(table: Table, column: int) -> Array:
    """Return a column as numbers that can be told apart in float32."""
    values = table.numbers(column)
    check_precision(table.whole_numbers(column, values), f"{table.path}, column {table.header[column]!r}")
    return values


def _are_labels(cells: Array) -> bool:
    if not are_numbers(cells):
        return True
    whole = all(cell.isdigit() for cell in cells)
    return whole and len(np.unique(cells)) <= _MOST_CLASSES


def _held_out(labels: Array, seed: int) -> Array:
    """Mark the test rows: of each class the second, twelfth, ... in random order, so that a lone example trains."""
    order = np.random.default_rng(seed).permutation(len(labels))
    test = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        test[order[labels[order] == label][1::_TEST_EVERY]] = True
    return test
