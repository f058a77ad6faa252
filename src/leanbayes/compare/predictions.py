"""Predictions of a trained run for new rows: find the rows, predict them, write a table for a spreadsheet.

`OUT/predictions.csv` has one line per row. Columns for classes: row, predicted, probability, total, aleatoric,
epistemic, and p(CLASS) for every class. Columns for real targets: row, mean, std, lower, upper, aleatoric_std and
epistemic_std in the units of the target, and the variances total, aleatoric, epistemic. Image files have the column
file after row.
"""

from __future__ import annotations

import csv
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor

from leanbayes import data, metrics
from leanbayes.compare.batch_predict import FIELDS, open_rows, read_scores, Rows, score
from leanbayes.compare.load_run import LoadedRun, Preparation
from leanbayes.data.files.csv import read_features
from leanbayes.data.files.folder import find_images, ImageFiles
from leanbayes.data.loading import read_own_table, TABLES
from leanbayes.runtime._files import local, remove_leftovers, write_whole
from leanbayes.training.progress import display

TABLE = "predictions.csv"
WIDE = 1.959964  # standard deviations from the mean to the ends of the interval that holds 95 % of a Normal
POLL = 0.5  # seconds between two counts of the finished parts


@dataclass(frozen=True)
class Request:
    """Rows to predict.

    Attributes:
        name: description of the rows.
        x: the raw rows: a .npy or .npz file, an array, or a tensor.
        y: their targets, if known and of the same kind as in training.
        files: names of image files, one a row.
        notes: sentences on columns and cells.
    """

    name: str
    x: Rows
    y: Tensor | None = None
    files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def find_rows(given: str, run: LoadedRun, root: str | None = None) -> Request:
    """Return the rows of a file or data set.

    Args:
        given: a .npy, .npz, .csv or .parquet file with rows; an image file, a folder of images, or a pattern such as
            "new/*.png"; a data set of `lb.data.load`, for its test rows; "" for the test rows of the run.
        run: the network that will predict.
        root: folder of the known data sets.

    Raises:
        ValueError: in one sentence, if the rows do not fit the training data.
    """
    request = _find(given, run, root)
    rows = open_rows(request.x)
    if len(rows):
        Preparation.of(run.data)(torch.as_tensor(np.array(rows[:1])))  # raises now if the rows do not fit
    return request


def predict_rows(run: LoadedRun, request: Request, out: Path, *, part_rows: int, fresh: bool, **how: Any) -> list[Path]:
    """Predict rows into `out`, show the progress, and write the table.

    Args:
        run: the network.
        request: the rows.
        out: folder of the parts and of predictions.csv.
        part_rows: rows per part.
        fresh: start again.
        how: samples, seed, workers and backend, as for `score`.

    Returns:
        The files of the parts.
    """
    rows = len(open_rows(request.x))
    own: dict[str, Any] = {"inputs": Preparation.of(run.data), "likelihood": run.likelihood, "units": run.units}
    before = 0 if fresh else _count_parts(out)
    with progress(out, rows, part_rows, before):
        parts = score(run.model, request.x, out, part_rows=part_rows, fresh=fresh, **own, **how)
    write_table(parts, out / TABLE, run.data.classes, request.files)
    return parts


def describe_scores(out: Path, y: Tensor, task: str) -> str:
    """Return the scores of the predictions in a folder, in a few words."""
    found = {name: torch.from_numpy(values) for name, values in read_scores(out).items()}
    if task == "classification":
        right, nll = metrics.accuracy(found["mean"], y), metrics.nll(found["mean"], y)
        return f"accuracy {100 * right:.2f} %, NLL {nll:.4f}"
    variance = found["total"]
    nll = 0.5 * ((y - found["mean"]).square() / variance + (2 * torch.pi * variance).log()).sum(1).mean()
    return f"RMSE {metrics.rmse(found['mean'], y):.4g}, NLL {nll:.4f} of a Normal with these means and deviations"


