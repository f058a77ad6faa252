"""Turn tables with text, gaps and dates into network inputs: `TablePreparation`, fitted to training rows alone."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leanbayes.data.cells import are_gaps, check_notation, is_number, Notation, notation_of, to_numbers
from leanbayes.data.checks import check_precision, EXACT
from leanbayes.data.columns import Column, Faults, fit_column, TYPES, unclear_dates
from leanbayes.data.dataset import Array, DataSet
from leanbayes.data.files.csv import Table
from leanbayes.data.files.npz import check_memory, tensor

SCHEMA = 1
FILE = "preparation.json"
_SHOWN = 12  # names in a list
_INDEX = ("", "Unnamed: 0", "index", "Index", "id", "ID", "Id", "row", "column 0")
"""Names of a column that may count the rows."""
_PLURAL = {
    "number": "numbers",
    "boolean": "booleans",
    "date": "dates",
    "category": "text, one input a value",
    "embedding": "text, learned vectors",
}
_MOST_UNREADABLE = 0.5  # share of the cells of a column that may be unreadable in new rows


@dataclass(frozen=True)
class TablePreparation:
    """How a table becomes network inputs, as its training rows decided; nothing but text and numbers.

    Attributes:
        columns: the columns in use, in the order of the training table.
        left_out: reason by name of the other columns.
        target: name of the target column.
        header: all names of the training table, for files without header.
        titled: whether the training table had a header.
        plain: whether the training table had numbers alone and no gap.
        comma: whether the targets of the training table have a decimal comma.
    """

    columns: tuple[Column, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    target: str = ""
    header: tuple[str, ...] = ()
    titled: bool = True
    plain: bool = False
    comma: bool = False

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Return the names of the network inputs."""
        return tuple(name for column in self.columns for name in column.inputs)

    @cached_property
    def scaled(self) -> Tensor:
        """Return which inputs are standardised (d,); ones, zeros and codes are not."""
        return torch.tensor(
            [scaled for column in self.columns for scaled in column.scaled], dtype=torch.bool, device="cpu"
        )

    @cached_property
    def embedded(self) -> dict[int, int]:
        """Return the number of codes of each input that is a code, by position."""
        starts = accumulate((len(column.inputs) for column in self.columns), initial=0)
        return {i: column.codes for i, column in zip(starts, self.columns, strict=False) if column.kind == "embedding"}

    def encode(self, cells: Mapping[str, Array], rows: Array | None = None) -> tuple[Array, dict[str, Faults]]:
        """Return the inputs (n, d) of columns of text, and the faults of each column."""
        found, faults = [], {}
        for column in self.columns:
            own = cells[column.name] if rows is None else cells[column.name][rows]
            x, faults[column.name] = column.encode(own)
            found.append(x)
        return np.concatenate(found, 1), faults

    def read(self, table: Table) -> tuple[Array, list[str]]:
        """Return the inputs (n, d) of new rows, and notes on columns and cells.

        Columns are found by name, in any order; without a header in one of the tables, by position, with or without
        the target.

        Raises:
            ValueError: A column is missing, or most of its cells cannot be read as in training.
        """
        table = table if self.titled and table.titled else self._by_position(table)
        lacking = [column.name for column in self.columns if column.name not in table.header]
        known = {*self.header, self.target}
        extra = [name for name in table.header if name not in known]
        if lacking:
            others = f"; it has the columns {_listed(extra)}, which training had not" if extra else ""
            names = _listed(list(map(repr, lacking)))
            raise ValueError(
                f"{table.where} has no column {names}, which the training data had{others}. Name the columns "
                "as in training, in any order."
            )
        if not len(table):
            raise ValueError(f"{table.where} has a header and no row; expected at least one. Add rows.")
        x, faults = self.encode(dict(zip(table.header, table.columns, strict=True)))
        for column in self.columns:
            self._check_readable(table, column, faults[column.name])
        notes = fault_notes(self.columns, faults, len(table), new=True)
        return x, [*([f"columns that training had not are ignored: {_listed(extra)}"] if extra else []), *notes]

    def targets(self, table: Table, classes: Sequence[str]) -> Array | None:
        """Return the targets of new rows: numbers of `classes`, or without them real ones (n, 1); None if unknown."""
        if not (self.titled and table.titled and self.target in table.header):
            return None
        try:
            y, there, _ = self.known_targets(table, classes)
        except ValueError:
            return None
        return y if there.all() else None

    def known_targets(self, table: Table, classes: Sequence[str]) -> tuple[Array, Array, list[str]]:
        """Return the targets of the rows that have one, which rows these are (n,), and a note on the others.

        Raises:
            ValueError: The target column is missing, or has another class, a cell that is no number, or gaps alone.
        """
        table = table if self.titled and table.titled else self._by_position(table)
        if self.target not in table.header:
            raise ValueError(
                f"{table.where} has no column {self.target!r}, the target of the training data. Add it: rows need "
                "targets to be scored."
            )
        cells = table.columns[table.header.index(self.target)]
        there = ~are_gaps(cells) | np.isin(cells, list(classes))
        missing = len(cells) - int(there.sum())
        if missing == len(cells):
            raise ValueError(f"{table.where}, column {self.target!r} has no target in {missing} rows. Fill it.")
        notes = [f"rows without a target are left out: {missing}"] if missing else []
        if classes:
            return self._labels(table, cells[there], classes), there, notes
        unclear: Notation = "comma" if table.separator == ";" else "point"
        if self.comma:
            check_notation(cells[there], "comma", f"{table.where}, column {self.target!r}")
        values = to_numbers(cells[there], "comma" if self.comma else notation_of(cells[there]) or unclear)
        if (odd := ~np.isfinite(values)).any():
            raise ValueError(
                f"{table.where}, column {self.target!r}: expected numbers as in training, got "
                f"{cells[there][np.argmax(odd)]!r}. Correct or drop these rows."
            )
        return values[:, None], there, notes

    def _labels(self, table: Table, cells: Array, classes: Sequence[str]) -> Array:
        """Return the numbers of classes; a whole number may be written with a decimal point."""
        number = {name: k for k, name in enumerate(classes)}
        if unknown := next((cell for cell in cells if cell not in number), None):
            values = to_numbers(cells)
            whole = np.isfinite(values) & (values == np.round(values))
            names = [
                str(int(value)) if is_whole else cell
                for cell, value, is_whole in zip(cells, values, whole, strict=True)
            ]
            unknown = next((name for name in names if name not in number), None)
            cells = np.array(names, dtype=object)
        if unknown is not None:
            raise ValueError(
                f"{table.where}, column {self.target!r} has the class {unknown!r}; expected those of the training "
                f"data: {_listed(list(classes))}. Correct or drop these rows."
            )
        return np.array([number[cell] for cell in cells])

    def _check_readable(self, table: Table, column: Column, faults: Faults) -> None:
        if column.kind == "number" and faults.odd:
            cells = table.columns[table.header.index(column.name)]
            check_notation(cells, column.notation, f"{table.where}, column {column.name!r}")
        if column.kind in ("category", "embedding") or faults.odd <= _MOST_UNREADABLE * len(table):
            return
        raise ValueError(
            f"{table.where}, column {column.name!r}: expected a {column.kind} as in training, got {faults.odd} of "
            f"{len(table)} cells that are none, such as {', '.join(map(repr, faults.examples))}. Correct the column."
        )

    def _by_position(self, table: Table) -> Table:
        """Name columns as in the training table."""
        features = [name for name in self.header if name != self.target]
        for names in (features, list(self.header)):
            if len(table.header) == len(names):
                return replace(table, header=names)
        raise ValueError(
            f"{table.where} has {len(table.header)} columns; expected the {len(features)} features of the training "
            "data, or these and the target. Give it a header, or these columns."
        )

    def to_json(self) -> dict[str, Any]:
        """Return the preparation as JSON values."""
        return {
            "schema": SCHEMA,
            "target": self.target,
            "header": list(self.header),
            "titled": self.titled,
            "plain": self.plain,
            **({"comma": True} if self.comma else {}),
            "columns": [column.to_json() for column in self.columns],
            "left_out": dict(self.left_out),
        }

    @classmethod
    def from_json(cls, found: Any) -> TablePreparation:
        """Return the preparation of JSON values; raise ``ValueError`` if they are damaged."""
        if not isinstance(found, Mapping) or found.get("schema") != SCHEMA:
            raise ValueError(f"expected a preparation of schema {SCHEMA}")
        columns, header, left_out = found.get("columns"), found.get("header"), found.get("left_out")
        target, flags = found.get("target"), [found.get("titled"), found.get("plain"), found.get("comma", False)]
        if not (isinstance(columns, list) and columns and isinstance(target, str)):
            raise ValueError("expected columns and a target")
        if not (_are_texts(header) and isinstance(left_out, Mapping) and _are_texts([*left_out, *left_out.values()])):
            raise ValueError("expected a header of names, and reasons by name of left_out columns")
        if not all(isinstance(flag, bool) for flag in flags):
            raise ValueError("expected titled, plain and comma to be true or false")
        return cls(
            columns=tuple(map(Column.from_json, columns)),
            left_out=dict(left_out),
            target=target,
            header=tuple(header or ()),
            titled=bool(flags[0]),
            plain=bool(flags[1]),
            comma=bool(flags[2]),
        )


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


