"""A table in a `.csv` file: numbers in the columns, one of which is the target."""

from __future__ import annotations

import csv
from dataclasses import dataclass
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
    """The cells of a file as text (n, columns), the names of the columns, and the line of each row."""

    path: Path
    header: list[str]
    cells: Array
    lines: list[int]

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


def are_numbers(cells: Array) -> bool:
    """Tell whether every cell can be read as a number."""
    try:
        cells.astype(np.float64)
    except ValueError:
        return False
    return True


def _read_table(path: Path) -> Table:
    rows = _read_rows(path)
    if len(rows) < _FEWEST_ROWS:
        raise ValueError(
            f"{path} has {len(rows)} rows; expected at least {_FEWEST_ROWS}: a header or none, then one row an "
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
    return Table(path, header, cells[titled:], lines[titled:])


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
