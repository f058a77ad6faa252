"""Data that claim too much, lose differences, or may mean something else: one sentence with file, array and cure."""

from __future__ import annotations

import io
import os
import resource
import zipfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from leanbayes import data
from leanbayes.cli import main as cli
from leanbayes.data.checks import check_precision


def save(path, **changes):
    x, y = np.random.default_rng(0).random((60, 4)), np.arange(60) % 2
    np.savez(path, **{"x_train": x, "y_train": y, "x_test": x[:20], "y_test": y[:20]} | changes)
    return path


def npy(shape, content=b"", kind="<f8"):
    """Write the header of an array, whatever follows."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": shape})
    return file.getvalue() + content


def pack(path, **entries):
    """Write an `.npz` file of entries that are arrays or bytes."""
    save(path)
    with zipfile.ZipFile(path) as archive:
        known = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in (known | {f"{name}.npy": content for name, content in entries.items()}).items():
            archive.writestr(name, content)
    return path


@contextmanager
def little_memory(mebibytes=256):
    """Let this process have no more memory than now plus a number of MiB."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + mebibytes * 2**20, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# ---------------------------------------------------------------- sizes


def test_an_array_that_claims_more_than_it_holds_is_refused(tmp_path):
    path = pack(tmp_path / "mine.npz", x_train=npy((60, 10**11), b"\0" * 64))
    with pytest.raises(ValueError, match=r"mine\.npz cannot be read .*array x_train has the shape .* but holds 64\)"):
        data.load(path)


def test_lengths_are_compared_before_data_are_unpacked(tmp_path):
    path = pack(tmp_path / "mine.npz", x_train=npy((2**24,), bytes(2**27)))
    assert path.stat().st_size < 2**20
    with little_memory(64), pytest.raises(ValueError, match="x_train and y_train differ in length, 16777216 and 60"):
        data.load(path)


def test_an_array_larger_than_memory_is_refused(tmp_path, monkeypatch):
    path = save(tmp_path / "mine.npz")
    monkeypatch.setattr(os, "sysconf", lambda name: 10)
    with pytest.raises(
        ValueError, match=r"mine\.npz has the array x_train, .* GiB in the shape \(60, 4\); this machine"
    ):
        data.load(path)


def test_predictions_refuse_a_file_that_claims_too_much(tmp_path):
    from leanbayes.compare.batch_predict import open_rows

    (tmp_path / "rows.npy").write_bytes(npy((5 * 10**12,), b"\0" * 64))
    with pytest.raises(ValueError, match=r"rows\.npy' is damaged or not a \.npy file"):
        open_rows(tmp_path / "rows.npy")


def test_a_giant_cell_is_called_one(tmp_path):
    path = tmp_path / "t.csv"
    for length in (40_000, 200_000):
        path.write_text(f"a,b\n1,{'x' * length}\n2,y\n3,z\n")
        with pytest.raises(ValueError, match=r"t\.csv, line 2: expected cells of at most 32,767 characters"):
            data.load(path)
    path.write_text('a,b\n1,"x\n' + "2,y\n" * 50_000)
    with pytest.raises(ValueError, match=r"line 2: expected .*closed quotation marks, got"):
        data.load(path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"a,b\n1,\x002\n3,4\n5,6\n", r"t\.csv, line 2: expected text, got a NUL byte"),
        (b"\x80\x81a,b\n1,2\n", r"t\.csv is not text in UTF-8"),
        (b"\xff\xfea", r"t\.csv is not text in UTF-8"),
        (b"", r"t\.csv has 0 rows; expected at least 3"),
        (b"\xef\xbb\xbf", r"t\.csv has 0 rows; expected at least 3"),
        (b"a,b\n" * 3, r"more than one column|at least 5 rows of each"),
        ((",".join(map(str, range(200_000))) + "\n").encode() * 3, r"200,000 columns; expected at most 100,000"),
    ],
    ids=["nul", "bytes", "half a character", "empty", "mark alone", "headers", "columns"],
)
def test_a_hostile_table_is_one_sentence(tmp_path, content, sentence):
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(ValueError, match=sentence) as told:
        data.load(tmp_path / "t.csv")
    assert "\n" not in str(told.value)


def test_a_table_larger_than_memory_is_refused(tmp_path, monkeypatch):
    (tmp_path / "t.csv").write_text("a,b\n" + "1,2\n" * 100)
    monkeypatch.setattr(os, "sysconf", lambda name: 10)
    with pytest.raises(ValueError, match=r"t\.csv is a large table, .* GiB as cells; this machine"):
        data.load(tmp_path / "t.csv")


def test_tables_in_utf16_with_quoted_line_ends_are_read(tmp_path):
    rows = "".join(f'"{"ä" if i % 2 else "ö"}\n";{i},5\n' for i in range(40))
    (tmp_path / "t.csv").write_bytes(("größe;y\n" + rows).encode("utf-16"))
    mine = data.load(tmp_path / "t.csv")
    assert mine.table.columns[0].values == ("ä", "ö")
    assert sorted(torch.cat([mine.train.y, mine.test.y]).flatten().tolist()) == [i + 0.5 for i in range(40)]


