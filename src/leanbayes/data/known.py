"""Known data sets, read from the cache."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from leanbayes.data.arrays import build, Raw
from leanbayes.data.cache import read_cached, sha256_of_arrays, sha256_of_files
from leanbayes.data.checks import Array
from leanbayes.data.dataset import DataSet
from leanbayes.data.sources import Piece, Source

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
