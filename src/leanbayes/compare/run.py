"""`perform`: one job from nothing to `result.json`; a finished one is kept, a killed one goes on."""

from __future__ import annotations

import json
import shutil
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from leanbayes.compare.examples import examples
from leanbayes.compare.experiment import Experiment
from leanbayes.compare.job import Job, located
from leanbayes.core.checkpoint import save
from leanbayes.core.conversion import own_likelihood, stochastic_layers
from leanbayes.core.summary import summary
from leanbayes.data import DataSet
from leanbayes.distributions.likelihoods import Likelihood
from leanbayes.evaluation import result as results
from leanbayes.evaluation.evaluate import evaluate, Result
from leanbayes.methods.ensemble import Ensemble
from leanbayes.runtime._files import untied, write_tensors, write_text
from leanbayes.runtime.distributed import is_first
from leanbayes.slim import narrow
from leanbayes.training import History
from leanbayes.training.fit import fit

MODEL = "model.safetensors"
CLAIM = "job.json"
NORM_ROWS = 1024
"""Training rows over which the norms of a nested network collect the statistics of its full width."""
Stage = Literal["train", "evaluate", "compare"]
Callback = Callable[[Any], object]


def perform(
    job: Job,
    experiment: Experiment,
    out: Path,
    *,
    stage: Stage = "compare",
    fresh: bool = False,
    callbacks: tuple[Callback, ...] = (),
    progress: bool = False,
) -> dict[str, Any]:
    """Train and evaluate one job, and return its result; a run that fails is written down as failed.

    Args:
        job: what to run.
        experiment: data and networks.
        out: the comparison's folder; the run lies in `job.folder(out)`.
        stage: "train" stops after training, "evaluate" insists on a finished training.
        fresh: begin anew, whatever is there; with "evaluate", only judge anew.
        callbacks: called after every epoch.
        progress: show the training's own progress bar.

    Raises:
        ValueError: if the folder holds a run with other settings.
    """
    folder = job.folder(out)
    if fresh and is_first() and stage != "evaluate":
        shutil.rmtree(folder, ignore_errors=True)
    found = None if fresh else finished(job, folder)
    if found is not None and stage != "train":
        return found
    claim(job, folder)
    try:
        result = _perform(job, experiment, folder, stage, callbacks, progress)
    except (RuntimeError, ValueError, ArithmeticError, OSError) as error:
        result = _header(job, experiment) | {"status": "failed", "error": f"{type(error).__name__}: {error}"}
        result["trace"] = traceback.format_exc().splitlines()[-12:]
    if is_first() and (stage != "train" or result["status"] == "failed"):
        results.write_result(folder, result)
    return result


def finished(job: Job, folder: Path) -> dict[str, Any] | None:
    """Return the result of a run that is done; None where there is none, or it failed.

    Raises:
        ValueError: if the folder holds a run with other settings: nobody's results are overwritten in passing.
    """
    _check_claim(job, folder)
    found = results.read_result(folder)
    if found is None or found.get("status") != "done":
        return None
    there = _in_place(found.get("settings", {}), job)
    if found.get("id") != job.id and there != json.loads(json.dumps(job.settings())):
        changed = _difference(_told(there), _told(job.settings()))
        raise ValueError(
            f"'{folder}' holds a finished run with other settings ({changed}); leanbayes evaluate --fresh judges its "
            "model anew; or choose another --out"
        )
    return found


def claim(job: Job, folder: Path) -> None:
    """Write down what the folder is for: whoever comes with other settings is told, also while training goes on."""
    if is_first():
        said = _training(job) | {"environment": _launch(job)}
        write_text(json.dumps(said, indent=1) + "\n", folder / CLAIM)


def _check_claim(job: Job, folder: Path) -> None:
    path = folder / CLAIM
    if not path.is_file():
        return
    try:
        said = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError):
        return  # cut off while it was written; the training state is checked by itself
    if not isinstance(said, dict):
        raise ValueError(f"'{path}' is damaged (expected an object, got a {type(said).__name__}); remove it")
    there = _in_place({name: value for name, value in said.items() if name != "environment"}, job)
    if there != _training(job):
        raise ValueError(
            f"'{folder}' holds a run with other settings ({_difference(_told(there), _told(_training(job)))}); choose "
            "another --out, or --fresh to begin again"
        )


def _training(job: Job) -> dict[str, Any]:
    """Return the settings that decide the training, without those of the evaluation."""
    settings = json.loads(json.dumps(job.settings()))
    return {name: value for name, value in settings.items() if name != "judging"}


def _launch(job: Job) -> dict[str, Any]:
    """Return how many processes there are, and who started them."""
    return {"processes": job.processes, "launcher": "local" if job.launch is None else job.launch.launcher}


