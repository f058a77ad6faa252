"""Load a table: choose its target, task, training and test rows; `table` prepares its columns.

Read Parquet files and frames of pandas, polars and pyarrow as cells of text; these libraries are optional.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from leanbayes.data.cells import are_gaps, NO_NUMBERS, Notation, notation_of, to_numbers
from leanbayes.data.checks import check_task, MOST_CLASSES, REGRESSION
from leanbayes.data.columns import Column, fit_column, unclear_dates
from leanbayes.data.dataset import Array, Raw, Task
from leanbayes.data.files.csv import check_names, clean_name, Table
from leanbayes.data.files.npz import check_memory
from leanbayes.data.table import check_quantity, likely_leaks, parse_names, parse_types, TablePreparation, TableRows

_TEST_EVERY = 10
_FEWEST_ROWS = 3
_FEWEST_OF_A_CLASS = 5
_FEW_ODD = 0.05  # share of the targets that may be unreadable as numbers
_FEWEST_READABLE = 0.5  # share of the real targets
_SHOWN = 5  # classes in a message
_FEW_TEST_ROWS = 30


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Options for a table; see `leanbayes.data.load`."""

    target: str | int | None = None
    task: str | None = None
    split: int = 0
    drop: str | Iterable[str] | None = None
    group: str | None = None
    time: str | None = None
    weight: str | None = None
    types: str | Mapping[str, str] | None = None

    @property
    def given(self) -> list[str]:
        """Return the names of the options for tables that are not at their default."""
        names = ("target", "drop", "group", "time", "weight", "types")
        return [name for name in names if getattr(self, name) is not None]


@dataclass(frozen=True, eq=False)
class LoadedTable:
    """The arrays of a table, its task and preparation, and weights, groups and times of all rows by split."""

    raw: Raw
    task: Task
    table: TablePreparation
    rows: TableRows
    notes: tuple[str, ...]
    extra: Mapping[str, Mapping[str, torch.Tensor]]


def load_table(table: Table, options: TableOptions) -> LoadedTable:
    """Turn the cells of a table into inputs and targets.

    Targets are labels if they are text, or whole numbers with at most 20 distinct values; the option `task` overrides
    this. Rows are shuffled with `split` as the seed; every tenth row (of each class) is for testing. With groups, a
    tenth of the rows in whole groups; with times, the latest tenth. Rows without target are left out.
    """
    target = len(table.header) - 1 if options.target is None else table.position(options.target)
    special = _special(table, options, target)
    if len(table.header) < 2:
        raise ValueError(f"{table.where} has one column; expected features in addition to the target. Add columns.")
    types = parse_types(options.types)
    types = {table.header[table.position(name)]: kind for name, kind in types.items()}
    table, values, task, notation, notes = _targets(table, target, options.task, types.pop(table.header[target], None))
    if len(values) < _FEWEST_ROWS:
        raise ValueError(
            f"{table.where} has {len(values)} rows with a target; expected at least {_FEWEST_ROWS}: two to train, one "
            "to test. Add rows."
        )
    extra, unclear = _extra(table, options, types)
    notes += unclear
    test = _test_rows(table, values, task, options.split, extra)
    notes += _of_test_rows(test, extra)
    about = TablePreparation(
        (), special, table.header[target], tuple(table.header), table.titled, comma=notation == "comma"
    )
    rows = TableRows(table, about, types, np.flatnonzero(~test), np.flatnonzero(test))
    preparation, x_train, x_test, own = rows.fit()
    notes += _leaks(preparation, rows, values[~test].astype(str) if task == "classification" else values[~test])
    values, classes = _numbered(values, task)
    return LoadedTable(
        Raw(x_train, values[~test], x_test, values[test], classes),
        task,
        preparation,
        replace(rows, notes=tuple(notes)),
        (*own, *notes),
        {
            split: {name: torch.from_numpy(column[mask]) for name, column in extra.items()}
            for split, mask in (("train", ~test), ("test", test))
        },
    )


def _special(table: Table, options: TableOptions, target: int) -> dict[str, str]:
    """Return the columns that are no features, with the reason; the target is not among them."""
    found: dict[str, str] = {}
    wanted = [(name, "dropped") for name in parse_names(options.drop)]
    wanted += [
        (name, reason)
        for name, reason in (
            (options.group, "groups of the split"),
            (options.time, "time of the split"),
            (options.weight, "weights of the rows"),
        )
        if name is not None
    ]
    for name, reason in wanted:
        position = table.position(name)
        if position == target:
            raise ValueError(
                f"{table.where}: column {table.header[target]!r} is the target and cannot be "
                f"{'dropped' if reason == 'dropped' else 'the ' + reason}. Name another column, or another target."
            )
        found[table.header[position]] = reason
    return found


