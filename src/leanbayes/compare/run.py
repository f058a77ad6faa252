"""`perform`: train and evaluate one job and write `result.json`. A finished run is kept, a killed one resumes."""

from __future__ import annotations

import base64
import copy
import json
import shutil
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn, Tensor

from leanbayes import metrics as scores
from leanbayes.compare.baselines import BASELINES, Fitted
from leanbayes.compare.experiment import Experiment
from leanbayes.compare.job import from_plain, Job, plain_of, student_recipe
from leanbayes.compare.kept import check_data, claim, data_of, finished, launch_of, training_settings
from leanbayes.compare.plain_state import FOLDER as SHARED
from leanbayes.compare.plain_state import Made, PlainStates
from leanbayes.compare.progress import RunProgress
from leanbayes.compare.row_training import FILE as VALIDATION
from leanbayes.compare.row_training import Held, Row, train_row, Trained
from leanbayes.compare.time_limit import TimeLimit
from leanbayes.compare.tuning import (
    codes_of,
    folder_of,
    held_by,
    own_values,
    read_outcome,
    table_of,
    tune,
    with_values,
)
from leanbayes.core.checkpoint import save
from leanbayes.core.conversion import attach_likelihood, is_stochastic, own_likelihood, stochastic_layers
from leanbayes.core.prediction import Prediction
from leanbayes.core.student import Student
from leanbayes.core.summary import summary
from leanbayes.data import DataSet
from leanbayes.data.table import FILE as TABLE_FILE
from leanbayes.data.table import one_hot_codes
from leanbayes.distributions.likelihoods import Likelihood
from leanbayes.evaluation import result as results
from leanbayes.evaluation.cost import count
from leanbayes.evaluation.evaluate import evaluate, in_units, metrics_of, Result
from leanbayes.evaluation.figures import examples, LEVEL
from leanbayes.methods.ensemble import Ensemble, members_of
from leanbayes.recalibrate import Temperature
from leanbayes.runtime._files import untied, write_tensors
from leanbayes.runtime.batches import device_of
from leanbayes.runtime.distributed import is_first
from leanbayes.slim import narrow
from leanbayes.training import History
from leanbayes.training.devices import pick_device
from leanbayes.training.distillation import distill
from leanbayes.training.fit import MEMBER_SEEDS
from leanbayes.training.logs import Logger
from leanbayes.training.objective import autocast

MODEL = "model.safetensors"
NORM_ROWS = 1024  # training rows for the norm statistics of a nested network at full width
Stage = Literal["train", "evaluate", "compare"]
Callback = Callable[[Any], object]


@dataclass(frozen=True)
class Hooks:
    """All that follows a run.

    Attributes:
        callbacks: called after every epoch of the final training.
        progress: of the run.
        loggers: of the epochs of the final training.
        limit: when to stop; None does not.
    """

    callbacks: tuple[Callback, ...] = ()
    progress: RunProgress = field(default_factory=lambda: RunProgress("", ""))
    loggers: tuple[Logger, ...] = ()
    limit: TimeLimit | None = None

    def training(self, name: str, epochs: int) -> tuple[Callback, ...]:
        """Begin a training and return its callbacks: the progress, then the time limit."""
        shown = self.progress.training(name, epochs)
        return shown if self.limit is None else (*shown, self.limit.after_epoch(self.progress.title, name, epochs))

    def plain_training(self, name: str, epochs: int) -> tuple[Callback, ...]:
        """Begin a training of the plain network that a method which converts late asks for."""
        return self.training(f"plain {name}", epochs)

    def quiet(self) -> Hooks:
        """Return the hooks of another row that this one needs: the limit holds, its progress is not shown."""
        return Hooks(progress=RunProgress(self.progress.title, self.progress.method), limit=self.limit)


