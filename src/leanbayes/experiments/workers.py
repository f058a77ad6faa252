"""Jobs on several local processes: worker i takes every n-th job; results meet in the output folder."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leanbayes.experiments.compare import look_ahead, run_all
from leanbayes.experiments.config import Job
from leanbayes.experiments.run import Stage
from leanbayes.results import read_result


def run_on_workers(
    jobs: Sequence[Job], out: Path, *, workers: int, stage: Stage = "compare", fresh: bool = False
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
    spawn = multiprocessing.get_context("spawn")
    shares = [list(jobs[i::workers]) for i in range(min(workers, len(jobs)))]
    processes = [spawn.Process(target=_work, args=(share, out, stage, fresh, sys.argv)) for share in shares]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join()
    except KeyboardInterrupt:
        for process in processes:
            process.join()
        raise
    return [_found(job, out) for job in jobs]


def _work(jobs: list[Job], out: Path, stage: Stage, fresh: bool, argv: list[str]) -> None:
    import torch

    sys.argv = argv  # results name the command that a person typed
    torch.set_num_threads(1)
    try:
        run_all(jobs, out, stage=stage, fresh=fresh)
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"leanbayes: {error}\n")
        sys.exit(2)


def _found(job: Job, out: Path) -> dict[str, Any]:
    """Return the result that a worker wrote; a worker that died left none."""
    found = read_result(job.folder(out))
    if found is not None:
        return found
    return {"status": "failed", "error": f"no result in '{job.folder(out)}': its worker died or was stopped"}