def _targets(
    table: Table, target: int, task: str | None, wanted: str | None
) -> tuple[Table, Array, Task, Notation, list[str]]:
    """Return the table of the rows with a target, the targets, the task, the decimal sign, and notes."""
    cells, name = table.columns[target], table.header[target]
    there = ~are_gaps(cells)
    if (cells == "+").any():
        there |= cells == "-"  # signs are classes
    if not there.any():
        raise ValueError(
            f"{table.where}: column {name!r} has no target, {len(cells)} gaps in {len(cells)} rows. Name another "
            "column as the target."
        )
    notation = _notation(table, name, cells[there], wanted)
    numbers = to_numbers(cells, notation)
    readable = np.isfinite(numbers)
    few_odd = readable[there].mean() >= 1 - _FEW_ODD and len(np.unique(numbers[readable])) > MOST_CLASSES
    are_words = wanted == "category" or not (readable[there].all() or task == "regression" or few_odd)
    kept = there if are_words else readable
    if kept.sum() < _FEWEST_READABLE * there.sum():
        example = cells[there & ~kept][0]
        raise ValueError(
            f"{table.where}: expected numbers in the target column {name!r}, got {example!r}. Leave out --task, or "
            "name another --target."
        )
    labels = are_words or (all(cell.isdigit() for cell in cells[kept]) and len(np.unique(cells[kept])) <= MOST_CLASSES)
    chosen = check_task(task, infer="classification" if labels else "regression")
    if not are_words:
        check_quantity(table.where, Column(name=name, kind="number", notation=notation), cells[kept])
    columns = [column[kept] for column in table.columns]
    lines = [line for line, keep in zip(table.lines, kept, strict=True) if keep]
    values = columns[target].astype(str) if are_words else numbers[kept]
    notes = _rows_left_out(cells[~kept], name)
    return replace(table, columns=columns, lines=lines), values, chosen, notation, notes


def _notation(table: Table, name: str, cells: Array, wanted: str | None) -> Notation:
    """Return the decimal sign of a column, as wanted or by its cells; raise ``ValueError`` if neither decides."""
    if wanted == "comma":
        return "comma"
    if found := notation_of(cells):
        return found
    if wanted == "number":
        return "point"
    if table.separator == ";":
        return "comma"
    raise ValueError(
        f"{table.where}, column {name!r}: expected numbers with a decimal point, got commas that may also separate "
        f"thousands. Say which: --types {name}=comma or --types {name}=number."
    )


def _rows_left_out(cells: Array, name: str) -> list[str]:
    if not len(cells):
        return []
    odd = cells[~are_gaps(cells, NO_NUMBERS)]
    words = cells[cells != ""]
    examples = f", such as {words[0][:20]!r}" if len(words) else ""
    if len(odd):
        examples = f", {len(odd)} of them unreadable, such as {odd[0][:20]!r}"
    count = "1 row is" if len(cells) == 1 else f"{len(cells)} rows are"
    return [f"{count} left out: no target in column {name!r}{examples}"]


def _numbered(values: Array, task: Task) -> tuple[Array, tuple[str, ...]]:
    """Number whole-number labels that are not 0, 1, 2, ..., and name the classes by them."""
    if task == "regression" or values.dtype.kind != "f" or (values != np.round(values)).any():
        return values, ()
    classes, codes = np.unique(values, return_inverse=True)
    if np.array_equal(classes, np.arange(len(classes))):
        return values, ()
    return codes, tuple(str(int(value)) for value in classes)


def _extra(table: Table, options: TableOptions, types: Mapping[str, str]) -> tuple[dict[str, Array], list[str]]:
    """Return weights, groups and times of all rows, where they are asked for, and notes on the times."""
    found: dict[str, Array] = {}
    notes: list[str] = []
    if options.weight is not None:
        found["weight"] = _weights(table, table.position(options.weight), types).astype(np.float32)
    if options.group is not None:
        cells = table.columns[table.position(options.group)].astype(str)
        found["group"] = np.unique(cells, return_inverse=True)[1].astype(np.int64)
    if options.time is not None:
        column = table.position(options.time)
        name, cells = table.header[column], table.columns[column]
        found["time"] = _times(table, name, cells, types.get(name, table.types.get(name)))
        unclear = unclear_dates(name, cells) if name not in types else None
        notes += [unclear] if unclear else []
    return found, notes


