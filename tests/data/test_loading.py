"""The user's own data: `.npz`, `.csv`, a folder of images."""

from __future__ import annotations

import hashlib
import os

import numpy as np
import pytest
import torch
from PIL import Image

from leanbayes import data


def save(path, **changes):
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.integers(0, 256, (50, 40, 24, 3), np.uint8),
        "y_train": np.arange(50) % 5,
        "x_test": rng.integers(0, 256, (20, 40, 24, 3), np.uint8),
        "y_test": np.arange(20) % 5,
    } | changes
    np.savez(path, **arrays)
    return arrays


# ---------------------------------------------------------------- npz


def test_channels_last_images_are_turned(tmp_path):
    arrays = save(tmp_path / "mine.npz")
    mine = data.load(str(tmp_path / "mine.npz"))
    assert mine.name == "mine"
    assert mine.input_shape == (3, 40, 24)
    assert torch.equal(mine.train.x.permute(0, 2, 3, 1), torch.from_numpy(arrays["x_train"]))
    assert mine.sha256 == hashlib.sha256((tmp_path / "mine.npz").read_bytes()).hexdigest()
    assert mine.augment == "none"


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((40, 24), (1, 40, 24)),
        ((1, 40, 24), (1, 40, 24)),
        ((3, 40, 24), (3, 40, 24)),
        ((40, 24, 1), (1, 40, 24)),
        ((6, 40, 24), (6, 40, 24)),
        ((17,), (17,)),
        ((), (1,)),
    ],
)
def test_shapes_are_understood(tmp_path, shape, expected):
    save(tmp_path / "mine.npz", x_train=np.ones((50, *shape), np.uint8), x_test=np.ones((20, *shape), np.uint8))
    mine = data.load(tmp_path / "mine.npz")
    assert mine.input_shape == expected
    assert mine.train.x.dtype == (torch.uint8 if len(expected) == 3 else torch.float32)


def test_pixels_may_be_floats_or_whole_numbers(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (50, 8, 8))
    save(tmp_path / "whole.npz", x_train=x, x_test=x[:20])
    save(tmp_path / "float.npz", x_train=x / 255, x_test=x[:20] / 255)
    whole, floats = (data.load(tmp_path / f"{name}.npz") for name in ("whole", "float"))
    assert whole.train.x.dtype == torch.uint8
    assert floats.train.x.dtype == torch.float32
    torch.testing.assert_close(whole.inputs(whole.test.x), floats.inputs(floats.test.x))


def test_text_labels_become_classes_in_sorted_order(tmp_path):
    names = np.array(["dog", "cat", "eel"])
    save(tmp_path / "mine.npz", y_train=names[np.arange(50) % 3], y_test=names[np.arange(20) % 3].astype("S3"))
    mine = data.load(tmp_path / "mine.npz")
    assert mine.classes == ("cat", "dog", "eel")
    assert mine.train.y[:3].tolist() == [1, 0, 2]
    assert mine.test.y[:3].tolist() == [1, 0, 2]


def test_classes_may_have_names_and_labels_any_number_type(tmp_path):
    names = np.array(["ant", "bee", "cow", "dog", "eel"])
    save(tmp_path / "mine.npz", y_train=(np.arange(50.0) % 5)[:, None], y_test=np.arange(20.0) % 5, classes=names)
    mine = data.load(tmp_path / "mine.npz", task="classification")
    assert mine.classes == tuple(names)
    assert mine.train.y.dtype == torch.int64
    assert mine.train.y.shape == (50,)


def test_real_targets_make_a_regression(tmp_path):
    save(tmp_path / "one.npz", y_train=np.arange(50) / 3, y_test=np.arange(20) / 3)
    save(tmp_path / "two.npz", y_train=np.arange(100.0).reshape(50, 2), y_test=np.ones((20, 2)))
    save(tmp_path / "whole.npz")
    assert data.load(tmp_path / "one.npz").train.y.shape == (50, 1)
    assert data.load(tmp_path / "two.npz").num_outputs == 2
    whole = data.load(tmp_path / "whole.npz", task="regression")
    assert (whole.task, whole.classes, whole.train.y.dtype) == ("regression", (), torch.float32)


