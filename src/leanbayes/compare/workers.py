"""Work on several local processes: worker i takes every n-th item; results meet in the output folder."""

from __future__ import annotations

import importlib
import io
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar

from leanbayes.compare.job import Job
from leanbayes.compare.run import device_of, Stage
from leanbayes.compare.run_all import look_ahead, run_all
from leanbayes.evaluation.result import commit, read_result

Item = TypeVar("Item")


def run_on_workers(
    jobs: Sequence[Job], out: Path, *, workers: int = 1, stage: Stage = "compare", fresh: bool = False
) -> list[dict[str, Any]]:
    """Perform the jobs on so many processes, each with one thread, and return their results.

    A job is never split, so its result is that of a single process. An interrupt reaches the workers, too; what they
    finished is kept.
    """
    if workers < 1:
        raise ValueError(f"expected at least one worker, got {workers}")
    if workers == 1 or len(jobs) == 1:
        return run_all(jobs, out, stage=stage, fresh=fresh)
    look_ahead(jobs, out, stage=stage, fresh=fresh)
    on_processes(_perform, [(share, out, stage, fresh) for share in dealt(jobs, workers)])
    return [_found(job, out) for job in jobs]


def dealt(items: Sequence[Item], workers: int) -> list[list[Item]]:
    """Deal items to at most so many workers: worker i gets every n-th."""
    return [list(items[i::workers]) for i in range(min(workers, len(items)))]


def on_processes(function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]]) -> None:
    """Call `function(*task)` for every task, each in a process of its own with one thread, and wait for all.

    Answers are not sent back: what a task leaves behind are files. What is wrong is said on stderr, in a sentence.
    """
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=_work, args=(function, task, sys.argv)) for task in tasks]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join()
    except KeyboardInterrupt:
        for process in processes:
            process.join()
        raise


def _work(function: Callable[..., Any], task: tuple[Any, ...], argv: list[str]) -> None:
    import torch

    sys.argv = argv  # results name the command that a person typed
    torch.set_num_threads(1)
    try:
        function(*task)
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"leanbayes: {error}\n")
        sys.exit(2)


def _perform(jobs: list[Job], out: Path, stage: Stage, fresh: bool) -> None:
    run_all(jobs, out, stage=stage, fresh=fresh)


def _found(job: Job, out: Path) -> dict[str, Any]:
    """Return the result that a worker wrote; a worker that died left none."""
    found = read_result(job.folder(out))
    if found is not None:
        return found
    return {"status": "failed", "error": f"no result in '{job.folder(out)}': its worker died or was stopped"}


# -------------------- ray
# Work on Ray: each item is a task of its own, results are those of local processes.
#
# Ray only carries the work. Jobs and parts are written by the same functions as on local processes, into the same
# files; on a cluster, the working folder, the data and the output folder must be on a disk that all machines share.


Backend = Literal["auto", "local", "ray"]
ADDRESS = "RAY_ADDRESS"
"""The variable that names a cluster, for Ray and for us."""


def on_ray(backend: Backend, workers: int | None) -> bool:
    """Say whether work goes to Ray: under "auto" where it is installed, and several workers or a cluster are there.

    Raises:
        ModuleNotFoundError: if Ray is asked for and not installed.
        ValueError: if there is no such backend, or less than one worker.
    """
    if backend not in ("auto", "local", "ray"):
        raise ValueError(f"expected a backend among auto, local, ray, got {backend!r}")
    if workers is not None and workers < 1:
        raise ValueError(f"expected at least one worker, got {workers}")
    if backend == "auto":
        return find_spec("ray") is not None and ((workers or 1) > 1 or ADDRESS in os.environ)
    if backend == "ray" and find_spec("ray") is None:
        raise ModuleNotFoundError("Ray is not installed; pip install leanbayes[ray], or choose the backend local")
    return backend == "ray"