def _weights(table: Table, column: int, types: Mapping[str, str]) -> Array:
    name, cells = table.header[column], table.columns[column]
    weights = to_numbers(cells, _notation(table, name, cells, types.get(name)))
    wrong = ~(np.isfinite(weights) & (weights >= 0))
    if wrong.any() or not weights.any():
        got = repr(cells[np.argmax(wrong)]) if wrong.any() else "zeros alone"
        raise ValueError(
            f"{table.where}, column {name!r}: expected weights, numbers of at least zero in every row, "
            f"got {got}. Fill them, or leave out --weight."
        )
    return weights


def _times(table: Table, name: str, cells: Array, wanted: str | None) -> Array:
    fitted = fit_column(name, cells, wanted)
    if isinstance(fitted, str) or fitted.kind not in ("number", "date"):
        kind = fitted if isinstance(fitted, str) else fitted.kind
        raise ValueError(f"{table.where}: expected dates or numbers in the column of times {name!r}, got {kind}.")
    if fitted.gaps:
        _, faults = fitted.encode(cells)
        raise ValueError(
            f"{table.where}: expected a time in every row of column {name!r}, got {faults.gaps + faults.odd} gaps. "
            "Fill them, or drop these rows."
        )
    if fitted.kind == "number":
        return fitted.encode(cells)[0][:, 0]
    return replace(fitted, parts=("elapsed days",)).encode(cells)[0][:, 0]


def _test_rows(table: Table, values: Array, task: Task, split: int, extra: Mapping[str, Array]) -> Array:
    """Mark the test rows."""
    if task == "classification":
        _check_counts(table, values)
    if "time" in extra:
        return _latest(table, extra["time"], split)
    if "group" in extra:
        return _whole_groups(table, extra["group"], split)
    return _held_out(values if task == "classification" else np.zeros(len(values)), split)


def _of_test_rows(test: Array, extra: Mapping[str, Array]) -> list[str]:
    """Return notes on few test rows, and on groups that the times split."""
    notes = []
    if (count := int(test.sum())) < _FEW_TEST_ROWS:
        others = "" if "time" in extra else "; --split 1 takes others"
        notes.append(f"figures of {count} test rows depend on the rows, by more than their ± over seeds{others}")
    if extra.keys() >= {"group", "time"}:
        split = len(np.intersect1d(extra["group"][test], extra["group"][~test]))
        notes += [f"groups with training and test rows: {split}; the time decides, leave out --time"] if split else []
    return notes


def _check_counts(table: Table, labels: Array) -> None:
    counts = Counter(labels.tolist())
    rare = {f"{label:g}" if isinstance(label, float) else label: n for label, n in counts.items()}
    rare = {label: n for label, n in rare.items() if n < _FEWEST_OF_A_CLASS}
    if not rare:
        return
    shown = ", ".join(f"{label!r} has {n}" for label, n in list(rare.items())[:_SHOWN])
    rest = f" and {len(rare) - _SHOWN} more" if len(rare) > _SHOWN else ""
    raise ValueError(
        f"{table.where}: expected at least {_FEWEST_OF_A_CLASS} rows of each of the {len(counts)} classes, but of "
        f"{len(labels)} rows {shown}{rest}. Add rows, merge or drop these classes, name another --target, or say "
        f"{REGRESSION} for targets that are quantities."
    )


def _held_out(labels: Array, seed: int) -> Array:
    """Mark the test rows: of each class the second, twelfth, ... in random order."""
    order = np.random.default_rng(seed).permutation(len(labels))
    test = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        test[order[labels[order] == label][1::_TEST_EVERY]] = True
    return test


def _whole_groups(table: Table, groups: Array, seed: int) -> Array:
    """Mark groups in random order until they have a tenth of the rows."""
    sizes = np.bincount(groups)
    if len(sizes) < 2:
        raise ValueError(f"{table.where}: expected at least two groups, got one. Name another column, or no --group.")
    order = np.random.default_rng(seed).permutation(len(sizes))
    enough = int(np.searchsorted(sizes[order].cumsum(), len(groups) / _TEST_EVERY)) + 1
    return np.isin(groups, order[: min(enough, len(sizes) - 1)])


