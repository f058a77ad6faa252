"""Read a text file of cells, `.csv` or `.tsv`: header, separator, encoding; every cell stays text."""

from __future__ import annotations

import codecs
import csv
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np

from leanbayes.data.cells import are_gaps, GAPS, is_number, is_value
from leanbayes.data.dataset import Array
from leanbayes.data.files.npz import check_memory

_LONGEST = 32_767  # characters of a cell, as many as a spreadsheet holds
_MOST_COLUMNS = 100_000
_BYTES_A_BYTE = 12  # memory for one byte of a file, as separate cells
_END = "the end of the file"  # the last row, unless a quotation mark is open


@dataclass(frozen=True, eq=False)
class Table:
    """The cells of a file or frame as text, column by column.

    Attributes:
        where: name of the file, for messages.
        header: names of the columns; positions if there is no header.
        columns: cells of each column, (n,) arrays of str.
        lines: line of each row in the file.
        titled: whether there is a header.
        separator: separator of the cells; with semicolons, a comma is a decimal sign.
        types: types of columns that a frame knows.
    """

    where: str
    header: list[str]
    columns: list[Array]
    lines: list[int]
    titled: bool
    separator: str = ","
    types: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.lines)

    def numbers(self, column: int) -> Array:
        """Return a column as floats; raise ``ValueError`` for a cell that is not a finite number."""
        cells = self.columns[column]
        wrong = next((i for i, cell in enumerate(cells) if not _is_finite(cell)), None)
        if wrong is None:
            return cells.astype(np.float64)
        raise ValueError(
            f"{self.where}, line {self.lines[wrong]}, column {self.header[column]!r}: expected a number, got "
            f"{repr(cells[wrong]) if cells[wrong] else 'nothing'}. Fill the gap, write text as numbers, or drop the "
            "row or the column."
        )

    def position(self, name: str | int) -> int:
        """Return the position of a column, given by name or position."""
        if isinstance(name, str) and clean_name(name) in self.header:
            return self.header.index(clean_name(name))
        try:
            return range(len(self.header))[int(name)]
        except (ValueError, IndexError):
            shown = ", ".join(self.header[:30]) + (", ..." if len(self.header) > 30 else "")
            raise ValueError(
                f"{self.where} has no column {name!r}; expected one of {shown}, or a position from 0 to "
                f"{len(self.header) - 1}. Name one of them."
            ) from None


def _is_finite(cell: str) -> bool:
    return is_number(cell) and abs(float(cell)) < float("inf")


def read_table(path: Path, fewest: int, names: Collection[str] = ()) -> Table:
    """Read a file of at least `fewest` lines, with or without a header (see `is_header`).

    A first line with one of the known `names` is a header.

    The separator is the most frequent of comma, semicolon and tab in the first line, outside quotes. Empty columns
    without a name at the right are dropped: they come from separators at the ends of lines.
    """
    separator, rows = _read_rows(path)
    if len(rows) < fewest:
        raise ValueError(
            f"{path} has {len(rows)} rows; expected at least {fewest}: a header or none, then one row an "
            "example. Add rows."
        )
    width = len(rows[0][1])
    if width > _MOST_COLUMNS:
        raise ValueError(f"{path} has {width:,} columns; expected at most {_MOST_COLUMNS:,}. Turn rows into columns?")
    rows = [(line, row if any(row) else [""] * width) for line, row in rows]
    for line, row in rows:
        if len(row) != width:
            raise ValueError(
                f"{path}, line {line}: expected {width} cells as in the first line, got {len(row)}. "
                "Fill or quote the cells."
            )
    columns, lines = _transposed([row for _, row in rows]), [line for line, _ in rows]
    while len(columns) > 1 and not any(columns[-1]):
        columns.pop()
    first, below = [column[0] for column in columns], [column[1:] for column in columns]
    if not (set(map(clean_name, first)) & set(names) or is_header(first, below)):
        return Table(str(path), [f"column {i}" for i in range(len(columns))], columns, lines, False, separator)
    first = list(map(clean_name, first))
    check_names(str(path), first)
    return Table(str(path), first, below, lines[1:], True, separator)


def _transposed(rows: list[list[str]]) -> list[Array]:
    columns = []
    for cells in zip(*rows, strict=True):
        column = np.empty(len(cells), object)
        column[:] = cells
        columns.append(column)
    return columns


