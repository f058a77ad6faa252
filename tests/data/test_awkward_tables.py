"""Tables whose cells are easily misread: signs as classes, commas in weights and times, blank rows, notations."""

from __future__ import annotations

import csv

import numpy as np
import pytest

from leanbayes import data
from leanbayes.data.files.csv import read_table
from leanbayes.data.table import TablePreparation

ROWS = 60


def write(path, columns, separator=","):
    """Write columns of cells by name."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def numbers(rows=ROWS):
    return np.random.default_rng(0).normal(size=rows).round(2).tolist()


# ---------------------------------------------------------------- targets


@pytest.mark.parametrize("labels", [("+", "-"), ("+", "-", "0")])
def test_a_minus_next_to_a_plus_is_a_class(tmp_path, labels):
    y = [labels[i % len(labels)] for i in range(ROWS)]
    mine = data.load(write(tmp_path / "t.csv", {"x": numbers(), "y": y}))
    assert set(mine.classes) == set(labels)
    assert len(mine.train) + len(mine.test) == ROWS


def test_words_that_stand_for_no_target_are_shown(tmp_path):
    mine = data.load(write(tmp_path / "t.csv", {"x": numbers(), "y": [("EU", "AS", "NA")[i % 3] for i in range(ROWS)]}))
    assert any("20 rows are left out: no target in column 'y', such as 'NA'" in note for note in mine.notes)


@pytest.mark.parametrize(("kind", "first"), [("comma", 1.5), ("number", 1500)])
def test_targets_that_may_be_thousands_follow_their_type(tmp_path, kind, first):
    path = write(tmp_path / "t.csv", {"x": numbers(), "y": [f"{1 + i},500" for i in range(ROWS)]})
    with pytest.raises(ValueError, match="--types y=comma or --types y=number"):
        data.load(path)
    assert data.load(path, types=f"y={kind}").train.y.min() == first


# ---------------------------------------------------------------- times and weights


DAYS = [f"{1 + i % 12:02d}/{12 - i % 12:02d}/2024" for i in range(ROWS)]  # day first: row 0 is the latest


def test_the_type_of_the_times_decides_the_latest_rows(tmp_path):
    path = write(tmp_path / "t.csv", {"x": list(range(ROWS)), "when": DAYS, "y": numbers()})
    for types, latest in (("when=day", {0, 1}), ("when=month", {10, 11})):
        mine = data.load(path, time="when", types=types)
        assert set((mine.test.x[:, 0] % 12).tolist()) == latest
        assert not any("month first" in note for note in mine.notes)
    mine = data.load(path, time="when")
    assert any("'when': 01/12/2024 is read with the month first (--types when=day" in note for note in mine.notes)


def test_groups_that_the_times_split_are_counted(tmp_path):
    groups = [f"g{i % 4}" for i in range(ROWS)]
    path = write(tmp_path / "t.csv", {"x": numbers(), "g": groups, "when": list(range(ROWS)), "y": numbers()})
    assert any(
        "groups with training and test rows: 4" in note for note in data.load(path, group="g", time="when").notes
    )
    assert not any("groups with" in note for note in data.load(path, group="g").notes)


@pytest.mark.parametrize(("rows", "few"), [(290, True), (310, False)])
def test_few_test_rows_have_a_warning(tmp_path, rows, few):
    path = write(tmp_path / "t.csv", {"x": numbers(rows), "y": numbers(rows)})
    assert any("29 test rows depend on the rows" in note for note in data.load(path).notes) == few


def test_weights_may_have_a_decimal_comma(tmp_path):
    weights = [("1,500", "2", "0,25")[i % 3] for i in range(ROWS)]
    path = write(tmp_path / "t.csv", {"x": numbers(), "w": weights, "y": numbers()}, ";")
    mine = data.load(path, weight="w")
    assert set(mine.train.weight.tolist()) == {1.5, 2, 0.25}


def test_weights_that_may_be_thousands_are_refused(tmp_path):
    path = write(tmp_path / "t.csv", {"x": numbers(), "w": ["1,500"] * ROWS, "y": numbers()})
    with pytest.raises(ValueError, match="--types w=comma or --types w=number"):
        data.load(path, weight="w")
    assert set(data.load(path, weight="w", types="w=comma").train.weight.tolist()) == {1.5}


# ---------------------------------------------------------------- new rows


def trained(tmp_path, notation):
    """Return a preparation of numbers with one decimal sign, in features and targets."""
    values = [f"{1 + i},25" if notation == "comma" else f"{1 + i}.25" for i in range(ROWS)]
    return data.load(write(tmp_path / "t.csv", {"x": values, "y": values}, ";")).table


@pytest.mark.parametrize(("notation", "cells"), [("point", ["1,250", "2,5"]), ("comma", ["1.250", "2.5"])])
def test_new_rows_with_the_other_decimal_sign_are_refused(tmp_path, notation, cells):
    table = trained(tmp_path, notation)
    new = read_table(write(tmp_path / "new.csv", {"x": cells * 3 + ["7"] * 9, "y": ["1"] * 15}, ";"), 1)
    with pytest.raises(ValueError, match=f"column 'x': expected numbers with a decimal {notation} as in training, got"):
        table.read(new)


def test_new_targets_have_the_decimal_sign_of_training(tmp_path):
    table = TablePreparation.from_json(trained(tmp_path, "comma").to_json())
    new = read_table(write(tmp_path / "new.csv", {"x": ["1,5"], "y": ["1,500"]}), 1)
    assert table.read(new)[0].tolist() == [[1.5]]
    assert table.known_targets(new, ())[0].tolist() == [[1.5]]
    new = read_table(write(tmp_path / "new.csv", {"x": ["1,5"] * 2, "y": ["1.500", "2.5"]}), 1)
    with pytest.raises(ValueError, match="column 'y': expected numbers with a decimal comma as in training, got"):
        table.known_targets(new, ())


@pytest.mark.parametrize("separator", [",", ";"])
def test_a_row_of_gaps_among_new_rows_counts(tmp_path, separator):
    path = tmp_path / "new.csv"
    lines = ["x,z,y", "1,a,2", ",,", "", "3,b,4", ",,", ""]
    path.write_text("\n".join(lines).replace(",", separator), encoding="utf-8")
    table = read_table(path, 1)
    assert table.columns[0].tolist() == ["1", "", "3"]  # empty lines, and separators at the end, are no rows
    assert table.lines == [2, 3, 5]
