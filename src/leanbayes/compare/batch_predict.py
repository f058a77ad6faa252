"""Predict many rows, part by part, into files: on one process, several, or Ray.

`score` predicts rows with any model. `OUT/part-00000.npz`, ... hold mean, total, aleatoric and epistemic of consecutive
rows. `OUT/scores.json` holds their settings. Draw i of a seed is the same network in every process, so the numbers
equal those of one `lb.predict`.

`predict_rows` predicts with a run of a comparison and adds `OUT/predictions.csv`, one line per row. Columns for
classes: row, predicted, probability, total, aleatoric, epistemic, and p(CLASS) for every class. Columns for real
targets: row, mean, std, lower, upper, aleatoric_std and epistemic_std in the units of the target, and the variances
total, aleatoric, epistemic. Image files have the column file after row.
"""

from __future__ import annotations

import copy
import csv
import hashlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import nn, Tensor

from leanbayes import data as known_data
from leanbayes import metrics
from leanbayes.compare.load_run import LoadedRun, Preparation
from leanbayes.compare.workers import Backend, on_processes, on_ray, split_items, tasks_on_ray
from leanbayes.core.checkpoint import load
from leanbayes.core.conversion import own_likelihood, unwrap
from leanbayes.core.predictor import predict
from leanbayes.data.files.csv import read_features
from leanbayes.data.files.folder import find_images, ImageFiles
from leanbayes.data.files.npz import array_names, read_array
from leanbayes.data.loading import read_own_table, TABLES
from leanbayes.distributions.likelihoods import Categorical, Likelihood
from leanbayes.evaluation.evaluate import in_units, Units
from leanbayes.evaluation.result import difference, read_json, write_json
from leanbayes.recalibrate import Temperature
from leanbayes.runtime._files import local, PathLike, remove_leftovers, write_whole
from leanbayes.runtime.noise import Design, INDEPENDENT
from leanbayes.training.progress import display

SETTINGS_FILE = "scores.json"
FIELDS = ("mean", "total", "aleatoric", "epistemic")
TABLE = "predictions.csv"
WIDE = 1.959964  # standard deviations from the mean to the ends of the interval that holds 95 % of a Normal
POLL = 0.5  # seconds between two counts of the finished parts
Rows = Any
"""A .npy or .npz file, image files, a tensor or array, or a data set with a length, of inputs or (inputs, ...)."""


@dataclass(frozen=True)
class Work:
    """The arguments of all parts."""

    model: nn.Module
    device: str
    data: Rows
    inputs: Callable[[Tensor], Tensor] | None
    likelihood: Likelihood
    units: Units | None
    samples: int
    seed: int
    design: Design
    temperature: float | None


@dataclass(frozen=True)
class Part:
    """Rows from `start` to `stop`, and the file of their predictions."""

    path: Path
    start: int
    stop: int


