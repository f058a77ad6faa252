"""Several jobs in a row: progress over all of them, one failure does not stop the others, Ctrl-C loses nothing."""

from __future__ import annotations

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

    Jobs on the same data and network share what is loaded. Finished runs are kept as they are, unless `fresh`. What
    `watch` returns for a job is called after each of its epochs.
    """
    done, workshops = look_ahead(jobs, out, stage=stage, fresh=fresh)
    found: list[dict[str, Any]] = []
    with _Overview(jobs, shown=progress) as overview:
        for job, result in zip(jobs, done, strict=True):
            overview.begin(job)
            kept = result is not None and stage != "train"
            if result is None or stage == "train":
                key = (job.source, job.net, job.judging)
                if key not in workshops:
                    workshops = {key: Experiment(*key)}  # one at a time: data sets are large
                callbacks = (overview.epoch, *(watch(job, workshops[key]) if watch else ()))
                result = perform(job, workshops[key], out, stage=stage, fresh=fresh, callbacks=callbacks)
            overview.end(job, result, kept=kept)
            found.append(result)
    return found


def look_ahead(
    jobs: Sequence[Job], out: Path, *, stage: Stage, fresh: bool
) -> tuple[list[dict[str, Any] | None], dict[Any, Experiment]]:
    """Find what is wrong before hours of work: other settings in a folder, no trained model, data, network, folder.

    Returns:
        The results of the jobs that are done, and a experiment for the first that is not.
    """
    commit(), project_commit()  # remembered now: sources may change while we train, what is running does not
    local(out)
    done = [None if fresh else finished(job, job.folder(out)) for job in jobs]
    if stage == "evaluate":
        _require_models(jobs, out)
    waiting = [job for job, result in zip(jobs, done, strict=True) if result is None]
    keys = [(job.source, job.net, job.judging) for job in waiting[:1]]
    workshops = {key: Experiment(*key) for key in keys}
    _make_folder(out)
    return done, workshops


def check_alike(jobs: Sequence[Job], out: Path) -> None:
    """Refuse jobs that would lie beside finished seeds of the same method with other settings.

    Raises:
        ValueError: naming the setting.
    """
    own = {job.folder(out) for job in jobs}
    for job in jobs:
        now = settings_of({"settings": job.settings()})
        for folder in sorted(set(job.folder(out).parent.glob("seed*")) - own):
            there = _settings_of_finished(folder)
            changed = next((name for name in now if there.get(name, now[name]) != now[name]), None)
            if changed is not None:
                raise ValueError(
                    f"'{folder}' holds a finished run of {job.label or job.name} with other settings ({changed}: "
                    f"{there[changed]} there, {now[changed]} now), which is no other seed of this one; use the same "
                    "settings, or another --out"
                )


def _settings_of_finished(folder: Path) -> dict[str, str]:
    """Return the settings of a run that is done, else none: a damaged one is the report's to name."""
    try:
        found = read_result(folder)
    except ValueError:
        return {}
    return settings_of(found) if found is not None and found.get("status") == "done" else {}


def _require_models(jobs: Sequence[Job], out: Path) -> None:
    for job in jobs:
        if not (job.folder(out) / MODEL).is_file():
            raise ValueError(
                f"no trained model in '{job.folder(out)}'; run leanbayes train with the same flags first, or name what "
                "was trained with --methods and --seeds"
            )


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"cannot make the folder '{out}' for the results ({error.strerror}); choose another --out"
        ) from error


class _Overview:
    """One bar over all jobs, in epochs, with the time left; plain lines where nobody watches a terminal."""

    def __init__(self, jobs: Sequence[Job], *, shown: bool) -> None:
        self.jobs = jobs
        self.shown = shown and is_first()
        self.bar: Any = None
        self.total = sum(_epochs(job) for job in jobs)
        self.before = 0
        self.done = 0

    def __enter__(self) -> _Overview:
        if self.shown and sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            self.bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.TaskProgressColumn(),
                progress.TextColumn("{task.fields[note]}"),
                progress.TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self.bar.start()
            self.task = self.bar.add_task("", total=self.total, note="")
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def begin(self, job: Job) -> None:
        self.clock = time.perf_counter()
        self.done = self.before
        if self.bar is not None:
            self.bar.update(self.task, description=_title(job), note="")

    def epoch(self, state: Any) -> None:
        self.done += 1
        if self.bar is not None:
            row = state.row
            note = f"epoch {row['epoch']}, loss {row['loss']:.3f}, KL {row['kl']:,.0f}"
            self.bar.update(self.task, completed=self.done, note=note)

    def end(self, job: Job, result: dict[str, Any], *, kept: bool) -> None:
        self.before += _epochs(job)
        if self.bar is not None:
            self.bar.update(self.task, completed=self.before)
        when = "kept" if kept else f"{time.perf_counter() - self.clock:.0f} s"
        line = f"{_title(job)}: {_outcome(result)}, {when}"
        if self.bar is not None:
            self.bar.console.print(line, highlight=False)
        elif self.shown:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()


def _epochs(job: Job) -> int:
    """Return the epochs of a job, of all members of an ensemble."""
    members = 1 if job.method is None or job.method.targets else job.method.fields().get("components", 1)
    return job.recipe.epochs * int(members)


def _title(job: Job) -> str:
    return f"{job.label or job.name}, seed {job.seed}"


def _outcome(result: dict[str, Any]) -> str:
    if result["status"] != "done":
        return f"failed ({result['error']})"
    test = result["metrics"].get("test", {})
    if "accuracy" in test:
        return f"accuracy {100 * test['accuracy']:.2f} %, NLL {abs(test['nll']):.4f}, ECE {test['ece']:.4f}"
    if "rmse" in test:
        return f"RMSE {test['rmse']:.4g}, LPD {test['lpd']:.4f}"
    return "trained"
