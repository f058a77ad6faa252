"""A table in a `.csv` file: numbers in the columns, one of which is the target."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from leanbayes.data.arrays import Raw
from leanbayes.data.checks import Array, check_task, REGRESSION
from leanbayes.data.dataset import Task

_MOST_CLASSES = 20  # whole numbers with more distinct values are taken for quantities
_TEST_EVERY = 10
_FEWEST_ROWS = 3  # a header and an example for each split


@dataclass(frozen=True, eq=False)
class Table:
    """The cells of a file as text (n, columns), the names of the columns, and the line of each row.

    `titled` says whether the file names its columns; else they are called by their positions.
    """

    path: Path
    header: list[str]
    cells: Array
    lines: list[int]
    titled: bool

    def complain(self, row: int, column: int, expected: str) -> ValueError:
        """Return an error about one cell."""
        cell = str(self.cells[row, column])
        return ValueError(
            f"{self.path}, line {self.lines[row]}, column {self.header[column]!r}: expected {expected}, got "
            f"{repr(cell) if cell else 'nothing'}. Fill the gap, write text as numbers, or drop the row or the column."
        )

    def numbers(self, column: int) -> Array:
        """Return a column as floats, or say which cell is no finite number."""
        cells = self.cells[:, column]
        if are_numbers(cells) and np.isfinite(values := cells.astype(np.float64)).all():
            return values
        wrong = (i for i in range(len(cells)) if not are_numbers(cells[i : i + 1]) or not np.isfinite(float(cells[i])))
        raise self.complain(next(wrong), column, "a number")


def read_csv(
    path: Path, *, target: str | int | None = None, split: int = 0, task: str | None = None
) -> tuple[Raw, Task]:
    """Read features and target, and set every tenth row aside for testing.

    A first row with text over numbers is a header. Separators are commas, semicolons or tabs, whichever the first
    line has most of. Targets are labels if they are text, or whole numbers with at most 20 distinct values; `task`
    overrules. Rows are shuffled with `split` as the seed before every tenth (of each class) goes to the test split.

    Returns:
        The arrays, and the task.
    """
    table = _read_table(path)
    column = _position(table, target)
    features = [i for i in range(len(table.header)) if i != column]
    if not features:
        raise ValueError(f"{path} has one column; expected features beside the target. Add columns.")
    x = np.stack([table.numbers(i) for i in features], 1)
    y = table.cells[:, column]
    if (y == "").any():
        raise table.complain(int(np.argmax(y == "")), column, "a target")
    chosen = check_task(task, infer="classification" if _are_labels(y) else "regression")
    values = y if chosen == "classification" and not are_numbers(y) else table.numbers(column)
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
    table = _read_table(path, fewest=1)
    names = table.header
    if like is not None:
        known = _read_table(like)
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


def are_numbers(cells: Array) -> bool:
    """Tell whether every cell can be read as a number."""
    try:
        cells.astype(np.float64)
    except ValueError:
        return False
    return True


def _read_table(path: Path, fewest: int = _FEWEST_ROWS) -> Table:
    rows = _read_rows(path)
    if len(rows) < fewest:
        raise ValueError(
            f"{path} has {len(rows)} rows; expected at least {fewest}: a header or none, then one row an "
            "example. Add rows."
        )
    width = len(rows[0][1])
    for line, row in rows:
        if len(row) != width:
            raise ValueError(
                f"{path}, line {line}: expected {width} cells as in the first line, got {len(row)}. "
                "Fill or quote the cells."
            )
    cells, lines = np.array([row for _, row in rows]), [line for line, _ in rows]
    titled = any(are_numbers(cells[1:2, i]) and not are_numbers(cells[:1, i]) for i in range(width))
    header = list(map(str, cells[0])) if titled else [f"column {i}" for i in range(width)]
    return Table(path, header, cells[titled:], lines[titled:], titled)


def _read_rows(path: Path) -> list[tuple[int, list[str]]]:
    """Return the rows that are not blank, each with the number of its line."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            reader = csv.reader(file, delimiter=max(",;\t", key=first.count))
            rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader]
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not text in UTF-8 ({error.reason} at byte {error.start}). Save it as UTF-8."
        ) from error
    return [(line, row) for line, row in rows if any(row)]


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