def score(  # noqa: PLR0913  # keywords, most of them those of predict
    model: nn.Module | PathLike,
    data: Rows,
    out: PathLike,
    *,
    net: nn.Module | None = None,
    inputs: Callable[[Tensor], Tensor] | None = None,
    likelihood: Likelihood | None = None,
    units: Units | None = None,
    samples: int = 16,
    seed: int = 0,
    design: Design = INDEPENDENT,
    temperature: float | None = None,
    part_rows: int = 4096,
    workers: int | None = None,
    backend: Backend = "auto",
    fresh: bool = False,
) -> list[Path]:
    """Predict all rows, part by part, and return the files in order; `read_scores` joins them.

    Existing parts are kept: after an interrupt, the same call resumes. A script with several workers needs
    `if __name__ == "__main__":`.

    Args:
        model: a model, or a file that `lb.save` wrote.
        data: network inputs: a .npy file (read piece by piece), a .npz file with one array or one named x or x_test, a
            tensor or array, or a torch data set.
        out: a folder. On a Ray cluster, all machines must share it, and the files of rows.
        net: for a file, a network of the converted architecture.
        inputs: turns raw rows into network inputs, such as `lb.data.load(...).inputs`.
        likelihood: how to read outputs; default the model's own, else `Categorical`.
        units: mean and standard deviation that standardised real targets; the files are then in the targets' own units.
        samples: number of draws.
        seed: of the draws.
        design: of the draws, as in `lb.predict`.
        temperature: of the mean prediction, from held-out rows (`lb.recalibrate.Temperature.of`); default none.
        part_rows: rows per file.
        workers: processes, each with one thread; default this one, on a Ray cluster as many as it has resources for.
        backend: "local" processes, "ray", or "auto". "auto" uses Ray if it is installed and there are several workers
            or the variable RAY_ADDRESS names a cluster.
        fresh: delete existing parts and start again.

    Raises:
        ValueError: if the folder holds predictions with other settings.
        RuntimeError: if a worker died.

    Example:
        >>> score("run/model.safetensors", "rows.npy", "scores", net=net, workers=4)
        >>> read_scores("scores")["epistemic"]
    """
    for name, number in {"part_rows": part_rows, "samples": samples}.items():
        if number < 1:
            raise ValueError(f"expected {name} to be at least 1, got {number}")
    folder = local(out)
    use_ray = on_ray(backend, workers)
    if isinstance(model, nn.Module):
        whole = unwrap(model)
    elif net is None:
        raise ValueError(f"expected net= with a file: the network whose conversion '{model}' holds")
    else:
        whole = load(model, net)
    data = local(data) if isinstance(data, (str, Path)) else data
    rows = len(open_rows(data))
    if not rows:
        raise ValueError("expected at least one row to predict, got none")
    copied = copy.deepcopy(whole).cpu()
    work = Work(
        model=copied,
        device=str(next((p.device for p in whole.parameters()), "cpu")),
        data=data,
        inputs=inputs,
        likelihood=copy.deepcopy(likelihood).cpu() if likelihood else own_likelihood(copied) or Categorical(),
        units=units,
        samples=samples,
        seed=seed,
        design=design,
        temperature=temperature,
    )
    _reserve_folder(folder, _settings(work, rows, part_rows), fresh=fresh)
    starts = range(0, rows, part_rows)
    parts = [Part(folder / f"part-{i:05d}.npz", s, min(rows, s + part_rows)) for i, s in enumerate(starts)]
    _predict_parts(work, [part for part in parts if not part.path.is_file()], use_ray=use_ray, workers=workers)
    if missing := [part.path.name for part in parts if not part.path.is_file()]:
        raise RuntimeError(
            f"{len(missing)} of {len(parts)} parts are missing in '{folder}', the first is {missing[0]}: a worker "
            "failed or was stopped, see above; the same call resumes"
        )
    return [part.path for part in parts]


