"""Run several jobs in order. A failure does not stop the others; after an interrupt, the same call resumes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from leanbayes.compare.experiment import Experiment
from leanbayes.compare.job import Job
from leanbayes.compare.loggers import loggers_of
from leanbayes.compare.progress import Overview, plan, ProgressFile, RunProgress, title_of
from leanbayes.compare.run import Callback, finished, Hooks, MODEL, perform, Stage, tuned
from leanbayes.compare.tuning import untuned
from leanbayes.evaluation.result import commit, project_commit, read_result, settings_of
from leanbayes.runtime._files import local
from leanbayes.runtime.distributed import is_first
from leanbayes.training.progress import watched


def run_all(
    jobs: Sequence[Job],
    out: Path,
    *,
    stage: Stage = "compare",
    fresh: bool = False,
    progress: bool | Literal["files"] = True,
    watch: Callable[[Job, Experiment], tuple[Callback, ...]] | None = None,
    log: str | None = None,
) -> list[dict[str, Any]]:
    """Perform the jobs in order and return their results.

    Jobs on the same data and network share an `Experiment`. Finished runs are kept, unless `fresh`. `watch` returns
    further callbacks of a job, called after each epoch. `log` is a logger of `loggers_of`. The progress "files" is for
    another process, which shows it.
    """
    done, experiments = look_ahead(jobs, out, stage=stage, fresh=fresh)
    shown = progress is True and is_first()
    runs = plan_runs(jobs, done, experiments, stage, tuning=to_tune(jobs, done, out, stage))
    found: list[dict[str, Any]] = []
    with watched(Overview(runs).status, shown=shown):
        for job, result, run in zip(jobs, done, runs, strict=True):
            clock = time.perf_counter()
            kept = result is not None and stage != "train"
            if progress == "files":
                run.changed = ProgressFile(job.folder(out))
            if result is None or stage == "train":
                key = (job.source, job.net, job.evaluation)
                if key not in experiments:
                    experiments = {key: Experiment(*key)}  # one at a time: data sets are large
                run.start()
                with loggers_of(log if is_first() else None, job, out) as loggers:
                    hooks = Hooks(watch(job, experiments[key]) if watch else (), run, loggers)
                    result = perform(job, experiments[key], out, stage=stage, fresh=fresh, hooks=hooks)
            duration = "kept" if kept else f"{time.perf_counter() - clock:.0f} s"
            run.end(f"{run.title}: {_outcome(result)}, {duration}")
            if shown:
                sys.stderr.write(f"{run.line}\n")
                sys.stderr.flush()
            found.append(result)
    return found


def plan_runs(
    jobs: Sequence[Job],
    done: Sequence[dict[str, Any] | None],
    experiments: dict[Any, Experiment],
    stage: Stage,
    *,
    caches: int | None = 1,
    tuning: Sequence[Job] = (),
) -> list[RunProgress]:
    """Return the progress of jobs before they begin; finished ones are ended, unless they train again.

    The jobs in `tuning` run the trials of their rows.
    """
    if not experiments:
        return [RunProgress(title_of(job), job.title) for job in jobs]
    runs = plan(jobs, next(iter(experiments.values())), stage, caches=caches, tuning=tuning)
    for run, result in zip(runs, done, strict=True):
        if result is not None and stage != "train":
            run.keep()
    return runs


def to_tune(jobs: Sequence[Job], done: Sequence[dict[str, Any] | None], out: Path, stage: Stage) -> list[Job]:
    """Return a job for each row whose trials have to run before it is trained."""
    waiting = [job for job, result in zip(jobs, done, strict=True) if result is None]
    return untuned(waiting, out) if stage != "evaluate" else []


def tune_all(jobs: Sequence[Job], out: Path) -> None:
    """Run the trials of jobs, for a display in another process; the run of a job reports its errors."""
    experiments: dict[Any, Experiment] = {}
    for job in jobs:
        key = (job.source, job.net, job.evaluation)
        if key not in experiments:
            experiments = {key: Experiment(*key)}
        (run,) = plan([job], experiments[key], "train", tuning=[job])
        run.changed = ProgressFile(job.folder(out))
        job.folder(out).mkdir(parents=True, exist_ok=True)
        run.start()
        with suppress(RuntimeError, ValueError, ArithmeticError, OSError):
            tuned(job, experiments[key], out, run)


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
    untuned([] if fresh else waiting, out)  # trials with other settings raise now
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


def _outcome(result: dict[str, Any]) -> str:
    if result["status"] != "done":
        return f"failed ({result['error']})"
    test = result["metrics"].get("test", {})
    if "accuracy" in test:
        return f"accuracy {100 * test['accuracy']:.2f} %, NLL {abs(test['nll']):.4f}, ECE {test['ece']:.4f}"
    if "rmse" in test:
        return f"RMSE {test['rmse']:.4g}, LPD {test['lpd']:.4f}"
    return "trained"