def _latest(table: Table, times: Array, split: int) -> Array:
    """Mark the latest tenth of the rows, and all rows of the same time as the first of them."""
    if split:
        raise ValueError(f"the latest rows are one split, got split={split}. Leave it at 0, or leave out --time.")
    first = np.sort(times)[len(times) - max(1, len(times) // _TEST_EVERY)]
    test = times >= first
    if test.all():
        raise ValueError(f"{table.where}: expected times that differ, got one time for most rows. Leave out --time.")
    return np.asarray(test)


def _leaks(preparation: TablePreparation, rows: TableRows, y: Array) -> list[str]:
    columns = {}
    for column in preparation.columns:
        cells = rows.table.columns[rows.table.header.index(column.name)][rows.train]
        columns[column.name] = column.encode(cells)[0][:, 0] if column.kind == "number" else cells
    names = likely_leaks(columns, y)
    return [
        f"likely leak: column {name!r} determines the target {preparation.target!r}; if it is not known before the "
        f"target, leave it out: --drop {name}"
        for name in names
    ]


_BYTES_A_CELL = 80  # memory of a cell as text
_MISSING = ("NAType", "NaTType")  # of pandas; the first refuses every comparison
_TYPES = (("dictionary", "category"), ("categorical", "category"), ("category", "category"), ("enum", "category"))
"""Types of frames that say what a column is, by the beginning of their name."""


def is_frame(value: object) -> bool:
    """Return whether a value is a frame of pandas or polars, or a table of pyarrow."""
    return _library(value) in ("pandas", "polars", "pyarrow") and type(value).__name__ in ("DataFrame", "Table")


def frame_table(frame: Any, where: str = "the table") -> Table:
    """Return the cells of a frame as text; dates are written year first, and gaps are empty."""
    match _library(frame):
        case "polars":
            columns = {name: (str(frame[name].dtype), frame[name].to_list()) for name in frame.columns}
            names = list(frame.columns)
        case "pyarrow":
            names = list(frame.column_names)
            columns = {name: (str(frame.schema.field(i).type), []) for i, name in enumerate(names)}
            check_names(where, names)
            columns = {name: (kind, frame.column(name).to_pylist()) for name, (kind, _) in columns.items()}
        case _:
            names = [str(name) for name in frame.columns]
            check_names(where, names)
            pairs = ((str(name), frame[name]) for name in frame.columns)
            columns = {name: (str(column.dtype), column.tolist()) for name, column in pairs}
    cells = [_cells(columns[name][1]) for name in names]
    types = {clean_name(name): kind for name in names if (kind := _type(columns[name][0]))}
    names = list(map(clean_name, names))
    check_names(where, names)
    rows = len(cells[0]) if cells else 0
    if not rows:
        raise ValueError(f"{where} has {rows} rows and {len(names)} columns; expected at least one row. Add rows.")
    return Table(where, names, cells, list(range(rows)), True, types=types)


def read_parquet(path: Path) -> Table:
    """Read a Parquet file with pyarrow, or with polars."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path} (looked in {Path.cwd()}). Check the path.")
    try:
        import pyarrow.parquet  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return _read_with_polars(path)
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            size = file.metadata.num_rows * file.metadata.num_columns
            check_memory(_BYTES_A_CELL * size, f"{path} has {file.metadata.num_rows:,} rows", "as cells")
            frame = file.read()
    except (pyarrow.ArrowException, OSError) as error:
        raise _damaged(path, error) from error
    return frame_table(frame, str(path))


def _read_with_polars(path: Path) -> Table:
    try:
        import polars  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        raise ModuleNotFoundError(
            f"{path} needs a reader of Parquet files. Install one: pip install leanbayes[tables]; or save it as .csv."
        ) from None
    try:
        frame = polars.read_parquet(path)
    except (polars.exceptions.PolarsError, OSError) as error:
        raise _damaged(path, error) from error
    return frame_table(frame, str(path))


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} cannot be read as a Parquet file ({str(error).splitlines()[0]}). Write it again.")


def _library(value: object) -> str:
    return type(value).__module__.partition(".")[0]


def _type(name: str) -> str | None:
    return next((kind for begin, kind in _TYPES if name.lower().startswith(begin)), None)


def _cells(values: Iterable[Any]) -> Array:
    texts = [_text(value) for value in values]
    column = np.empty(len(texts), object)
    column[:] = texts
    return column


def _text(value: Any) -> str:
    if value is None or type(value).__name__ in _MISSING or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (datetime, date)):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace").strip()
    return str(value).strip()