@dataclass(frozen=True, eq=False)
class TableRows:
    """A table as text, and the numbers of its training and test rows.

    Attributes:
        table: the cells of the rows in use.
        about: a preparation without columns: target, header, and columns that are left out on request.
        types: types of columns that the user named.
        train, test: numbers of the rows.
        notes: notes on rows and targets.
    """

    table: Table
    about: TablePreparation
    types: Mapping[str, str]
    train: Array
    test: Array
    notes: tuple[str, ...] = ()

    def fit(self) -> tuple[TablePreparation, Array, Array, list[str]]:
        """Fit the preparation to the training rows; return it, the inputs of both splits, and notes."""
        names = [name for name in self.about.header if name not in self.about.left_out and name != self.about.target]
        cells = {name: self.table.columns[self.table.header.index(name)] for name in names}
        fitted = {name: self._fit_column(name, cells[name]) for name in names}
        plain = all(_is_plain(column, cells[name]) for name, column in fitted.items())
        left_out = dict(self.about.left_out)
        useless = {name: reason for name, column in fitted.items() if (reason := self._useless(column, cells[name]))}
        gone = {name: reason for name, reason in useless.items() if not plain or isinstance(fitted[name], str)}
        left_out |= gone
        columns = [column for name, column in fitted.items() if name not in gone and not isinstance(column, str)]
        if not columns:
            reasons = ", ".join(f"{name} ({reason})" for name, reason in list(left_out.items())[:_SHOWN])
            raise ValueError(
                f"{self.table.where} has no usable column in addition to the target: {reasons or 'one column'}. Add "
                "columns, or say what they are: --types COLUMN=category."
            )
        preparation = replace(self.about, columns=tuple(columns), left_out=left_out, plain=plain)
        width = len(preparation.inputs)
        check_memory(8 * width * len(self.table), f"{self.table.where} becomes {width:,} inputs a row", "in memory")
        for column in columns:
            check_quantity(self.table.where, column, cells[column.name])
        x_train, faults = preparation.encode(cells, self.train)
        x_test, others = preparation.encode(cells, self.test)
        notes = describe_columns(preparation)
        notes += [
            f"column {_shown(name)}: {reason}; if it is of no use, --drop {self.table.header.index(name)}"
            for name, reason in useless.items()
            if name not in gone
        ]
        notes += fault_notes(columns, faults, len(self.train), new=False)
        notes += [f"test rows: {note}" for note in fault_notes(columns, others, len(self.test), new=True)]
        dates = (unclear_dates(c.name, cells[c.name]) for c in columns if c.kind == "date" and c.name not in self.types)
        return preparation, x_train, x_test, [*notes, *filter(None, dates)]

    def _useless(self, column: Column | str, cells: Array) -> str:
        """Return the reason why a column is of no use, or an empty text."""
        if isinstance(column, str):
            return column
        if _is_constant(column, cells[self.train]):
            return "constant"
        return "it counts the rows" if column.name in _INDEX and _counts(column, cells) else ""

    def _fit_column(self, name: str, cells: Array) -> Column | str:
        unclear: Notation | None = "comma" if self.table.separator == ";" else None
        wanted = self.types.get(name, self.table.types.get(name))
        try:
            return fit_column(name, cells[self.train], wanted, unclear)
        except ValueError as error:
            raise ValueError(f"{self.table.where}, {error}") from None

    def select(self, train: Array, test: Array | None) -> TableRows:
        """Return other rows: `train` and `test` count the present training rows; None keeps the test rows."""
        return replace(self, train=self.train[train], test=self.test if test is None else self.train[test])


