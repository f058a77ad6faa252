"""Tables with text, gaps, dates and odd cells: inputs, notes, the stored preparation, and new rows."""

from __future__ import annotations

import csv
import json
import re

import numpy as np
import pytest
import torch

from leanbayes import data
from leanbayes.data.files.csv import read_table
from leanbayes.data.table import one_hot_codes, select, TablePreparation

ROWS = 200


def write(path, columns):
    """Write columns of cells by name."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def columns(rows=ROWS, **others):
    random = np.random.default_rng(0)
    found = {
        "x": random.normal(size=rows).round(3).tolist(),
        "region": random.choice(["north", "south"], rows).tolist(),
    }
    found |= others
    return found | {"y": random.normal(size=rows).round(4).tolist()}


def load(tmp_path, others=None, rows=ROWS, **options):
    return data.load(write(tmp_path / "t.csv", columns(rows, **(others or {}))), **options)


def told(mine, *words):
    """Return whether one note has all the words."""
    return any(all(word in note for word in words) for note in mine.notes)


# ---------------------------------------------------------------- columns


def test_text_with_few_values_is_one_hot(tmp_path):
    mine = load(tmp_path)
    assert mine.table.inputs == ("x", "region=north", "region=south")
    assert torch.equal(mine.train.x[:, 1:].sum(1), torch.ones(len(mine.train)))
    assert torch.equal(mine.inputs(mine.train.x)[:, 1:], mine.train.x[:, 1:])  # ones and zeros are not scaled
    assert mine.inputs(mine.train.x)[:, 0].mean().abs() < 1e-6


@pytest.mark.parametrize(("values", "kind"), [(30, "category"), (31, "embedding")])
def test_text_with_more_than_thirty_values_has_codes(tmp_path, values, kind):
    mine = load(tmp_path, {"city": [f"c{i % values}" for i in range(ROWS)]})
    (city,) = (column for column in mine.table.columns if column.name == "city")
    assert city.kind == kind
    assert mine.embedded == ({3: 32} if kind == "embedding" else {})
    if kind == "embedding":
        assert set(mine.train.x[:, 3].tolist()) <= set(range(32))
        assert torch.equal(mine.inputs(mine.train.x)[:, 3], mine.train.x[:, 3])


def test_codes_become_ones_for_a_linear_model():
    x = torch.tensor([[0.5, 2.0, 7.0], [1.5, 0.0, 8.0]])
    assert one_hot_codes(x, {1: 3}).tolist() == [[0.5, 7, 0, 0, 1], [1.5, 8, 1, 0, 0]]
    assert one_hot_codes(x, {}) is x


def test_an_unseen_value_has_its_own_code(tmp_path):
    mine = load(tmp_path, {"city": [f"c{i % 40}" for i in range(ROWS)]})
    new = read_table(write(tmp_path / "new.csv", {"city": ["c1", "Rome"], "region": ["west", "north"], "x": [0, 0]}), 1)
    x, notes = mine.table.read(new)
    assert x[0, 1:3].tolist() == [0, 0]
    assert x[1, 1:3].tolist() == [1, 0]
    assert x[1, 3] == 0 != x[0, 3]
    assert notes == ["text that training rows lack or have once: region 1 ('west'), city 1 ('Rome')"]


def test_text_of_one_row_shares_the_code_of_unseen_text(tmp_path):
    mine = load(tmp_path, {"city": [f"c{i % 40}" for i in range(ROWS - 20)] + [f"one{i}" for i in range(20)]})
    (city,) = (column for column in mine.table.columns if column.name == "city")
    assert not any(value.startswith("one") for value in city.values)
    assert told(mine, "text of one row, with one common code: city")
    assert 0.0 in mine.train.x[:, 3]


@pytest.mark.parametrize(
    ("name", "cells", "reason"),
    [
        ("id", [f"a{i}" for i in range(ROWS)], r"\d+ of \d+ values differ"),
        ("remark", [f"this was a long and winding remark {i}" for i in range(ROWS)], "free text"),
        ("same", ["k"] * ROWS, "constant"),
        ("five", [5] * ROWS, "constant"),
        ("nothing", [""] * ROWS, "empty"),
        ("day", ["2024-02-01"] * ROWS, "constant"),
        ("Unnamed: 0", list(range(ROWS)), "it counts the rows"),
    ],
)
def test_useless_columns_are_left_out_and_named(tmp_path, name, cells, reason):
    mine = load(tmp_path, {name: cells})
    assert mine.table.inputs == ("x", "region=north", "region=south")
    assert re.fullmatch(reason, mine.table.left_out[name])
    assert told(mine, "left out", name)


def test_gaps_get_the_median_of_the_training_rows_and_an_indicator(tmp_path):
    x = [None if i % 10 == 0 else float(i) for i in range(ROWS)]
    mine = load(tmp_path, {"z": ["" if value is None else value for value in x]})
    there = mine.train.x[mine.train.x[:, 4] == 0, 3]
    filled = mine.train.x[mine.train.x[:, 4] == 1, 3]
    assert len(filled) + len(there) == len(mine.train)
    assert (filled == torch.tensor(float(np.median(there.numpy())))).all()
    assert mine.table.inputs[3:] == ("z", "z (gap)")
    assert told(mine, "gaps in 180 rows", f"z {len(filled)}")


@pytest.mark.parametrize("gap", ["", "NA", "n/a", "NaN", "null", "?", "-", "None"])
def test_words_for_a_gap(tmp_path, gap):
    mine = load(tmp_path, {"z": [gap if i % 4 == 0 else i / 7 for i in range(ROWS)]})
    assert mine.table.inputs[3:] == ("z", "z (gap)")
    assert mine.train.x[:, 4].sum() + mine.test.x[:, 4].sum() == ROWS / 4


def test_odd_cells_are_counted_and_taken_for_gaps(tmp_path):
    mine = load(tmp_path, {"z": ["<5" if i < 3 else "inf" if i < 5 else i / 7 for i in range(ROWS)]})
    found = " ".join(note for note in mine.notes if "cells that cannot be read" in note)
    counts = [int(number) for number in re.findall(r"z (\d+) \(", found)]
    assert sum(counts) == 5
    assert torch.isfinite(mine.train.x).all()


def test_a_gap_in_text_is_a_value(tmp_path):
    mine = load(tmp_path, {"z": ["" if i % 9 == 0 else "uvw"[i % 3] for i in range(ROWS)]})
    assert mine.table.inputs[3:] == ("z=u", "z=v", "z=w", "z=(gap)")
    assert torch.equal(mine.train.x[:, 3:].sum(1), torch.ones(len(mine.train)))


def test_booleans_and_dates(tmp_path):
    days = [f"{1 + i % 28}.{1 + i % 12}.{2020 + i % 3}" for i in range(ROWS)]
    mine = load(tmp_path, {"flag": ["True", "False"] * (ROWS // 2), "day": days})
    assert mine.table.inputs[3:] == ("flag", "day (year)", "day (month)", "day (weekday)", "day (elapsed days)")
    year, month, weekday, elapsed = mine.train.x[:, 4:].T
    assert set(year.tolist()) == {2020, 2021, 2022}
    assert (month.min(), month.max(), weekday.min(), weekday.max(), elapsed.min()) == (1, 12, 0, 6, 0)
    assert set(mine.train.x[:, 3].tolist()) == {0, 1}


def test_dates_of_one_year_have_no_year(tmp_path):
    mine = load(tmp_path, {"day": [f"2024-{1 + i % 12:02}-01" for i in range(ROWS)]})
    assert "day (year)" not in mine.table.inputs


def test_unclear_dates_are_said(tmp_path):
    days = {"day": [f"{1 + i % 9}/{1 + i % 7}/2024" for i in range(ROWS)]}
    assert told(load(tmp_path, days), "month first", "--types day=day")
    mine = load(tmp_path, days, types="day=day")
    assert not told(mine, "month first")
    assert set(mine.train.x[:, mine.table.inputs.index("day (month)")].tolist()) == set(range(1, 8))


def test_decimal_commas_percent_and_money(tmp_path):
    rows = "".join(f"{i},5;{i} %;{i}.000,25 €;{i * i % 13},25\n" for i in range(1, 40))
    path = tmp_path / "t.csv"
    path.write_text("a;share;price;y\n" + rows)
    mine = data.load(path)
    row = mine.train.x[mine.train.x[:, 0] == 7.5][0] if (mine.train.x[:, 0] == 7.5).any() else mine.test.x[0]
    assert row.tolist() == [row[0].item(), row[0].item() - 0.5, (row[0].item() - 0.5) * 1000 + 0.25]
    assert mine.task == "regression"


def test_types_may_be_named(tmp_path):
    codes = {"zip": [10_000 + i % 5 for i in range(ROWS)]}
    assert load(tmp_path, codes).table.columns[2].kind == "number"
    mine = load(tmp_path, codes, types="zip=category")
    assert mine.table.columns[2].values == tuple(str(10_000 + i) for i in range(5))
    assert load(tmp_path, codes, types={"zip": "embedding"}).embedded == {3: 6}
    with pytest.raises(
        ValueError, match=r"expected types such as zip=category, with one of number, .*, got zip=colour"
    ):
        load(tmp_path, codes, types="zip=colour")
    with pytest.raises(ValueError, match="has no column 'plz'"):
        load(tmp_path, codes, types="plz=category")


# ---------------------------------------------------------------- targets and rows


def test_rows_without_target_are_left_out_and_counted(tmp_path):
    found = columns()
    found["y"][::10] = [""] * 20
    mine = data.load(write(tmp_path / "t.csv", found))
    assert len(mine.train) + len(mine.test) == ROWS - 20
    assert told(mine, "20 rows are left out: no target in column 'y'")


def test_odd_targets_are_left_out_and_shown(tmp_path):
    found = columns()
    found["y"][3] = "broken"
    mine = data.load(write(tmp_path / "t.csv", found))
    assert len(mine.train) + len(mine.test) == ROWS - 1
    assert told(mine, "1 row is left out", "'broken'")


def test_whole_numbers_that_begin_elsewhere_are_classes(tmp_path):
    found = columns()
    found["y"] = [(3, 5, 10)[i % 3] for i in range(ROWS)]
    mine = data.load(write(tmp_path / "t.csv", found))
    assert mine.classes == ("3", "5", "10")
    assert mine.train.y.bincount().tolist() == [60, 60, 59]
    name, share = mine.largest_class
    assert (name, share) == ("3", pytest.approx(7 / 21))


def test_a_table_of_text_alone(tmp_path):
    text = {"colour": [("red", "green", "blue")[i % 3] for i in range(60)], "label": ["pe"[i % 2] for i in range(60)]}
    mine = data.load(write(tmp_path / "t.csv", text))
    assert (mine.classes, mine.input_shape) == (("e", "p"), (3,))


def test_groups_are_not_split(tmp_path):
    names = [f"patient{i // 8}" for i in range(ROWS)]
    for split in (0, 1):
        mine = load(tmp_path, {"patient": names}, group="patient", split=split)
        assert not set(mine.train.group.tolist()) & set(mine.test.group.tolist())
        assert 20 <= len(mine.test) < 28
        assert mine.table.left_out == {"patient": "groups of the split"}
    with pytest.raises(ValueError, match="at least two groups, got one"):
        load(tmp_path, {"patient": ["a"] * ROWS}, group="patient")


def test_the_latest_rows_are_for_testing(tmp_path):
    days = [f"2024-{1 + i % 12:02}-{1 + i % 28:02}" for i in range(ROWS)]
    mine = load(tmp_path, {"day": days}, time="day")
    assert mine.train.time.max() < mine.test.time.min()
    assert len(mine.test) >= 20
    with pytest.raises(ValueError, match="a time in every row of column 'day', got 1 gaps"):
        load(tmp_path, {"day": ["", *days[1:]]}, time="day")
    with pytest.raises(ValueError, match="one split, got split=1"):
        load(tmp_path, {"day": days}, time="day", split=1)


def test_weights_come_with_the_rows(tmp_path):
    mine = load(tmp_path, {"w": [i % 4 for i in range(ROWS)]}, weight="w")
    assert mine.train.weight.shape == (len(mine.train),)
    assert "w" not in mine.table.inputs
    with pytest.raises(ValueError, match="expected weights, numbers of at least zero in every row, got '-1'"):
        load(tmp_path, {"w": [-1] * ROWS}, weight="w")


def test_columns_are_dropped_by_name_or_position(tmp_path):
    assert load(tmp_path, drop="region").table.inputs == ("x",)
    assert load(tmp_path, drop=["1"]).table.inputs == ("x",)
    assert load(tmp_path, {"a, b": [i % 7 for i in range(ROWS)]}, drop='"a, b",x').table.inputs[0] == "region=north"
    for name, sentence in (("z", "has no column 'z'"), ("y", "'y' is the target and cannot be dropped")):
        with pytest.raises(ValueError, match=sentence):
            load(tmp_path, drop=name)
    with pytest.raises(ValueError, match=r"no usable column in addition to the target: x .dropped., region .dropped."):
        load(tmp_path, drop="x,region")


def test_a_column_that_determines_the_target_is_a_likely_leak(tmp_path):
    found = columns()
    leaky = found | {"copy": found["y"], "double": [3 - 2 * y for y in found["y"]], "y": found["y"]}
    del leaky["y"]
    mine = data.load(write(tmp_path / "t.csv", leaky | {"y": found["y"]}))
    assert [note.split("'")[1] for note in mine.notes if note.startswith("likely leak")] == ["copy", "double"]
    labels = ["uv"[i % 2] for i in range(ROWS)]
    coded = {"x": found["x"], "code": [f"{label}{i % 3}" for i, label in enumerate(labels)], "label": labels}
    mine = data.load(write(tmp_path / "t.csv", coded))
    assert [note.split("'")[1] for note in mine.notes if note.startswith("likely leak")] == ["code"]


def test_no_leak_by_chance(tmp_path):
    labels = ["u" if i % 20 else "v" for i in range(ROWS)]  # one class has nearly all rows
    found = {"x": [i // 2 for i in range(ROWS)], "z": [f"a{i % 100}" for i in range(ROWS)], "label": labels}
    assert not told(data.load(write(tmp_path / "t.csv", found)), "likely leak", "'z'")


# ---------------------------------------------------------------- statistics from training rows, and new rows


def test_statistics_come_from_training_rows_alone(tmp_path):
    found = columns(z=["" if i % 5 == 0 else i for i in range(ROWS)], city=[f"c{i // 2}" for i in range(ROWS)])
    mine = data.load(write(tmp_path / "t.csv", found), types="city=category")
    test = set(mine.rows.test.tolist())
    changed = {name: [cell if i not in test else other for i, cell in enumerate(cells)] for (name, cells), other in
               zip(found.items(), (1e6, "west", 1e9, "Rome", 7.5), strict=True)}  # fmt: skip
    other = data.load(write(tmp_path / "t.csv", changed), types="city=category")
    assert other.table == mine.table
    assert torch.equal(other.train.x, mine.train.x)
    assert torch.equal(other.mean, mine.mean)


def test_rows_held_out_later_do_not_count_either(tmp_path):
    found = columns(z=["" if i % 5 == 0 else i for i in range(ROWS)], city=[f"c{i // 2}" for i in range(ROWS)])
    mine = data.load(write(tmp_path / "t.csv", found), types="city=category")
    held = torch.arange(len(mine.train)) % 4 == 0
    some = select(mine, ~held, held)
    rows = mine.rows.train[~held.numpy()]
    z = [found["z"][i] for i in rows if found["z"][i] != ""]
    by_name = {column.name: column for column in some.table.columns}
    assert by_name["z"].fill == np.median(z)
    assert set(by_name["city"].values) == {found["city"][i] for i in rows}
    assert (len(some.train), len(some.test)) == ((~held).sum(), held.sum())
    assert some.train.x.shape[1] == some.test.x.shape[1] == len(some.table.inputs)
    assert torch.equal(some.test.y, mine.train.y[held])


def test_selected_rows_of_numbers_are_the_same_rows(tmp_path):
    found = {name: [i * k % 17 for i in range(60)] for k, name in enumerate("ab", 3)} | {
        "y": [i / 7 for i in range(60)]
    }
    mine = data.load(write(tmp_path / "t.csv", found))
    some = select(mine, torch.arange(0, 50, 2))
    assert mine.table.plain
    assert torch.equal(some.train.x, mine.train.x[:50:2])
    assert torch.equal(some.test.x, mine.test.x)


def everything(tmp_path):
    others = {
        "z": ["" if i % 5 == 0 else i for i in range(ROWS)],
        "city": [f"c{i % 50}" for i in range(ROWS)],
        "day": [f"{1 + i % 12}/{1 + i % 28}/2024" for i in range(ROWS)],
        "flag": ["yes", "no"] * (ROWS // 2),
        "id": [f"a{i}" for i in range(ROWS)],
    }
    return load(tmp_path, others), columns(**others)


def test_the_preparation_is_json(tmp_path):
    mine, _ = everything(tmp_path)
    stored = json.dumps(mine.table.to_json(), allow_nan=False)
    again = TablePreparation.from_json(json.loads(stored))
    assert again == mine.table
    assert again.embedded == mine.embedded


def test_new_rows_are_prepared_as_in_training(tmp_path):
    mine, found = everything(tmp_path)
    names = list(found)[::-1]  # another order
    again = TablePreparation.from_json(json.loads(json.dumps(mine.table.to_json())))
    x, notes = again.read(read_table(write(tmp_path / "new.csv", {name: found[name] for name in names}), 1))
    order = torch.from_numpy(np.concatenate([mine.rows.train, mine.rows.test]))
    expected = torch.cat([mine.train.x, mine.test.x])
    assert torch.equal(torch.from_numpy(x).float()[order], expected)
    assert not any("training had not" in note for note in notes)


def test_missing_and_extra_columns_are_named(tmp_path):
    mine, found = everything(tmp_path)
    del found["z"], found["city"], found["id"]
    with pytest.raises(
        ValueError, match=r"new\.csv has no column 'z', 'city', which the training data had; it has .* town"
    ):
        mine.table.read(read_table(write(tmp_path / "new.csv", found | {"town": [1] * ROWS}), 1))
    mine = load(tmp_path)
    x, notes = mine.table.read(read_table(write(tmp_path / "new.csv", columns(town=[1] * ROWS)), 1))
    assert x.shape == (ROWS, 3)
    assert notes == ["columns that training had not are ignored: town"]


def test_a_column_of_another_type_is_refused(tmp_path):
    mine = load(tmp_path)
    new = read_table(write(tmp_path / "new.csv", columns() | {"x": ["high"] * ROWS}), 1)
    with pytest.raises(
        ValueError, match=r"new\.csv, column 'x': expected a number as in training, got 200 of 200 cells"
    ):
        mine.table.read(new)


def test_a_first_line_with_known_names_is_a_header(tmp_path):
    text = {"colour": [("red", "green", "blue")[i % 3] for i in range(60)], "label": ["pe"[i % 2] for i in range(60)]}
    mine = data.load(write(tmp_path / "t.csv", text))
    (tmp_path / "new.csv").write_text("colour\nred\n")
    x, _ = mine.table.read(read_table(tmp_path / "new.csv", 1, mine.table.header))
    assert x.tolist() == [[0, 0, 1]]


def test_columns_without_header_are_found_by_position(tmp_path):
    mine = load(tmp_path)
    (tmp_path / "bare.csv").write_text("0.5,north\n0.5,south\n")
    (tmp_path / "whole.csv").write_text("0.5,north,3\n0.5,south,4\n")
    for name in ("bare", "whole"):
        assert mine.table.read(read_table(tmp_path / f"{name}.csv", 1))[0].tolist() == [[0.5, 1, 0], [0.5, 0, 1]]
    (tmp_path / "one.csv").write_text("0.5\n0.5\n")
    with pytest.raises(ValueError, match="has 1 columns; expected the 2 features"):
        mine.table.read(read_table(tmp_path / "one.csv", 1))


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"columns": []},
        {"columns": [{"name": "x", "kind": "code"}]},
        {"columns": [{"name": "x", "kind": "number", "fill": "1"}]},
        {"columns": [{"name": "x", "kind": "number", "fill": float("nan")}]},
        {"columns": [{"name": "x", "kind": "category", "values": [1]}]},
        {"columns": [{"name": "x", "kind": "number", "colour": "red"}]},
        {"columns": ["x"]},
        {"columns": [{"name": "x", "kind": "date", "parts": ["hour"]}]},
        {"columns": [{"name": "x", "kind": "date", "fill": 1e300}]},
        {"header": "x"},
        {"titled": 1},
        {"left_out": {"a": 1}},
        {"target": None},
    ],
)
def test_a_damaged_preparation_is_refused(tmp_path, change):
    stored = load(tmp_path).table.to_json()
    with pytest.raises(ValueError, match=r"expected|column .x. has"):
        TablePreparation.from_json(stored | change)
