"""Run several jobs in order, then measure their prices. After an interrupt, the same call resumes.

A failure does not stop the others. Prices are measured by one process on one thread when nothing else of the comparison
runs: each method once, against the plain network in turn. All seeds of a method get the same price.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from leanbayes.compare.experiment import Experiment
from leanbayes.compare.job import Job
from leanbayes.compare.kept import finished
from leanbayes.compare.load_run import load_model
from leanbayes.compare.loggers import loggers_of
from leanbayes.compare.plain_state import discard
from leanbayes.compare.progress import Overview, Part, plan, ProgressFile, RunProgress, title_of
from leanbayes.compare.run import as_evaluated, Callback, fit_baseline, Hooks, MODEL, perform, Stage, tuned
from leanbayes.compare.time_limit import TimeLimit
from leanbayes.compare.tuning import own_values, read_outcome, untuned
from leanbayes.core.conversion import own_likelihood
from leanbayes.data.table import one_hot_codes
from leanbayes.evaluation.cost import Cost, measure_answers, PRICES
from leanbayes.evaluation.evaluate import price
from leanbayes.evaluation.result import commit, FILE, project_commit, read_result, settings_of, write_json
from leanbayes.runtime._files import local
from leanbayes.runtime.batches import device_of
from leanbayes.runtime.display import counted
from leanbayes.runtime.distributed import is_first
from leanbayes.training.devices import pick_device
from leanbayes.training.objective import autocast
from leanbayes.training.progress import watched


def run_all(  # noqa: PLR0913
    jobs: Sequence[Job],
    out: Path,
    *,
    stage: Stage = "compare",
    fresh: bool = False,
    progress: bool | Literal["files"] = True,
    watch: Callable[[Job, Experiment], tuple[Callback, ...]] | None = None,
    log: str | None = None,
    limit: TimeLimit | None = None,
) -> list[dict[str, Any]]:
    """Perform the jobs in order, measure their prices, and return their results.

    Finished runs are kept, unless `fresh`; prices that are missing are measured. `watch` returns further callbacks of a
    job, called after each epoch. `log` is a logger of `loggers_of`. After the `limit`, `TimeIsUp` is raised.
    """
    found = run_in_order(jobs, out, stage=stage, fresh=fresh, progress=progress, watch=watch, log=log, limit=limit)
    return complete(jobs, out, found, stage=stage, shown=progress is True, limit=limit)


def run_in_order(  # noqa: PLR0913
    jobs: Sequence[Job],
    out: Path,
    *,
    stage: Stage = "compare",
    fresh: bool = False,
    progress: bool | Literal["files"] = True,
    watch: Callable[[Job, Experiment], tuple[Callback, ...]] | None = None,
    log: str | None = None,
    limit: TimeLimit | None = None,
) -> list[dict[str, Any]]:
    """Perform the jobs in order and return their results, without prices.

    Jobs on the same data and network share an `Experiment`. The progress "files" is for another process, which shows
    it. The other arguments are those of `run_all`.
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
                if limit is not None:
                    limit.check(f"{run.title}: not begun")
                key = (job.source, job.net, job.evaluation)
                if key not in experiments:
                    experiments = {key: Experiment(*key)}  # one at a time: data sets are large
                run.start()
                with loggers_of(log if is_first() else None, job, out) as loggers:
                    hooks = Hooks(watch(job, experiments[key]) if watch else (), run, loggers, limit)
                    result = perform(job, experiments[key], out, stage=stage, fresh=fresh, hooks=hooks)
            duration = "kept" if kept else f"{time.perf_counter() - clock:.0f} s"
            run.end(f"{run.title}: {_outcome(result)}, {duration}")
            if shown:
                sys.stderr.write(f"{run.line}\n")
                sys.stderr.flush()
            found.append(result)
    return found


def complete(
    jobs: Sequence[Job],
    out: Path,
    found: Sequence[dict[str, Any]],
    *,
    stage: Stage,
    shown: bool = True,
    limit: TimeLimit | None = None,
) -> list[dict[str, Any]]:
    """Measure missing prices when all jobs have ended, and return the results with them.

    Kept states of plain trainings are removed, unless a row that begins from them is not done.
    """
    if not is_first():
        return list(found)
    done = {job for job, result in zip(jobs, found, strict=True) if result["status"] == "done"}
    discard(jobs, out, done.__contains__)
    if stage == "train":
        return list(found)
    results = dict(zip(jobs, found, strict=True))
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        if job in done:
            groups.setdefault(_without_seed(job), []).append(job)
    waiting = [group for group in groups.values() if any(not has_prices(results[job]) for job in group)]
    if waiting:
        if limit is not None:
            limit.check("all runs are done, the costs are not measured")
        _measure_all(waiting, out, results, shown=shown)
    return [results[job] for job in jobs]


def has_prices(result: Mapping[str, Any]) -> bool:
    """Return whether the prices of a run were measured."""
    return "answer_ms" in result.get("cost", {})


