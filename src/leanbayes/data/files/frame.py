"""Read Parquet files and frames of pandas, polars and pyarrow as cells of text; these libraries are optional."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np

from leanbayes.data.dataset import Array
from leanbayes.data.files.csv import check_names, clean_name, Table
from leanbayes.data.files.npz import check_memory

_BYTES_A_CELL = 80  # memory of a cell as text
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
    if value is None or value != value:  # NaN differs from itself
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (datetime, date)):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace").strip()
    return str(value).strip()
