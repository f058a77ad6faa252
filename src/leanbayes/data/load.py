"""The user's own data: an `.npz` file, a `.csv` file, or a folder of images."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from leanbayes.data.cache import array_header, array_names, read_array, read_cached, sha256_of_arrays, sha256_of_files
from leanbayes.data.catalogue import find, lookup, Piece, Source
from leanbayes.data.checks import Array
from leanbayes.data.dataset import Channels, DataSet
from leanbayes.data.files.csv import read_csv
from leanbayes.data.files.folder import image_files, read_folder
from leanbayes.data.files.npz import as_text, build, Raw
from leanbayes.runtime._files import local

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


# -------------------- known
# Known data sets, read from the cache.


_DIGITS_TRAIN = 1000


def load_known(source: Source, root: Path, split: int = 0) -> DataSet:
    """Read a known set; `split` is the number of its train/test split, where there are several."""
    if split and source.mask is None and source.origin is not None:
        raise ValueError(f"{source.name} has one split, its own; got split={split}. Leave it at 0.")
    if source.read is not None:
        _check_here(source, root)
        return source.read(root)
    if source.origin is None:
        raw = _digits(split)
        sha256 = sha256_of_arrays([raw.x_train, raw.y_train, raw.x_test, raw.y_test])
    else:
        _check_here(source, root)
        raw = _masked(source, root, split) if source.mask else _pieces(source, root)
        sha256 = sha256_of_files(root / file for file in source.files)
    return build(
        raw,
        name=source.name,
        sha256=sha256,
        task=source.task,
        augment=source.augment,
        count=len(source.classes),
    )


def test_inputs(source: Source, root: Path) -> Array:
    """Read the raw test inputs of a known set, and nothing else."""
    if source.read is not None:
        raise ValueError(
            f"{source.name} has tokens, neither images nor features, and cannot stand for either. Pick another foreign "
            "set."
        )
    if source.origin is None:
        return _digits(0).x_test
    if source.mask is not None:
        return _masked(source, root, 0).x_test
    pieces = source.test if _here(root, source.test) or not _here(root, source.test_only) else source.test_only
    if not _here(root, pieces):
        raise missing(source, root, [piece.file for piece in pieces])
    return _join([(root / piece.file, piece.x) for piece in pieces])


def where(source: Source, root: Path) -> str:
    """Tell in a few words where a set is."""
    if source.origin is None:
        return "built in"
    if _here(root, (*source.train, *source.test)):
        return f"cached at {root}"
    return f"cached at {root} (as a foreign set only)" if _here(root, source.test_only) else "not here"


def missing(source: Source, root: Path, files: list[str]) -> FileNotFoundError:
    """Return the error that says which file to put where, and which command makes the set."""
    assert source.origin is not None
    absent = [file for file in files if not (root / file).is_file()]
    by_hand = ", ".join(f"{file.name} from {file.urls[0]}" for file in source.origin.files)
    return FileNotFoundError(
        f"{source.name} is not in {root}: {', '.join(absent)} missing. Run `leanbayes data prepare {source.name}`; "
        f"without a network first put into {root / 'upstream' / source.origin.name}: {by_hand}."
    )


def _here(root: Path, pieces: tuple[Piece, ...]) -> bool:
    return bool(pieces) and all((root / piece.file).is_file() for piece in pieces)


def _check_here(source: Source, root: Path) -> None:
    if not source.train:
        raise ValueError(
            f"{source.name} has a test split only, so no network can learn from it. Use it as a foreign set (--ood "
            f"{source.name}), and another set as data."
        )
    if _here(root, (*source.train, *source.test)):
        return
    error = missing(source, root, source.files)
    if _here(root, source.test_only):
        raise FileNotFoundError(f"{error} What is there, {source.test_only[0].file}, serves as a foreign set only.")
    raise error


def _pieces(source: Source, root: Path) -> Raw:
    classes = source.classes
    if source.names is not None:
        file, array = source.names
        classes = tuple(map(str, read_cached(root / file, array)))
    return Raw(
        x_train=_join([(root / piece.file, piece.x) for piece in source.train]),
        y_train=_join([(root / piece.file, piece.y) for piece in source.train]),
        x_test=_join([(root / piece.file, piece.x) for piece in source.test]),
        y_test=_join([(root / piece.file, piece.y) for piece in source.test]),
        classes=classes,
    )


def _join(arrays: list[tuple[Path, str]]) -> Array:
    """Read arrays side by side (decompression lets other threads run) and concatenate them."""
    with ThreadPoolExecutor() as pool:
        parts = list(pool.map(lambda where: read_cached(*where), arrays))
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _masked(source: Source, root: Path, split: int) -> Raw:
    """Split the rows as the mask says."""
    (piece,) = source.test
    path = root / piece.file
    if not path.is_file():
        raise missing(source, root, source.files)
    x, y, masks = (read_cached(path, name) for name in (piece.x, piece.y, str(source.mask)))
    if not 0 <= split < len(masks):
        raise ValueError(f"{source.name} has the splits 0 to {len(masks) - 1}, got {split}. Pick one of them.")
    test = masks[split]
    return Raw(x[~test], y[~test], x[test], y[test])


def _digits(split: int) -> Raw:
    """Shuffle scikit-learn's digits by the number of the split; 1,000 are for training. Sixteen is white."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    bunch = load_digits()
    images = np.round(bunch.images * (255 / 16)).astype(np.uint8)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(split), device="cpu").numpy()
    train, test = order[:_DIGITS_TRAIN], order[_DIGITS_TRAIN:]
    return Raw(images[train], bunch.target[train], images[test], bunch.target[test], tuple("0123456789"))
