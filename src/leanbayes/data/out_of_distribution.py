"""Other rows in the shape of a data set: out-of-distribution inputs (`ood`), shifted rows with targets (`shifted`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.data.checks import check_inputs, check_targets
from leanbayes.data.dataset import Array, Channels, DataSet, Split
from leanbayes.data.files.csv import read_features
from leanbayes.data.files.folder import find_images, image_files, ImageFiles
from leanbayes.data.files.npz import array_names, as_text, channel_axis_like, channels_first, read_array, tensor
from leanbayes.data.loading import is_table, load, read_own_table, read_test_inputs, resolve

# N rows, C channels, H height, W width, d columns, D targets

MADE_UP = ("noise", "shuffled", "inverted")
_LUMA = (0.299, 0.587, 0.114)  # weights of red, green and blue in grey, ITU-R BT.601
_CHUNK = 1024
_CHOICE = f"one of {', '.join(MADE_UP)}"
_SAME = "Pick a table with as many columns."
_PAIRS = (("x_test", "y_test"), ("x", "y"))  # arrays of an .npz file with rows and their targets


def ood(name: str, like: DataSet, root: str | Path | None = None) -> Tensor:
    """Return raw inputs of another set in the shape of `like`.

    Images become uint8 with the channels and size of `like`: grey is repeated, colour becomes luma, sizes are changed
    bilinearly with antialiasing. Features must agree in number; if `like` is a table with text or gaps, all rows of
    another table are prepared as its rows were. Three sets are made from `like` with a fixed seed:

    - "noise": uniform pixels; features uniform over the range of each column;
    - "shuffled": the pixels of each test image in random order; each column shuffled over the test rows;
    - "inverted": dark and light, or low and high, exchanged.

    A further split of `like` is taken by its name ("left-out" of fashion-demo). Else `name` is a known set, or the path
    of the user's own, which may be any folder of images; `root` is the cache, as in ``load``.
    """
    if like.kind not in ("image", "table"):
        raise ValueError(
            f"{like.name} is a {like.kind} of tokens; out-of-distribution inputs are for images and features. Leave "
            "them out (--ood none)."
        )
    if name in MADE_UP:
        return _made_up(name, like)
    if name in like.further:
        return like.further[name].x
    known = resolve(name)
    own = isinstance(known, Path)
    if isinstance(known, Path) and is_table(known) and like.table is not None and not like.table.plain:
        return tensor(like.table.read(read_own_table(known, names=like.table.header))[0])
    if isinstance(known, Path) and known.is_dir() and like.kind == "image" and not (known / "train").is_dir():
        return _in_form_of(like, find_images(str(known)) or [])
    raw, channels = read_test_inputs(name, root)
    channels = channels or channel_axis_like(raw.shape[1:], like.input_shape, like.channels if own else None)
    return _like(raw, like, f"{name}: x_test", channels, f"Pick a table with as many columns, or {_CHOICE}.")


@dataclass(frozen=True, eq=False)
class ShiftedRows:
    """Raw rows with targets, numbered and in units as those of another data set, and notes on columns and cells."""

    rows: Split
    notes: tuple[str, ...] = ()


def shifted(name: str, like: DataSet, root: str | Path | None = None) -> ShiftedRows:
    """Return rows with targets of another origin in the shape of `like`, to measure robustness to a shift.

    `name` is one of these:

    - a table (.csv, .tsv, .parquet): all its rows that have a target, prepared as the rows of `like` were. If `like` is
      no table of the user's own, the columns are numbers: the features, then the targets;
    - an `.npz` file with x_test and y_test, or with x and y;
    - a folder of images, test/CLASS/ or CLASS/;
    - a known set, or a further split of `like`: its test rows.

    Images are brought to the size and the colours of `like`.

    Raises:
        ValueError: A column or the target is missing, or there are other classes.
    """
    if name in like.further:
        split = like.further[name]
        return ShiftedRows(Split(split.x, _targets(split.y.numpy(), like, f"{name}: y")))
    known = resolve(name)
    if isinstance(known, Path):
        return _own_rows(known, like)
    other = load(name, root)
    if other.task != like.task:
        raise ValueError(f"{other.name} is for {other.task}, {like.name} for {like.task}. Pick a set of the same task.")
    labels = np.array(other.classes)[other.test.y.numpy()] if other.classes else other.test.y.numpy()
    x = other.test.x if like.kind in ("series", "text") else _like(other.test.x.numpy(), like, other.name, "first")
    return ShiftedRows(Split(x, _targets(labels, like, f"{other.name}: y_test")))


def _own_rows(path: Path, like: DataSet) -> ShiftedRows:
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {path} (looked in {Path.cwd()}). Check the path.")
    if is_table(path):
        return _rows_of_table(path, like)
    if like.table is not None:
        raise ValueError(
            f"expected a table such as .csv for rows like those of {like.name}, got {path}. Save it as one."
        )
    if path.is_dir():
        x, labels = _images_of_folder(path, like)
        return ShiftedRows(Split(x, _targets(labels, like, str(path))))
    if path.suffix.lower() == ".npz":
        return _rows_of_arrays(path, like)
    raise ValueError(f"expected a table, an .npz file or a folder of images, got {path}. Convert it to one.")


def _rows_of_arrays(path: Path, like: DataSet) -> ShiftedRows:
    there = array_names(path)
    pair = next((pair for pair in _PAIRS if set(pair) <= set(there)), None)
    if pair is None:
        raise ValueError(
            f"{path} has the arrays {', '.join(there) or 'none'}; expected x_test and y_test, rows with their targets. "
            "Save them with numpy.savez."
        )
    raw, y = (read_array(path, each) for each in pair)
    if like.kind in ("series", "text"):
        if raw.dtype.kind not in "ui" or raw.shape[1:] != like.input_shape:
            raise ValueError(f"{path}: {pair[0]} has {raw.dtype} of {raw.shape}; expected tokens as {like.name} has.")
        x = torch.from_numpy(raw.astype(np.int64))
    else:
        x = _like(raw, like, f"{path}: {pair[0]}", channel_axis_like(raw.shape[1:], like.input_shape, like.channels))
    targets = _targets(y, like, f"{path}: {pair[1]}")
    if len(x) != len(targets):
        raise ValueError(
            f"{path}: {pair[0]} and {pair[1]} differ in length, {len(x)} and {len(targets)}. Give every row one target."
        )
    return ShiftedRows(Split(x, targets))


def _rows_of_table(path: Path, like: DataSet) -> ShiftedRows:
    if like.kind != "table":
        raise ValueError(f"{path} is a table, {like.name} has {like.kind} rows. Pick rows of the same kind.")
    if like.table is not None:
        cells = read_own_table(path, names=like.table.header)
        y, there, own = like.table.known_targets(cells, like.classes)
        rows, notes = like.table.read(cells)
        return ShiftedRows(Split(tensor(rows[there]), torch.from_numpy(y).to(like.test.y.dtype)), (*notes, *own))
    values, (columns,) = read_features(path), like.input_shape
    targets = 1 if like.task == "classification" else like.num_outputs
    if values.shape[1] != columns + targets:
        raise ValueError(
            f"{path} has {values.shape[1]} columns; expected {columns} features and {targets} more with the target, as "
            f"{like.name} has. Add or drop columns."
        )
    x = _like(values[:, :columns], like, str(path))
    return ShiftedRows(Split(x, _targets(values[:, columns:], like, f"{path}, the last column")))


def _images_of_folder(path: Path, like: DataSet) -> tuple[Tensor, Array]:
    images = image_files(path)["test"] if (path / "train").is_dir() else None
    images = images or find_images(str(path / "test" if (path / "test").is_dir() else path)) or []
    if {path, path / "test"} & {image.parent for image in images}:
        raise ValueError(
            f"expected images in one folder a class, {path}/CLASS/, got images without a class. Sort them."
        )
    return _in_form_of(like, images), np.array([image.parent.name for image in images])


def _in_form_of(like: DataSet, images: list[Path]) -> Tensor:
    """Return the pixels of image files in the size, the colours and the depth of a data set."""
    rows = ImageFiles.like(images, like.input_shape, deep=like.train.x.is_floating_point())
    return tensor(rows[: len(rows)])


def _targets(y: Array, like: DataSet, where: str) -> Tensor:
    """Return class numbers, or real targets (N, D), of the kind that `like` has."""
    if y.ndim == 2 and y.shape[1] == 1 and like.task == "classification":
        y = y[:, 0]
    if y.dtype.kind in "US" and like.task == "classification":
        names = as_text(y, where)
        number = {name: k for k, name in enumerate(like.classes)}
        if unknown := sorted(set(names.tolist()) - set(number)):
            raise _other_class(where, unknown[0], like)
        return torch.tensor([number[name] for name in names.tolist()], device="cpu")
    check_targets(y, where, like.task)
    if like.task == "classification":
        if (outside := (y < 0) | (y >= len(like.classes))).any():
            raise _other_class(where, str(int(y[np.argmax(outside)])), like)
        return torch.from_numpy(y.astype(np.int64))
    y = y.reshape(len(y), -1)
    if y.shape[1] != like.num_outputs:
        raise ValueError(
            f"{where} has {y.shape[1]} targets a row, {like.name} has {like.num_outputs}. Give the same targets."
        )
    return torch.from_numpy(y.astype(np.float32))


def _other_class(where: str, name: str, like: DataSet) -> ValueError:
    known = ", ".join(like.classes[:10])
    return ValueError(f"{where} has the class {name!r}; expected those of {like.name}: {known}. Drop these rows.")


def _like(raw: Array, like: DataSet, where: str, channels: Channels | None = None, remedy: str = _SAME) -> Tensor:
    """Return checked rows in the shape of `like`: images are converted, features must agree in number."""
    ask = "Save them as (rows, channels, height, width) of one size."
    raw = channels_first(raw, where, channels, ask)
    check_inputs(raw, where)
    x = tensor(raw)
    if like.kind == "image":
        return _like_images(x, like, where)
    if tuple(x.shape[1:]) != like.input_shape:
        raise ValueError(f"{where} has rows of shape {tuple(x.shape[1:])}, {like.name} of {like.input_shape}. {remedy}")
    return x


def _like_images(x: Tensor, like: DataSet, name: str) -> Tensor:
    if x.dim() != 4:
        raise ValueError(f"{name} has features, {like.name} images. Pick a set of images.")
    channels, *size = like.input_shape
    if x.shape[1] != channels and {x.shape[1], channels} != {1, 3}:
        raise ValueError(
            f"{name} has images of {x.shape[1]} channels, {like.name} of {channels}; only grey and colour turn into "
            "each other. Pick a set with as many channels."
        )
    return torch.cat([_fit(chunk, channels, size) for chunk in torch.split(x, _CHUNK)])


def _fit(x: Tensor, channels: int, size: list[int]) -> Tensor:
    """Convert a chunk of images in float, to round only once."""
    pixels = x.float() * (1.0 if x.dtype == torch.uint8 else 255.0)
    if channels < x.shape[1]:
        pixels = torch.einsum("nchw,c->nhw", pixels, pixels.new_tensor(_LUMA))[:, None]
    if list(x.shape[2:]) != size:
        pixels = F.interpolate(pixels, size=size, mode="bilinear", antialias=True, align_corners=False)
    return pixels.round().clamp(0, 255).to(torch.uint8).expand(-1, channels, -1, -1).contiguous()


def _made_up(name: str, like: DataSet) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = like.test.x if like.kind == "table" or like.test.x.dtype == torch.uint8 else (like.test.x * 255).round().byte()
    if like.kind == "image":
        return _made_up_images(name, x, generator)
    low, high = like.train.x.amin(0), like.train.x.amax(0)
    if name == "noise":
        return low + (high - low) * torch.rand(
            x.shape, generator=generator, dtype=torch.float32, device=generator.device
        )
    if name == "shuffled":
        return x.gather(
            0, torch.rand(x.shape, generator=generator, dtype=torch.float32, device=generator.device).argsort(0)
        )
    return low + high - x


def _made_up_images(name: str, x: Tensor, generator: torch.Generator) -> Tensor:
    if name == "noise":
        return torch.randint(256, x.shape, generator=generator, dtype=torch.uint8, device=generator.device)
    if name == "shuffled":
        flat = x.flatten(2)
        order = torch.rand(
            (len(flat), 1, flat.shape[2]), generator=generator, dtype=torch.float32, device=generator.device
        ).argsort(2)
        return flat.gather(2, order.expand_as(flat)).view(x.shape)
    return 255 - x