def perform(
    job: Job,
    experiment: Experiment,
    out: Path,
    *,
    stage: Stage = "compare",
    fresh: bool = False,
    hooks: Hooks | None = None,
) -> dict[str, Any]:
    """Train and evaluate one job, and return its result; an error is recorded as a failed run.

    The run is stored in `job.folder(out)`. The stage "train" stops after training, "evaluate" requires a finished
    training. `fresh` deletes an earlier run; with "evaluate", it only evaluates again.

    Raises:
        ValueError: if the folder holds a run with other settings.
    """
    folder = job.folder(out)
    if fresh and is_first() and stage != "evaluate":
        shutil.rmtree(folder, ignore_errors=True)
    found = None if fresh else finished(job, folder)
    if found is not None and stage != "train":
        return found
    if not fresh:
        check_data(job, out, experiment.data.sha256)
    if found is None and stage == "train" and is_first():
        (folder / results.FILE).unlink(missing_ok=True)  # of a failed run; training alone writes none
    if is_first():  # from now on a run with other settings raises, even during training
        claim(job, folder, data_of(folder) if stage == "evaluate" else experiment.data.sha256)
    try:
        result = _perform(job, experiment, out, stage, hooks or Hooks())
    except (RuntimeError, ValueError, ArithmeticError, OSError) as error:
        result = _header(job, experiment) | {"status": "failed", "error": f"{type(error).__name__}: {error}"}
        result["trace"] = traceback.format_exc().splitlines()[-12:]
    if is_first() and (stage != "train" or result["status"] == "failed"):
        results.write_json(result, folder / results.FILE)
    return result


def _perform(job: Job, experiment: Experiment, out: Path, stage: Stage, hooks: Hooks) -> dict[str, Any]:
    header = _header(job, experiment)
    values: dict[str, float] = {}
    if job.tune:
        tuning = tuned(job, experiment, out, hooks, may_run=stage != "evaluate")
        values, title = tuning["chosen"], job.title
        job = with_values(job, values)  # from now on, a job with these values
        settings = job.settings()
        used = {"method": settings["method"] | {"label": title}, "recipe": settings["recipe"]}
        header |= used | {"tuning": tuning}
    if job.baseline:
        return header | _baseline(job, experiment, own_values(values, job.baseline)) | {"status": "done"}
    trained = _train(job, experiment, out, stage, hooks)
    if trained.validation is not None:
        header["validation"] = trained.validation.to_json()
    if isinstance(trained.model, Student):
        header["agreement"] = trained.model.report
    if stage == "train":
        return header | {"status": "done", "history": list(trained.history)}
    if hooks.limit is not None:
        hooks.limit.check(f"{hooks.progress.title}: trained, not evaluated yet")
    return header | _evaluate(job, experiment, trained, hooks.progress) | {"status": "done"}


def _train(job: Job, experiment: Experiment, out: Path, stage: Stage, hooks: Hooks) -> Trained:
    """Train the network of a job, or resume, and write it."""
    folder = job.folder(out)
    if stage == "evaluate" and not (folder / MODEL).is_file():
        raise ValueError(f"no trained model in '{folder}'; run leanbayes train with the same flags first")
    if is_first() and experiment.data.table is not None:
        results.write_json(experiment.data.table.to_json(), folder / TABLE_FILE)
    if job.student:
        trained = _student(job, experiment, out, hooks)
    elif job.members:
        trained = _ensemble_of_seeds(job, experiment, out, hooks)
    else:
        trained = train_row(row_of(job, experiment, out, hooks))
    if is_first():
        write_model(trained.model, folder / MODEL)
    return trained


def tuned(job: Job, experiment: Experiment, out: Path, hooks: Hooks, *, may_run: bool = True) -> dict[str, Any]:
    """Return the outcome of the trials of a job; run those that are left, if they may run.

    Raises:
        ValueError: if trials are left that may not run, or as `compare.tuning.tune` does.
    """
    known = read_outcome(job, out)
    if known is None and not may_run:
        raise ValueError(
            f"no outcome of {job.tune} trials in '{folder_of(job, out)}'; run leanbayes train with the same flags first"
        )
    return known or tune(job, experiment, out, lambda one: row_of(one, experiment, out), hooks.training)


def _ensemble_of_seeds(job: Job, experiment: Experiment, out: Path, hooks: Hooks) -> Trained:
    """Return an ensemble of the plain networks of several seeds; those that are trained already cost nothing more."""
    trained = [train_row(row_of(one, experiment, out, hooks.quiet())) for one in job.followed]
    history = History(row | {"member": k} for k, one in enumerate(trained) for row in one.history)
    ensemble, likelihood = Ensemble([one.model for one in trained]), copy.deepcopy(trained[0].likelihood)
    likelihood.join([one.likelihood for one in trained])
    attach_likelihood(ensemble, likelihood)
    return Trained(ensemble, likelihood, history, None)


