"""The user's own data: an `.npz` file, a `.csv` file, or a folder of images."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from leanbayes.data.arrays import as_text, build, Raw
from leanbayes.data.cache import array_header, array_names, read_array, sha256_of_files
from leanbayes.data.checks import Array
from leanbayes.data.csv_file import read_csv
from leanbayes.data.dataset import Channels, DataSet
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


def load_own(
    path: Path,
    *,
    split: int = 0,
    target: str | int | None = None,
    task: str | None = None,
    channels: str | None = None,
) -> DataSet:
    """Read a data set of the user's own; it is called like its file or folder.

    Args:
        path: An `.npz` file with x_train, y_train, x_test, y_test (and `classes`, names, if wanted), a `.csv` file,
            or a folder with train/<class>/ and test/<class>/ (or val/<class>/).
        split: Number of the random train/test split of a `.csv` file.
        target: Column to predict of a `.csv` file, by header or position; None is the last.
        task: "classification" or "regression"; None goes by the targets.
        channels: "first" or "last", where images of an `.npz` file have their channels; None goes by the shape.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {path} (looked in {Path.cwd()}). Check the path.")
    is_table = path.suffix.lower() in _TABLES
    if target is not None and not is_table:
        raise ValueError(f"a target column is for .csv files, got target={target!r} with {path}. Leave it out.")
    if channels is not None and (is_table or path.is_dir()):
        raise ValueError(f"channels are for .npz files, got channels={channels!r} with {path}. Leave them out.")
    if path.is_dir():
        raw, files = read_folder(path), image_files(path)
    elif is_table:
        raw, task = read_csv(path, target=target, split=split, task=task)
        files = [path]
    elif path.suffix.lower() == ".npz":
        raw, files = _read_npz(path), [path]
    else:
        raise ValueError(f"expected an .npz file, a .csv file or a folder of images, got {path}. Convert it to one.")
    about: dict[str, Any] = {"name": path.resolve().stem, "sha256": sha256_of_files(files), "task": task}
    if path.is_dir():
        return replace(build(raw, **about, channels="first"), channels=None)  # decoded so; files have no such axis
    return build(raw, **about, channels=channels)


def own_test_inputs(path: Path) -> tuple[Array, Channels | None]:
    """Read the raw test inputs of the user's own data; an `.npz` file needs nothing but x_test for that.

    Returns:
        The inputs, and where their channels are, if that is known.
    """
    if path.suffix.lower() == ".npz" and path.is_file():
        return read_array(path, "x_test"), None
    x = load_own(path).test.x.numpy()
    return x, "first" if x.ndim == 4 else None


def _read_npz(path: Path) -> Raw:
    there = array_names(path)
    lacking = [name for name in _ARRAYS if name not in there]
    if lacking:
        raise ValueError(
            f"{path} lacks {', '.join(lacking)}; expected the arrays {', '.join(_ARRAYS)}, got "
            f"{', '.join(there) or 'none'}. Save them with numpy.savez."
        )
    _check_lengths(path)
    classes = _read_classes(path) if "classes" in there else ()
    x_train, y_train, x_test, y_test = (read_array(path, name) for name in _ARRAYS)
    return Raw(x_train, y_train, x_test, y_test, classes)


def _check_lengths(path: Path) -> None:
    """Compare the numbers of rows, from the headers of the arrays: their data may be large."""
    for split in ("train", "test"):
        x, y = (array_header(path, f"{name}_{split}").shape for name in ("x", "y"))
        if x and y and x[0] != y[0]:
            raise ValueError(
                f"{path.resolve().stem}: x_{split} and y_{split} differ in length, {x[0]} and {y[0]}. Give every row "
                "one target."
            )


def _read_classes(path: Path) -> tuple[str, ...]:
    names = read_array(path, "classes")
    if names.ndim != 1 or names.dtype.kind not in "USui":
        raise ValueError(
            f"{path}: classes has shape {names.shape} and dtype {names.dtype}; expected one name for each class, such "
            "as numpy.array(['cat', 'dog']). Save it so, or leave it out."
        )
    return tuple(map(str, as_text(names, f"{path}: classes")))