def select(data: DataSet, train: Tensor, test: Tensor | None = None) -> DataSet:
    """Return a data set with some of its training rows; others may replace the test rows.

    Medians, values of text columns and the like come from the remaining training rows alone.

    Args:
        data: The data set.
        train: Training rows to keep, as numbers or a mask.
        test: Training rows that become the test rows; None keeps the test rows.
    """
    kept, held = data.train.take(train), data.test if test is None else data.train.take(test)
    if data.rows is None:
        return replace(data, train=kept, test=held)
    rows = data.rows.select(train.numpy(), None if test is None else test.numpy())
    table, x_train, x_test, notes = rows.fit()
    kept, held = replace(kept, x=tensor(x_train)), replace(held, x=tensor(x_test))
    return replace(data, train=kept, test=held, rows=rows, table=table, notes=(*notes, *rows.notes))


def prepared_by(data: DataSet, table: TablePreparation) -> DataSet:
    """Return a data set whose columns are prepared by a stored preparation instead of its own."""
    if data.rows is None or table == data.table:
        return data
    cells = dict(zip(data.rows.table.header, data.rows.table.columns, strict=True))
    if lacking := [column.name for column in table.columns if column.name not in cells]:
        raise ValueError(f"the training data have no column {lacking[0]!r}")
    x_train, x_test = (table.encode(cells, rows)[0] for rows in (data.rows.train, data.rows.test))
    train, test = replace(data.train, x=tensor(x_train)), replace(data.test, x=tensor(x_test))
    return replace(data, train=train, test=test, table=table)


