"""`load`: known data sets from the cache, and the user's own from an `.npz` file, a `.csv` file or a folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from leanbayes.data.annotated import annotated_name
from leanbayes.data.cache import data_root, read_cached, sha256_of_arrays, sha256_of_files
from leanbayes.data.catalogue import find, lookup, Piece, Source, SOURCES
from leanbayes.data.checks import check, check_not_one_hot, check_task, warn_of_whole_targets
from leanbayes.data.dataset import Array, Channels, DataSet, Raw, Split, Task
from leanbayes.data.files.csv import read_table, Table
from leanbayes.data.files.folder import image_files, read_folder
from leanbayes.data.files.npz import as_text, channel_axis, channels_first, check_channels, read_array, read_npz, tensor
from leanbayes.data.tabular import frame_table, is_frame, load_table, LoadedTable, read_parquet, TableOptions
from leanbayes.runtime._files import local

DEMO = "fashion-demo"  # the embedded images
TABLES = (".csv", ".tsv", ".parquet")
_NO_OPTIONS = TableOptions()
_FEWEST_LINES = 3  # a header and an example for each split
_DIGITS_TRAIN = 1000


class Row(NamedTuple):
    """A row of the table of known data sets."""

    name: str
    task: Task
    train: int
    test: int
    shape: tuple[int, ...]
    where: str
    note: str


def names() -> list[str]:
    """Return the names of the known data sets."""
    return list(SOURCES)


def describe(root: str | Path | None = None) -> list[Row]:
    """Return name, sizes, shape, place and note of every known data set."""
    folder = data_root(root)
    return [
        Row(source.name, source.task, *source.rows, source.shape, _where(source, folder), source.note)
        for source in SOURCES.values()
    ]


def load(  # noqa: PLR0913  # keywords, most of them for tables
    name: Any,
    root: str | Path | None = None,
    *,
    split: int = 0,
    target: str | int | None = None,
    task: str | None = None,
    channels: str | None = None,
    drop: str | Iterable[str] | None = None,
    group: str | None = None,
    time: str | None = None,
    weight: str | None = None,
    types: str | Mapping[str, str] | None = None,
) -> DataSet:
    """Return a data set by name, or the user's own by path or as a frame.

    Text, gaps and dates of a table become network inputs, see ``leanbayes.data.columns``; ``DataSet.notes`` has the
    types of its columns and the faults of its cells.

    Args:
        name: One of ``names()`` (case, hyphens and underscores do not matter), or a path: an `.npz` file with x_train,
            y_train, x_test, y_test (and `classes`, optional names), a `.csv` or `.parquet` file, or a folder of images
            with train/<class>/ and test/<class>/ (or val/<class>/); or a frame of pandas, polars or pyarrow.
        root: Folder of the known sets; else ``$LEANBAYES_DATA``, else one in the user's cache folder.
        split: Number of the train/test split, for the UCI sets, digits and tables.
        target: Column of a table to predict, by header or position; None is the last.
        task: "classification" or "regression" for the user's own data; None goes by the targets.
        channels: "first" or "last", the axis of the channels in an `.npz` file; None goes by the shape, and raises an
            error if both are possible.
        drop: Columns of a table to leave out, a list or names separated by commas.
        group: Column of a table whose groups are not split: all rows of a group train or test.
        time: Column of a table with dates or numbers: the latest rows test.
        weight: Column of a table with the weights of the rows in training.
        types: Types of columns of a table, a dict or text such as "zip=category,when=date"; None goes by the cells.

    Raises:
        FileNotFoundError: The set is not in the cache; the message names the missing files.
        ValueError: The name is unknown, or the data are not valid.
    """
    options = TableOptions(
        target=target, task=task, split=split, drop=drop, group=group, time=time, weight=weight, types=types
    )
    if is_frame(name):
        return _load_frame(name, options)
    if isinstance(name, str) and annotated_name(name):
        raise ValueError(f"{name} has several annotators an image, not one target. Use data.load_annotated({name!r}).")
    known = resolve(name)
    if isinstance(known, Path):
        return _load_own(known, options, channels)
    if options.given or channels is not None or task not in (None, known.task):
        raise ValueError(
            f"{known.name} is for {known.task} and has its own target; target, task and channels are for your own "
            "data, as are the options for tables. Leave them out."
        )
    return _load_known(known, data_root(root), split)


def resolve(name: str | Path) -> Source | Path:
    """Return the known set of a name, or the path of the user's own data.

    A path has a separator or a known ending. Any other folder counts only if no known set has its name.
    """
    path = local(name).expanduser()
    if isinstance(name, Path) or "/" in name or os.sep in name or path.suffix.lower() in (".npz", *TABLES):
        return path
    return path if lookup(name) is None and path.is_dir() else find(name)


def read_test_inputs(name: str, root: str | Path | None = None) -> tuple[Array, Channels | None]:
    """Read the raw test inputs of a set; an `.npz` file needs no other array than x_test.

    Returns:
        The inputs, and the axis of their channels, if known.
    """
    known = resolve(name)
    if not isinstance(known, Path):
        return _known_test_inputs(known, data_root(root)), None
    if known.suffix.lower() == ".npz" and known.is_file():
        return read_array(known, "x_test"), None
    x = _load_own(known).test.x.numpy()
    return x, "first" if x.ndim == 4 else None


def _load_own(path: Path, options: TableOptions = _NO_OPTIONS, channels: str | None = None) -> DataSet:
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {path} (looked in {Path.cwd()}). Check the path.")
    table = is_table(path)
    if options.given and not table:
        given = options.given[0]
        which = "a target column is" if given == "target" else f"{given} is"
        raise ValueError(f"{which} for .csv files, got {given}={getattr(options, given)!r} with {path}. Leave it out.")
    if channels is not None and (table or path.is_dir()):
        raise ValueError(f"channels are for .npz files, got channels={channels!r} with {path}. Leave them out.")
    about: dict[str, Any] = {"name": path.resolve().stem, "task": options.task}
    if table:
        found = load_table(read_own_table(path, _FEWEST_LINES), options)
        about |= {"task": found.task, "sha256": sha256_of_files([path])}
        if options.task is None and found.task == "regression":
            where = f"{path}, column {found.table.target!r}"
            warn_of_whole_targets(np.concatenate([found.raw.y_train, found.raw.y_test]), where, stacklevel=4)
        return _with_table(_build(found.raw, **about), found)
    if path.is_dir():
        raw, files = read_folder(path), [file for split in image_files(path).values() for file in split]
        built = _build(raw, **about, sha256=sha256_of_files(files), channels="first")
        return replace(built, channels=None)  # image files have no such axis
    if path.suffix.lower() == ".npz":
        return _build(read_npz(path), **about, sha256=sha256_of_files([path]), channels=channels)
    raise ValueError(
        f"expected an .npz file, a .csv file or a folder of images, got {path}. Convert it to one, or to .parquet."
    )


def is_table(path: Path) -> bool:
    """Return whether a path is that of a table, by its ending."""
    return path.suffix.lower() in TABLES and not path.is_dir()


def read_own_table(path: Path, fewest: int = 1, names: Collection[str] = ()) -> Table:
    """Read the cells of a `.csv`, `.tsv` or `.parquet` file; the arguments are those of `read_table`."""
    return read_parquet(path) if path.suffix.lower() == ".parquet" else read_table(path, fewest, names)


def _load_frame(frame: Any, options: TableOptions) -> DataSet:
    table = frame_table(frame)
    cells = "\0".join("\0".join((name, *column)) for name, column in zip(table.header, table.columns, strict=True))
    sha256 = hashlib.sha256(cells.encode("utf-8", "replace")).hexdigest()
    found = load_table(table, options)
    return _with_table(_build(found.raw, name="table", sha256=sha256, task=found.task), found)


def _with_table(built: DataSet, found: LoadedTable) -> DataSet:
    train, test = (replace(getattr(built, split), **found.extra[split]) for split in ("train", "test"))
    return replace(built, train=train, test=test, table=found.table, rows=found.rows, notes=found.notes)


def _build(
    raw: Raw,
    *,
    name: str,
    sha256: str,
    task: str | None = None,
    augment: str = "none",
    count: int | None = None,
    channels: str | None = None,
) -> DataSet:
    """Check raw arrays and make a `DataSet` of them.

    If `task` is None, text and whole-number types are labels. `count` is the number of classes, if known beforehand.
    """
    chosen = check_task(task, infer="regression" if raw.y_train.dtype.kind == "f" else "classification")
    if task is None and chosen == "regression":
        check_not_one_hot(raw.y_train, f"{name}: y_train")
        warn_of_whole_targets(raw.y_train, f"{name}: y_train")
    wanted = check_channels(channels, raw.x_train, name)
    axis = channel_axis(raw.x_train, f"{name}: x_train", wanted)
    x_train, x_test = (channels_first(getattr(raw, x), f"{name}: {x}", wanted) for x in ("x_train", "x_test"))
    raw = replace(raw, x_train=x_train, x_test=x_test)
    if chosen == "classification":
        raw = _label(raw, name)
    check(raw, name=name, task=chosen, count=count or len(raw.classes))
    classes = raw.classes if chosen == "classification" else ()
    if chosen == "classification" and not classes:
        classes = tuple(map(str, range(count or int(raw.y_train.max()) + 1)))
    return DataSet(
        name=name,
        task=chosen,
        train=Split(tensor(raw.x_train), _targets(raw.y_train, chosen)),
        test=Split(tensor(raw.x_test), _targets(raw.y_test, chosen)),
        classes=classes,
        sha256=sha256,
        augment=augment,
        channels=axis,
    )


def _targets(y: Array, task: Task) -> torch.Tensor:
    if task == "classification":
        return torch.from_numpy(y.astype(np.int64))
    return torch.from_numpy(y.astype(np.float32).reshape(len(y), -1))


def _label(raw: Raw, name: str) -> Raw:
    """Flatten a column of labels, and number text labels in sorted order."""
    train, test = (y.reshape(-1) if y.ndim == 2 and y.shape[1] == 1 else y for y in (raw.y_train, raw.y_test))
    if train.dtype.kind not in "US":
        return replace(raw, y_train=train, y_test=test)
    train, test = as_text(train, f"{name}: y_train"), as_text(test, f"{name}: y_test")
    classes = np.unique(train)
    unknown = np.setdiff1d(test, classes)
    if len(unknown):
        raise ValueError(
            f"{name}: the test label {str(unknown[0])!r} does not occur in training, where the labels are "
            f"{', '.join(map(str, classes[:10]))}. Give both splits the same labels."
        )
    train, test = np.searchsorted(classes, train), np.searchsorted(classes, test)
    return replace(raw, y_train=train, y_test=test, classes=tuple(map(str, classes)))


def _load_known(source: Source, root: Path, split: int = 0) -> DataSet:
    if source.name == DEMO and split == 0:
        return _embedded(source)
    if split and source.mask is None and (source.origin is not None or source.name == DEMO):
        raise ValueError(f"{source.name} has one split, its own; got split={split}. Leave it at 0.")
    if source.origin is None:
        raw = _digits(split)
        sha256 = sha256_of_arrays([raw.x_train, raw.y_train, raw.x_test, raw.y_test])
    else:
        _check_here(source, root)
        if source.read is not None:
            return source.read(root)
        raw = _masked(source, root, split) if source.mask else _pieces(source, root)
        sha256 = sha256_of_files(root / file for file in source.files)
    about: dict[str, Any] = {"task": source.task, "augment": source.augment, "count": len(source.classes)}
    return _build(raw, name=source.name, sha256=sha256, **about)


def _known_test_inputs(source: Source, root: Path) -> Array:
    if source.read is not None:
        raise ValueError(
            f"{source.name} has tokens, neither images nor features. Pick another out-of-distribution set."
        )
    if source.name == DEMO:
        return _embedded(source).test.x.numpy()
    if source.origin is None:
        return _digits(0).x_test
    if source.mask is not None:
        return _masked(source, root, 0).x_test
    pieces = source.test if _here(root, source.test) or not _here(root, source.test_only) else source.test_only
    if not _here(root, pieces):
        raise _missing(source, root, [piece.file for piece in pieces])
    return _join(root, [(piece.file, piece.x) for piece in pieces])


def _where(source: Source, root: Path) -> str:
    if source.origin is None:
        return "built in"
    if _here(root, (*source.train, *source.test)):
        return f"cached at {root}"
    return f"cached at {root} (as an out-of-distribution set only)" if _here(root, source.test_only) else "not here"


def _missing(source: Source, root: Path, files: list[str]) -> FileNotFoundError:
    """Return the error that names the missing files, their place, and the command that makes them."""
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
            f"{source.name} has a test split only, so no network can learn from it. Use it as an out-of-distribution "
            f"set (--ood {source.name}), and another set as data."
        )
    if _here(root, (*source.train, *source.test)):
        return
    error = _missing(source, root, source.files)
    if _here(root, source.test_only):
        only = f"The file {source.test_only[0].file} in that folder is an out-of-distribution set only."
        raise FileNotFoundError(f"{error} {only}")
    raise error


def _pieces(source: Source, root: Path) -> Raw:
    classes = source.classes
    if source.names is not None:
        file, array = source.names
        classes = tuple(map(str, read_cached(root / file, array)))
    return Raw(
        x_train=_join(root, [(piece.file, piece.x) for piece in source.train]),
        y_train=_join(root, [(piece.file, piece.y) for piece in source.train]),
        x_test=_join(root, [(piece.file, piece.x) for piece in source.test]),
        y_test=_join(root, [(piece.file, piece.y) for piece in source.test]),
        classes=classes,
    )


def _join(root: Path, arrays: list[tuple[str, str]]) -> Array:
    """Read arrays in threads (decompression releases the interpreter lock) and concatenate them."""
    with ThreadPoolExecutor() as pool:
        parts = list(pool.map(lambda array: read_cached(root / array[0], array[1]), arrays))
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _masked(source: Source, root: Path, split: int) -> Raw:
    """Read the rows and split them by the mask of that number."""
    (piece,) = source.test
    path = root / piece.file
    if not path.is_file():
        raise _missing(source, root, source.files)
    x, y, masks = (read_cached(path, name) for name in (piece.x, piece.y, str(source.mask)))
    if not 0 <= split < len(masks):
        raise ValueError(f"{source.name} has the splits 0 to {len(masks) - 1}, got {split}. Pick one of them.")
    test = masks[split]
    return Raw(x[~test], y[~test], x[test], y[test])


def _embedded(source: Source) -> DataSet:
    """Read the embedded images: two splits of the known classes, and images of the others as "left-out"."""
    with np.load(Path(__file__).parent / "embedded" / "fashion.npz", allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    left_out = torch.from_numpy(arrays.pop("x_left_out"))[:, None]
    raw = Raw(**{name: array.astype(np.int64) if name[0] == "y" else array for name, array in arrays.items()})
    sha256 = sha256_of_arrays([raw.x_train, raw.y_train, raw.x_test, raw.y_test])
    built = _build(raw, name=source.name, sha256=sha256, task=source.task, count=len(source.classes))
    further = {"left-out": Split(left_out, torch.full((len(left_out),), -1, device="cpu"))}
    return replace(built, classes=source.classes, further=further)


def _digits(split: int) -> Raw:
    """Shuffle scikit-learn's digits with `split` as the seed; the grey levels 0 to 16 become 0 to 255."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    bunch = load_digits()
    images = np.round(bunch.images * (255 / 16)).astype(np.uint8)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(split), device="cpu").numpy()
    train, test = order[:_DIGITS_TRAIN], order[_DIGITS_TRAIN:]
    return Raw(images[train], bunch.target[train], images[test], bunch.target[test], tuple("0123456789"))
