"""Predictions for more rows than one wants to hold: part by part into files, on one process, several, or Ray.

`OUT/part-00000.npz` and so on hold mean, total, aleatoric and epistemic of consecutive rows; `OUT/scores.json` says
what they are of. Sample i of a seed is the same network in every process, so the numbers are those of one `lb.predict`.
"""

from __future__ import annotations

import copy
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn, Tensor

from leanbayes.compare.workers import Backend, dealt, on_processes, on_ray, tasks_on_ray
from leanbayes.core.checkpoint import load
from leanbayes.core.conversion import own_likelihood, unwrap
from leanbayes.core.predictor import predict
from leanbayes.data.files.npz import array_names, read_array
from leanbayes.distributions.likelihoods import Categorical, Likelihood
from leanbayes.evaluation.evaluate import in_units, Units
from leanbayes.runtime._files import local, PathLike, remove_leftovers, write_text, write_whole

CLAIM = "scores.json"
FIELDS = ("mean", "total", "aleatoric", "epistemic")
Rows = Any
"""A .npy or .npz file, a tensor or array, or a data set with a length, whose items are inputs or (inputs, ...)."""


@dataclass(frozen=True)
class Work:
    """What every part needs to know."""

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
    """Predict for all rows, part by part, and return the files in the order of the rows; `read_scores` joins them.

    Parts that are there are kept: after an interrupt, the same call goes on. A script that asks for several workers
    needs the usual `if __name__ == "__main__":`.

    Args:
        model: a model, or a file that `lb.save` wrote.
        data: rows as the network takes them: a .npy file (read piece by piece), a .npz file with one array or one named
            x or x_test, a tensor or array, or a torch data set.
        out: a folder; on a Ray cluster, one that all machines share, like the files of rows.
        net: with a file, a network of the architecture that was converted.
        inputs: makes network inputs of raw rows, such as `lb.data.load(...).inputs`.
        likelihood: how to read outputs; default the model's own, else `Categorical`.
        units: mean and standard deviation by which real targets were standardised; files are then in their own units.
        samples: number of draws.
        seed: names the draws.
        part_rows: rows of a file.
        workers: processes, each with one thread; default this one, on a Ray cluster as many as it has room for.
        backend: "local" processes, "ray", or "auto": Ray where it is installed and there are several workers or the
            variable RAY_ADDRESS names a cluster.
        fresh: begin anew.

    Raises:
        ValueError: if the folder holds predictions of something else.
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
    whole = _model(model, net)
    data = local(data) if isinstance(data, (str, Path)) else data
    rows = len(opened(data))
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
    _claim(folder, _described(work, rows, part_rows), fresh=fresh)
    starts = range(0, rows, part_rows)
    parts = [Part(folder / f"part-{i:05d}.npz", s, min(rows, s + part_rows)) for i, s in enumerate(starts)]
    missing = [part for part in parts if not part.path.is_file()]
    if use_ray:
        _on_ray(work, missing, workers)
    elif (workers or 1) > 1 and len(missing) > 1:
        with _tensors_by_name():
            on_processes(_predict, [(work, share) for share in dealt(missing, workers or 1)])
    else:
        _predict(work, missing)
    _require(parts, folder)
    return [part.path for part in parts]


def read_scores(out: PathLike) -> dict[str, np.ndarray[Any, Any]]:
    """Return mean, total, aleatoric and epistemic of all rows in `out`, a folder that `score` filled."""
    folder = local(out)
    if not (folder / CLAIM).is_file():
        raise ValueError(f"expected a folder that score filled, got '{out}', which has no {CLAIM}")
    said = _claimed(folder / CLAIM)
    count = -(-said["rows"] // said["part_rows"])
    paths = [folder / f"part-{i:05d}.npz" for i in range(count)]
    if missing := sum(not path.is_file() for path in paths):
        raise ValueError(f"{missing} of {count} parts are missing in '{out}'; the same call of score adds them")
    arrays = [dict(np.load(path, allow_pickle=False)) for path in paths]
    return {name: np.concatenate([part[name] for part in arrays]) for name in FIELDS}


def _predict(work: Work, parts: list[Part]) -> None:
    """Predict and write parts."""
    rows = opened(work.data)
    model, likelihood = work.model.to(work.device), work.likelihood.to(work.device)
    for part in parts:
        x = _prepared(work, _taken(rows, part.start, part.stop), part)
        found = predict(model, x, likelihood, samples=work.samples, seed=work.seed, keep_samples=False).to("cpu")
        found = found if work.units is None else in_units(found, *work.units)
        remove_leftovers(part.path)
        write_whole(part.path, _writer({name: getattr(found, name).numpy() for name in FIELDS}))


def _prepared(work: Work, x: Tensor, part: Part) -> Tensor:
    try:
        return x if work.inputs is None else work.inputs(x)
    except ValueError as error:
        raise ValueError(f"rows {part.start} to {part.stop - 1}: {error}") from error


def _writer(arrays: dict[str, Any]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with path.open("wb") as file:  # a name would get another ending
            np.savez(file, **arrays)

    return write


def _on_ray(work: Work, parts: list[Part], workers: int | None) -> None:
    tasks = [([part],) for part in parts]
    gpus = int(work.device.startswith("cuda"))
    for number, answer in tasks_on_ray(_predict, work, tasks, workers=workers, gpus=gpus):
        if isinstance(answer, Exception):
            sys.stderr.write(f"leanbayes: {parts[number].path.name}: {answer}\n")


def _require(parts: list[Part], folder: Path) -> None:
    if missing := [part.path.name for part in parts if not part.path.is_file()]:
        raise RuntimeError(
            f"{len(missing)} of {len(parts)} parts are missing in '{folder}', the first is {missing[0]}: a worker "
            "failed or was stopped, see above; the same call goes on from there"
        )


def _model(model: nn.Module | PathLike, net: nn.Module | None) -> nn.Module:
    if isinstance(model, nn.Module):
        return unwrap(model)
    if net is None:
        raise ValueError(f"expected net=, the network whose conversion '{model}' holds, beside a file")
    return load(model, net)


def opened(data: Rows) -> Any:
    """Return something with a length and rows; a .npy file stays on disk.

    Raises:
        ValueError: in one sentence, if a file does not hold rows.
    """
    if not isinstance(data, Path):
        return data
    if data.suffix not in (".npy", ".npz"):
        raise ValueError(f"expected rows in a .npy or .npz file, got '{data}'")
    if not data.is_file():
        raise FileNotFoundError(f"there is no file '{data}' (looked in '{Path.cwd()}')")
    rows = _mapped(data) if data.suffix == ".npy" else read_array(data, _field(data))
    if not rows.ndim or rows.dtype.kind not in "buif":
        raise ValueError(f"expected rows of numbers in '{data}', got {rows.dtype} of shape {rows.shape}")
    return rows


def _mapped(data: Path) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(np.load(data, mmap_mode="r", allow_pickle=False))
    except (ValueError, EOFError) as error:
        raise ValueError(f"'{data}' is damaged or not a .npy file of numbers; write it with numpy.save") from error


def _field(data: Path) -> str:
    """Return the name of the array with the rows."""
    names = array_names(data)
    name = next((name for name in ("x", "x_test") if name in names), names[0] if len(names) == 1 else None)
    if name is None:
        raise ValueError(f"expected one array, or one named x or x_test, in '{data}', got {', '.join(names)}")
    return name


def _taken(rows: Any, start: int, stop: int) -> Tensor:
    if isinstance(rows, Tensor):
        return rows[start:stop]
    if isinstance(rows, np.ndarray):
        return torch.from_numpy(np.array(rows[start:stop]))
    items = (rows[i] for i in range(start, stop))
    return torch.stack([torch.as_tensor(item[0] if isinstance(item, (tuple, list)) else item) for item in items])


def _described(work: Work, rows: int, part_rows: int) -> dict[str, Any]:
    """Return what decides the numbers, as JSON holds it: other rows or weights must not end up in the same folder."""
    return {
        "rows": rows,
        "part_rows": part_rows,
        "samples": work.samples,
        "seed": work.seed,
        "likelihood": type(work.likelihood).__name__,
        "model": _digest(*(tensor for _, tensor in sorted(work.model.state_dict().items()))),
        "data": _named(work.data),
        **({} if work.units is None else {"units": [moment.tolist() for moment in work.units]}),
    }


def _named(data: Rows) -> str:
    """Name rows: a file by its size and date, an array by its numbers, a data set by its type."""
    if isinstance(data, Path):
        return f"{data.name}, {data.stat().st_size} bytes, {data.stat().st_mtime_ns}"
    if isinstance(data, (Tensor, np.ndarray)):
        return _digest(torch.as_tensor(data))
    return type(data).__name__


def _digest(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _claim(folder: Path, said: dict[str, Any], *, fresh: bool) -> None:
    """Write down what the folder is for, or refuse one that is for something else."""
    path = folder / CLAIM
    if fresh:
        for old in (path, *folder.glob("part-*.npz")):
            old.unlink(missing_ok=True)
    if path.is_file():
        there = _claimed(path)
        if other := [name for name in said if there.get(name) != said[name]]:
            difference = f"{other[0]}: {there.get(other[0])!r} there, {said[other[0]]!r} now"
            raise ValueError(
                f"'{folder}' holds predictions of something else ({difference}); choose another folder, or begin "
                "anew: fresh=True, on the command line --fresh"
            )
    write_text(json.dumps(said, indent=1) + "\n", path)


def _claimed(path: Path) -> dict[str, Any]:
    """Return what a folder says that it is for."""
    try:
        said = json.loads(path.read_text())
        if not (isinstance(said, dict) and all(isinstance(said.get(name), int) for name in ("rows", "part_rows"))):
            raise TypeError("no rows")
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"'{path}' is damaged ({error}); choose another folder, or begin again: fresh=True, on the command line "
            "--fresh"
        ) from error
    return said


@contextmanager
def _tensors_by_name() -> Iterator[None]:
    """Send tensors to processes by name: else each takes a file descriptor, of which a process has about 1,000."""
    sharing: Any = torch.multiprocessing  # not typed
    before = sharing.get_sharing_strategy()
    sharing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        sharing.set_sharing_strategy(before)
