"""`--tune N`: choose the learning rate and the noise level of a row by N trials on held-out training rows.

| row                | space                                                                                          |
|--------------------|------------------------------------------------------------------------------------------------|
| plain              | the learning rate, from a fifth of the recipe's to five times                                  |
| a method           | the same, and the fields of its `space`; a field that the user set is kept                     |
| linear             | the penalty                                                                                    |
| boosting           | the learning rate, and the leaves of a tree                                                    |
| mean               | none, and no trials                                                                            |

A trial trains the row as it would be trained, with seed 0. Its score is the NLL of the held-out rows; test rows are not
used. Trial 0 has the values of the untuned row. Trials 1 to 9 are random, later ones come from a
tree-structured Parzen estimator. Successive halving stops trials early, except those of linear and boosting. All seeds
of the row use the values of the best complete trial, so that their differences show the noise of the training alone.

`tuning/journal.jsonl` next to the seeds of a row records the trials, `tuning/tuning.json` the outcome. One process runs
the trials of a row in order. They depend on the settings and the trials before: any number of workers gives the same.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from leanbayes.compare.baselines import ANY, default_values, held_out_nll
from leanbayes.compare.experiment import Experiment
from leanbayes.compare.job import Job, relocated
from leanbayes.compare.progress import trial_name
from leanbayes.compare.row_training import Held, held_out_parts, Row, uses_folds, validation_nll, Watch
from leanbayes.data import DataSet
from leanbayes.data.table import one_hot_codes
from leanbayes.evaluation.result import difference, read_json, write_json
from leanbayes.runtime._files import write_text
from leanbayes.training.diagnostics import TrainingError

Study: TypeAlias = Any
Trial: TypeAlias = Any
"""Classes of Optuna, which is imported when trials run."""

SEED = 0
"""The seed of all trials, whatever seeds the comparison has."""

FOLDER, FILE, JOURNAL = "tuning", "tuning.json", "journal.jsonl"
AROUND = 5.0
"""The learning rate is at most this factor from the recipe's."""

RANDOM = 10  # trials before the estimator has enough of them
HALF = 2  # successive halving keeps this part of the trials at each step


