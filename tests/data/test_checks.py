"""Every way in which data can be wrong has one clear sentence."""

from __future__ import annotations

import numpy as np
import pytest

from leanbayes import data


def arrays(**changes):
    """Return a good data set of 40 x 24 grey images in five classes, with changes."""
    rng = np.random.default_rng(0)
    good = {
        "x_train": rng.integers(0, 256, (50, 40, 24), np.uint8),
        "y_train": np.arange(50) % 5,
        "x_test": rng.integers(0, 256, (20, 40, 24), np.uint8),
        "y_test": np.arange(20) % 5,
    }
    return good | changes


def load(tmp_path, task=None, **changes):
    np.savez(tmp_path / "mine.npz", **arrays(**changes))
    return data.load(tmp_path / "mine.npz", task=task)


def spoilt(shape, where, value=np.nan):
    x = np.zeros(shape)
    x[where] = value
    return x


WRONG = {
    "nan": (
        {"x_train": spoilt((50, 7), (17, 2)), "x_test": np.zeros((20, 7))},
        r"mine: x_train has 1 values that are NaN or infinite, the first in row 17\. Drop",
    ),
    "inf": (
        {"x_train": np.zeros((50, 7)), "x_test": spoilt((20, 7), (slice(3, 5), 2), np.inf)},
        r"mine: x_test has 2 values that are NaN or infinite, the first in row 3",
    ),
    "too large for float32": (
        {"x_train": spoilt((50, 7), (0, 0), 1e300), "x_test": np.zeros((20, 7))},
        r"x_train has 1 values that are NaN or infinite",
    ),
    "nan pixel": (
        {"x_train": spoilt((50, 40, 24), (9, 3, 3)), "x_test": np.zeros((20, 40, 24))},
        r"x_train has 1 values that are NaN or infinite, the first in row 9",
    ),
    "nan target": ({"y_test": spoilt(20, 4), "y_train": np.zeros(50)}, r"y_test has 1 values that are NaN .* row 4"),
    "negative label": (
        {"y_train": np.arange(50) % 5 - 1},
        r"y_train has the label -1 in row 0; expected labels from 0",
    ),
    "test label out of range": (
        {"y_test": np.arange(20) % 6},
        r"y_test has the label 5 in row 5; expected labels from 0 to 4",
    ),
    "more labels than names": (
        {"classes": np.array(["a", "b", "c"])},
        r"y_train has the label 3 in row 3; expected labels from 0 to 2",
    ),
    "empty class": (
        {"y_train": np.arange(50) % 4 + (np.arange(50) % 4 >= 2), "y_test": np.arange(20) % 2},
        r"class 2 has no training example \(1 of 5 classes are empty\)\. .*from 0 to 3 without gaps",
    ),
    "labels from one": (
        {"y_train": np.arange(50) % 5 + 1, "y_test": np.arange(20) % 5 + 1},
        r"class 0 has no training",
    ),
    "huge labels": ({"y_train": np.arange(50) * 10**12}, r"class 1 has no training example .*task='regression'"),
    "one class": ({"y_train": np.zeros(50, int), "y_test": np.zeros(20, int)}, r"all training labels are 0"),
    "one-hot": ({"y_train": np.eye(5, dtype=int)[np.arange(50) % 5]}, r"y_train has shape \(50, 5\).*argmax"),
    "one-hot floats": (
        {"y_train": np.eye(5)[np.arange(50) % 5], "y_test": np.eye(5)[np.arange(20) % 5]},
        r"y_train has shape \(50, 5\) with a single one in every row; .*argmax\(1\), or say .*\(--task regression\)",
    ),
    "constant target": (
        {"y_train": np.stack([np.arange(50.0), np.full(50, 2.5)], 1), "y_test": np.ones((20, 2))},
        r"all training targets in column 1 are 2\.5; expected targets that vary",
    ),
    "target constant in float32": (
        {"y_train": np.where(np.arange(50) % 2, 0.1 + 0.2, 0.3), "y_test": np.ones(20)},
        r"all training targets are 0\.3; expected targets that vary",
    ),
    "huge": (
        {"y_train": np.linspace(0, 1e30, 50), "y_test": np.linspace(0, 1e30, 20), "task": "regression"},
        r"training targets have a standard deviation of 2.95e\+29; expected 1e-15 to 1e\+15, .* Change the unit",
    ),
    "tiny": (
        {"y_train": np.linspace(0, 1e-30, 50), "y_test": np.linspace(0, 1e-30, 20), "task": "regression"},
        r"training targets have a standard deviation of 2.95e-31; expected 1e-15 to 1e\+15, .* Change the unit",
    ),
    "target lost in float32": (
        {"y_train": 1.7e9 + np.arange(50.0), "y_test": 1.7e9 + np.arange(20.0)},
        r"mine: y_train has values about 1700000024 with a standard deviation of 14\.4; expected .*Subtract an offset",
    ),
    "feature lost in float32": (
        {"x_train": np.stack([np.arange(50), 1_700_000_000 + np.arange(50)], 1), "x_test": np.ones((20, 2))},
        r"mine: x_train, column 1 has values about 1700000024 with",
    ),
    "feature below float32": (
        {"x_train": np.arange(50.0)[:, None] * 1e-50, "x_test": np.ones((20, 1))},
        r"mine: x_train has values about 2\.45e-49 with .*or change the unit",
    ),
    "image size": ({"x_test": np.zeros((20, 24, 40), np.uint8)}, r"x_train has rows of shape \(1, 40, 24\), x_test of"),
    "lengths": ({"y_train": np.arange(49) % 5}, r"x_train and y_train differ in length, 50 and 49"),
    "empty": ({"x_test": np.zeros((0, 40, 24), np.uint8), "y_test": np.zeros(0, int)}, r"x_test is empty"),
    "scalar": ({"x_train": np.array(3.0)}, r"x_train is empty \(shape \(\)\)|x_train has shape"),
    "text": ({"x_train": np.full((50, 7), "a")}, r"x_train has dtype <U1; expected numbers"),
    "complex": ({"x_train": np.zeros((50, 7), complex)}, r"x_train has dtype complex128; expected numbers"),
    "five axes": ({"x_train": np.zeros((50, 1, 2, 3, 4))}, r"x_train has shape \(50, 1, 2, 3, 4\); expected features"),
    "no columns": ({"x_train": np.zeros((50, 0))}, r"x_train has shape \(50, 0\)"),
    "pixel range": (
        {"x_train": np.linspace(-2, 2, 50 * 40 * 24).reshape(50, 40, 24)},
        r"x_train has float64 pixels from -2 to 2; expected uint8, or floats from 0 to 1\. Save",
    ),
    "pixels over 255": ({"x_train": np.full((50, 40, 24), 300)}, r"x_train has int64 pixels from 300 to 300"),
    "mixed pixels": ({"x_test": np.zeros((20, 40, 24))}, r"x_train is uint8, x_test float64"),
    "unknown test label": (
        {"y_train": np.array(["cat", "dog"] * 25), "y_test": np.array(["cow"] * 20)},
        r"the test label 'cow' does not occur in training, where the labels are cat, dog",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_data_are_refused_in_one_sentence(tmp_path, case):
    changes, sentence = WRONG[case]
    with pytest.raises(ValueError, match=sentence):
        load(tmp_path, **changes)


def test_labels_that_are_not_whole_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"y_train has the label 0\.5 in row 1; expected whole numbers"):
        load(tmp_path, task="classification", y_train=np.arange(50) / 2)
    with pytest.raises(ValueError, match=r"y_train has dtype <U1; expected numbers"):
        load(tmp_path, task="regression", y_train=np.array(["a"] * 50))
    with pytest.raises(ValueError, match=r"y_train has shape \(50, 1, 1\); expected \(rows,\)"):
        load(tmp_path, task="regression", y_train=np.zeros((50, 1, 1)))
    with pytest.raises(ValueError, match=r"expected task 'classification' or 'regression' .*got 'ranking'"):
        load(tmp_path, task="ranking")


def test_rows_with_a_single_one_may_be_meant_as_targets(tmp_path):
    y = np.eye(5)[np.arange(50) % 5]
    assert load(tmp_path, task="regression", y_train=y, y_test=y[:20]).num_outputs == 5


def test_a_class_missing_from_the_test_split_is_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="mine: 2 of 5 classes have no test example"):
        loaded = load(tmp_path, y_test=np.arange(20) % 3)
    assert loaded.num_outputs == 5


@pytest.mark.parametrize(
    "column",
    [
        np.full(50, 1.7e9 + 1),
        np.where(np.arange(50) % 2, 0.1 + 0.2, 0.3),
        (1e8 + np.arange(50.0)).astype(np.float32),
        1.7e9 + 128 * np.arange(50.0),
        np.arange(50) * 365 * 86400 // 50 + 1_700_000_000,
        np.linspace(1000, 1001, 50),
    ],
    ids=["constant", "constant but for float64", "float32 already", "exact", "seconds of a year", "small offset"],
)
def test_what_float32_keeps_may_lie_far_from_zero(tmp_path, column):
    loaded = load(tmp_path, x_train=column[:, None], x_test=column[:20, None])
    assert loaded.train.x.shape == (50, 1)


def test_good_data_pass_without_a_word(tmp_path):
    loaded = load(tmp_path)
    assert (loaded.name, loaded.task, loaded.input_shape, loaded.classes) == (
        "mine", "classification", (1, 40, 24), tuple("01234"),
    )  # fmt: skip