def _without_seed(job: Job) -> str:
    settings = job.settings()
    recipe = {name: value for name, value in settings["recipe"].items() if name != "seed"}
    return json.dumps(settings | {"recipe": recipe, "label": job.label}, sort_keys=True)


def _measure_all(groups: Sequence[list[Job]], out: Path, results: dict[Job, dict[str, Any]], *, shown: bool) -> None:
    """Give each method its price: that of another seed, if it was measured on such a machine, or a new one."""
    experiments: dict[Any, Experiment] = {}
    runs = [RunProgress(f"cost of {jobs[0].title}", jobs[0].title, {"cost": Part("cost", 1, 1)}) for jobs in groups]
    clock, failures = time.perf_counter(), []
    with watched(Overview(runs).status, shown=shown), _one_thread():
        for jobs, run in zip(groups, runs, strict=True):
            run.start()
            run.evaluation("cost", "measuring")
            key = (jobs[0].source, jobs[0].net, jobs[0].evaluation)
            try:
                for job in jobs:
                    if has_prices(results[job]):
                        continue
                    prices = _known_prices(results[job], [results[other] for other in jobs])
                    if prices is None:
                        experiments = experiments if key in experiments else {key: Experiment(*key)}
                        prices = measure(job, experiments[key], out) | {"price_seed": job.seed}
                    results[job] |= {"cost": results[job]["cost"] | prices}
                    write_json(results[job], job.folder(out) / FILE)
            except (RuntimeError, ValueError, ArithmeticError, OSError) as error:
                failures.append(
                    f"the cost of {jobs[0].title} could not be measured ({error}); the same command tries again"
                )
            run.end("")
    if shown:
        seconds = f"{time.perf_counter() - clock:.0f} s"
        lines = [*failures, f"costs: {counted(len(groups) - len(failures), 'method')} measured, {seconds}"]
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        sys.stderr.flush()


def _known_prices(result: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the prices that were measured for another seed, on the same kind of machine; None if there are none."""
    for other in others:
        same = all(other["environment"].get(name) == result["environment"].get(name) for name in ("device", "torch"))
        if same and "price_seed" in other["cost"]:
            return {name: value for name, value in other["cost"].items() if name in (*PRICES, "price_seed")}
    return None


def measure(job: Job, experiment: Experiment, out: Path) -> dict[str, Any]:
    """Return the prices of a trained run: the trained and the plain network in turn, in this process."""
    _, x, y = experiment.test
    if job.baseline:
        outcome = read_outcome(job, out) if job.tune else None
        fitted, codes = fit_baseline(job, experiment, own_values((outcome or {}).get("chosen", {}), job.baseline))
        return measure_answers(lambda: fitted.predict(one_hot_codes(x, codes)), len(y))
    device = pick_device(job.recipe.accelerator)
    trained = load_model(job.folder(out) / MODEL, experiment.plain(job.seed), job.name).to(device)
    cost = _cost_of(trained, job, experiment)
    found = {name: getattr(cost, name) for name in PRICES}
    if job.student:  # its training is that of its teacher, and its own, which `cost.distillation` has
        teacher = experiment.model(job.method, job.seed, job.where).to(device)
        step = _cost_of(teacher, job, experiment, samples=1)
        found |= {"train_step_ratio": step.train_step_ratio, "train_quartiles": step.train_quartiles}
    return found


def _cost_of(network: nn.Module, job: Job, experiment: Experiment, samples: int | None = None) -> Cost:
    _, x, y = experiment.test
    recipe, device = job.recipe, device_of(network)
    with autocast(recipe.precision, device):
        model = as_evaluated(job, experiment, network)
        plain = experiment.plain(job.seed).to(device)
        return price(
            model,
            plain.to(memory_format=torch.channels_last) if recipe.channels_last else plain,  # type: ignore[call-overload]
            (x, y),
            likelihood=own_likelihood(model) or experiment.likelihood().to(device),
            samples=samples or job.evaluation.samples,
            batch_size=recipe.batch_size,
            compile=recipe.compile,
        )


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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


def tune_all(jobs: Sequence[Job], out: Path, limit: TimeLimit | None = None) -> None:
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
            tuned(job, experiments[key], out, Hooks(progress=run, limit=limit))


def look_ahead(
    jobs: Sequence[Job], out: Path, *, stage: Stage, fresh: bool
) -> tuple[list[dict[str, Any] | None], dict[Any, Experiment]]:
    """Find errors before hours of work: other settings in a folder, a missing model, data, network or folder.

    Returns:
        The results of finished jobs (None for others), and the experiment of the first job that is not finished.
    """
    commit(), project_commit()  # cached now: the source may change during training
    local(out)
    for leftover in (path for job in jobs if is_first() for path in job.folder(out).rglob(".*.tmp")):
        leftover.unlink(missing_ok=True)  # half-written by a process that was killed
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