def one_hot_codes(x: Tensor, codes: Mapping[int, int]) -> Tensor:
    """Replace columns of codes (see `DataSet.embedded`) by one column a code: (n, d) to (n, d - m + sum of codes)."""
    if not codes:
        return x
    others = [i for i in range(x.shape[1]) if i not in codes]
    ones = [
        torch.eye(count, dtype=x.dtype, device=x.device)[x[:, i].round().long().clamp(0, count - 1)]
        for i, count in codes.items()
    ]
    return torch.cat([x[:, others], *ones], 1)


def parse_names(text: str | Iterable[str] | None) -> list[str]:
    """Return names separated by commas; a name with a comma is quoted."""
    if text is None:
        return []
    if not isinstance(text, str):
        return list(text)
    return [name.strip() for name in next(csv.reader([text], skipinitialspace=True), []) if name.strip()]


def parse_types(text: str | Mapping[str, str] | None) -> dict[str, str]:
    """Return types by name, from a text such as "zip=category,when=date".

    Raises:
        ValueError: A type is unknown, or a part is not NAME=TYPE.
    """
    if isinstance(text, Mapping):
        types = dict(text)
    else:
        parts = [part.rpartition("=") for part in parse_names(text)]
        types = {name.strip(): kind.strip() for name, _, kind in parts}
    for name, kind in types.items():
        if kind not in TYPES or not name:
            raise ValueError(f"expected types such as zip=category, with one of {', '.join(TYPES)}, got {name}={kind}")
    return types


def _is_plain(column: Column | str, cells: Array) -> bool:
    if isinstance(column, str) or column.kind != "number" or column.notation != "point":
        return False
    return all(map(is_number, cells)) and bool(np.isfinite(cells.astype(np.float64)).all())


def _is_constant(column: Column, cells: Array) -> bool:
    """Return whether a column has one number alone; text and dates are checked when they are fitted."""
    if column.kind not in ("number", "boolean") or column.gaps:
        return False
    x, _ = column.encode(cells)
    return bool((x == x[0]).all())


def _counts(column: Column, cells: Array) -> bool:
    return column.kind == "number" and bool((np.diff(column.encode(cells)[0][:, 0]) == 1).all())