def run_on_ray(
    jobs: Sequence[Job], out: Path, *, workers: int | None = None, stage: Stage = "compare", fresh: bool = False
) -> list[dict[str, Any]]:
    """Perform the jobs as Ray tasks, each on one thread, and return their results in the order of the jobs.

    An interrupt stops the tasks; finished runs are kept and the same call goes on with the rest.

    Args:
        jobs: what to run.
        out: the comparison's folder, on a disk that all machines of the cluster share.
        workers: jobs at a time; default as many as Ray has room for.
        stage: as for `run_all`.
        fresh: begin anew.
    """
    for job in jobs:
        if job.recipe.devices > 1:
            raise ValueError(f"expected --devices 1 on Ray, where a run is one task, got {job.recipe.devices}")
    done, _ = look_ahead(jobs, out, stage=stage, fresh=fresh)
    waiting = [job for job, result in zip(jobs, done, strict=True) if result is None or stage == "train"]
    kept = [job for job in jobs if job not in waiting]
    found = dict(zip(kept, run_all(kept, out, stage=stage), strict=True)) if kept else {}
    on_gpu = any(device_of(job.recipe.accelerator).type == "cuda" for job in waiting)
    tasks = [(job,) for job in waiting]
    for number, answer in tasks_on_ray(_perform_on_ray, (out, stage, fresh), tasks, workers=workers, gpus=int(on_gpu)):
        job = waiting[number]
        found[job], said = _lost(job, out, answer) if isinstance(answer, Exception) else answer
        sys.stderr.write(said)
        sys.stderr.flush()
    return [found[job] for job in jobs]


def tasks_on_ray(
    function: Callable[..., Any],
    shared: Any,
    tasks: Sequence[tuple[Any, ...]],
    *,
    workers: int | None = None,
    gpus: int = 0,
) -> Iterator[tuple[int, Any]]:
    """Call `function(shared, *task)` for every task on Ray; yield number and answer as they come.

    A task sees the working folder, the command line and the LEANBAYES_ variables of this process, and one thread. An
    answer is an exception where the task raised one or its process died; the other tasks go on.

    Args:
        function: of a module that the workers can import.
        shared: what all tasks need; sent once.
        tasks: further arguments of each.
        workers: tasks at a time; default as many as Ray has room for.
        gpus: accelerators of each task.
    """
    if not tasks:
        return
    with _connected(workers) as ray:
        own = {name: value for name, value in os.environ.items() if name.startswith("LEANBAYES_")}
        environment = {"env_vars": own | {"LEANBAYES_COMMIT": commit()}}
        remote = ray.remote(_in_place).options(num_cpus=1, num_gpus=gpus, max_retries=0, runtime_env=environment)
        caller = (str(Path.cwd()), sys.argv)
        sent = ray.put(shared)
        rest = list(enumerate(tasks))[::-1]
        waiting: dict[Any, int] = {}
        try:
            while rest or waiting:
                while rest and len(waiting) < (workers or len(tasks)):
                    number, task = rest.pop()
                    waiting[remote.remote(caller, function, sent, task)] = number
                (done, *_), _ = ray.wait(list(waiting))
                yield waiting.pop(done), _answer(ray, done)
        finally:
            for reference in waiting:
                ray.cancel(reference, force=True)


@contextmanager
def _connected(workers: int | None) -> Iterator[Any]:
    """Give Ray: the caller's, else the cluster that RAY_ADDRESS names, else one on this machine for the time being."""
    ray = importlib.import_module("ray")
    if ray.is_initialized():
        yield ray
        return
    own = {} if ADDRESS in os.environ else {"address": "local", "num_cpus": workers, "include_dashboard": False}
    ray.init(**own, log_to_driver=False, logging_level="ERROR")
    try:
        yield ray
    finally:
        ray.shutdown()


def _answer(ray: Any, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:
        return getattr(error, "cause", None) or error


def _in_place(caller: tuple[str, list[str]], function: Callable[..., Any], shared: Any, task: tuple[Any, ...]) -> Any:
    """Call a function as if in the process that asked."""
    import torch

    folder, argv = caller
    if not Path(folder).is_dir():
        raise FileNotFoundError(
            f"there is no folder '{folder}' on {socket.gethostname()}; machines of a cluster must share the working one"
        )
    os.chdir(folder)
    sys.argv = argv  # results name the command that a person typed
    torch.set_num_threads(1)
    return function(shared, *task)


def _perform_on_ray(shared: tuple[Path, Stage, bool], job: Job) -> tuple[dict[str, Any], str]:
    """Perform one job; return its result and what was said of it, for the person at the other end."""
    out, stage, fresh = shared
    with redirect_stderr(io.StringIO()) as said:
        (result,) = run_all([job], out, stage=stage, fresh=fresh)
    return result, said.getvalue()


def _lost(job: Job, out: Path, error: Exception) -> tuple[dict[str, Any], str]:
    """Return the result of a job whose task came back without one."""
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    said = f"no result in '{job.folder(out)}': its worker died or was stopped ({reason})"
    return {"status": "failed", "error": said}, f"{said}\n"