def is_header(first: list[str], below: list[Array]) -> bool:
    """Return whether the first row names the columns, given the cells below it, column by column.

    Text above a number or a date is a name. Numbers are names, too, if no text of the first row is repeated below, and

    - they are 0, 1, 2, ..., as pandas writes them; one or two of them must be above decimals, because a row of data
      may begin with them;
    - or they are whole numbers above decimals, next to text above labels that all occur more than once.

    A first row of text above text is a header if its cells differ, are not repeated below, and others are.
    """
    numeric = [is_number(cell) for cell in first]
    texts = [i for i, number in enumerate(numeric) if not number]
    gaps = [i for i in texts if first[i].casefold() in GAPS and (first[i] or i)]  # an index has no name
    named = [i for i in texts if i not in gaps and not is_value(first[i])]
    if any(_begins_with_value(below[i]) for i in named):
        return True
    names = [cell for cell, number in zip(first, numeric, strict=True) if number]
    over = [cell for cells, number in zip(below, numeric, strict=True) if number for cell in cells]
    repeated = any((below[i] == first[i]).any() for i in texts)
    if not names:
        return not repeated and _differ(first) and any(len(set(cells)) < len(cells) for cells in below)
    if not over or repeated:
        return False
    counted = names == [str(i) for i in range(len(names))]
    decimals = all(map(str.isdigit, names)) and not any(map(str.isdigit, over))
    if counted and (len(names) > 2 or decimals):
        return True
    return decimals and bool(texts) and all(min(Counter(below[i]).values()) > 1 for i in texts)


def _begins_with_value(cells: Array) -> bool:
    """Return whether the first cell that is no gap is a number or a date, or there is no cell."""
    some = cells[:100]
    kept = some[~are_gaps(some)]
    return is_value(kept[0]) if len(kept) else not len(cells)


def _differ(names: list[str]) -> bool:
    return all(names) and len(set(names)) == len(names)


def _read_rows(path: Path) -> tuple[str, list[tuple[int, list[str]]]]:
    """Return the separator, and the rows with their line numbers, from the first to the last that has a cell.

    Empty lines are no rows. A row of separators alone is one of gaps: new rows are counted as others count them.
    """
    check_memory(_BYTES_A_BYTE * path.stat().st_size, f"{path} is a large table", "as cells")
    rows, line = [], 1
    try:
        with path.open(encoding=_encoding(path), newline="") as file:
            first = next(filter(str.strip, file), "")
            file.seek(0)
            separator = _separator(first)
            reader = csv.reader(chain(file, [_END]), delimiter=separator)
            for row in reader:
                rows.append((line, [cell.strip() for cell in row]))
                line = reader.line_num + 1
    except UnicodeError as error:
        place = f"{error.reason} at byte {error.start}" if isinstance(error, UnicodeDecodeError) else str(error)
        raise ValueError(f"{path} is not text in UTF-8 ({place}). Save it as UTF-8.") from error
    except csv.Error as error:
        raise _unreadable(path, line, f"more than {csv.field_size_limit():,} characters") from error
    line, row = rows.pop()
    if row != [_END]:
        raise _unreadable(path, line, "a quotation mark that stays open")
    for line, row in rows:
        if (longest := max(map(len, row), default=0)) > _LONGEST:
            raise _unreadable(path, line, f"{longest:,} characters")
        if any("\0" in cell for cell in row):
            raise ValueError(f"{path}, line {line}: expected text, got a NUL byte. Save the table as UTF-8 text.")
    rows = [(line, row) for line, row in rows if row not in ([], [""])]
    filled = [i for i, (_, row) in enumerate(rows) if any(row)]
    return separator, rows[filled[0] : filled[-1] + 1] if filled else []


def _encoding(path: Path) -> str:
    """Return UTF-16 for a file that begins with its mark, as spreadsheets write it; else UTF-8."""
    with path.open("rb") as file:
        begin = file.read(2)
    return "utf-16" if begin in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"


def _separator(line: str) -> str:
    """Return the most frequent separator of a line outside quotes."""
    return max(",;\t", key=re.sub('"[^"]*"', "", line).count)


def _unreadable(path: Path, line: int, got: str) -> ValueError:
    return ValueError(
        f"{path}, line {line}: expected cells of at most {_LONGEST:,} characters with closed quotation marks, got "
        f'{got}. Look for a single " in this line and close or remove it; or shorten the cell.'
    )


def clean_name(name: str) -> str:
    """Return the name of a column without line ends, repeated spaces and signs that steer a terminal."""
    return "".join(sign for sign in " ".join(name.split()) if sign.isprintable())


def check_names(where: str, header: list[str]) -> None:
    """Raise ``ValueError`` for repeated names, because columns are found by name."""
    repeated = [name for name, times in Counter(header).items() if times > 1]
    if repeated:
        raise ValueError(
            f"{where} has more than one column named {', '.join(map(repr, repeated[:10]))}; expected names that "
            "differ. Rename or drop columns; if the first line is no header, put one above it."
        )


def read_features(path: Path) -> Array:
    """Read a table of numbers without target, (n, columns)."""
    table = read_table(path, 1)
    if not len(table):
        raise ValueError(f"{path} has a header and no row; expected at least one. Add rows.")
    return np.stack([table.numbers(i) for i in range(len(table.header))], 1)
