"""Progress of a comparison: the work of every run, its measured speed, and the time left.

Work is counted in rows that pass a network. An epoch is three passes of the training rows (forward and backward), a
prediction one pass for each draw. The seconds for such a row are measured apart for training, prediction, corruption
and cost, by method as soon as possible. Work of a kind that was not measured yet is taken to be as fast as the rest.

Runs in other processes write their `RunProgress` to `progress.json` in the folder of the run, for every backend.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from leanbayes.compare.experiment import Experiment
from leanbayes.compare.job import Job, student_recipe
from leanbayes.compare.row_training import FOLDS, uses_folds
from leanbayes.training.distillation import PERTURBED
from leanbayes.training.progress import describe, duration, Status, watched

FILE = "progress.json"
EVERY = 0.5  # seconds between two writes of the file
BACKWARD = 3  # passes of a training row, compared with a prediction
CORRUPTED = 3  # passes that corrupting an image takes; a guess, until it is measured
OVERTIME = 0.25  # a training that lasts longer than the others is expected to last this share more


@dataclass
class Part:
    """A piece of the work of a run: a training, or one kind of step of an evaluation.

    Attributes:
        kind: of the work; parts of one kind have one speed.
        units: epochs, or data sets.
        work: rows passed in a unit.
        may_stop: whether early stopping may end it before.
        done: units that are done, in earlier processes too.
        timed: units that this process did, in `seconds`.
        closed: nothing is left.
    """

    kind: str
    units: float
    work: float
    may_stop: bool = False
    done: float = 0.0
    timed: float = 0.0
    seconds: float = 0.0
    closed: bool = False


@dataclass
class RunProgress:
    """The progress of one run.

    Attributes:
        title: method and seed.
        method: runs of one method have one speed.
        parts: by name, in order.
        current: name of the part in work.
        doing: a few words on it.
        since: begin of the unit in work, in seconds of the clock.
        values: of the last epoch.
        state: "waiting", "running" or "ended".
        line: outcome of an ended run.
        changed: called after every change.
    """

    title: str
    method: str
    parts: dict[str, Part] = field(default_factory=dict)
    current: str = ""
    doing: str = ""
    since: float = 0.0
    values: dict[str, Any] = field(default_factory=dict)
    state: str = "waiting"
    line: str = ""
    changed: Callable[[RunProgress], object] = field(default=lambda run: None, repr=False)

    def keep(self) -> None:
        """Mark a run that is finished already."""
        self.parts, self.state = {}, "ended"

    def start(self) -> None:
        """Begin the run; what comes before its first epoch belongs to no part."""
        self.state, self.since, self.doing = "running", time.time(), "starting"
        self.changed(self)

    def training(self, name: str, epochs: int) -> tuple[Callable[[Any], object], ...]:
        """Begin a training and return its callback; earlier trainings are over."""
        self._close(before=name)
        known = next((part for part in self.parts.values() if part.kind == "train"), None)
        part = self.parts.setdefault(name, Part("train", epochs, known.work if known else 0.0))
        part.units = epochs
        self._enter(name, f"{name}, epoch 1 of {epochs}")

        def epoch(state: Any) -> None:
            part.done = min(part.units, max(part.done + 1, float(state.epoch)))
            self._measure(part)
            self.values = values_of(state.row)
            self.doing = f"{name}, epoch {part.done:.0f} of {epochs}"
            self.changed(self)

        return (epoch,)

    def evaluation(self, kind: str, name: str) -> None:
        """Begin a step of the evaluation: the step before is done."""
        if (before := self.parts.get(self.current)) is not None and before.kind != "train":
            before.done += 1
            self._measure(before)
        self._close(before=None)
        self.parts.setdefault(kind, Part(kind, 0, 0.0))
        self.values = {}
        self._enter(kind, name)

    def end(self, line: str) -> None:
        """End the run."""
        if (part := self.parts.get(self.current)) is not None and part.kind != "train":
            self._measure(part)
        for each in self.parts.values():
            each.closed = True
        self.state, self.line = "ended", line
        self.changed(self)

    def _enter(self, name: str, doing: str) -> None:
        self.current, self.doing, self.since = name, doing, time.time()
        self.changed(self)

    def _measure(self, part: Part) -> None:
        now = time.time()
        part.timed, part.seconds, self.since = part.timed + 1, part.seconds + now - self.since, now

    def _close(self, before: str | None) -> None:
        """Close the trainings before a part, all of them if it is None."""
        for name, part in self.parts.items():
            if name == before:
                return
            part.closed |= part.kind == "train"


def plan(
    jobs: Sequence[Job], experiment: Experiment, stage: str, *, caches: int | None = 1, tuning: Sequence[Job] = ()
) -> list[RunProgress]:
    """Return the progress of jobs, nothing done yet.

    The rows of `experiment` are taken for all of them. The first `caches` jobs corrupt the images, which later jobs of
    their process find in memory; None if every job does. The jobs in `tuning` run the trials of their rows.
    """
    found = []
    for number, job in enumerate(jobs):
        others = {(other.seed, other.name) for other in jobs}
        parts: dict[str, Part] = _trials(job, len(experiment.data.train)) if job in tuning else {}
        if stage != "evaluate" or job.baseline:
            parts |= _trainings(job, len(experiment.data.train), plain_runs=(job.seed, "plain") in others)
        if stage != "train" and not job.baseline:
            parts |= _evaluations(job, experiment, corrupts=caches is None or number < caches)
        found.append(RunProgress(title_of(job), job.title, parts))
    return found


def title_of(job: Job) -> str:
    """Return the method and the seed of a job."""
    return f"{job.title}, seed {job.seed}"


def _trials(job: Job, rows: int) -> dict[str, Part]:
    """Return the trainings of the trials, which may stop early; those of rows without a network are not counted."""
    if job.baseline:
        return {}
    own = _trainings(replace(job, members=()), rows, plain_runs=False)
    if uses_folds(job.recipe, rows):
        del own["training"]  # after folds, a trial trains no network on all rows
    return {
        trial_name(number, job.tune, name): replace(part, may_stop=True)
        for number in range(job.tune)
        for name, part in own.items()
    }


def trial_name(number: int, trials: int, name: str) -> str:
    """Return the name of a training of a trial."""
    title = f"trial {number + 1} of {trials}"
    return title if name == "training" else f"{title}, {name}"


def _trainings(job: Job, rows: int, *, plain_runs: bool) -> dict[str, Part]:
    if job.baseline or job.members:
        return {"training": Part("train", 0, 0)}
    if job.student:  # the pool has perturbed rows, too
        return {"training": Part("train", student_recipe(job.recipe, rows).epochs, (1 + PERTURBED) * BACKWARD * rows)}
    recipe = job.recipe if job.method is None else job.method.extended(job.recipe)
    stops, trained = bool(recipe.patience), _trained(job)
    folds = bool(job.source.validation) and uses_folds(recipe, rows)
    work = BACKWARD * rows
    names = [f"fold {number + 1} of {FOLDS}" for number in range(FOLDS)] if folds else ["training"]
    parts = {}
    if stops and job.source.validation and recipe.convert_at_epoch and not plain_runs:
        parts = {f"plain {name}": Part("train", recipe.epochs, work, stops) for name in names}
    final = ["training"] if folds else []
    return parts | {name: Part("train", recipe.all_epochs * trained, work, stops) for name in names + final}


def _evaluations(job: Job, experiment: Experiment, *, corrupts: bool) -> dict[str, Part]:
    drawn = job.method is not None and job.method.targets and not job.student
    passes = job.evaluation.samples if drawn else _networks(job)
    rows, sets = len(experiment.test[0]), 1 + len(experiment.ood) + len(experiment.shift_data)
    parts = {"test": Part("predict", sets, passes * rows)}
    shift = experiment.shift if experiment.data.task == "classification" else None
    if shift is not None:
        images = len(shift.y)
        if corrupts:
            parts["corrupt"] = Part("corrupt", len(shift), CORRUPTED * images)
        parts["shift"] = Part("predict", len(shift), passes * images)
    return parts


def _networks(job: Job) -> int:
    """Return the number of whole networks in a row: of an ensemble its members, else one."""
    if job.members or job.student:
        return len(job.members) or 1
    return 1 if job.method is None or job.method.targets else int(job.method.fields().get("components", 1))


def _trained(job: Job) -> int:
    """Return the number of networks that are trained; members may also come from one training."""
    return 1 if job.method is not None and job.method.post_hoc else _networks(job)


class Overview:
    """All runs of a comparison, `workers` of them at a time."""

    def __init__(self, runs: Sequence[RunProgress], workers: int = 1) -> None:
        self.runs, self.workers = list(runs), workers
        self.clock = time.time()

    def left(self, now: float) -> float | None:
        """Return the seconds that all runs still take; None as long as nothing was measured."""
        open_runs = [run for run in self.runs if run.state != "ended"]
        if open_runs and not any(part.seconds for _, part in self._parts()):
            return None
        each = [self._left_of(run, now) for run in open_runs]
        return max(sum(each) / max(1, min(self.workers, len(each))), *each) if each else 0.0

    def share(self, now: float) -> float:
        """Return the share of the time that is over, below 1 until all runs have ended."""
        if all(run.state == "ended" for run in self.runs):
            return 1.0
        left, elapsed = self.left(now), now - self.clock
        return 0.0 if left is None else min(0.99, elapsed / max(1e-9, elapsed + left))

    def text(self) -> str:
        """Return the number of ended runs, and a few words on each that is running."""
        ended = sum(run.state == "ended" for run in self.runs)
        running = [run for run in self.runs if run.state == "running"]
        told = "; ".join(f"{run.title}: {_listed(run.doing, describe(run.values))}" for run in running)
        return _listed(f"{ended} of {len(self.runs)} runs done", told)

    def time_left(self, now: float) -> str:
        """Return the time left in words."""
        left = self.left(now)
        if left is None:
            return "time left not known yet"
        known = not any(part.may_stop and not part.closed for _, part in self._parts()) or self._stopped("")[1]
        return f"{'' if known else 'at most '}{duration(left)} left"

    def status(self) -> Status:
        """Return the state of all runs now."""
        now = time.time()
        return Status(self.share(now), self.text(), self.time_left(now))

    def _parts(self) -> Iterator[tuple[RunProgress, Part]]:
        return ((run, part) for run in self.runs for part in list(run.parts.values()))

    def _left_of(self, run: RunProgress, now: float) -> float:
        """Return the seconds of a run, less those of the unit in work."""
        seconds = 0.0
        for name, part in list(run.parts.items()):
            each = part.work * self._rate(run.method, part.kind)
            left = each * self._units_left(run, part, begun=name == run.current)
            if name == run.current and run.state == "running":
                left -= min(max(0.0, now - run.since), each, left)
            seconds += left
        return seconds

    def _units_left(self, run: RunProgress, part: Part, *, begun: bool) -> float:
        if part.closed:
            return 0.0
        most = max(0.0, part.units - part.done)
        if not part.may_stop:
            return most
        expected = part.units * self._stopped(run.method)[0] - part.done
        return min(most, max(expected, OVERTIME * part.done if begun else 0.0))

    def _stopped(self, method: str) -> tuple[float, bool]:
        """Return the share of its epochs after which a training stops: of the method, else of all; else 1."""
        over = [(run, part) for run, part in self._parts() if part.may_stop and part.closed and part.timed]
        own = [part for run, part in over if run.method == method] or [part for _, part in over]
        return (sum(part.done for part in own) / sum(part.units for part in own), True) if own else (1.0, False)

    def _rate(self, method: str, kind: str) -> float:
        """Return the seconds for one row: of the method and kind, else of the kind, else of all work."""
        timed = [(run, part) for run, part in self._parts() if part.timed and part.work]
        same = [(run, part) for run, part in timed if part.kind == kind]
        own = [part for run, part in same if run.method == method]
        chosen = own or [part for _, part in same] or [part for _, part in timed]
        return sum(part.seconds for part in chosen) / max(1e-9, sum(part.timed * part.work for part in chosen))


def _listed(*texts: str) -> str:
    return ", ".join(text for text in texts if text)


class ProgressFile:
    """Writes the progress of a run to its folder, at most every half second."""

    def __init__(self, folder: Path) -> None:
        self.path, self.next, self.state = folder / FILE, 0.0, ""

    def __call__(self, run: RunProgress) -> None:
        """Write the file, if it is time or the state changed."""
        now = time.monotonic()
        if now < self.next and run.state == self.state:
            return
        self.next, self.state = now + EVERY, run.state
        stored = {name: value for name, value in vars(run).items() if name not in ("changed", "parts")}
        text = json.dumps(stored | {"parts": {name: asdict(part) for name, part in run.parts.items()}})
        temporary = self.path.with_name(f".{FILE}.tmp")
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self.path)
        except OSError:
            return  # of a display alone: the training reports a full disk


def read_into(run: RunProgress, folder: Path) -> None:
    """Take over the progress that another process wrote; a file that is missing or odd changes nothing."""
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
        parts = {str(name): _part(part) for name, part in found["parts"].items()}
        own = {name: type(getattr(run, name))(found[name]) for name in ("current", "doing", "since", "state", "line")}
        values = {str(name): float(value) for name, value in found["values"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return
    run.parts, run.values = parts, values
    for name, value in own.items():
        setattr(run, name, value)


def _part(found: Mapping[str, Any]) -> Part:
    numbers = {name: float(found[name]) for name in ("units", "work", "done", "timed", "seconds")}
    return Part(str(found["kind"]), **numbers, may_stop=bool(found["may_stop"]), closed=bool(found["closed"]))


@contextmanager
def followed(runs: Sequence[RunProgress], folders: Sequence[Path], workers: int, *, shown: bool) -> Iterator[None]:
    """Show runs of other processes by the files that they write, and the outcome of each when it ends."""
    forget(folders)
    overview = Overview(runs, workers)

    def look() -> Status:
        for run, folder in zip(runs, folders, strict=True):
            if run.state == "ended":
                continue
            read_into(run, folder)
            if run.state == "ended" and shown:
                sys.stderr.write(f"{run.line}\n")
                sys.stderr.flush()
        return overview.status()

    try:
        with watched(look, shown=shown):
            yield
    finally:
        forget(folders)


def forget(folders: Iterable[Path]) -> None:
    """Remove the files of runs that have ended or were killed."""
    for folder in folders:
        for name in (FILE, f".{FILE}.tmp"):
            (folder / name).unlink(missing_ok=True)


def values_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row that are shown next to the bar."""
    return {name: row[name] for name in ("loss", "valid_nll") if row.get(name) is not None}
