"""Run work on local processes or on Ray. Results are files in the output folder, the same for both.

On a Ray cluster, all machines must share the working folder, the data and the output folder.
"""

from __future__ import annotations

import importlib
import io
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar

from leanbayes.compare.job import Job
from leanbayes.compare.plain_state import waits
from leanbayes.compare.progress import followed
from leanbayes.compare.run import MODEL, Stage
from leanbayes.compare.run_all import complete, look_ahead, plan_runs, run_all, run_in_order, to_tune, tune_all
from leanbayes.compare.time_limit import STOPPED, TimeIsUp, TimeLimit
from leanbayes.evaluation.result import commit, read_result
from leanbayes.runtime.display import brief_warnings, counted, said_warnings
from leanbayes.training.devices import pick_device

Item = TypeVar("Item")
Backend = Literal["auto", "local", "ray"]
ADDRESS = "RAY_ADDRESS"  # the environment variable with the address of a Ray cluster


def run_on_workers(
    jobs: Sequence[Job],
    out: Path,
    *,
    workers: int = 1,
    stage: Stage = "compare",
    fresh: bool = False,
    log: str | None = None,
    limit: TimeLimit | None = None,
) -> list[dict[str, Any]]:
    """Perform the jobs on several processes, each with one thread, and return their results.

    A job is never split, so its result equals that of a single process. An interrupt reaches the workers too; finished
    runs are kept. This process shows the progress of all.
    """
    if workers < 1:
        raise ValueError(f"expected at least one worker, got {workers}")
    if workers == 1 or len(jobs) == 1:
        return run_all(jobs, out, stage=stage, fresh=fresh, log=log, limit=limit)
    done, experiments = look_ahead(jobs, out, stage=stage, fresh=fresh)
    rows = to_tune(jobs, done, out, stage)
    runs = plan_runs(jobs, done, experiments, stage, caches=workers, tuning=rows)
    how = {"stage": stage, "fresh": fresh, "progress": "files", "log": log, "limit": limit}
    with followed(runs, [job.folder(out) for job in jobs], workers, shown=True):
        if rows:
            on_processes(tune_all, [(share, out) for share in split_items(rows, workers)], limit=limit)
        for part in phases(jobs):
            on_processes(run_in_order, [(share, out) for share in split_items(part, workers)], **how)
    return complete(jobs, out, [_read_result(job, out, stage) for job in jobs], stage=stage, limit=limit)


def phases(jobs: Sequence[Job]) -> list[list[Job]]:
    """Divide jobs into those that may run at a time.

    Rows that convert late begin from a state of the plain one, and come after it. Ensembles of seeds and students need
    the networks of other rows, and come last.
    """
    late = [2 if job.follows else int(waits(job, jobs)) for job in jobs]
    parts = [[job for job, own in zip(jobs, late, strict=True) if own == number] for number in range(3)]
    return [part for part in parts if part]


def split_items(items: Sequence[Item], workers: int) -> list[list[Item]]:
    """Split items over at most n workers; worker i gets every n-th item."""
    return [list(items[i::workers]) for i in range(min(workers, len(items)))]


def on_processes(function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], **how: Any) -> None:
    """Call `function(*task, **how)` for each task, in one process and one thread each, and wait for all.

    Tasks return nothing; their results are files. An error is one sentence on stderr.

    Raises:
        TimeIsUp: if the time limit stopped one of them.
    """
    spawn = multiprocessing.get_context("spawn")
    told = sys.argv, said_warnings()
    processes = [spawn.Process(target=_work, args=(function, task, how, *told)) for task in tasks]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join()
    except KeyboardInterrupt:
        for process in processes:
            process.join()
        raise
    if stopped := sum(process.exitcode == STOPPED for process in processes):
        raise TimeIsUp(f"stopped on {counted(stopped, 'worker')}: the time of --stop-after is over")


def _work(
    function: Callable[..., Any],
    task: tuple[Any, ...],
    how: dict[str, Any],
    argv: list[str],
    said: frozenset[str] | None,
) -> None:
    import torch

    sys.argv = argv  # results record the user's command
    torch.set_num_threads(1)
    try:
        with nullcontext() if said is None else brief_warnings(said):
            function(*task, **how)
    except KeyboardInterrupt:
        sys.exit(130)
    except TimeIsUp:
        sys.exit(STOPPED)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"leanbayes: {error}\n")
        sys.exit(2)


def _read_result(job: Job, out: Path, stage: Stage) -> dict[str, Any]:
    found = read_result(job.folder(out))
    if found is not None:
        return found
    if stage == "train" and (job.folder(out) / MODEL).is_file():
        return {"status": "done", "metrics": {}}
    return {"status": "failed", "error": f"no result in '{job.folder(out)}': its worker died or was stopped"}