def _told(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings that tell the number of processes, which goes unsaid where the recipe has it."""
    return settings | {"processes": results.processes_of(settings)}


def _in_place(said: Any, job: Job) -> dict[str, Any]:
    """Return settings that name the job's own file as the job does: it may have been moved, or typed from elsewhere."""
    settings: dict[str, Any] = said if isinstance(said, dict) else {}
    data, now = settings.get("data"), located(job.source.name)
    if not (isinstance(data, dict) and isinstance(data.get("name"), str)):
        return settings
    there = Path(located(data["name"]))
    moved = not there.exists() and there.name == Path(now).name
    return settings | {"data": data | {"name": now}} if moved or str(there) == now else settings


def _perform(
    job: Job, experiment: Experiment, folder: Path, stage: Stage, callbacks: tuple[Callback, ...], progress: bool
) -> dict[str, Any]:
    device = device_of(job.recipe.accelerator)
    model = experiment.model(job.method, job.seed, job.where).to(device)
    likelihood = own_likelihood(model) or experiment.likelihood().to(device)
    if stage == "evaluate" and not (folder / MODEL).is_file():
        raise ValueError(f"no trained model in '{folder}'; run leanbayes train with the same flags first")
    history = _train(job, experiment, model, likelihood, folder, callbacks, progress)
    if is_first():
        write_model(model, folder / MODEL)
    header = _header(job, experiment)
    if stage == "train":
        return header | {"status": "done", "history": list(history)}
    with _precision(job, device):
        result = _evaluate(job, experiment, at_full_width(model, experiment.data), likelihood)
    return header | _outcome(experiment, model, result, history) | {"status": "done"}


def _train(
    job: Job,
    experiment: Experiment,
    model: nn.Module,
    likelihood: Likelihood,
    folder: Path,
    callbacks: tuple[Callback, ...],
    progress: bool,
) -> History:
    train = experiment.data.prepared(experiment.data.train)
    return fit(
        model,
        train,
        job.recipe,
        likelihood=likelihood,
        folder=folder,
        resume=True,
        callbacks=callbacks,
        progress=progress,
    )


def _evaluate(job: Job, experiment: Experiment, model: nn.Module, likelihood: Likelihood) -> Result:
    _, x, y = experiment.test
    plain = experiment.plain(job.seed).to(next(model.parameters()).device)
    if job.recipe.channels_last:
        model, plain = (network.to(memory_format=torch.channels_last) for network in (model, plain))  # type: ignore[call-overload]
    return evaluate(
        model,
        (x, y),
        likelihood=likelihood,
        ood=experiment.ood,
        shift=experiment.shift if experiment.data.task == "classification" else None,
        samples=job.judging.samples,
        batch_size=job.recipe.batch_size,
        plain=plain,
        units=experiment.units,
        compile=job.recipe.compile,
    )


def at_full_width(model: nn.Module, data: DataSet) -> nn.Module:
    """Return what is judged: of a network whose channels are ordered the full width, not a mixture of all widths."""
    if not any(layer.ordered for _, layer in stochastic_layers(model)):
        return model
    device = next(model.parameters()).device
    x = data.inputs(data.train.x[:NORM_ROWS]).to(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)  # norms see draws: the same ones whenever the network is judged
        return narrow(model, 1.0, data=x)


def _layers(model: nn.Module) -> dict[str, Any]:
    """Return how many layers carry the method, and which layers with parameters do not."""
    said = summary(model)
    skipped = [f"{row.path}: {row.kind}, {row.reason}" for row in said.rows if not row.method]
    return {
        "converted": said.converted,
        "total": said.total,
        "eligible": said.eligible,
        "things": said.things,
        "covered": None if said.partial else said.covered,
        "skipped": [line for line in skipped if not line.endswith("no parameters")],
    }


def _outcome(experiment: Experiment, model: nn.Module, result: Result, history: History) -> dict[str, Any]:
    raw = experiment.test[0]
    figures = dict(result.figures)
    if experiment.data.task == "classification":
        figures["examples"] = examples(result.prediction, result.targets, raw if raw.dim() == 4 else None)
    assert result.cost is not None
    timing = {"train_seconds": history.seconds, "peak_memory_mb": history.peak_memory_mb}
    return {
        "metrics": result.metrics,
        "cost": asdict(result.cost) | timing | {"layers": _layers(model)},
        "figures": figures,
        "history": list(history),
    }


def _header(job: Job, experiment: Experiment) -> dict[str, Any]:
    """Return what is known before the run."""
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
        "method": settings["method"] | {"label": job.label or job.name},
        "network": {"name": job.net, "parameters": sum(p.numel() for p in experiment.plain(job.seed).parameters())},
        "data": {
            "name": data.name,
            "task": data.task,
            "train": len(data.train),
            "test": len(experiment.test[0]),  # those that are judged
            "held_out": job.source.hold_out,
            "sha256": data.sha256,
            "classes": list(data.classes),
        },
        "recipe": settings["recipe"],
        "settings": settings,
        "metrics": {},
        "cost": {},
        "figures": {},
        "history": [],
        "environment": results.environment(device_of(job.recipe.accelerator)) | _launch(job),
    }


def write_model(model: nn.Module, path: Path) -> None:
    """Save a trained model: a converted one as `lb.save` does, a plain one as its state dict."""
    if isinstance(model, Ensemble) or any(True for _ in stochastic_layers(model)):
        save(model, path)
        return
    tensors, tied = untied(model.state_dict())
    write_tensors(tensors, path, {"tied": json.dumps(tied)})


def device_of(accelerator: str) -> torch.device:
    """Return the device that Fabric will choose under this name: auto, cpu, cuda or mps.

    Raises:
        ValueError: if there is no such device here.
    """
    here = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if accelerator == "auto":
        return torch.device(next(name for name, available in here.items() if available))
    if not here.get(accelerator, False):
        there = ", ".join(("auto", *(name for name, available in here.items() if available)))
        raise ValueError(f"expected a device among {there} on this machine, got {accelerator!r}")
    return torch.device(accelerator)


def _precision(job: Job, device: torch.device) -> AbstractContextManager[Any]:
    if job.recipe.precision == "bf16-mixed":
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


def _difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Name the first setting that differs."""
    for name, value in new.items():
        before = old.get(name)
        if before != value:
            if isinstance(before, dict) and isinstance(value, dict):
                return f"{name}.{_difference(before, value)}"
            return f"{name}: {before!r} there, {value!r} now"
    return "a newer format"
