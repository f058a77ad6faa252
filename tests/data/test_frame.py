"""Frames of pandas and polars, tables of pyarrow, and Parquet files: the same data as their `.csv` file."""

from __future__ import annotations

import sys
from datetime import date

import numpy as np
import pytest
import torch

from leanbayes import data
from leanbayes.data.tabular import is_frame

ROWS = 80


def columns():
    random = np.random.default_rng(0)
    return {
        "x": [None if i % 9 == 0 else float(value) for i, value in enumerate(random.normal(size=ROWS))],
        "count": random.integers(0, 99, ROWS).tolist(),
        "region": [None if i % 11 == 0 else ("north", "south")[i % 2] for i in range(ROWS)],
        "day": [date(2024, 1 + i % 12, 1 + i % 28) for i in range(ROWS)],
        "flag": [i % 3 == 0 for i in range(ROWS)],
        "y": random.normal(size=ROWS).tolist(),
    }


def from_csv(folder):
    def text(value):
        return "" if value is None else repr(value) if isinstance(value, float) else str(value)

    found = columns()
    lines = [",".join(found), *(",".join(map(text, row)) for row in zip(*found.values(), strict=True))]
    (folder / "t.csv").write_text("\n".join(lines))
    return data.load(folder / "t.csv")


def check(mine, expected):
    assert mine.table == expected.table
    for split in ("train", "test"):
        assert torch.equal(getattr(mine, split).x, getattr(expected, split).x)
        assert torch.equal(getattr(mine, split).y, getattr(expected, split).y)


def test_a_frame_of_pandas(tmp_path):
    pandas = pytest.importorskip("pandas", reason="needs pandas, of the tables extra")
    frame = pandas.DataFrame(columns())
    check(data.load(frame), from_csv(tmp_path))
    check(data.load(frame.assign(day=pandas.to_datetime(frame["day"]))), from_csv(tmp_path))
    assert data.load(frame).sha256 == data.load(frame.copy()).sha256 != data.load(frame[::-1]).sha256
    mine = data.load(frame.assign(count=(frame["count"] % 3).astype("category")))
    assert [column.kind for column in mine.table.columns][1] == "category"
    with pytest.raises(ValueError, match="more than one column named 'x'"):
        data.load(pandas.concat([frame, frame[["x"]]], axis=1))
    with pytest.raises(ValueError, match="the table has 0 rows"):
        data.load(frame[:0])


def test_missing_values_of_every_type_of_pandas():
    pandas = pytest.importorskip("pandas")
    here = [i % 7 > 0 for i in range(ROWS)]
    frame = pandas.DataFrame({
        "count": pandas.array([i if known else None for i, known in enumerate(here)], dtype="Int64"),
        "flag": pandas.array([i % 2 == 0 if known else None for i, known in enumerate(here)], dtype="boolean"),
        "day": pandas.to_datetime([f"2024-01-{1 + i % 28:02}" if known else None for i, known in enumerate(here)]),
        "mixed": [float(i) if known else np.float64("nan") for i, known in enumerate(here)],
        "lists": [[1, 2] if known else None for known in here],
        "y": [i % 10 + 0.5 for i in range(ROWS)],
    })  # fmt: skip
    mine = data.load(frame)
    assert {column.name: column.gaps for column in mine.table.columns} == dict.fromkeys(
        ("count", "flag", "day", "mixed", "lists"), True
    )


def test_a_frame_of_polars(tmp_path):
    polars = pytest.importorskip("polars", reason="needs polars, of the tables extra")
    frame = polars.DataFrame(columns())
    check(data.load(frame), from_csv(tmp_path))
    mine = data.load(
        frame.with_columns(polars.col("region").cast(polars.Categorical)), target="count", task="regression"
    )
    assert mine.table.left_out == {}


def test_parquet_files(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow, of the tables extra")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table(columns())
    check(data.load(table), from_csv(tmp_path))
    parquet.write_table(table, tmp_path / "t.parquet")
    mine = data.load(tmp_path / "t.parquet")
    check(mine, from_csv(tmp_path))
    assert mine.name == "t"
    (tmp_path / "junk.parquet").write_bytes(b"junk" * 10)
    cut = (tmp_path / "t.parquet").read_bytes()[:-40]
    (tmp_path / "cut.parquet").write_bytes(cut)
    for name in ("junk", "cut"):
        with pytest.raises(ValueError, match=rf"{name}\.parquet cannot be read as a Parquet file"):
            data.load(tmp_path / f"{name}.parquet")


def test_parquet_files_without_pyarrow_are_read_by_polars(tmp_path, monkeypatch):
    polars = pytest.importorskip("polars", reason="needs polars, of the tables extra")
    polars.DataFrame(columns()).write_parquet(tmp_path / "t.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    check(data.load(tmp_path / "t.parquet"), from_csv(tmp_path))
    (tmp_path / "junk.parquet").write_bytes(b"junk" * 10)
    with pytest.raises(ValueError, match=r"junk\.parquet cannot be read as a Parquet file"):
        data.load(tmp_path / "junk.parquet")


def test_without_a_reader_the_extra_is_named(tmp_path, monkeypatch):
    for name in ("pyarrow", "pyarrow.parquet", "polars"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    with pytest.raises(ModuleNotFoundError, match=r"t\.parquet needs a reader .*pip install leanbayes\[tables\]"):
        data.load(tmp_path / "t.parquet")
    with pytest.raises(FileNotFoundError, match=r"no file or folder .*none\.parquet"):
        data.load(tmp_path / "none.parquet")


def test_other_values_are_no_frames():
    assert not any(map(is_frame, ("digits", np.zeros(3), torch.zeros(3), {}, None)))
