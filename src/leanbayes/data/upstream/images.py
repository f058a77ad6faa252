"""Published files of MNIST, Fashion-MNIST, notMNIST (idx), CIFAR-10, CIFAR-100 (binary) and SVHN (Matlab)."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import numpy as np

from leanbayes.data.dataset import Array
from leanbayes.data.upstream import Files, read_tar

_PIXELS = 3 * 32 * 32  # of a CIFAR image: red, green, blue planes, row by row
_CIFAR10_PARTS = (17_000, 34_000)  # ends of the first two training files in the cache


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


def read_idx(path: Path) -> Array:
    """Read an idx file of unsigned bytes, gzipped or not.

    Layout: two zero bytes, 0x08 (unsigned byte), the number of axes, their lengths as big-endian 32-bit integers,
    then the values, last axis fastest.
    """
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise ValueError(
            f"{path} is no idx file of bytes: it begins with {content[:4].hex() or 'nothing'}. Get it again."
        )
    start = 4 + 4 * content[3]
    shape = tuple(int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4))
    if len(content) != start + math.prod(shape):
        raise ValueError(f"{path} promises {math.prod(shape)} values and has {len(content) - start}. Get it again.")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def read_cifar(content: bytes, *, label_bytes: int) -> tuple[Array, Array]:
    """Read CIFAR's binary records: `label_bytes` labels, the last is the finest, then the pixels.

    Returns:
        Images (N, 3, 32, 32) and labels (N,), both uint8.
    """
    size = label_bytes + _PIXELS
    if len(content) % size:
        raise ValueError(f"expected CIFAR records of {size} bytes, got {len(content)} bytes. Get the file again.")
    records = np.frombuffer(content, np.uint8).reshape(-1, size)
    return records[:, label_bytes:].reshape(-1, 3, 32, 32), records[:, label_bytes - 1]


def read_svhn(path: Path) -> tuple[Array, Array]:
    """Read a Matlab file of SVHN's cropped digits, where the digit 0 has the label 10.

    Returns:
        Images (N, 3, 32, 32) and labels (N,), both uint8.
    """
    from scipy.io import loadmat  # type: ignore[import-untyped]

    content = loadmat(path, variable_names=("X", "y"))
    images, labels = np.asarray(content["X"], np.uint8), np.asarray(content["y"], np.uint8)
    return np.ascontiguousarray(images.transpose(3, 2, 0, 1)), labels.reshape(-1) % 10


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
