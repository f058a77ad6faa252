"""Tables whose cells are easily misread: signs as classes, commas in weights and times, blank rows, notations."""

from __future__ import annotations

import csv

import numpy as np
import pytest

from leanbayes import data

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
