"""Readers of the formats in which data sets are published: idx, CIFAR binary, SVHN's .mat, the UCI texts."""

from __future__ import annotations

import gzip
import math
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from leanbayes.data.checks import Array

_PIXELS = 3 * 32 * 32  # of a CIFAR image: red, green, blue planes, row by row


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
            f"{path} is no idx file of bytes: it begins with {content[:4].hex() or 'nothing'}. Get it anew."
        )
    start = 4 + 4 * content[3]
    shape = tuple(int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4))
    if len(content) != start + math.prod(shape):
        raise ValueError(f"{path} promises {math.prod(shape)} values and has {len(content) - start}. Get it anew.")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def read_cifar(content: bytes, *, label_bytes: int) -> tuple[Array, Array]:
    """Read records of CIFAR's binary version: `label_bytes` labels (the last is the finest), then the pixels.

    Returns:
        Images (N, 3, 32, 32) and labels (N,), both uint8.
    """
    size = label_bytes + _PIXELS
    if len(content) % size:
        raise ValueError(f"expected CIFAR records of {size} bytes, got {len(content)} bytes in all. Get the file anew.")
    records = np.frombuffer(content, np.uint8).reshape(-1, size)
    return records[:, label_bytes:].reshape(-1, 3, 32, 32), records[:, label_bytes - 1]


def read_svhn(path: Path) -> tuple[Array, Array]:
    """Read a Matlab file of SVHN's cropped digits, in which the digit 0 has the label 10.

    Returns:
        Images (N, 3, 32, 32) and labels (N,), both uint8.
    """
    from scipy.io import loadmat  # type: ignore[import-untyped]

    content = loadmat(path, variable_names=("X", "y"))
    images, labels = np.asarray(content["X"], np.uint8), np.asarray(content["y"], np.uint8)
    return np.ascontiguousarray(images.transpose(3, 2, 0, 1)), labels.reshape(-1) % 10


def read_tar(path: Path, *, ending: tuple[str, ...]) -> dict[str, bytes]:
    """Read those files of a tar archive whose names end so; nothing is unpacked to disk."""
    contents = {}
    with tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.name.endswith(ending) else None
            if file is not None:
                contents[member.name] = file.read()
    return contents


def read_uci(texts: Mapping[str, bytes]) -> dict[str, Array]:
    """Read one UCI set as Hernández-Lobato & Adams (2015) split it.

    Args:
        texts: Contents of data.txt (rows of numbers), index_features.txt, index_target.txt (columns) and
            index_train_<k>.txt, index_test_<k>.txt (rows).

    Returns:
        X float64 (n, d), y float64 (n,), test_mask bool (splits, n), True where a row is for testing.
    """
    table = _numbers(texts["data.txt"])
    features = _numbers(texts["index_features.txt"]).astype(int).ravel()
    target = _numbers(texts["index_target.txt"]).astype(int).ravel()[0]
    splits = sum(name.startswith("index_test_") for name in texts)
    mask = np.zeros((splits, len(table)), bool)
    for k in range(splits):
        train, test = (_numbers(texts[f"index_{part}_{k}.txt"]).astype(int).ravel() for part in ("train", "test"))
        if not np.array_equal(np.sort(np.concatenate([train, test])), np.arange(len(table))):
            raise ValueError(
                f"split {k} does not put each of the {len(table)} rows either into training or into testing. "
                "Get the files anew."
            )
        mask[k, test] = True
    return {"X": table[:, features], "y": table[:, target], "test_mask": mask}


def _numbers(text: bytes) -> Array:
    return np.loadtxt(text.decode().splitlines(), ndmin=2)