def test_files_that_are_no_data_set_are_refused(tmp_path):
    np.savez(tmp_path / "part.npz", x_train=np.zeros(3), data=np.zeros(2))
    with pytest.raises(ValueError, match=r"lacks y_train, x_test, y_test; expected .* got x_train, data\."):
        data.load(tmp_path / "part.npz")
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(ValueError, match=r"text\.npz cannot be read as an \.npz file"):
        data.load(tmp_path / "text.npz")
    save(tmp_path / "objects.npz", y_train=np.array([{}] * 50, dtype=object))
    with pytest.raises(ValueError, match=r"objects\.npz cannot be read .*plain arrays"):
        data.load(tmp_path / "objects.npz")
    save(tmp_path / "cut.npz")
    content = (tmp_path / "cut.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"cut\.npz cannot be read .*cut short"):
        data.load(tmp_path / "cut.npz")
    (tmp_path / "table.xls").write_text("")
    with pytest.raises(
        ValueError, match=r"expected an \.npz file, a \.csv file or a folder of images, got .*table\.xls"
    ):
        data.load(tmp_path / "table.xls")
    with pytest.raises(FileNotFoundError, match=r"there is no file or folder .*nowhere\.npz"):
        data.load(tmp_path / "nowhere.npz")


# ---------------------------------------------------------------- csv


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def table(header="a,b,c\n", rows=40, target=lambda i: i / 3, separator=","):
    lines = [separator.join(str(v) for v in (i, i * i % 7, target(i))) for i in range(rows)]
    return header.replace(",", separator) + "\n".join(lines) + "\n"


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("header", ["a,b,c\n", ""])
def test_a_table_of_numbers(tmp_path, separator, header):
    path = write(tmp_path / "mine.csv", table(header, separator=separator))
    mine = data.load(path)
    assert (mine.name, mine.task, mine.kind, mine.input_shape) == ("mine", "regression", "table", (2,))
    assert (len(mine.train), len(mine.test)) == (36, 4)
    rows = torch.cat([torch.cat([mine.train.x, mine.train.y], 1), torch.cat([mine.test.x, mine.test.y], 1)])
    expected = torch.tensor([[i, i * i % 7, i / 3] for i in range(40)])
    assert torch.equal(rows[rows[:, 0].argsort()], expected)
    assert mine.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_split_is_a_seed(tmp_path):
    path = write(tmp_path / "mine.csv", table())
    first, same, other = (data.load(path, split=k).test.x[:, 0].tolist() for k in (0, 0, 1))
    assert first == same != other


def test_the_target_is_a_header_or_a_position(tmp_path):
    path = write(tmp_path / "mine.csv", table())
    for target in ("a", 0, "0", -3):
        mine = data.load(path, target=target)
        assert sorted(torch.cat([mine.train.y, mine.test.y]).flatten().tolist()) == list(range(40))
    with pytest.raises(ValueError, match="no column 'price'; expected one of a, b, c, or a position from 0 to 2"):
        data.load(path, target="price")
    save(tmp_path / "mine.npz")
    with pytest.raises(ValueError, match=r"a target column is for \.csv files"):
        data.load(tmp_path / "mine.npz", target="a")


def test_the_task_follows_the_target_unless_told(tmp_path):
    whole = write(tmp_path / "whole.csv", table(target=lambda i: i % 3))
    many = write(tmp_path / "many.csv", table(target=lambda i: i))
    text = write(tmp_path / "text.csv", table("", target=lambda i: "uvw"[i % 3]))
    assert data.load(whole).classes == ("0", "1", "2")
    assert data.load(whole, task="regression").task == "regression"
    assert data.load(many).task == "regression"
    lone = write(tmp_path / "lone.csv", table(target=lambda i: min(i // 4, 5)))
    with pytest.raises(ValueError, match=r"at least 5 rows of each of the 6 classes, but of 40 rows '0' has 4"):
        data.load(lone)
    mine = data.load(text)
    assert mine.classes == ("u", "v", "w")
    assert mine.train.y.bincount().tolist() == [12, 11, 11]  # of 14, 13 and 13; each class gives a tenth, rounded up
    assert mine.test.y.bincount().tolist() == [2, 2, 2]


def test_quotes_blank_lines_and_a_byte_order_mark(tmp_path):
    text = '\ufeff"a, really",b\n' + "".join(f'"{i}",{i / 2}\n\n' for i in range(12))
    mine = data.load(write(tmp_path / "mine.csv", text), target="a, really", task="regression")
    assert len(mine.train) + len(mine.test) == 12


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a,b\n1,2\n3,4,5\n6,7\n", r"line 3: expected 2 cells as in the first line, got 3"),
        ("a,b\n1,2\n", r"mine\.csv has 2 rows; expected at least 3: a header or none, then one row an example\. Add"),
        ("a,b\n1,u\n2,v\n3,w\n", r"at least 5 rows of each of the 3 classes, .*\(--task regression\)"),
        ("a,b\n1,u\n3,\n5,u\n", r"has 2 rows with a target; expected at least 3"),
        ("a,b\n1,2\n2,x\n3,y\n4,z\n", r"expected numbers in the target column 'b', got 'x'"),
        ("a,b\n1,0.5\n2,0.5\n3,0.5\n", r"mine: all training targets are 0\.5; expected targets that vary"),
        ("a\n1\n2\n3\n", r"has one column; expected features in addition to the target"),
    ],
)
def test_a_wrong_cell_is_named(tmp_path, text, sentence):
    path = write(tmp_path / "mine.csv", text)
    task = "regression" if "expected numbers" in sentence else None
    with pytest.raises(ValueError, match=sentence):
        data.load(path, task=task)


def test_another_encoding_is_one_sentence(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_bytes(table("größe,b,c\n").encode("latin-1"))
    with pytest.raises(ValueError, match=r"mine\.csv is not text in UTF-8 \(.* at byte 2\)\. Save it as UTF-8\."):
        data.load(path)


# ---------------------------------------------------------------- folder


def make_folder(path, sizes=((12, 8),), mode="RGB", test="test", count=4):
    rng = np.random.default_rng(0)
    for split in ("train", test):
        for name in ("zebra", "ape"):
            (path / split / name).mkdir(parents=True)
            for k in range(count):
                height, width = sizes[k % len(sizes)]
                shape = (height, width, 3) if mode == "RGB" else (height, width)
                pixels = rng.integers(0, 256, shape, np.uint8)
                Image.fromarray(pixels).save(path / split / name / f"{k}.png")
    (path / "train" / "zebra" / "notes.txt").write_text("no image")
    return path


@pytest.mark.parametrize("test", ["test", "val"])
def test_a_folder_of_images_of_one_size_is_read_as_it_is(tmp_path, test):
    path = make_folder(tmp_path / "animals", test=test)
    mine = data.load(str(path))
    assert (mine.name, mine.classes, mine.input_shape) == ("animals", ("ape", "zebra"), (3, 12, 8))
    assert mine.train.y.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    for index, where in ((0, "train/ape/0.png"), (7, "train/zebra/3.png")):
        with Image.open(path / where) as image:
            assert np.array_equal(mine.train.x[index].permute(1, 2, 0).numpy(), np.asarray(image))


def test_grey_images_have_one_channel(tmp_path):
    assert data.load(make_folder(tmp_path / "grey", mode="L")).input_shape == (1, 12, 8)


def test_different_sizes_are_brought_to_the_median(tmp_path):
    path = make_folder(tmp_path / "mixed", sizes=((10, 20), (30, 40), (50, 60)), count=3)
    with pytest.warns(UserWarning, match=r"8 of 12 images are scaled and cut to 30 x 40 pixels") as told:
        mine = data.load(path)
    assert [warning.filename for warning in told] == [__file__]
    assert mine.input_shape == (3, 30, 40)
    with Image.open(path / "train" / "ape" / "1.png") as image:  # one that has that size already
        assert np.array_equal(mine.train.x[1].permute(1, 2, 0).numpy(), np.asarray(image))
    with Image.open(path / "train" / "ape" / "2.png") as image:  # 50 x 60: cover 30 x 40 with it, cut the centre
        box = (0, 2.5, 60, 47.5)  # 60 x 45 has the wanted proportion
        expected = np.asarray(image.resize((40, 30), Image.Resampling.BILINEAR, box=box))
    assert np.abs(mine.train.x[2].permute(1, 2, 0).numpy().astype(int) - expected).max() <= 1


def test_large_images_are_capped(tmp_path):
    path = make_folder(tmp_path / "large", sizes=((300, 230),), count=1)
    with pytest.warns(UserWarning, match=r"4 of 4 images are scaled and cut to 224 x 224 pixels"):
        assert data.load(path).input_shape == (3, 224, 224)


def test_a_folder_beside_a_known_name_needs_a_path(tmp_path, monkeypatch):
    make_folder(tmp_path / "animals")
    make_folder(tmp_path / "digits")
    monkeypatch.chdir(tmp_path)
    assert data.load("animals").name == "animals"
    assert data.load("digits").input_shape == (1, 8, 8)
    assert data.load("./digits").input_shape == (3, 12, 8)


def test_a_wrong_folder_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "a.png").touch()
    with pytest.raises(FileNotFoundError, match=r"expected train/<class>/ and test/<class>/ .*got a\.png"):
        data.load(tmp_path / "flat")
    (tmp_path / "bare" / "train").mkdir(parents=True)
    (tmp_path / "bare" / "test").mkdir()
    with pytest.raises(FileNotFoundError, match="has no images in class folders"):
        data.load(tmp_path / "bare")
    path = make_folder(tmp_path / "broken")
    (path / "train" / "ape" / "2.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"2\.png cannot be read as an image"):
        data.load(path)
    path = make_folder(tmp_path / "stranger")
    (path / "test" / "yak").mkdir()
    Image.new("RGB", (8, 12)).save(path / "test" / "yak" / "0.png")
    with pytest.raises(ValueError, match=r"0\.png is of a class that .*train does not have \(ape, zebra\)"):
        data.load(path)
    path = make_folder(tmp_path / "hollow")
    (path / "train" / ".hidden").mkdir()
    (path / "train" / "yak").mkdir()
    with pytest.raises(ValueError, match=r"train.yak is a class without images; .*remove the folder"):
        data.load(path)
    (path / "train" / "yak").rmdir()
    assert data.load(path).classes == ("ape", "zebra")
    monkeypatch.setattr(os, "sysconf", lambda name: 10)
    with pytest.raises(ValueError, match=r"has 16 images, .* GiB as 12 x 8 pixels; this machine has"):
        data.load(make_folder(tmp_path / "huge"))
