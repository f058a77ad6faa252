"""The real data: shapes, class counts and moments as published."""

from __future__ import annotations

import pytest
import torch

from leanbayes import data
from leanbayes.data.cache import sha256_of_arrays
from leanbayes.data.catalogue import NOTMNIST, UCI
from leanbayes.data.files.npz import read_array
from leanbayes.data.upstream import UCI_SETS

# rows, columns, splits as in Hernandez-Lobato & Adams (2015)
UCI_SIZES = {
    "boston": (506, 13, 20), "concrete": (1030, 8, 20), "energy": (768, 8, 20), "kin8nm": (8192, 8, 20),
    "naval": (11934, 16, 20), "power": (9568, 4, 20), "protein": (45730, 9, 5), "wine-red": (1599, 11, 20),
    "yacht": (308, 6, 20),
}  # fmt: skip


def need(root, *files):
    for file in files:
        if not (root / file).is_file():
            pytest.skip(f"needs {file} in the data folder")


@pytest.mark.parametrize(
    ("name", "file", "mean", "std"),
    [("mnist", "mnist.npz", 0.1307, 0.3081), ("fashion-mnist", "fashion_mnist.npz", 0.2860, 0.3530)],
)
def test_mnist_and_fashion_mnist(data_root, name, file, mean, std):
    need(data_root, file)
    loaded = data.load(name, data_root)
    assert (loaded.train.x.shape, loaded.test.x.shape) == ((60_000, 1, 28, 28), (10_000, 1, 28, 28))
    assert loaded.mean.item() == pytest.approx(mean, abs=5e-5)
    assert loaded.std.item() == pytest.approx(std, abs=5e-5)
    counts = loaded.train.y.bincount().tolist()
    mnist = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert counts == (mnist if name == "mnist" else [6000] * 10)
    assert len(loaded.classes) == 10


@pytest.mark.slow
def test_cifar10(data_root):
    need(data_root, "cifar10_test.npz", *(f"cifar10_train_{k}of3.npz" for k in (1, 2, 3)))
    loaded = data.load("cifar10", data_root)
    assert (loaded.train.x.shape, loaded.test.x.shape) == ((50_000, 3, 32, 32), (10_000, 3, 32, 32))
    assert loaded.train.y.bincount().tolist() == [5000] * 10
    assert loaded.test.y.bincount().tolist() == [1000] * 10
    published = torch.tensor([[0.49139968, 0.48215841, 0.44653091], [0.24703223, 0.24348513, 0.26158784]])
    torch.testing.assert_close(torch.stack([loaded.mean, loaded.std]), published, atol=1e-7, rtol=0)
    assert loaded.classes[:2] == ("airplane", "automobile")
    again = data.load("cifar10", data_root)  # now from the decoded copies
    assert torch.equal(again.train.x, loaded.train.x)
    assert data.ood("mnist", loaded, data_root).shape == (10_000, 3, 32, 32)


def test_svhn_and_notmnist_are_out_of_distribution_sets(data_root):
    need(data_root, "svhn_test_6k.npz", "notmnist_test.npz")
    digits = data.load("digits")
    assert data.ood("svhn", digits, data_root).shape[1:] == (1, 8, 8)
    assert data.ood("notmnist", digits, data_root).shape == (10_000, 1, 8, 8)


def test_notmnist_is_the_one_whose_digest_prepare_expects(data_root):
    need(data_root, "notmnist_test.npz")
    arrays = [read_array(data_root / "notmnist_test.npz", name) for name in ("x_test", "y_test")]
    assert sha256_of_arrays(arrays) == NOTMNIST.content[""]


@pytest.mark.parametrize("name", UCI_SIZES)
def test_uci_sets(data_root, name):
    need(data_root, "uci_regression.npz")
    rows, columns, splits = UCI_SIZES[name]
    described = next(row for row in data.describe(data_root) if row.name == f"uci-{name}")
    seen = []
    for split in (0, splits - 1):
        loaded = data.load(f"uci-{name}", data_root, split=split)
        assert (len(loaded.train), len(loaded.test), loaded.input_shape) == described[2:5]
        assert len(loaded.train) + len(loaded.test) == rows
        assert loaded.input_shape == (columns,)
        assert abs(len(loaded.test) - rows / 10) < 1
        inputs, targets = loaded.prepared(loaded.train)
        assert inputs.isfinite().all()
        torch.testing.assert_close(targets.mean(), torch.tensor(0.0), atol=1e-4, rtol=0)
        seen.append(loaded.test.y)
    assert not torch.equal(*seen)
    with pytest.raises(ValueError, match=f"splits 0 to {splits - 1}, got {splits}"):
        data.load(f"uci-{name}", data_root, split=splits)


def test_uci_content_is_the_one_whose_digest_prepare_expects(data_root):
    need(data_root, "uci_regression.npz")
    path = data_root / "uci_regression.npz"
    for name in UCI_SETS:
        arrays = [read_array(path, f"{name}_{array}") for array in ("X", "y", "test_mask")]
        assert sha256_of_arrays(arrays) == UCI.content[f"{name}_"]