def _student(job: Job, experiment: Experiment, out: Path, hooks: Hooks) -> Trained:
    """Distill the trained row of the same method and seed; one that is trained already costs nothing more."""
    data = experiment.data
    teacher = train_row(row_of(job.teacher, experiment, out, hooks.quiet()))
    recipe = student_recipe(job.recipe, len(data.train))
    callbacks = (*hooks.callbacks, *hooks.training("training", recipe.epochs))
    given: dict[str, Any] = {"likelihood": teacher.likelihood, "samples": job.evaluation.samples, "recipe": recipe}
    given |= {"folder": job.folder(out), "resume": True, "progress": False}
    student = distill(
        at_full_width(teacher.model, data),
        data.prepared(data.train),
        callbacks=callbacks,
        loggers=hooks.loggers,
        **given,
    )
    return Trained(student, student.likelihood, History(student.history), None, teacher)


def _baseline(job: Job, experiment: Experiment, values: Mapping[str, float]) -> dict[str, Any]:
    """Fit and evaluate a row without a network; `values` are those that trials chose."""
    start = time.perf_counter()
    fitted, codes = fit_baseline(job, experiment, values)
    seconds = time.perf_counter() - start
    _, x, y = experiment.test

    def predict(rows: Tensor) -> Prediction:
        p = fitted.predict(one_hot_codes(rows, codes))
        return p if experiment.units is None else in_units(p, *experiment.units)

    prediction = predict(x)
    others = {name: predict(rows) for name, (rows, _) in experiment.ood.items()}
    moved = {name: (predict(rows), targets) for name, (rows, targets) in experiment.shift_data.items()}
    found, figures = metrics_of(prediction, y, others, moved)
    if fitted.quantiles is not None and experiment.units is not None:
        mean, std = experiment.units
        low, high = (end * std + mean for end in fitted.quantiles(one_hot_codes(x, codes)))
        found["test"] |= {
            "quantile_coverage": float(scores.interval_coverage(low, high, y)),
            "quantile_width": float((high - low).mean()),
        }
    found["test"] |= _validated_interval(prediction, y, fitted.interval)
    losses = {"losses": _losses(prediction, y, None)}
    cost = {"train_seconds": seconds, "parameters": fitted.parameters}
    known = {name: value for name, value in cost.items() if value is not None}
    return {"metrics": found, "figures": figures | losses, "cost": known, "history": []}


def fit_baseline(
    job: Job, experiment: Experiment, values: Mapping[str, float] = MappingProxyType({})
) -> tuple[Fitted, Mapping[int, int]]:
    """Fit a row without a network, with values that trials chose; return it with its columns of one-hot codes."""
    held = held_by(experiment.data)
    fitted = BASELINES[job.baseline](*table_of(job, experiment.data), job.seed, values, held)
    return fitted, codes_of(job, experiment.data)


def row_of(job: Job, experiment: Experiment, out: Path, hooks: Hooks | None = None) -> Row:
    """Return a job as a row to train; a method that converts late knows the plain network of its seed."""
    share, data = job.source.validation, experiment.data
    hooks = hooks or Hooks()
    row = Row(
        make=partial(_make, job, experiment),
        recipe=job.recipe,
        data=(*data.prepared(data.train), *([] if data.train.weight is None else [data.train.weight])),
        held=Held(share, data.train.group, data.train.time) if share else None,
        folder=job.folder(out),
        samples=job.evaluation.samples,
        key=training_settings(job) | {"samples": job.evaluation.samples},
        evaluated=partial(at_full_width, data=data),
        callbacks=hooks.callbacks,
        watch=hooks.training,
        loggers=hooks.loggers,
        scaled=partial(_with_less_noise, job, experiment) if job.scaled else None,
    )
    plain_job = plain_of(job)
    if plain_job is None:
        states = PlainStates(row.folder / SHARED, {**row.key, "sha256": data.sha256}, job.keeps)
        return replace(row, states=states if job.processes == 1 else None)
    plain = row_of(plain_job, experiment, out)
    same = data_of(plain.folder) in (None, data.sha256)
    own: dict[str, Any] = {"folder": row.folder / "plain", "states": None}
    own["known"] = plain.folder / VALIDATION if same else None
    own["watch"] = hooks.plain_training
    # A row whose callbacks see every epoch trains them all.
    return replace(row, states=None if hooks.callbacks else plain.states, plain=replace(plain, **own))