def check_quantity(where: str, column: Column, cells: Array) -> None:
    """Raise ``ValueError`` for a column of numbers that loses its differences in float32."""
    if column.kind != "number":
        return
    values = column.encode(cells)[0][:, 0]
    if np.abs(values).max() >= EXACT and all(cell.lstrip("+-").isdigit() for cell in cells):
        values = np.array([int(cell) for cell in cells], dtype=object)  # exact
    check_precision(values, f"{where}, column {column.name!r}")


def describe_columns(table: TablePreparation) -> list[str]:
    """Return the types of the columns, and the columns that are left out."""
    kinds: dict[str, list[str]] = {}
    for column in table.columns:
        count = {"category": len(column.values), "embedding": column.codes - 1}.get(column.kind)
        shown = _shown(column.name) + ("" if count is None else f" ({count} values)")
        kinds.setdefault(_PLURAL[column.kind], []).append(shown)
    types = [f"{kind} ({len(names)}): {_listed(names)}" for kind, names in kinds.items()]
    gone = [f"{_shown(name)} ({reason})" for name, reason in table.left_out.items()]
    return [f"target: {_shown(table.target)}; {'; '.join(types)}", *([f"left out: {_listed(gone)}"] if gone else [])]


def fault_notes(columns: Iterable[Column], faults: Mapping[str, Faults], rows: int, *, new: bool) -> list[str]:
    """Return notes on gaps and odd cells of all columns, as counts by column; `new` rows may have new values."""
    gaps: list[str] = []
    odd: list[str] = []
    unseen: list[str] = []
    for column in columns:
        found = faults[column.name]
        if found.gaps:
            gaps.append(f"{_shown(column.name)} {found.gaps}")
        if found.odd:
            few = f"{_shown(column.name)} {found.odd} ({', '.join(map(repr, found.examples))})"
            (unseen if column.kind in ("category", "embedding") else odd).append(few)
    notes = (
        [f"gaps in {rows} rows, filled by the median, in text a value of their own: {_listed(gaps)}"] if gaps else []
    )
    notes += [f"cells that cannot be read, taken for gaps: {_listed(odd)}"] if odd else []
    if unseen:
        text = "text that training rows lack or have once" if new else "text of one row, with one common code"
        notes.append(f"{text}: {_listed(unseen)}")
    return notes


def _shown(name: str) -> str:
    return name or "(no name)"


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest


def likely_leaks(x: Mapping[str, Array], y: Array, rows: int = 2000) -> list[str]:
    """Return the names of columns that equal the target or determine it.

    A column determines the target if rows of one value always have one target, and chance alone would give this with
    a probability below 1e-6: (sum_k p_k^2)^(n - d) for n rows, d values and shares p_k of the targets. A column of
    numbers also does so if it is a linear function of a real target, up to rounding.

    Args:
        x: Cells or numbers of the columns, (n,) each.
        y: Labels or numbers (n,).
        rows: Largest number of rows to look at, evenly spaced.
    """
    some = np.arange(min(len(y), rows)) * len(y) // min(len(y), rows)
    y = y[some]
    targets, codes = np.unique(y, return_inverse=True)
    chance = float(np.square(np.bincount(codes) / len(codes)).sum())
    return [name for name, column in x.items() if _determines(column[some], y, codes, len(targets), chance)]


def _determines(column: Array, y: Array, codes: Array, targets: int, chance: float) -> bool:
    if column.dtype.kind == y.dtype.kind == "f" and _is_linear(column, y):
        return True
    if column.dtype.kind == "O" and are_gaps(column).mean() > 0.5:
        return False
    values, numbers = np.unique(column.astype(str) if column.dtype.kind == "O" else column, return_inverse=True)
    if len(values) < 2 or targets < 2 or len(np.unique(numbers * targets + codes)) > len(values):
        return False
    return chance ** (len(y) - len(values)) < 1e-6


def _is_linear(column: Array, y: Array) -> bool:
    enough = len(y) >= 10 and column.std() > 0 and y.std() > 0
    return bool(enough and abs(np.corrcoef(column, y)[0, 1]) > 1 - 1e-9)