@dataclass(frozen=True)
class Range:
    """The ends of a range; on a log scale if they are positive. `whole` numbers are integers."""

    low: float
    high: float
    whole: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the range as JSON values."""
        return {"low": self.low, "high": self.high, "scale": "log" if self.low > 0 else "linear"}

    def suggested(self, trial: Trial, name: str) -> float:
        """Return the value of a trial."""
        if self.whole:
            return int(trial.suggest_int(name, int(self.low), int(self.high), log=self.low > 0))
        return float(trial.suggest_float(name, self.low, self.high, log=self.low > 0))


BASELINE_SPACES = {
    "linear": {"linear.penalty": Range(1e-4, 1e4)},
    "boosting": {"boosting.learning_rate": Range(0.02, 0.5), "boosting.max_leaf_nodes": Range(4, 128, whole=True)},
}
"""Spaces of the rows without a network; ridge regression has the penalty, logistic regression C = 1 / penalty."""


def check_tune(trials: int, validation: float, processes: int) -> None:
    """Raise ValueError if rows cannot be tuned with these flags, ModuleNotFoundError without Optuna."""
    if trials < 0:
        raise ValueError(f"expected --tune to be a number of trials, at least 1, or 0 for none, got {trials}")
    if not trials:
        return
    if not validation:
        raise ValueError("--tune scores its trials on held-out training rows, got --validation 0; leave it out")
    if processes > 1:
        raise ValueError(
            f"expected one process a network with --tune, got {processes}; --workers N tunes N rows at a time"
        )
    if find_spec("optuna") is None:
        raise ModuleNotFoundError("--tune needs Optuna, not installed here; pip install leanbayes[tune]")


def space_of(job: Job) -> dict[str, Range]:
    """Return the values that a row can choose, by the names of their flags; empty if it has none."""
    if job.baseline:
        return BASELINE_SPACES.get(job.baseline, {})
    space = {"recipe.lr": Range(job.recipe.lr / AROUND, job.recipe.lr * AROUND)}
    if job.method is not None:
        usual = type(job.method)()
        for name, ends in job.method.space.items():
            if getattr(job.method, name) == getattr(usual, name):
                space[f"{job.method.name}.{name}"] = Range(*ends)
    return space


def with_values(job: Job, values: Mapping[str, float]) -> Job:
    """Return the job with chosen values, to be trained without further trials; rates of posteriors keep their ratio."""
    recipe, method = job.recipe, job.method
    if (lr := values.get("recipe.lr", recipe.lr)) != recipe.lr:
        own = None if recipe.posterior_lr is None else lr * (recipe.posterior_lr / recipe.lr)
        recipe = replace(recipe, lr=lr, posterior_lr=own)
    scaled = job.scaled
    if method is not None and (fields := own_values(values, method.name)):
        scaled = scaled and all(
            getattr(method, name) == fields.get(name, getattr(method, name)) for name in method.scaled
        )
        method = replace(method, **fields)
    return replace(job, recipe=recipe, method=method, tune=0, scaled=scaled)


def own_values(values: Mapping[str, float], name: str) -> dict[str, Any]:
    """Return the values of a method or of a row without a network, by field."""
    return {key.removeprefix(f"{name}."): value for key, value in values.items() if key.startswith(f"{name}.")}


def codes_of(job: Job, data: DataSet) -> Mapping[int, int]:
    """Return the columns of codes that become one input a value: trees split codes, a linear model cannot."""
    return data.embedded if job.baseline == "linear" else {}


def table_of(job: Job, data: DataSet) -> tuple[Tensor, Tensor, int]:
    """Return inputs and targets of the training rows and the number of classes, for a row without a network."""
    x, y = data.prepared(data.train)
    return one_hot_codes(x, codes_of(job, data)), y, data.num_outputs if data.task == "classification" else 0


def held_by(data: DataSet) -> Held:
    """Return the groups or times by which a row without a network holds out rows."""
    return replace(ANY, groups=data.train.group, time=data.train.time)


def folder_of(job: Job, out: Path) -> Path:
    """Return the folder of the trials, which all seeds share."""
    return _row(job).folder(out).parent / FOLDER


def _row(job: Job) -> Job:
    """Return the row that has the trials: of an ensemble of seeds the plain network, of a student its teacher."""
    return job.teacher if job.student else replace(job, members=())


def forget(jobs: Sequence[Job], out: Path) -> None:
    """Remove the trials of jobs."""
    for job in jobs:
        if job.tune:
            shutil.rmtree(folder_of(job, out), ignore_errors=True)


def read_outcome(job: Job, out: Path) -> dict[str, Any] | None:
    """Return the outcome of the trials of a job; None if there are trials left.

    Raises:
        ValueError: if the trials have other settings, or the file is damaged.
    """
    path = folder_of(job, out) / FILE
    if not path.is_file():
        return None
    stored = read_json(path, "; --fresh begins again")
    there, here = stored.get("key"), _key(job)
    changed = difference(relocated(there, here), here) if isinstance(there, dict) else "no settings in it"
    if changed:
        raise ValueError(
            f"'{path.parent}' holds trials of --tune with other settings ({changed}); choose another --out, or --fresh "
            "to begin again"
        )
    if stored.get("trials") != job.tune:
        return None  # other trials: those that are there count
    _check_values(stored.get("chosen"), space_of(job), path)
    return {name: value for name, value in stored.items() if name not in ("key", "sha256")}


def data_of(job: Job, out: Path) -> Any:
    """Return the digest of the data of the trials; None without trials, and for those of earlier versions."""
    try:
        return read_json(folder_of(job, out) / FILE).get("sha256")
    except (OSError, ValueError):
        return None  # there are none, or `read_outcome` says that the file is damaged


def untuned(jobs: Sequence[Job], out: Path) -> list[Job]:
    """Return a job for each row that has trials left."""
    rows = {folder_of(job, out): job for job in reversed(jobs) if job.tune and read_outcome(job, out) is None}
    return list(rows.values())[::-1]


def tune(
    job: Job, experiment: Experiment, out: Path, rows: Callable[[Job], Row], watch: Watch = lambda name, epochs: ()
) -> dict[str, Any]:
    """Run the trials of a job that are left, and return the outcome.

    Args:
        job: with the number of trials in `tune`.
        experiment: its data.
        out: the folder of the comparison.
        rows: returns a job without trials as a row to train.
        watch: called with the name and the epochs of each training; returns callbacks of it.

    Raises:
        ValueError: if the trials in the folder have other settings or are damaged, or no trial was completed.
    """
    known = read_outcome(job, out)
    if known is not None:
        return known
    base, folder = _base(job), folder_of(job, out)
    of = {"key": _key(job), "sha256": experiment.data.sha256}
    write_json(of, folder / FILE)
    space, scored = space_of(base), _score(base, experiment, rows)
    with _study(folder / JOURNAL, base.recipe, len(experiment.data.train)) as study:
        if not study.get_trials(deepcopy=False):
            study.enqueue_trial(_first_values(base, experiment, space))
        for trial in _trials(study, job, space):
            values = {name: each.suggested(trial, name) for name, each in space.items()}
            digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
            own = folder / f"trial{trial.number}-{digest}"  # a killed trial resumes from its state
            named = _named(watch, partial(trial_name, trial.number, job.tune))
            _run_trial(study, trial, partial(scored, values, own, named))
            shutil.rmtree(own, ignore_errors=True)
        trials = [one for one in study.get_trials() if one.number < job.tune]
    outcome = _outcome(job, trials, folder / JOURNAL) | _held_out_rows(base, experiment.data)
    write_json(of | outcome, folder / FILE)
    return outcome


def _base(job: Job) -> Job:
    """Return the job of the trials, the same for all seeds."""
    return replace(_row(job), recipe=replace(job.recipe, seed=SEED), tune=0)


def _key(job: Job) -> dict[str, Any]:
    """Return the settings that the trials depend on, as JSON values."""
    base = _base(job)
    settings = {name: value for name, value in base.settings().items() if name != "judging"}
    space = {name: each.to_json() for name, each in space_of(base).items()}
    key = settings | {"samples": job.evaluation.samples, "space": space}
    return dict(json.loads(json.dumps(key)))


def _first_values(base: Job, experiment: Experiment, space: Mapping[str, Range]) -> dict[str, float]:
    """Return the values of the row without trials, moved into the space."""
    if base.baseline:
        data = experiment.data
        usual = default_values(base.baseline, *table_of(base, data), base.seed, held_by(data))
        values = {f"{base.baseline}.{name}": value for name, value in usual.items()}
    else:
        own = {} if base.method is None else {f"{base.method.name}.{n}": v for n, v in base.method.fields().items()}
        values = {"recipe.lr": base.recipe.lr} | own
    return {name: min(max(values[name], each.low), each.high) for name, each in space.items()}


def _score(base: Job, experiment: Experiment, rows: Callable[[Job], Row]) -> Callable[..., float]:
    """Return the function of values, folder, watch and report that trains a trial and returns its NLL."""
    data = experiment.data

    def of_network(values: Mapping[str, float], folder: Path, watch: Watch, report: Callable[..., Any]) -> float:
        row = rows(with_values(base, values))
        own: dict[str, Any] = {"callbacks": (), "loggers": (), "states": None}  # of trials, nothing is shared
        if row.plain is not None:
            watch_plain = _named(watch, "plain {}".format)
            own["plain"] = replace(row.plain, folder=folder / "plain", watch=watch_plain, **own)
        return validation_nll(replace(row, folder=folder, watch=watch, **own), report)

    def of_baseline(values: Mapping[str, float], *_: object) -> float:
        x, y, classes = table_of(base, data)
        own = own_values(values, base.baseline)
        return held_out_nll(base.baseline, x, y, classes, SEED, values=own, parts=_parts(base, data))

    return of_baseline if base.baseline else of_network


def _named(watch: Watch, rename: Callable[[str], str]) -> Watch:
    return lambda name, epochs: watch(rename(name), epochs)


def _parts(base: Job, data: DataSet) -> list[Tensor]:
    """Return the held-out rows of the trials, those of every row of seed 0."""
    held = Held(base.source.validation, data.train.group, data.train.time)
    return held_out_parts(data.prepared(data.train)[1], held, base.recipe)


def _held_out_rows(base: Job, data: DataSet) -> dict[str, Any]:
    parts = _parts(base, data)
    return {"how": "split" if len(parts) == 1 else "folds", "rows": sum(int(part.sum()) for part in parts)}


def _trials(study: Study, job: Job, space: Mapping[str, Range]) -> Iterator[Trial]:
    """Yield the trials that are left: first one that was killed, then new ones."""
    from optuna.samplers import TPESampler
    from optuna.trial import Trial, TrialState

    while True:
        begun = [one for one in study.get_trials() if one.state != TrialState.WAITING]
        killed = [one for one in begun if one.state == TrialState.RUNNING]
        number = killed[0].number if killed else len(begun)
        if number >= job.tune:
            return
        # A seed for each trial: after a kill, a sampler with one seed would repeat its first trials.
        study.sampler = TPESampler(seed=_seed(job, number), n_startup_trials=RANDOM)
        yield Trial(study, killed[0]._trial_id) if killed else study.ask()


def _seed(job: Job, number: int) -> int:
    text = f"tune/{job.title if not job.members else 'plain'}/{number}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def _reporter(study: Study, trial: Trial) -> Callable[[int, float], None]:
    """Return a function that records the NLL at a step of a trial, once, and raises TrialPruned if it is too high."""
    from optuna import TrialPruned

    reported = {step for one in study.get_trials() if one.number == trial.number for step in one.intermediate_values}

    def report(step: int, nll: float) -> None:
        if step in reported:
            return
        reported.add(step)
        trial.report(nll, step)
        if trial.should_prune():
            raise TrialPruned

    return report


def _run_trial(study: Study, trial: Trial, scored: Callable[[Callable[[int, float], None]], float]) -> None:
    """Run a trial to its end; one that does not train is recorded as failed, with the reason."""
    from optuna import TrialPruned
    from optuna.trial import TrialState

    try:
        nll = scored(_reporter(study, trial))
        if not math.isfinite(nll):
            raise ArithmeticError(f"the NLL of the held-out rows is {nll}")
    except TrialPruned:
        study.tell(trial, state=TrialState.PRUNED)
    except (TrainingError, ValueError, ArithmeticError) as error:
        if isinstance(error.__cause__, OSError):
            raise  # a full disk is no fault of the trial
        trial.set_user_attr("error", f"{type(error).__name__}: {error}")
        study.tell(trial, state=TrialState.FAIL)
    else:
        study.tell(trial, nll)


def _outcome(job: Job, trials: Sequence[Trial], journal: Path) -> dict[str, Any]:
    """Return the record of finished trials: the values of the best complete one, and the counts."""
    from optuna.trial import TrialState

    space = space_of(job)
    complete = [one for one in trials if one.state == TrialState.COMPLETE and one.value is not None]
    failed = [one for one in trials if one.state == TrialState.FAIL]
    if not complete:
        reason = failed[-1].user_attrs.get("error", "no reason recorded") if failed else "none was begun"
        raise ValueError(f"none of the {len(trials)} trials of {job.title} was completed; the last one: {reason}")
    best = min(complete, key=lambda one: (one.value, one.number))
    chosen = {name: best.params.get(name) for name in space}
    _check_values(chosen, space, journal)
    first = next((one.value for one in complete if one.number == 0), None)
    return {
        "trials": job.tune,
        "space": {name: each.to_json() for name, each in space.items()},
        "chosen": chosen,
        "best_nll": best.value,
        "best_trial": best.number,
        "first_nll": first,
        "complete": len(complete),
        "pruned": len(trials) - len(complete) - len(failed),
        "failed": len(failed),
        "seed": SEED,
        "seconds": sum(one.duration.total_seconds() for one in trials if one.duration is not None),
    }


def _check_values(chosen: Any, space: Mapping[str, Range], path: Path) -> None:
    """Raise ValueError unless every value of the space is there, a number in its range."""
    values = chosen if isinstance(chosen, dict) else {}
    for name, each in space.items():
        value: Any = values.get(name)
        number = isinstance(value, int if each.whole else float) and not isinstance(value, bool)
        if not (number and each.low <= value <= each.high):
            raise ValueError(
                f"'{path}' is damaged (expected {name} from {each.low:g} to {each.high:g}, got {value!r}); --fresh "
                "begins again"
            )


@contextmanager
def _study(journal: Path, recipe: Any, rows: int) -> Iterator[Study]:
    """Yield the trials of a journal, a text file; a line that a killed process cut off is removed."""
    import optuna
    from optuna.pruners import SuccessiveHalvingPruner
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    _mend(journal)
    after = recipe.epochs - recipe.convert_at_epoch
    steps = 2 if uses_folds(recipe, rows) else recipe.patience or after // HALF**2  # first two folds, or a quarter
    loud = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        try:
            lock = JournalFileOpenLock(str(journal))
            study = optuna.create_study(
                storage=JournalStorage(JournalFileBackend(str(journal), lock_obj=lock)),
                study_name="tune",
                load_if_exists=True,
                pruner=SuccessiveHalvingPruner(min_resource=max(1, steps), reduction_factor=HALF),
            )
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"'{journal}' is damaged ({reason}); --fresh begins again") from error
        yield study
    finally:
        optuna.logging.set_verbosity(loud)


def _mend(journal: Path) -> None:
    if not journal.is_file():
        return
    text = journal.read_text(encoding="utf-8", errors="replace")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        write_text(whole, journal)
