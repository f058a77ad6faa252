"""Work on several local processes: worker i takes every n-th item; results meet in the output folder."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from leanbayes.experiments.compare import look_ahead, run_all
from leanbayes.experiments.config import Job
from leanbayes.experiments.run import Stage
from leanbayes.results import read_result

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
