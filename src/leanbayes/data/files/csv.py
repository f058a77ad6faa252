"""Read a `.csv` file: columns of numbers, and one column of targets."""

from __future__ import annotations

import csv
import re
from collections import Counter
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np

from leanbayes.data.checks import check_precision, check_task, EXACT, MOST_CLASSES, REGRESSION, warn_of_whole_targets
from leanbayes.data.dataset import Array, Raw, Task

_WHOLE = re.compile(r"[+-]?[0-9]+")
_LONGEST = 1000  # characters of a cell: a number or a label
_END = "the end of the file"  # the last row, unless a quotation mark is open
_TEST_EVERY = 10
_FEWEST_ROWS = 3  # a header and an example for each split


@dataclass(frozen=True, eq=False)
class Table:
    """The cells of a file as text (n, columns), the names of the columns, and the line of each row.

    Without a header (`titled` is False), the names are positions.
    """

    path: Path
    header: list[str]
    cells: Array
    lines: list[int]
    titled: bool

    def complain(self, row: int, column: int, expected: str) -> ValueError:
        """Return the error about one cell."""
        cell = str(self.cells[row, column])
        return ValueError(
            f"{self.path}, line {self.lines[row]}, column {self.header[column]!r}: expected {expected}, got "
            f"{repr(cell) if cell else 'nothing'}. Fill the gap, write text as numbers, or drop the row or the column."
        )

    def numbers(self, column: int) -> Array:
        """Return a column as floats; raise ``ValueError`` for a cell that is not a finite number."""
        cells = self.cells[:, column]
        if are_numbers(cells) and np.isfinite(values := cells.astype(np.float64)).all():
            return values
        wrong = (i for i in range(len(cells)) if not are_numbers(cells[i : i + 1]) or not np.isfinite(float(cells[i])))
        raise self.complain(next(wrong), column, "a number")

    def whole_numbers(self, column: int, values: Array) -> Array:
        """Return the numbers of a column; whole numbers that are too large for floats stay exact."""
        cells = self.cells[:, column]
        if np.abs(values).max() < EXACT or not all(_WHOLE.fullmatch(cell) for cell in cells):
            return values
        return np.array([int(cell) for cell in cells], dtype=object)


def are_numbers(cells: Array) -> bool:
    """Return whether every cell can be read as a number."""
    try:
        cells.astype(np.float64)
    except ValueError:
        return False
    return True


def read_table(path: Path, fewest: int) -> Table:
    """Read a file of at least `fewest` lines, with or without a header (see `is_header`).

    Empty columns without a name at the right are dropped: they come from separators at the ends of lines.
    """
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
    _check_commas(path, cells, lines)
    titled = is_header(cells[0], cells[1:])
    if not titled:
        return Table(path, [f"column {i}" for i in range(width)], cells, lines, titled)
    cells = cells[:, : 1 + int(np.flatnonzero((cells != "").any(0))[-1])]
    header = list(map(str, cells[0]))
    _check_names(path, header)
    return Table(path, header, cells[1:], lines[1:], titled)


def is_header(first: Array, below: Array) -> bool:
    """Return whether the first row (columns,) names the columns of the rows below (n, columns).

    Text above a number is a name. Numbers are names, too, if no text of the first row is repeated below it, and

    - they are 0, 1, 2, ..., as pandas writes them; one or two of them must be above decimals, because a row of data
      may begin with them;
    - or they are whole numbers above decimals, next to text above labels that all occur more than once.
    """
    numeric = np.array([are_numbers(first[i : i + 1]) for i in range(len(first))])
    if any(are_numbers(below[:1, i]) for i in np.flatnonzero(~numeric)):  # or above nothing
        return True
    names, over = first[numeric], below[:, numeric]
    if not over.size or (below[:, ~numeric] == first[~numeric]).any():
        return False
    counted = list(names) == [str(i) for i in range(len(names))]
    decimals = np.char.isdigit(names).all() and not np.char.isdigit(over).any()
    if counted and (len(names) > 2 or decimals):
        return True
    return bool(decimals and (~numeric).any() and all(_repeated(below[:, i]) for i in np.flatnonzero(~numeric)))


def _repeated(labels: Array) -> bool:
    return bool((np.unique(labels, return_counts=True)[1] > 1).all())