def write_table(parts: Sequence[Path], path: Path, classes: Sequence[str], files: Sequence[str] = ()) -> None:
    """Write one line per row; `classes` is empty for real targets, `files` names image files."""

    def write(temporary: Path) -> None:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            _write(file, parts, classes, files)

    remove_leftovers(path)
    write_whole(path, write)


def _find(given: str, run: LoadedRun, root: str | None) -> Request:
    path = local(given).expanduser()
    if not given or _same(given, run.source.name):
        return Request(f"the test rows of {run.data.name}", run.data.test.x, run.data.test.y)
    if path.suffix in (".npy", ".npz"):
        return Request(path.name, path)
    if path.suffix.lower() in TABLES:
        table = run.data.table
        if table is None:
            return Request(path.name, read_features(path))
        cells = read_own_table(path, names=table.header)
        x, notes = table.read(cells)
        y = table.targets(cells, run.data.classes)
        like = run.data.test.y
        return Request(path.name, x, None if y is None else torch.from_numpy(y).to(like), notes=tuple(notes))
    if images := find_images(given):
        deep = run.data.train.x.is_floating_point()
        rows = ImageFiles.like(images, run.data.input_shape, deep=deep)
        count = "1 image" if len(images) == 1 else f"{len(images)} images"
        where = str(images[0].parent) if "\n" in given else given
        return Request(f"{count} of {where}", rows, files=tuple(map(str, images)))
    other = data.load(given, root or run.source.root)
    alike = other.task == "classification" and other.classes == run.data.classes
    return Request(f"the test rows of {other.name}", other.test.x, other.test.y if alike else None)


def _same(given: str, name: str) -> bool:
    here, there = Path(given).expanduser(), Path(name).expanduser()
    return given == name or (here.exists() and there.exists() and here.samefile(there))


def _write(file: TextIO, parts: Sequence[Path], classes: Sequence[str], files: Sequence[str]) -> None:
    writer = csv.writer(file)
    row = 0
    for number, part in enumerate(parts):
        with np.load(part, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in FIELDS}
        columns = _class_columns(found, classes) if classes else _target_columns(found)
        if number == 0:
            writer.writerow(["row", *(["file"] if files else []), *columns])
        for cells in zip(*columns.values(), strict=True):
            writer.writerow([row, *files[row : row + 1], *cells])
            row += 1


def _class_columns(found: dict[str, Any], classes: Sequence[str]) -> dict[str, list[str]]:
    best = found["mean"].argmax(1)
    columns = {"predicted": [classes[k] for k in best], "probability": _format(found["mean"].max(1))}
    columns |= {name: _format(found[name]) for name in FIELDS[1:]}
    return columns | {f"p({name})": _format(found["mean"][:, k]) for k, name in enumerate(classes)}


def _target_columns(found: dict[str, Any]) -> dict[str, list[str]]:
    """Return the columns of real targets; several targets are numbered."""
    std = np.sqrt(found["total"])
    values = {"mean": found["mean"], "std": std}
    values |= {"lower": found["mean"] - WIDE * std, "upper": found["mean"] + WIDE * std}
    values |= {f"{name}_std": np.sqrt(found[name]) for name in ("aleatoric", "epistemic")}
    values |= {name: found[name] for name in FIELDS[1:]}
    targets = found["mean"].shape[1]
    return {
        name if targets == 1 else f"{name}_{k + 1}": _format(values[name][:, k])
        for k in range(targets)
        for name in values
    }


def _format(values: Any) -> list[str]:
    return [f"{value:.6g}" for value in values.tolist()]


@contextmanager
def progress(out: Path, rows: int, part_rows: int, before: int) -> Iterator[None]:
    """Show the number of finished rows and the time left, by counting files: all backends write them."""
    stop = threading.Event()

    def watch() -> None:
        last = before
        while not stop.wait(POLL):
            if (parts := _count_parts(out)) > last:
                last = parts
                shown.epoch(min(rows, parts * part_rows), {})

    with display(rows, shown=True, unit="row") as shown:
        shown.begin(before * part_rows)
        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def _count_parts(out: Path) -> int:
    return sum(1 for _ in out.glob("part-*.npz"))
