"""Predictions of a trained run for new rows: find the rows, score them, and write a table for a spreadsheet.

`OUT/predictions.csv` has a line for every row: of classes row, predicted, probability, total, aleatoric, epistemic; of
real targets row, mean, std, total, aleatoric, epistemic, in their own units.
"""

from __future__ import annotations

import csv
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor

from leanbayes import data, metrics
from leanbayes.compare.batch_predict import FIELDS, opened, read_scores, Rows, score
from leanbayes.compare.load_run import LoadedRun, Preparation
from leanbayes.data.files.csv import read_features
from leanbayes.runtime._files import local, remove_leftovers, write_whole

TABLE = "predictions.csv"
TABLES = (".csv", ".tsv")
GLANCE = 0.5
"""Seconds between two looks at the folder."""
EVERY = 15.0
"""Seconds between two lines about the progress, where nobody watches a terminal."""


@dataclass(frozen=True)
class Asked:
    """Rows to predict.

    Attributes:
        name: what to call them.
        x: the rows, raw: a .npy or .npz file, an array, or a tensor.
        y: their targets, where they are known and mean what they meant in training.
    """

    name: str
    x: Rows
    y: Tensor | None = None


def find_rows(given: str, run: LoadedRun, root: str | None = None) -> Asked:
    """Return the rows that a name means.

    Args:
        given: a .npy, .npz or .csv file with rows, a data set that `lb.data.load` knows, of which the test rows are
            taken, or nothing for the test rows of the run.
        run: the network that will predict.
        root: folder of the known data sets.

    Raises:
        ValueError: in one sentence, if they are not what the network was trained on.
    """
    asked = _find(given, run, root)
    rows = opened(asked.x)
    if len(rows):
        Preparation.of(run.data)(torch.as_tensor(np.array(rows[:1])))  # what does not fit should come out now
    return asked


def predict_rows(run: LoadedRun, asked: Asked, out: Path, *, part_rows: int, fresh: bool, **how: Any) -> list[Path]:
    """Score rows into `out`, show the progress, and write the table.

    Args:
        run: the network.
        asked: the rows.
        out: folder of the parts and of predictions.csv.
        part_rows: rows of a part.
        fresh: begin anew.
        how: samples, seed, workers and backend, as for `score`.

    Returns:
        The files of the parts.
    """
    rows = len(opened(asked.x))
    own: dict[str, Any] = {"inputs": Preparation.of(run.data), "likelihood": run.likelihood, "units": run.units}
    there = 0 if fresh else _present(out)
    with progress(out, rows, part_rows, there):
        parts = score(run.model, asked.x, out, part_rows=part_rows, fresh=fresh, **own, **how)
    write_table(parts, out / TABLE, run.data.classes)
    return parts


def judged(out: Path, y: Tensor, task: str) -> str:
    """Return how good predictions in a folder are, in a few words."""
    found = {name: torch.from_numpy(values) for name, values in read_scores(out).items()}
    if task == "classification":
        right, nll = metrics.accuracy(found["mean"], y), metrics.nll(found["mean"], y)
        return f"accuracy {100 * right:.2f} %, NLL {nll:.4f}"
    variance = found["total"]
    nll = 0.5 * ((y - found["mean"]).square() / variance + (2 * torch.pi * variance).log()).sum(1).mean()
    return f"RMSE {metrics.rmse(found['mean'], y):.4g}, NLL {nll:.4f} of a Normal with these means and deviations"


def write_table(parts: Sequence[Path], path: Path, classes: Sequence[str]) -> None:
    """Write a line for every row, part by part; `classes` names the classes and is empty for real targets."""

    def write(temporary: Path) -> None:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            _write(file, parts, classes)

    remove_leftovers(path)
    write_whole(path, write)


def _find(given: str, run: LoadedRun, root: str | None) -> Asked:
    path = local(given).expanduser()
    if not given or _same(given, run.source.name):
        return Asked(f"the test rows of {run.data.name}", run.data.test.x, run.data.test.y)
    if path.suffix in (".npy", ".npz"):
        return Asked(path.name, path)
    if path.suffix.lower() in TABLES:
        trained_on = Path(run.source.name).expanduser()
        like = trained_on if trained_on.suffix.lower() in TABLES else None
        return Asked(path.name, read_features(path, like, run.source.target))
    other = data.load(given, root or run.source.root)
    alike = other.task == "classification" and other.classes == run.data.classes
    return Asked(f"the test rows of {other.name}", other.test.x, other.test.y if alike else None)


def _same(given: str, name: str) -> bool:
    here, there = Path(given).expanduser(), Path(name).expanduser()
    return given == name or (here.exists() and there.exists() and here.samefile(there))


def _write(file: TextIO, parts: Sequence[Path], classes: Sequence[str]) -> None:
    writer = csv.writer(file)
    row = 0
    for number, part in enumerate(parts):
        with np.load(part, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in FIELDS}
        columns = _of_classes(found, classes) if classes else _of_targets(found)
        if number == 0:
            writer.writerow(["row", *columns])
        for cells in zip(*columns.values(), strict=True):
            writer.writerow([row, *cells])
            row += 1


def _of_classes(found: dict[str, Any], classes: Sequence[str]) -> dict[str, list[str]]:
    best = found["mean"].argmax(1)
    columns = {"predicted": [classes[k] for k in best], "probability": _short(found["mean"].max(1))}
    return columns | {name: _short(found[name]) for name in FIELDS[1:]}


def _of_targets(found: dict[str, Any]) -> dict[str, list[str]]:
    """Return the columns of real targets, which have a number where there are several."""
    values = {"mean": found["mean"], "std": np.sqrt(found["total"]), **{name: found[name] for name in FIELDS[1:]}}
    targets = found["mean"].shape[1]
    return {
        name if targets == 1 else f"{name}_{k + 1}": _short(values[name][:, k])
        for k in range(targets)
        for name in values
    }


def _short(values: Any) -> list[str]:
    return [f"{value:.6g}" for value in values.tolist()]


@contextmanager
def progress(out: Path, rows: int, part_rows: int, there: int) -> Iterator[None]:
    """Show how many rows are done and the time left, while others fill the folder.

    The files are counted, for these are what all backends have in common: parts may be written by this process, by
    others, or by other machines.
    """
    stop = threading.Event()
    shown = _bar(rows, there * part_rows) if sys.stderr.isatty() else _lines(rows, there * part_rows)

    def watch() -> None:
        while not stop.wait(GLANCE):
            shown.send(min(rows, _present(out) * part_rows))

    next(shown)
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        shown.close()


def _present(out: Path) -> int:
    return sum(1 for _ in out.glob("part-*.npz"))


def _bar(rows: int, before: int) -> Any:
    """Draw a bar; takes the number of rows that are done."""
    from rich import progress as rich
    from rich.console import Console

    columns = (rich.BarColumn(), rich.MofNCompleteColumn(), rich.TextColumn("rows"), rich.TimeRemainingColumn())
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=rows, completed=before)
        while True:
            done = yield
            bar.update(task, completed=done)


def _lines(rows: int, before: int) -> Any:
    """Write a line now and then; takes the number of rows that are done."""
    began = said = time.monotonic()
    while True:
        done = yield
        now = time.monotonic()
        if now - said >= EVERY and done > before:
            minutes, seconds = divmod(round((now - began) * (rows - done) / (done - before)), 60)
            sys.stderr.write(f"{done:,} of {rows:,} rows, {minutes}:{seconds:02d} minutes left\n")
            sys.stderr.flush()
            said = now