def _with_less_noise(job: Job, experiment: Experiment, scale: float) -> Callable[[], Made]:
    """Return what makes the model of a job with a share of its method's initial noise."""
    assert job.method is not None
    fields = {name: scale * getattr(job.method, name) for name in job.method.scaled}
    return partial(_make, replace(job, method=replace(job.method, **fields)), experiment)


def _make(job: Job, experiment: Experiment) -> tuple[nn.Module, Likelihood]:
    device = pick_device(job.recipe.accelerator)
    model = experiment.model(job.method, job.seed, job.where).to(device)
    return model, own_likelihood(model) or experiment.likelihood().to(device)


def _evaluate(job: Job, experiment: Experiment, trained: Trained, progress: RunProgress) -> dict[str, Any]:
    """Evaluate a trained model in the precision and memory order of its training; return its part of the result."""
    _, x, y = experiment.test
    samples = job.evaluation.samples
    with autocast(job.recipe.precision, device_of(trained.model)):
        model = as_evaluated(job, experiment, trained.model)
        result = evaluate(
            model,
            (x, y),
            likelihood=trained.likelihood,
            ood=experiment.ood,
            shift=experiment.shift if experiment.data.task == "classification" else None,
            samples=samples,
            design=job.evaluation.design,
            batch_size=job.recipe.batch_size,
            units=experiment.units,
            temperature=_temperature(experiment, trained),
            progress=progress.evaluation,
            shift_data=experiment.shift_data,
            members=_temperatures_of_members(trained),
        )
    for number, member in enumerate(result.metrics.get("members", ())):
        member["seed"] = job.seed + MEMBER_SEEDS * number
    return _outcome(experiment, trained, result, count(model, samples))


def as_evaluated(job: Job, experiment: Experiment, model: nn.Module) -> nn.Module:
    """Return the network to evaluate: at full width, in the memory order of the training."""
    model = at_full_width(model, experiment.data)
    return model.to(memory_format=torch.channels_last) if job.recipe.channels_last else model  # type: ignore[call-overload]


def _temperature(experiment: Experiment, trained: Trained) -> Temperature | None:
    """Return the temperature that the held-out rows gave; None for real targets and without such rows."""
    if trained.validation is None or experiment.data.task != "classification":
        return None
    return Temperature.of(trained.validation.temperature, trained.likelihood)


def _temperatures_of_members(trained: Trained) -> list[Temperature]:
    """Return the temperature of each member of an ensemble of plain networks; none for other rows.

    The noise of real targets already has the factor of the whole ensemble.
    """
    validation = trained.validation
    if validation is None or validation.members is None:
        return []
    return [Temperature.of(own / validation.noise, trained.likelihood) for own in validation.members]


def at_full_width(model: nn.Module, data: DataSet) -> nn.Module:
    """Return the network to evaluate: one with ordered channels at full width, any other unchanged."""
    if not any(layer.ordered for _, layer in stochastic_layers(model)):
        return model
    device = device_of(model)
    x = data.inputs(data.train.x[:NORM_ROWS]).to(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)  # the norm statistics come from draws: the same ones at each evaluation
        return narrow(model, 1.0, data=x)


def write_model(model: nn.Module, path: Path) -> None:
    """Save a trained model: a converted one with `lb.save`, a plain one as its state dict."""
    if members_of(model) or is_stochastic(model) or isinstance(model, Student):
        save(model, path)
        return
    tensors, tied = untied(model.state_dict())
    write_tensors(tensors, path, {"tied": json.dumps(tied)})


