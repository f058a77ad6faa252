"""The record itself: moments, network inputs, targets; the cache on disk; names."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from leanbayes import data
from leanbayes.data import cache
from leanbayes.data.dataset import DataSet, Split


def image_set(dtype=torch.uint8, count=300):
    x = torch.randint(256, (count, 3, 10, 6), dtype=torch.uint8)
    x[:, 2] = 7  # a constant channel
    raw = x if dtype == torch.uint8 else x / 255
    y = torch.arange(count) % 4
    return DataSet("toy", "classification", Split(raw[:200], y[:200]), Split(raw[200:], y[200:]), tuple("abcd"), "")


def table_set():
    x = torch.randn(70_000, 5) * torch.tensor([1.0, 10, 0.1, 1, 0]) + torch.tensor([0.0, 1000, 5, -2, 3.3])
    y = torch.stack([3 * x[:, 0] + 7, x[:, 1]], 1)
    return DataSet("toy", "regression", Split(x[:-10], y[:-10]), Split(x[-10:], y[-10:]), (), "")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_moments_of_channels_are_those_of_numpy(dtype):
    toy = image_set(dtype)
    pixels = toy.train.x.numpy().astype(np.float64) / (255 if dtype == torch.uint8 else 1)
    np.testing.assert_allclose(toy.mean, pixels.mean((0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(toy.std[:2], pixels.std((0, 2, 3))[:2], rtol=1e-6)
    assert toy.std[2] == 1


def test_moments_of_columns_are_those_of_numpy():
    toy = table_set()  # more rows than a chunk has
    x = toy.train.x.numpy().astype(np.float64)
    np.testing.assert_allclose(toy.mean, x.mean(0), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(toy.std[:4], x.std(0)[:4], rtol=1e-6)
    assert toy.std[4] == 1
    np.testing.assert_allclose(toy.target_mean, toy.train.y.double().mean(0), rtol=1e-6)
    np.testing.assert_allclose(toy.target_std, toy.train.y.double().std(0, correction=0), rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_inputs_have_mean_zero_and_unit_variance(dtype):
    toy = image_set(dtype)
    before = toy.train.x.clone()
    x = toy.inputs(toy.train.x)
    assert x.dtype == torch.float32
    torch.testing.assert_close(x.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.std((0, 2, 3), correction=0), torch.tensor([1.0, 1, 0]), atol=1e-5, rtol=0)
    assert torch.equal(toy.train.x, before)  # the raw data are not touched


def test_bytes_and_floats_of_the_same_images_give_the_same_inputs():
    toy = image_set()
    torch.testing.assert_close(toy.inputs(toy.test.x), toy.inputs(toy.test.x / 255))


def test_gradients_reach_raw_images():
    toy = image_set(torch.float32)
    x = toy.test.x[:2].clone().requires_grad_()
    toy.inputs(x).sum().backward()
    torch.testing.assert_close(x.grad, (1 / toy.std).view(1, 3, 1, 1).expand_as(x))


def test_targets_are_standardised_and_come_back():
    toy = table_set()
    inputs, targets = toy.prepared(toy.train)
    torch.testing.assert_close(targets.mean(0), torch.zeros(2), atol=1e-4, rtol=0)
    torch.testing.assert_close(targets.std(0), torch.ones(2), atol=1e-4, rtol=0)
    torch.testing.assert_close(targets * toy.target_std + toy.target_mean, toy.train.y, rtol=1e-5, atol=1e-4)
    assert inputs.shape == toy.train.x.shape
    assert toy.num_outputs == 2
    assert toy.kind == "table"


def test_labels_are_targets_as_they_are():
    toy = image_set()
    assert torch.equal(toy.prepared(toy.test)[1], toy.test.y)
    assert (toy.kind, toy.input_shape, toy.num_outputs, toy.augment) == ("image", (3, 10, 6), 4, "none")
    with pytest.raises(ValueError, match="has classes"):
        _ = toy.target_std


def test_inputs_of_a_wrong_size_are_refused():
    with pytest.raises(ValueError, match=r"expected rows of shape \(3, 10, 6\), got \(3, 6, 10\)"):
        image_set().inputs(torch.zeros(1, 3, 6, 10))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.int16])
def test_pixels_up_to_255_that_are_no_bytes_are_refused(dtype):
    toy = image_set()
    with pytest.raises(ValueError, match=f"toy expected uint8 pixels, or floats from 0 to 1, got {dtype} up to 255"):
        toy.inputs(toy.test.x.to(dtype))
    noisy = toy.test.x / 255 + 0.1 * torch.randn(100, 3, 10, 6)
    torch.testing.assert_close(toy.inputs(noisy).mean(), toy.inputs(toy.test.x).mean(), atol=0.1, rtol=0)


def test_the_record_prints_on_a_line():
    assert repr(image_set()).count("\n") == 0
    assert "tensor" not in repr(image_set())


def test_digits_need_nothing(tmp_path):
    digits = data.load("digits", tmp_path)
    assert (len(digits.train), len(digits.test)) == (1000, 797)
    assert digits.input_shape == (1, 8, 8)
    assert digits.train.x.dtype == torch.uint8
    assert digits.train.x.max() == 255
    assert digits.classes == tuple("0123456789")
    assert digits.sha256 == data.load("Digits").sha256 != data.load("digits", split=1).sha256

    from sklearn.datasets import load_digits

    every = torch.cat([digits.train.x, digits.test.x]).flatten(1).sort(0).values
    expected = torch.tensor(load_digits().data).mul(255 / 16).round().byte().sort(0).values
    assert torch.equal(every, expected)


@pytest.mark.parametrize("name", ["fashion-mnist", "fashion_mnist", "FashionMNIST", "Fashion MNIST"])
def test_names_are_read_with_tolerance(tmp_path, name):
    with pytest.raises(FileNotFoundError, match=r"fashion-mnist is not in .*fashion_mnist\.npz missing"):
        data.load(name, tmp_path)


def test_a_missing_set_says_where_to_get_it_and_which_command_makes_it(tmp_path):
    expected = r"`leanbayes data prepare cifar100`; .*upstream.cifar100: cifar-100-binary\.tar\.gz from https://"
    with pytest.raises(FileNotFoundError, match=expected):
        data.load("cifar100", tmp_path)


def test_an_unknown_name_lists_the_known_ones(tmp_path):
    with pytest.raises(
        ValueError, match=r"'cifra10', did you mean cifar10\? Expected one of digits, fashion-demo, mnist"
    ):
        data.load("cifra10", tmp_path)


def test_a_test_part_alone_serves_as_an_out_of_distribution_set(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (12, 3, 32, 32), np.uint8)
    np.savez(tmp_path / "svhn_test_6k.npz", x_test=x, y_test=np.zeros(12, np.uint8))
    like = image_set()
    assert data.ood("svhn", like, tmp_path).shape == (12, 3, 10, 6)
    with pytest.raises(
        FileNotFoundError, match=r"svhn\.npz missing.*svhn_test_6k\.npz in that folder is an out-of-dis"
    ):
        data.load("svhn", tmp_path)
    rows = {row.name: row for row in data.describe(tmp_path)}
    assert rows["svhn"].where == f"cached at {tmp_path} (as an out-of-distribution set only)"


def test_the_table_of_known_sets(tmp_path):
    np.savez(tmp_path / "mnist.npz", x_train=0)
    rows = {row.name: row for row in data.describe(tmp_path)}
    assert list(rows) == data.names()
    assert rows["digits"].where == "built in"
    assert rows["mnist"].where == f"cached at {tmp_path}"
    assert rows["cifar10"][:5] == ("cifar10", "classification", 50_000, 10_000, (3, 32, 32))
    assert rows["uci-yacht"][1:6] == ("regression", 277, 31, (6,), "not here")
    assert all(row.note for row in rows.values())


def test_the_root_is_the_argument_then_the_environment_then_the_cache(tmp_path, monkeypatch, cache_home):
    monkeypatch.setenv("LEANBAYES_DATA", str(tmp_path / "b"))
    assert cache.data_root(tmp_path / "a") == tmp_path / "a"
    assert cache.data_root() == tmp_path / "b"
    monkeypatch.delenv("LEANBAYES_DATA")
    assert cache.data_root() == cache_home / "leanbayes" / "data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.data_root() == tmp_path / ".cache" / "leanbayes" / "data"


def test_a_decoded_copy_is_made_once_and_follows_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    path = tmp_path / "big.npz"
    first, second = (np.random.default_rng(k).integers(0, 256, (2, 1 << 20), np.uint8) for k in (0, 1))
    np.savez_compressed(path, x=first, small=first[:, :9])
    assert np.array_equal(cache.read_cached(path, "small"), first[:, :9])
    assert not (tmp_path / "home").exists()  # small arrays are not worth a copy
    assert np.array_equal(cache.read_cached(path, "x"), first)
    (copy,) = (tmp_path / "home" / "leanbayes" / "decoded").iterdir()
    assert np.array_equal(np.load(copy), first)
    monkeypatch.setattr(cache, "read_array", None)  # the second time nothing is decompressed
    again = cache.read_cached(path, "x")
    assert np.array_equal(again, first)
    again[0, 0] += 1  # and the copy cannot be spoilt
    assert np.array_equal(np.load(copy), first)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    np.savez_compressed(path, x=second)
    os.utime(path, ns=(1, 1))
    assert np.array_equal(cache.read_cached(path, "x"), second)


@pytest.mark.parametrize("spoilt", ["unwritable", "cut short"])
def test_without_a_usable_copy_the_file_is_read(tmp_path, monkeypatch, spoilt):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    path = tmp_path / "big.npz"
    x = np.zeros((2, 1 << 20), np.uint8)
    np.savez_compressed(path, x=x)
    if spoilt == "unwritable":
        (tmp_path / "home").write_text("a file where the folder should be")
    else:
        cache.read_cached(path, "x")
        (copy,) = (tmp_path / "home" / "leanbayes" / "decoded").iterdir()
        copy.write_bytes(copy.read_bytes()[:1000])
    assert np.array_equal(cache.read_cached(path, "x"), x)


def test_files_appear_whole_or_not_at_all(tmp_path):
    (tmp_path / "file.npz").write_bytes(b"old")
    with pytest.raises(ValueError, match="Object arrays cannot be saved"):
        cache.write_npz(tmp_path / "file.npz", {"x": np.zeros(1000), "y": np.array([{}])})
    assert (tmp_path / "file.npz").read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1
