"""Run several jobs in order. A failure does not stop the others; after an interrupt, the same call resumes."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from leanbayes.compare.experiment import Experiment
from leanbayes.compare.job import Job
from leanbayes.compare.run import Callback, finished, MODEL, perform, Stage
from leanbayes.evaluation.result import commit, project_commit, read_result, settings_of
from leanbayes.runtime._files import local
from leanbayes.runtime.distributed import is_first
from leanbayes.training.progress import Display, display


def run_all(
    jobs: Sequence[Job],
    out: Path,
    *,
    stage: Stage = "compare",
    fresh: bool = False,
    progress: bool = True,
    watch: Callable[[Job, Experiment], tuple[Callback, ...]] | None = None,
) -> list[dict[str, Any]]:
    """Perform the jobs in order and return their results.

    Jobs on the same data and network share an `Experiment`. Finished runs are kept, unless `fresh`. `watch` returns
    further callbacks of a job, called after each epoch.
    """
    done, experiments = look_ahead(jobs, out, stage=stage, fresh=fresh)
    found: list[dict[str, Any]] = []
    progress = progress and is_first()
    epochs = 0
    with display(sum(map(_epochs, jobs)), shown=progress and sys.stderr.isatty()) as shown:
        for job, result in zip(jobs, done, strict=True):
            clock = time.perf_counter()
            kept = result is not None and stage != "train"
            if result is None or stage == "train":
                key = (job.source, job.net, job.evaluation)
                if key not in experiments:
                    experiments = {key: Experiment(*key)}  # one at a time: data sets are large
                callbacks = (_report_to(shown, epochs, job), *(watch(job, experiments[key]) if watch else ()))
                result = perform(job, experiments[key], out, stage=stage, fresh=fresh, callbacks=callbacks)
            epochs += _epochs(job)
            shown.epoch(epochs, {})
            if progress:
                duration = "kept" if kept else f"{time.perf_counter() - clock:.0f} s"
                sys.stderr.write(f"{_title(job)}: {_outcome(result)}, {duration}\n")
                sys.stderr.flush()
            found.append(result)
    return found


def look_ahead(
    jobs: Sequence[Job], out: Path, *, stage: Stage, fresh: bool
) -> tuple[list[dict[str, Any] | None], dict[Any, Experiment]]:
    """Find errors before hours of work: other settings in a folder, a missing model, data, network or folder.

    Returns:
        The results of finished jobs (None for others), and the experiment of the first job that is not finished.
    """
    commit(), project_commit()  # cached now: the source may change during training
    local(out)
    done = [None if fresh else finished(job, job.folder(out)) for job in jobs]
    for job in jobs if stage == "evaluate" else ():
        if not job.baseline and not (job.folder(out) / MODEL).is_file():
            raise ValueError(
                f"no trained model in '{job.folder(out)}'; run leanbayes train with the same flags first, or select "
                "trained runs with --methods and --seeds"
            )
    waiting = [job for job, result in zip(jobs, done, strict=True) if result is None]
    keys = [(job.source, job.net, job.evaluation) for job in waiting[:1]]
    experiments = {key: Experiment(*key) for key in keys}
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"cannot make the folder '{out}' for the results ({error.strerror}); choose another --out"
        ) from error
    return done, experiments


def check_alike(jobs: Sequence[Job], out: Path) -> None:
    """Raise ValueError if the settings of jobs differ from those of finished seeds of the same method."""
    own = {job.folder(out) for job in jobs}
    for job in jobs:
        here = settings_of({"settings": job.settings()})
        for folder in sorted(set(job.folder(out).parent.glob("seed*")) - own):
            try:
                found = read_result(folder) or {}
            except ValueError:
                found = {}  # damaged; the report names it
            there = settings_of(found) if found.get("status") == "done" else {}
            changed = next((name for name in here if there.get(name, here[name]) != here[name]), None)
            if changed is not None:
                raise ValueError(
                    f"'{folder}' holds a finished run of {job.title} with other settings ({changed}: "
                    f"{there[changed]} there, {here[changed]} now), which is no other seed of this one; use the same "
                    "settings, or another --out"
                )


def _epochs(job: Job) -> int:
    """Return the epochs of a job, summed over the members of an ensemble."""
    members = 1 if job.method is None or job.method.targets else job.method.fields().get("components", 1)
    return job.recipe.epochs * int(members)


def _report_to(shown: Display, before: int, job: Job) -> Callback:
    """Return a callback that shows the epochs of a job after `before` epochs of other jobs."""
    count = itertools.count(before + 1)
    return lambda state: shown.epoch(next(count), {"title": _title(job), **state.row})


def _title(job: Job) -> str:
    return f"{job.title}, seed {job.seed}"


def _outcome(result: dict[str, Any]) -> str:
    if result["status"] != "done":
        return f"failed ({result['error']})"
    test = result["metrics"].get("test", {})
    if "accuracy" in test:
        return f"accuracy {100 * test['accuracy']:.2f} %, NLL {abs(test['nll']):.4f}, ECE {test['ece']:.4f}"
    if "rmse" in test:
        return f"RMSE {test['rmse']:.4g}, LPD {test['lpd']:.4f}"
    return "trained"