def _header(job: Job, experiment: Experiment) -> dict[str, Any]:
    data = experiment.data
    settings = job.settings()
    return {
        "schema": results.SCHEMA,
        "id": job.id,
        "status": "failed",
        "error": None,
        "command": results.command(),
        "created": results.now(),
        "commit": results.commit(),
        **({} if results.project_commit() is None else {"project_commit": results.project_commit()}),
        "seed": job.seed,
        "method": settings["method"] | {"label": job.title},
        "from_plain": from_plain(job),
        "network": {"name": job.net, "parameters": sum(p.numel() for p in experiment.plain(job.seed).parameters())},
        "data": {
            "name": data.name,
            "task": data.task,
            "train": len(data.train),
            "test": len(experiment.test[0]),  # the evaluated rows
            "held_out": job.source.hold_out,
            "sha256": data.sha256,
            "classes": list(data.classes),
            **_table_facts(data, experiment.test[2]),
        },
        "recipe": settings["recipe"],
        "prediction": {"samples": job.evaluation.samples, "design": job.evaluation.design},
        "settings": settings,
        **{"metrics": {}, "cost": {}, "figures": {}, "history": []},
        "environment": results.environment(pick_device(job.recipe.accelerator)) | launch_of(job),
    }


def _table_facts(data: DataSet, labels: Tensor) -> dict[str, Any]:
    """Return notes on the columns of the user's own table, and the largest class with its share of evaluated rows."""
    if data.table is None:
        return {}
    facts: dict[str, Any] = {"notes": list(data.notes), "target": data.table.target}
    if data.task == "classification":
        largest = int(torch.bincount(data.train.y).argmax())
        share = float((labels == largest).double().mean())
        facts["largest_class"] = {"name": data.classes[largest], "share": share}
    return facts


def _outcome(experiment: Experiment, trained: Trained, result: Result, counts: Mapping[str, Any]) -> dict[str, Any]:
    raw, history = experiment.test[0], trained.history
    losses = _losses(result.prediction, result.targets, _temperature(experiment, trained))
    figures = result.figures | {"losses": losses}
    if experiment.data.task == "classification":
        figures["examples"] = examples(result.prediction, result.targets, raw if raw.dim() == 4 else None)
    factor = None if trained.validation is None else trained.validation.interval
    result.metrics["test"] |= _validated_interval(result.prediction, result.targets, factor)
    timing = {"train_seconds": history.seconds, "peak_memory_mb": history.peak_memory_mb}
    if trained.teacher is not None:
        before = trained.teacher.history.seconds
        timing |= {"train_seconds": before + history.seconds, "distillation": history.seconds / before}
    return {
        "metrics": result.metrics,
        "cost": {**counts, **timing, "layers": _layers(trained.model)},
        "figures": figures,
        "history": list(history),
    }


def _validated_interval(p: Prediction, y: Tensor, factor: float | None) -> dict[str, float]:
    """Return width and coverage of the intervals that hold 95 % of the held-out rows; nothing without a factor."""
    if factor is None:
        return {}
    low, high = scores.scaled_interval(*p.interval(LEVEL), factor)
    coverage = float(scores.interval_coverage(low, high, y))
    return {"interval_width_validated": float((high - low).mean()), "coverage_validated": coverage}


def _losses(prediction: Prediction, y: Tensor, temperature: Temperature | None) -> dict[str, str]:
    """Return -log p of every test row in base64, little-endian float16: differences of methods are paired by row."""
    found = {"test": prediction} | ({} if temperature is None else {"tempered": temperature(prediction)})
    losses = {name: -p.log_prob(y).double().clamp(-6e4, 6e4) for name, p in found.items()}
    return {name: base64.b64encode(row.numpy().astype("<f2").tobytes()).decode() for name, row in losses.items()}


def _layers(model: nn.Module) -> dict[str, Any]:
    """Return the number of converted layers, and the layers with parameters that were skipped."""
    found = summary(model)
    skipped = [f"{row.path}: {row.kind}, {row.reason}" for row in found.rows if not row.method]
    return {
        **{name: getattr(found, name) for name in ("converted", "total", "eligible", "things")},
        "covered": None if found.partial else found.covered,
        "skipped": [line for line in skipped if not line.endswith("no parameters")],
    }
