"""Rows of another origin with targets, in the shape of a data set: `data.shifted`."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import torch
from PIL import Image

from leanbayes import data


def write(path, columns):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def people(rows=60, shift=0.0):
    random = np.random.default_rng(0)
    x = random.normal(size=rows) + shift
    return {
        "x": x.round(6).tolist(),
        "city": ["Rome", "Oslo", "Bonn"] * (rows // 3),
        "label": np.where(x > shift, "high", "low").tolist(),
    }


@pytest.fixture
def table(tmp_path):
    return data.load(str(write(tmp_path / "t.csv", people())))


def test_all_rows_of_a_table_are_prepared_as_the_training_rows(table, tmp_path):
    new = people(30, shift=2.0)
    new["label"][4] = ""
    path = write(tmp_path / "new.csv", {name: new[name] for name in ("label", "city", "x")} | {"more": [1] * 30})
    found = data.shifted(str(path), table)
    kept = [i for i in range(30) if i != 4]
    assert len(found.rows) == 29
    expected = torch.tensor([new["x"][i] for i in kept])
    torch.testing.assert_close(found.rows.x[:, 0], expected)
    assert found.rows.y.tolist() == [table.classes.index(new["label"][i]) for i in kept]
    assert table.inputs(found.rows.x)[:, 0].mean() > 1  # scaled by the training rows, so the shift stays
    notes = " ".join(found.notes)
    assert "columns that training had not are ignored: more" in notes
    assert "rows without a target are left out: 1" in notes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"city": None}, "has no column 'city', which the training data had"),
        ({"label": None}, "has no column 'label', the target of the training data"),
        ({"label": ["medium"] * 30}, "has the class 'medium'; expected those of the training data: high, low"),
        ({"label": [""] * 30}, "has no target in 30 rows"),
    ],
)
def test_wrong_tables_are_refused_in_a_sentence(table, tmp_path, changes, message):
    columns = people(30) | changes
    path = write(tmp_path / "new.csv", {name: cells for name, cells in columns.items() if cells is not None})
    with pytest.raises(ValueError, match=message):
        data.shifted(str(path), table)


def test_real_targets_of_a_table(tmp_path):
    random = np.random.default_rng(0)
    columns = {"x": random.normal(size=60).tolist(), "price": (1000 * random.normal(size=60)).tolist()}
    like = data.load(str(write(tmp_path / "t.csv", columns)))
    found = data.shifted(str(write(tmp_path / "new.csv", {name: cells[:7] for name, cells in columns.items()})), like)
    torch.testing.assert_close(found.rows.y, torch.tensor(columns["price"][:7])[:, None])
    path = write(tmp_path / "odd.csv", {"x": [1, 2], "price": [3.0, "cheap"]})
    with pytest.raises(ValueError, match="column 'price': expected numbers as in training, got 'cheap'"):
        data.shifted(str(path), like)


def test_classes_that_are_numbers_may_have_a_decimal_point(tmp_path):
    columns = {"x": np.arange(30).tolist(), "grade": [3, 7] * 15}
    like = data.load(str(write(tmp_path / "t.csv", columns)))
    found = data.shifted(str(write(tmp_path / "new.csv", {"x": [1, 2], "grade": ["7.0", "3.0"]})), like)
    assert found.rows.y.tolist() == [1, 0]


def test_arrays_with_labels_as_numbers_or_text(tmp_path):
    digits = data.load("digits")
    x, y = digits.test.x[:20].numpy(), digits.test.y[:20].numpy()
    for name, labels in (("numbers", y), ("text", y.astype(str))):
        np.savez(tmp_path / f"{name}.npz", x=x[:, 0], y=labels)
        found = data.shifted(str(tmp_path / f"{name}.npz"), digits)
        assert torch.equal(found.rows.x, digits.test.x[:20])
        assert torch.equal(found.rows.y, digits.test.y[:20])
    for arrays, message in (
        ({"x_test": x}, "expected x_test and y_test"),
        ({"x": x, "y": y + 5}, "has the class '1[0-4]'; expected those of digits: 0, 1"),
        ({"x": x, "y": y[:3]}, "differ in length, 20 and 3"),
        ({"x": np.zeros((20, 5)), "y": y}, "has features, digits images"),
    ):
        np.savez(tmp_path / "wrong.npz", **arrays)
        with pytest.raises(ValueError, match=message):
            data.shifted(str(tmp_path / "wrong.npz"), digits)


def test_known_sets_are_brought_to_the_size_of_the_images():
    demo = data.load("fashion-demo")
    digits = data.load("digits")
    with pytest.raises(ValueError, match="has the class '0'; expected those of fashion-demo"):
        data.shifted("digits", demo)
    found = data.shifted("digits", digits)
    assert torch.equal(found.rows.y, digits.test.y)
    assert found.rows.x.shape[1:] == digits.input_shape


def test_numbers_for_a_known_table_are_features_and_then_the_target(tmp_path):
    random = np.random.default_rng(0)
    arrays = {"x_train": random.normal(size=(40, 3)), "y_train": random.normal(size=40)}
    np.savez(tmp_path / "t.npz", **arrays, x_test=arrays["x_train"][:5], y_test=arrays["y_train"][:5])
    like = data.load(str(tmp_path / "t.npz"))
    columns = {"a": [1.0, 2.0], "b": [3.0, 4.0], "c": [5.0, 6.0], "y": [7.0, 8.0]}
    found = data.shifted(str(write(tmp_path / "new.csv", columns)), like)
    assert found.rows.x.tolist() == [[1, 3, 5], [2, 4, 6]]
    assert found.rows.y.tolist() == [[7], [8]]
    with pytest.raises(ValueError, match="has 5 columns; expected 3 features and 1 more with the target"):
        data.shifted(str(write(tmp_path / "wide.csv", columns | {"z": [1.0, 2.0]})), like)


@pytest.mark.parametrize("below", ["", "test"])
def test_a_folder_of_images_has_a_folder_for_each_class(tmp_path, below):
    digits = data.load("digits")
    for label, name in ((3, "a"), (3, "b"), (5, "c")):
        folder = tmp_path / "new" / below / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((12, 12, 3), 40 * label, np.uint8)).save(folder / f"{name}.png")
    found = data.shifted(str(tmp_path / "new"), digits)
    assert found.rows.x.shape == (3, *digits.input_shape)
    assert found.rows.y.tolist() == [3, 3, 5]
    with pytest.raises(ValueError, match="expected images in one folder a class"):
        data.shifted(str(tmp_path / "new" / below / "3"), digits)
    (tmp_path / "new" / below / "5").rename(tmp_path / "new" / below / "five")
    with pytest.raises(ValueError, match="has the class 'five'; expected those of digits"):
        data.shifted(str(tmp_path / "new"), digits)


def test_rows_of_another_kind_and_missing_files_are_refused(table, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no file or folder .*missing\.csv"):
        data.shifted(str(tmp_path / "missing.csv"), table)
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 2)), y=np.zeros(2))
    with pytest.raises(ValueError, match=r"expected a table such as \.csv for rows like those of t"):
        data.shifted(str(tmp_path / "a.npz"), table)
    with pytest.raises(ValueError, match="is a table, digits has image rows"):
        data.shifted(str(tmp_path / "t.csv"), data.load("digits"))