def read_scores(out: PathLike) -> dict[str, np.ndarray[Any, Any]]:
    """Return mean, total, aleatoric and epistemic of all rows in `out`, a folder that `score` filled."""
    folder = local(out)
    if not (folder / SETTINGS_FILE).is_file():
        raise ValueError(f"expected a folder that score filled, got '{out}', which has no {SETTINGS_FILE}")
    settings = _read_settings(folder / SETTINGS_FILE)
    count = -(-settings["rows"] // settings["part_rows"])
    paths = [folder / f"part-{i:05d}.npz" for i in range(count)]
    if missing := sum(not path.is_file() for path in paths):
        raise ValueError(f"{missing} of {count} parts are missing in '{out}'; the same call of score adds them")
    arrays = [dict(np.load(path, allow_pickle=False)) for path in paths]
    return {name: np.concatenate([part[name] for part in arrays]) for name in FIELDS}


def _predict_parts(work: Work, parts: list[Part], *, use_ray: bool, workers: int | None) -> None:
    if use_ray:
        gpus = int(work.device.startswith("cuda"))
        tasks = [([part],) for part in parts]
        for number, answer in tasks_on_ray(_predict, work, tasks, workers=workers, gpus=gpus):
            if isinstance(answer, Exception):
                sys.stderr.write(f"leanbayes: {parts[number].path.name}: {answer}\n")
    elif (workers or 1) > 1 and len(parts) > 1:
        with _tensors_by_name():
            on_processes(_predict, [(work, share) for share in split_items(parts, workers or 1)])
    else:
        _predict(work, parts)


def _predict(work: Work, parts: list[Part]) -> None:
    rows = open_rows(work.data)
    model, likelihood = work.model.to(work.device), work.likelihood.to(work.device)
    for part in parts:
        x = _take(rows, part.start, part.stop)
        try:
            x = x if work.inputs is None else work.inputs(x)
        except ValueError as error:
            raise ValueError(f"rows {part.start} to {part.stop - 1}: {error}") from error
        drawn: dict[str, Any] = {name: getattr(work, name) for name in ("samples", "seed", "design")}
        found = predict(model, x, likelihood, **drawn, keep_samples=False).to("cpu")
        found = found if work.temperature is None else Temperature.of(work.temperature, likelihood)(found)
        found = found if work.units is None else in_units(found, *work.units)
        remove_leftovers(part.path)
        write_whole(part.path, partial(_write_part, {name: getattr(found, name).numpy() for name in FIELDS}))


def _write_part(arrays: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:  # given a name, numpy would append .npz
        np.savez(file, **arrays)


def open_rows(data: Rows) -> Any:
    """Return an object with a length and rows; a .npy file is mapped, not read. A file without rows raises."""
    if not isinstance(data, Path):
        return data
    if data.suffix not in (".npy", ".npz"):
        raise ValueError(f"expected rows in a .npy or .npz file, got '{data}'")
    if not data.is_file():
        raise FileNotFoundError(f"there is no file '{data}' (looked in '{Path.cwd()}')")
    if data.suffix == ".npz":
        rows = read_array(data, _find_array(data))
    else:
        try:
            rows = np.asarray(np.load(data, mmap_mode="r", allow_pickle=False))
        except (ValueError, EOFError) as error:
            raise ValueError(f"'{data}' is damaged or not a .npy file of numbers; write it with numpy.save") from error
    if not rows.ndim or rows.dtype.kind not in "buif":
        raise ValueError(f"expected rows of numbers in '{data}', got {rows.dtype} of shape {rows.shape}")
    return rows


def _find_array(data: Path) -> str:
    names = array_names(data)
    name = next((name for name in ("x", "x_test") if name in names), names[0] if len(names) == 1 else None)
    if name is None:
        raise ValueError(f"expected one array, or one named x or x_test, in '{data}', got {', '.join(names)}")
    return name


def _take(rows: Any, start: int, stop: int) -> Tensor:
    if isinstance(rows, Tensor):
        return rows[start:stop]
    if isinstance(rows, (np.ndarray, ImageFiles)):
        return torch.from_numpy(np.array(rows[start:stop]))
    items = (rows[i] for i in range(start, stop))
    return torch.stack([torch.as_tensor(item[0] if isinstance(item, (tuple, list)) else item) for item in items])


def _settings(work: Work, rows: int, part_rows: int) -> dict[str, Any]:
    """Return the settings that decide the numbers, with digests of the weights and the rows."""
    return {
        "rows": rows,
        "part_rows": part_rows,
        "samples": work.samples,
        "seed": work.seed,
        "likelihood": type(work.likelihood).__name__,
        "model": _digest(*(tensor for _, tensor in sorted(work.model.state_dict().items()))),
        "data": _identify(work.data),
        **({} if work.design == INDEPENDENT else {"design": work.design}),
        **({} if work.temperature is None else {"temperature": work.temperature}),
        **({} if work.units is None else {"units": [moment.tolist() for moment in work.units]}),
    }


def _identify(data: Rows) -> str:
    """Return a file's size and date, a digest of an array, or the type of a data set."""
    if isinstance(data, Path):
        return f"{data.name}, {data.stat().st_size} bytes, {data.stat().st_mtime_ns}"
    if isinstance(data, (Tensor, np.ndarray)):
        return _digest(torch.as_tensor(data))
    if isinstance(data, ImageFiles):
        return hashlib.sha256(data.state.encode()).hexdigest()[:16]
    return type(data).__name__


def _digest(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _reserve_folder(folder: Path, settings: dict[str, Any], *, fresh: bool) -> None:
    path = folder / SETTINGS_FILE
    if fresh:
        for old in (path, *folder.glob("part-*.npz")):
            old.unlink(missing_ok=True)
    if path.is_file() and (changed := difference(_read_settings(path), settings)):
        raise ValueError(
            f"'{folder}' holds predictions of something else ({changed}); choose another folder, or begin again: "
            "fresh=True, on the command line --fresh"
        )
    write_json(settings, path)


def _read_settings(path: Path) -> dict[str, Any]:
    remedy = "; choose another folder, or begin again: fresh=True, on the command line --fresh"
    settings = read_json(path, remedy)
    if not all(isinstance(settings.get(name), int) for name in ("rows", "part_rows")):
        raise ValueError(f"'{path}' is damaged (no rows){remedy}")
    return settings


@contextmanager
def _tensors_by_name() -> Iterator[None]:
    """Send tensors to processes by file name: by default each needs one of about 1,000 file descriptors."""
    sharing: Any = torch.multiprocessing  # not typed
    before = sharing.get_sharing_strategy()
    sharing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        sharing.set_sharing_strategy(before)


@dataclass(frozen=True)
class Request:
    """Raw rows to predict with their description, and their targets if known and of the same kind as in training."""

    name: str
    x: Rows
    y: Tensor | None = None
    files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def find_rows(given: str, run: LoadedRun, root: str | None = None) -> Request:
    """Return the rows of a file, or the test rows of a data set, by default the run's; rows that do not fit raise."""
    request = _find(local(given).expanduser(), given, run, root)
    rows = open_rows(request.x)
    if len(rows):
        Preparation.of(run.data)(torch.as_tensor(np.array(rows[:1])))  # raises now if the rows do not fit
    return request


def predict_rows(run: LoadedRun, request: Request, out: Path, *, part_rows: int, fresh: bool, **how: Any) -> list[Path]:
    """Predict rows into the folder `out`, show the progress, write the table, and return the files of the parts.

    `part_rows`, `fresh` and `how` (samples, seed, temperature, workers, backend) are those of `score`. The design of
    the draws is that of the run's evaluation.
    """
    rows = len(open_rows(request.x))
    own: dict[str, Any] = {"inputs": Preparation.of(run.data), "likelihood": run.likelihood, "units": run.units}
    own["design"] = run.design
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
            _write_lines(file, parts, classes, files)

    remove_leftovers(path)
    write_whole(path, write)


def _find(path: Path, given: str, run: LoadedRun, root: str | None) -> Request:
    trained_on = Path(run.source.name).expanduser()
    same = given == run.source.name or (path.exists() and trained_on.exists() and path.samefile(trained_on))
    if not given or same:
        return Request(f"the test rows of {run.data.name}", run.data.test.x, run.data.test.y)
    if path.suffix in (".npy", ".npz"):
        return Request(path.name, path)
    if path.suffix.lower() in TABLES:
        return _find_in_table(path, run)
    if images := find_images(given):
        deep = run.data.train.x.is_floating_point()
        rows = ImageFiles.like(images, run.data.input_shape, deep=deep)
        count = "1 image" if len(images) == 1 else f"{len(images)} images"
        where = str(images[0].parent) if "\n" in given else given
        return Request(f"{count} of {where}", rows, files=tuple(map(str, images)))
    other = known_data.load(given, root or run.source.root)
    alike = other.task == "classification" and other.classes == run.data.classes
    return Request(f"the test rows of {other.name}", other.test.x, other.test.y if alike else None)


def _find_in_table(path: Path, run: LoadedRun) -> Request:
    table = run.data.table
    if table is None:
        return Request(path.name, read_features(path))
    cells = read_own_table(path, names=table.header)
    x, notes = table.read(cells)
    y = table.targets(cells, run.data.classes)
    if y is None and table.target in cells.header:
        notes = [*notes, f"no scores: column {table.target!r} has gaps, or targets unlike those of training"]
    return Request(path.name, x, None if y is None else torch.from_numpy(y).to(run.data.test.y), notes=tuple(notes))


def _write_lines(file: TextIO, parts: Sequence[Path], classes: Sequence[str], files: Sequence[str]) -> None:
    writer = csv.writer(file)
    row = 0
    for number, part in enumerate(parts):
        with np.load(part, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in FIELDS}
        columns = _columns(found, classes)
        if number == 0:
            writer.writerow(["row", *(["file"] if files else []), *columns])
        for cells in zip(*columns.values(), strict=True):
            writer.writerow([row, *files[row : row + 1], *cells])
            row += 1


def _columns(found: dict[str, Any], classes: Sequence[str]) -> dict[str, list[str]]:
    """Return the columns of classes or real targets; several targets are numbered."""
    mean, others = found["mean"], {name: found[name] for name in FIELDS[1:]}
    if classes:
        columns = {"predicted": [classes[k] for k in mean.argmax(1)], "probability": _format(mean.max(1))}
        columns |= {name: _format(values) for name, values in others.items()}
        return columns | {f"p({name})": _format(mean[:, k]) for k, name in enumerate(classes)}
    std = np.sqrt(found["total"])
    values = {"mean": mean, "std": std, "lower": mean - WIDE * std, "upper": mean + WIDE * std}
    values |= {f"{name}_std": np.sqrt(found[name]) for name in ("aleatoric", "epistemic")} | others
    targets = mean.shape[1]
    return {
        name if targets == 1 else f"{name}_{k + 1}": _format(values[name][:, k])
        for k in range(targets)
        for name in values
    }


def _format(values: Any) -> list[str]:
    return list(values.astype(str))  # as many digits as distinguish it from the next float: a year has a fraction


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