def _read_rows(path: Path) -> list[tuple[int, list[str]]]:
    """Return the rows that are not blank, each with its line number."""
    rows, line = [], 1
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = next(filter(str.strip, file), "")
            file.seek(0)
            reader = csv.reader(chain(file, [_END]), delimiter=_separator(first))
            for row in reader:
                rows.append((line, [cell.strip() for cell in row]))
                line = reader.line_num + 1
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not text in UTF-8 ({error.reason} at byte {error.start}). Save it as UTF-8."
        ) from error
    except csv.Error as error:
        raise _unreadable(path, line, f"more than {csv.field_size_limit():,} characters") from error
    line, row = rows.pop()
    if row != [_END]:
        raise _unreadable(path, line, "a quotation mark that stays open")
    for line, row in rows:
        if (longest := max(map(len, row), default=0)) > _LONGEST:
            raise _unreadable(path, line, f"{longest:,} characters")
    return [(line, row) for line, row in rows if any(row)]


def _separator(line: str) -> str:
    """Return the most frequent separator of a line outside quotes."""
    return max(",;\t", key=re.sub('"[^"]*"', "", line).count)


def _unreadable(path: Path, line: int, got: str) -> ValueError:
    return ValueError(
        f"{path}, line {line}: expected cells of at most {_LONGEST:,} characters with closed quotation marks, got "
        f'{got}. Look for a single " in this line and close or remove it; or shorten the cell.'
    )


def _check_commas(path: Path, cells: Array, lines: list[int]) -> None:
    """Reject numbers with commas: in 1,500 the comma can be a decimal point or a separator of thousands."""
    for row, column in np.argwhere(np.char.find(cells, ",") >= 0):
        if are_numbers(np.char.replace(cells[row : row + 1, column], ",", "")):
            raise ValueError(
                f"{path}, line {lines[row]}: expected numbers with a decimal point, got {str(cells[row, column])!r}, "
                "with a comma. Write 1,5 as 1.5, and 1,500 as 1500."
            )


def _check_names(path: Path, header: list[str]) -> None:
    """Raise ``ValueError`` for repeated names, because columns are found by name."""
    repeated = [name for name, times in Counter(header).items() if times > 1]
    if repeated:
        raise ValueError(
            f"{path} has more than one column named {', '.join(map(repr, repeated))}; expected names that differ. "
            "Rename or drop columns; if the first line is no header, put one above it."
        )


def read_csv(
    path: Path, *, target: str | int | None = None, split: int = 0, task: str | None = None
) -> tuple[Raw, Task]:
    """Read features and target; every tenth row is for testing.

    For headers, see `is_header`. The separator is the most frequent of comma, semicolon and tab in the first line,
    outside quotes. Targets are labels if they are text, or whole numbers with at most 20 distinct values; `task`
    overrides this. Rows are shuffled with `split` as the seed; every tenth row (of each class) is for testing.

    Returns:
        The arrays, and the task.
    """
    table = read_table(path, _FEWEST_ROWS)
    column = _position(table, target)
    features = [i for i in range(len(table.header)) if i != column]
    if not features:
        raise ValueError(f"{path} has one column; expected features in addition to the target. Add columns.")
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
    """Read the features of rows without their target, (n, d).

    With `like`, the file of the training data, and `target`, its target column, features are found by their names, in
    any order and among other columns. If one of the files has no header, they are found by position, with or without
    the target column. Without `like`, every column is a feature.
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
    """Name columns as in the training file, which had `whole` columns and the target at position `target`."""
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
    """Return a column as numbers that remain distinct in float32."""
    values = table.numbers(column)
    check_precision(table.whole_numbers(column, values), f"{table.path}, column {table.header[column]!r}")
    return values


def _are_labels(cells: Array) -> bool:
    if not are_numbers(cells):
        return True
    whole = all(cell.isdigit() for cell in cells)
    return whole and len(np.unique(cells)) <= MOST_CLASSES


def _held_out(labels: Array, seed: int) -> Array:
    """Mark the test rows: of each class the second, twelfth, ... in random order, so that a single example trains."""
    order = np.random.default_rng(seed).permutation(len(labels))
    test = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        test[order[labels[order] == label][1::_TEST_EVERY]] = True
    return test