def on_ray(backend: Backend, workers: int | None) -> bool:
    """Return whether to use Ray. "auto" does if Ray is installed and there are several workers or a cluster.

    Raises:
        ModuleNotFoundError: if Ray is requested and not installed.
        ValueError: if the backend is unknown, or there is less than one worker.
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
    jobs: Sequence[Job],
    out: Path,
    *,
    workers: int | None = None,
    stage: Stage = "compare",
    fresh: bool = False,
    log: str | None = None,
) -> list[dict[str, Any]]:
    """Perform the jobs as Ray tasks, each on one thread, and return their results in order.

    The folder `out` must be on a disk that all machines share. `workers` jobs run at a time; default as many as Ray has
    resources for. An interrupt stops the tasks. Finished runs are kept, and the same call resumes.
    """
    for job in jobs:
        if job.recipe.devices > 1:
            raise ValueError(f"expected --devices 1 on Ray, where a run is one task, got {job.recipe.devices}")
    done, experiments = look_ahead(jobs, out, stage=stage, fresh=fresh)
    waiting = [job for job, result in zip(jobs, done, strict=True) if result is None or stage == "train"]
    kept = [job for job in jobs if job not in waiting]
    found = dict(zip(kept, run_in_order(kept, out, stage=stage), strict=True)) if kept else {}
    rows = to_tune(waiting, [None] * len(waiting), out, stage)
    runs = plan_runs(waiting, [None] * len(waiting), experiments, stage, caches=None, tuning=rows)
    at_once = workers or os.cpu_count() or 1
    with followed(runs, [job.folder(out) for job in waiting], at_once, shown=True):
        gpus = {"gpus": int(any(pick_device(job.recipe.accelerator).type == "cuda" for job in rows))}
        list(tasks_on_ray(_tune_on_ray, out, [(job,) for job in rows], workers=workers, **gpus))
        for part in phases(waiting):
            found |= _tasks_of(part, (out, stage, fresh, log), workers)
    return complete(jobs, out, [found[job] for job in jobs], stage=stage)


def _tasks_of(jobs: list[Job], shared: tuple[Path, Stage, bool, str | None], workers: int | None) -> dict[Job, Any]:
    """Perform jobs as Ray tasks; one that died has a failed result, and its reason is written."""
    found: dict[Job, Any] = {}
    on_gpu = any(pick_device(job.recipe.accelerator).type == "cuda" for job in jobs)
    tasks = [(job,) for job in jobs]
    for number, answer in tasks_on_ray(_perform_on_ray, shared, tasks, workers=workers, gpus=int(on_gpu)):
        job = jobs[number]
        if isinstance(answer, Exception):
            reason = (str(answer).splitlines() or [type(answer).__name__])[0]
            message = f"no result in '{job.folder(shared[0])}': its worker died or was stopped ({reason})"
            answer = {"status": "failed", "error": message}, f"{message}\n"
        found[job], messages = answer
        sys.stderr.write(messages)
        sys.stderr.flush()
    return found


def tasks_on_ray(
    function: Callable[..., Any],
    shared: Any,
    tasks: Sequence[tuple[Any, ...]],
    *,
    workers: int | None = None,
    gpus: int = 0,
) -> Iterator[tuple[int, Any]]:
    """Call `function(shared, *task)` for each task on Ray; yield its number and answer as they arrive.

    A task gets the working folder, command line and LEANBAYES_ variables of this process, and one thread. The answer is
    an exception if the task raised one or its process died; the other tasks continue. `shared` is sent once. `workers`
    tasks run at a time, each with `gpus` accelerators; default as many as Ray has resources for.
    """
    if not tasks:
        return
    with _connected(workers) as ray:
        own = {name: value for name, value in os.environ.items() if name.startswith("LEANBAYES_")}
        environment = {"env_vars": own | {"LEANBAYES_COMMIT": commit()}}
        resources = {"num_cpus": 1, "num_gpus": gpus, "max_retries": 0}
        remote = ray.remote(_call_like_caller).options(**resources, runtime_env=environment)
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
                try:
                    answer = ray.get(done)
                except ray.exceptions.RayError as error:
                    answer = getattr(error, "cause", None) or error
                yield waiting.pop(done), answer
        finally:
            for reference in waiting:
                ray.cancel(reference, force=True)


@contextmanager
def _connected(workers: int | None) -> Iterator[Any]:
    """Yield Ray: already initialised, else the cluster of RAY_ADDRESS, else a temporary one on this machine."""
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


def _call_like_caller(
    caller: tuple[str, list[str]], function: Callable[..., Any], shared: Any, task: tuple[Any, ...]
) -> Any:
    """Call a function in the caller's working folder, with its command line."""
    import torch

    folder, argv = caller
    if not Path(folder).is_dir():
        raise FileNotFoundError(
            f"there is no folder '{folder}' on {socket.gethostname()}; machines of a cluster must share the working one"
        )
    os.chdir(folder)
    sys.argv = argv  # results record the user's command
    torch.set_num_threads(1)
    return function(shared, *task)


def _perform_on_ray(shared: tuple[Path, Stage, bool, str | None], job: Job) -> tuple[dict[str, Any], str]:
    out, stage, fresh, log = shared
    with redirect_stderr(io.StringIO()) as messages:
        (result,) = run_in_order([job], out, stage=stage, fresh=fresh, progress="files", log=log)
    return result, messages.getvalue()


def _tune_on_ray(out: Path, job: Job) -> None:
    with redirect_stderr(io.StringIO()):
        tune_all([job], out)