def test_names_of_columns_cannot_steer_a_terminal(tmp_path):
    rows = "".join(f"{i % 7},{i / 3}\n" for i in range(40))
    (tmp_path / "t.csv").write_text('"\x1b[2Jfirst\n column",y\n' + rows)
    mine = data.load(tmp_path / "t.csv")
    assert mine.table.header == ("[2Jfirst column", "y")
    assert all(note.isprintable() for note in mine.notes)
    assert data.load(tmp_path / "t.csv", target="[2Jfirst \n column").table.target == "[2Jfirst column"


# ---------------------------------------------------------------- names and labels


@pytest.mark.parametrize("classes", [np.array("ab"), np.array([["a"], ["b"]]), np.array([0.5, 1.5])])
def test_classes_that_are_no_list_of_names_are_refused(tmp_path, classes):
    with pytest.raises(ValueError, match=r"mine\.npz: classes has shape .*expected one name for each class"):
        data.load(save(tmp_path / "mine.npz", classes=classes))


def test_the_command_says_so_in_one_sentence(tmp_path, capsys):
    path = save(tmp_path / "mine.npz", classes=np.array("ab"))
    assert cli.main(["compare", "--data", str(path), "--methods", "plain", "--out", str(tmp_path / "r")]) == 2
    assert "classes has shape ()" in capsys.readouterr().err


def test_bytes_are_text_in_utf8(tmp_path):
    names = np.array(["größe".encode(), b"ant"])
    path = save(tmp_path / "mine.npz", y_train=names[np.arange(60) % 2], y_test=names[np.arange(20) % 2])
    assert data.load(path).classes == ("ant", "größe")
    path = save(tmp_path / "mine.npz", classes=names)
    assert data.load(path).classes == ("größe", "ant")
    names = np.array(["größe".encode("latin-1"), b"ant"])
    path = save(tmp_path / "mine.npz", y_train=names[np.arange(60) % 2], y_test=names[np.arange(20) % 2])
    with pytest.raises(ValueError, match=r"mine: y_train has bytes that are not UTF-8 .*Save it as str"):
        data.load(path)


# ---------------------------------------------------------------- whole numbers beyond 2^53


@pytest.mark.parametrize("kind", [np.int64, np.uint64])
def test_large_whole_numbers_that_lose_their_differences_are_refused(tmp_path, kind):
    x = (2**60 + np.arange(120).reshape(60, 2)).astype(kind)
    with pytest.raises(
        ValueError, match=r"mine: x_train, column 0 has values about 1\.15.*e\+18 with a standard deviation"
    ):
        data.load(save(tmp_path / "mine.npz", x_train=x, x_test=x[:20]))


def test_large_whole_numbers_in_a_table_are_refused(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("id,y\n" + "".join(f"{2**60 + i},{i / 3}\n" for i in range(40)))
    with pytest.raises(ValueError, match=r"t\.csv, column 'id' has values about 1\.15.* keep their differences"):
        data.load(path)


def test_large_whole_numbers_that_differ_enough_are_kept():
    wide = np.linspace(-(2**62), 2**62, 40).astype(np.int64)
    check_precision(wide, "here")
    check_precision(np.full(40, 2**60), "here")  # constant: nothing is lost
    check_precision(np.array([-(10**30), 0, 10**30], dtype=object), "here")
    check_precision(np.arange(40) * 2**40, "here")


# ---------------------------------------------------------------- labels written as floats


@pytest.mark.parametrize(
    ("values", "named", "cure"),
    [
        ((0.0, 1.0, 2.0), "0, 1, 2", "say task='classification' .--task classification."),
        ((-1.0, 0.0, 1.0), "-1, 0, 1", "number them from 0 and say task='classification'"),
    ],
)
def test_labels_written_as_floats_give_a_warning(tmp_path, values, named, cure):
    y = np.array(values)[np.arange(60) % 3]
    path = save(tmp_path / "mine.npz", y_train=y, y_test=y[:20])
    with pytest.warns(UserWarning, match=rf"mine: y_train has the values {named} alone, .*{cure}") as told:
        assert data.load(path).task == "regression"
    assert [warning.filename for warning in told] == [__file__]
    assert data.load(path, task="regression").task == "regression"  # without a word
    table = tmp_path / "t.csv"
    table.write_text("a,b\n" + "".join(f"{i % 7},{value}\n" for i, value in enumerate(y)))
    with pytest.warns(UserWarning, match=rf"t\.csv, column 'b' has the values {named} alone, .*{cure}") as told:
        assert data.load(table).task == "regression"
    assert [warning.filename for warning in told] == [__file__]


def test_the_flag_of_the_warning_works(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b\n" + "".join(f"{i % 7},{i % 3}.0\n" for i in range(100)))
    mine = data.load(path, task="classification")
    assert (mine.task, mine.classes) == ("classification", ("0", "1", "2"))


def test_quantities_give_no_warning(tmp_path):
    for y in (np.arange(60) / 3, np.arange(60.0), np.array([0.5, 1.5])[np.arange(60) % 2]):
        data.load(save(tmp_path / "mine.npz", y_train=y, y_test=y[:20]))
