"""The user's own data: an `.npz` file, a `.csv` file, or a folder of images."""

from __future__ import annotations

import os
from pathlib import Path

from leanbayes.data.arrays import build, Raw
from leanbayes.data.cache import array_names, read_array, sha256_of_files
from leanbayes.data.checks import Array
from leanbayes.data.csv_file import read_csv
from leanbayes.data.dataset import DataSet
from leanbayes.data.folder import image_files, read_folder
from leanbayes.data.sources import find, lookup, Source
from leanbayes.paths import local

_ARRAYS = ("x_train", "y_train", "x_test", "y_test")
_TABLES = (".csv", ".tsv")


def resolve(name: str | Path) -> Source | Path:
    """Return the known set that a name means, or the path of the user's own data.

    A path has a separator or one of our endings; any other folder counts only where no known set has its name.
    """
    path = local(name).expanduser()
    if isinstance(name, Path) or "/" in name or os.sep in name or path.suffix.lower() in (".npz", *_TABLES):
        return path
    return path if lookup(name) is None and path.is_dir() else find(name)


def load_own(path: Path, *, split: int = 0, target: str | int | None = None, task: str | None = None) -> DataSet:
    """Read a data set of the user's own; it is called like its file or folder.

    Args:
        path: An `.npz` file with x_train, y_train, x_test, y_test (and `classes`, names, if wanted), a `.csv` file,
            or a folder with train/<class>/ and test/<class>/ (or val/<class>/).
        split: Number of the random train/test split of a `.csv` file.
        target: Column to predict of a `.csv` file, by header or position; None is the last.
        task: "classification" or "regression"; None goes by the targets.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {path} (looked in {Path.cwd()}). Check the path.")
    is_table = path.suffix.lower() in _TABLES
    if target is not None and not is_table:
        raise ValueError(f"a target column is for .csv files, got target={target!r} with {path}. Leave it out.")
    if path.is_dir():
        raw, files = read_folder(path), image_files(path)
    elif is_table:
        raw, task = read_csv(path, target=target, split=split, task=task)
        files = [path]
    elif path.suffix.lower() == ".npz":
        raw, files = _read_npz(path), [path]
    else:
        raise ValueError(f"expected an .npz file, a .csv file or a folder of images, got {path}. Convert it to one.")
    return build(raw, name=path.resolve().stem, sha256=sha256_of_files(files), task=task)


def own_test_inputs(path: Path) -> Array:
    """Read the raw test inputs of the user's own data; an `.npz` file needs nothing but x_test for that."""
    if path.suffix.lower() == ".npz" and path.is_file():
        return read_array(path, "x_test")
    return load_own(path).test.x.numpy()


def _read_npz(path: Path) -> Raw:
    there = array_names(path)
    lacking = [name for name in _ARRAYS if name not in there]
    if lacking:
        raise ValueError(
            f"{path} lacks {', '.join(lacking)}; expected the arrays {', '.join(_ARRAYS)}, got "
            f"{', '.join(there) or 'none'}. Save them with numpy.savez."
        )
    classes = tuple(map(str, read_array(path, "classes"))) if "classes" in there else ()
    x_train, y_train, x_test, y_test = (read_array(path, name) for name in _ARRAYS)
    return Raw(x_train, y_train, x_test, y_test, classes)
