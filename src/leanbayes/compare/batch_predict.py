"""Predict many rows, part by part, into files: on one process, several, or Ray.

`OUT/part-00000.npz`, ... hold mean, total, aleatoric and epistemic of consecutive rows. `OUT/scores.json` holds their
settings. Draw i of a seed is the same network in every process, so the numbers equal those of one `lb.predict`.
"""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn, Tensor

from leanbayes.compare.workers import Backend, on_processes, on_ray, split_items, tasks_on_ray
from leanbayes.core.checkpoint import load
from leanbayes.core.conversion import own_likelihood, unwrap
from leanbayes.core.predictor import predict
from leanbayes.data.files.folder import ImageFiles
from leanbayes.data.files.npz import array_names, read_array
from leanbayes.distributions.likelihoods import Categorical, Likelihood
from leanbayes.evaluation.evaluate import in_units, Units
from leanbayes.evaluation.result import difference, read_json, write_json
from leanbayes.runtime._files import local, PathLike, remove_leftovers, write_whole

SETTINGS_FILE = "scores.json"
FIELDS = ("mean", "total", "aleatoric", "epistemic")
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
    whole = _load_model(model, net)
    data = local(data) if isinstance(data, (str, Path)) else data
    rows = len(open_rows(data))
    if not rows:
        raise ValueError("expected at least one row to predict, got none")
    work = Work(
        model=copy.deepcopy(whole).cpu(),
        device=str(next((p.device for p in whole.parameters()), "cpu")),
        data=data,
        inputs=inputs,
        likelihood=copy.deepcopy(likelihood or own_likelihood(whole) or Categorical()).cpu(),
        units=units,
        samples=samples,
        seed=seed,
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
        x = _prepare(work, _take(rows, part.start, part.stop), part)
        found = predict(model, x, likelihood, samples=work.samples, seed=work.seed, keep_samples=False).to("cpu")
        found = found if work.units is None else in_units(found, *work.units)
        remove_leftovers(part.path)
        write_whole(part.path, partial(_write, {name: getattr(found, name).numpy() for name in FIELDS}))


def _prepare(work: Work, x: Tensor, part: Part) -> Tensor:
    try:
        return x if work.inputs is None else work.inputs(x)
    except ValueError as error:
        raise ValueError(f"rows {part.start} to {part.stop - 1}: {error}") from error


def _write(arrays: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:  # given a name, numpy would append .npz
        np.savez(file, **arrays)


def _load_model(model: nn.Module | PathLike, net: nn.Module | None) -> nn.Module:
    if isinstance(model, nn.Module):
        return unwrap(model)
    if net is None:
        raise ValueError(f"expected net= with a file: the network whose conversion '{model}' holds")
    return load(model, net)


def open_rows(data: Rows) -> Any:
    """Return an object with a length and rows; a .npy file is mapped, not read.

    Raises:
        ValueError: in one sentence, if a file does not hold rows.
    """
    if not isinstance(data, Path):
        return data
    if data.suffix not in (".npy", ".npz"):
        raise ValueError(f"expected rows in a .npy or .npz file, got '{data}'")
    if not data.is_file():
        raise FileNotFoundError(f"there is no file '{data}' (looked in '{Path.cwd()}')")
    rows = _map_file(data) if data.suffix == ".npy" else read_array(data, _find_array(data))
    if not rows.ndim or rows.dtype.kind not in "buif":
        raise ValueError(f"expected rows of numbers in '{data}', got {rows.dtype} of shape {rows.shape}")
    return rows


def _map_file(data: Path) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(np.load(data, mmap_mode="r", allow_pickle=False))
    except (ValueError, EOFError) as error:
        raise ValueError(f"'{data}' is damaged or not a .npy file of numbers; write it with numpy.save") from error


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
