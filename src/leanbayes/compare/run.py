"""`perform`: train and evaluate one job and write `result.json`. A finished run is kept, a killed one resumes."""

from __future__ import annotations

import base64
import io
import json
import shutil
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn, Tensor
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from leanbayes.compare.experiment import Experiment, pick_device
from leanbayes.compare.job import Job, located
from leanbayes.core.checkpoint import save
from leanbayes.core.conversion import is_stochastic, own_likelihood, stochastic_layers
from leanbayes.core.prediction import Prediction
from leanbayes.core.summary import summary
from leanbayes.data import DataSet
from leanbayes.data.table import FILE as TABLE_FILE
from leanbayes.distributions.likelihoods import Likelihood
from leanbayes.evaluation import result as results
from leanbayes.evaluation.evaluate import evaluate, Result
from leanbayes.methods.ensemble import members_of
from leanbayes.runtime._files import untied, write_tensors
from leanbayes.runtime.batches import device_of
from leanbayes.runtime.distributed import is_first
from leanbayes.slim import narrow
from leanbayes.training import History, Recipe
from leanbayes.training.fit import fit

MODEL = "model.safetensors"
SETTINGS_FILE = "job.json"
NORM_ROWS = 1024  # training rows for the norm statistics of a nested network at full width
SHOWN = 6  # example images of each kind in a result
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
) -> dict[str, Any]:
    """Train and evaluate one job, and return its result; an error is recorded as a failed run.

    Args:
        job: the run.
        experiment: data and networks.
        out: the comparison's folder; the run is stored in `job.folder(out)`.
        stage: "train" stops after training, "evaluate" requires a finished training.
        fresh: delete an earlier run and start again; with "evaluate", only evaluate again.
        callbacks: called after each epoch.

    Raises:
        ValueError: if the folder holds a run with other settings.
    """
    folder = job.folder(out)
    if fresh and is_first() and stage != "evaluate":
        shutil.rmtree(folder, ignore_errors=True)
    found = None if fresh else finished(job, folder)
    if found is not None and stage != "train":
        return found
    if found is None and stage == "train" and is_first():
        (folder / results.FILE).unlink(missing_ok=True)  # of a failed run; training alone writes none
    reserve_folder(job, folder)
    try:
        result = _perform(job, experiment, folder, stage, callbacks)
    except (RuntimeError, ValueError, ArithmeticError, OSError) as error:
        result = _header(job, experiment) | {"status": "failed", "error": f"{type(error).__name__}: {error}"}
        result["trace"] = traceback.format_exc().splitlines()[-12:]
    if is_first() and (stage != "train" or result["status"] == "failed"):
        results.write_result(folder, result)
    return result


def finished(job: Job, folder: Path) -> dict[str, Any] | None:
    """Return the result of a finished run; None if there is none, or it failed.

    Raises:
        ValueError: if the folder holds a run with other settings; it is never overwritten silently.
    """
    _check_settings_file(job, folder)
    found = results.read_result(folder)
    if found is None or found.get("status") != "done":
        return None
    changed = results.difference(_relocated(found.get("settings"), job), _as_json(job.settings()))
    if found.get("id") != job.id and changed:
        raise ValueError(
            f"'{folder}' holds a finished run with other settings ({changed}); run leanbayes evaluate --fresh to "
            "evaluate its model again, or choose another --out"
        )
    return found


def reserve_folder(job: Job, folder: Path) -> None:
    """Write the settings of a run into its folder. A run with other settings raises, even during training."""
    if is_first():
        results.write_json(_training_settings(job) | {"environment": _launch(job)}, folder / SETTINGS_FILE)


def _check_settings_file(job: Job, folder: Path) -> None:
    path = folder / SETTINGS_FILE
    if not path.is_file():
        return
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return  # a killed process cut it off; the training state is checked on its own
    if not isinstance(recorded, dict):
        raise ValueError(f"'{path}' is damaged (expected an object, got a {type(recorded).__name__}); remove it")
    there = {name: value for name, value in recorded.items() if name != "environment"}
    if changed := results.difference(_relocated(there, job), _training_settings(job)):
        raise ValueError(
            f"'{folder}' holds a run with other settings ({changed}); choose another --out, or --fresh to begin again"
        )


def _as_json(settings: dict[str, Any]) -> dict[str, Any]:
    return dict(json.loads(json.dumps(settings)))


def _training_settings(job: Job) -> dict[str, Any]:
    return {name: value for name, value in _as_json(job.settings()).items() if name != "judging"}


def _launch(job: Job) -> dict[str, Any]:
    return {"processes": job.processes, "launcher": "local" if job.launch is None else job.launch.launcher}


def _relocated(settings: Any, job: Job) -> dict[str, Any]:
    """Rename the data file in recorded settings to the job's, if it is the same file or was moved."""
    known: dict[str, Any] = settings if isinstance(settings, dict) else {}
    data, here = known.get("data"), located(job.source.name)
    if not (isinstance(data, dict) and isinstance(data.get("name"), str)):
        return known
    there = Path(located(data["name"]))
    moved = not there.exists() and there.name == Path(here).name
    return known | {"data": data | {"name": here}} if moved or str(there) == here else known


def _perform(
    job: Job, experiment: Experiment, folder: Path, stage: Stage, callbacks: tuple[Callback, ...]
) -> dict[str, Any]:
    device = pick_device(job.recipe.accelerator)
    model = experiment.model(job.method, job.seed, job.where).to(device)
    likelihood = own_likelihood(model) or experiment.likelihood().to(device)
    if stage == "evaluate" and not (folder / MODEL).is_file():
        raise ValueError(f"no trained model in '{folder}'; run leanbayes train with the same flags first")
    if is_first() and experiment.data.table is not None:
        results.write_json(experiment.data.table.to_json(), folder / TABLE_FILE)
    train = training_rows(experiment.data, job.recipe)
    options: dict[str, Any] = {"folder": folder, "resume": True, "callbacks": callbacks, "progress": False}
    history = fit(model, train, job.recipe, likelihood=likelihood, **options)
    if is_first():
        write_model(model, folder / MODEL)
    header = _header(job, experiment)
    if stage == "train":
        return header | {"status": "done", "history": list(history)}
    with autocast(job.recipe.precision, device):
        result = _evaluate(job, experiment, at_full_width(model, experiment.data), likelihood)
    return header | _outcome(experiment, model, result, history) | {"status": "done"}


def training_rows(data: DataSet, recipe: Recipe) -> Any:
    """Return the data for `fit`; rows with weights are drawn in proportion to them, with replacement."""
    inputs, targets = data.prepared(data.train)
    if data.train.weight is None:
        return inputs, targets
    generator = torch.Generator()
    sampler = WeightedRandomSampler(data.train.weight.double().tolist(), len(inputs), generator=generator)
    how: dict[str, Any] = {"batch_size": recipe.batch_size, "sampler": sampler, "generator": generator}
    lone = len(inputs) % recipe.batch_size == 1  # one row has no batch statistics
    return DataLoader(TensorDataset(inputs, targets), drop_last=lone, **how)


def _evaluate(job: Job, experiment: Experiment, model: nn.Module, likelihood: Likelihood) -> Result:
    _, x, y = experiment.test
    plain = experiment.plain(job.seed).to(device_of(model))
    if job.recipe.channels_last:
        model, plain = (network.to(memory_format=torch.channels_last) for network in (model, plain))  # type: ignore[call-overload]
    return evaluate(
        model,
        (x, y),
        likelihood=likelihood,
        ood=experiment.ood,
        shift=experiment.shift if experiment.data.task == "classification" else None,
        samples=job.evaluation.samples,
        batch_size=job.recipe.batch_size,
        plain=plain,
        units=experiment.units,
        compile=job.recipe.compile,
    )


def at_full_width(model: nn.Module, data: DataSet) -> nn.Module:
    """Return the network to evaluate: one with ordered channels at full width, any other unchanged."""
    if not any(layer.ordered for _, layer in stochastic_layers(model)):
        return model
    device = device_of(model)
    x = data.inputs(data.train.x[:NORM_ROWS]).to(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)  # the norm statistics come from draws: the same ones at each evaluation
        return narrow(model, 1.0, data=x)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context with the precision of a recipe."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16-mixed" else nullcontext()


def write_model(model: nn.Module, path: Path) -> None:
    """Save a trained model: a converted one with `lb.save`, a plain one as its state dict."""
    if members_of(model) or is_stochastic(model):
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
        "settings": settings,
        "metrics": {},
        "cost": {},
        "figures": {},
        "history": [],
        "environment": results.environment(pick_device(job.recipe.accelerator)) | _launch(job),
    }


def _table_facts(data: DataSet, labels: Tensor) -> dict[str, Any]:
    """Return notes on the columns of the user's own table, and the largest class with its share of evaluated rows."""
    if data.table is None:
        return {}
    facts: dict[str, Any] = {"notes": list(data.notes)}
    if data.task == "classification":
        largest = int(torch.bincount(data.train.y).argmax())
        share = float((labels == largest).double().mean())
        facts["largest_class"] = {"name": data.classes[largest], "share": share}
    return facts


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


def _layers(model: nn.Module) -> dict[str, Any]:
    """Return the number of converted layers, and the layers with parameters that were skipped."""
    found = summary(model)
    skipped = [f"{row.path}: {row.kind}, {row.reason}" for row in found.rows if not row.method]
    return {
        "converted": found.converted,
        "total": found.total,
        "eligible": found.eligible,
        "things": found.things,
        "covered": None if found.partial else found.covered,
        "skipped": [line for line in skipped if not line.endswith("no parameters")],
    }


def examples(p: Prediction, y: Tensor, images: Tensor | None) -> dict[str, list[dict[str, Any]]]:
    """Return the most certain rows, the least certain rows, and those with most epistemic uncertainty."""
    order = p.total.argsort(stable=True)
    chosen = {
        "certain": order[:SHOWN],
        "uncertain": order.flip(0)[:SHOWN],
        "epistemic": p.epistemic.argsort(descending=True, stable=True)[:SHOWN],
    }
    return {kind: [_example(p, y, images, int(row)) for row in rows] for kind, rows in chosen.items()}


def _example(p: Prediction, y: Tensor, images: Tensor | None, row: int) -> dict[str, Any]:
    std = torch.zeros_like(p.mean[row]) if p.samples is None else p.samples[:, row].std(0, correction=0)
    return {
        "image": None if images is None else png(images[row]),
        "label": int(y[row]),
        "predicted": int(p.mean[row].argmax()),
        "probabilities": [round(value, 5) for value in p.mean[row].tolist()],
        "spread": [round(value, 5) for value in std.tolist()],
        "total": float(p.total[row]),
        "aleatoric": float(p.aleatoric[row]),
        "epistemic": float(p.epistemic[row]),
    }


def png(image: Tensor) -> str:
    """Return an image (C, H, W), uint8 or in [0, 1], as base64 PNG."""
    from PIL import Image

    pixels = image if image.dtype == torch.uint8 else (image.clamp(0, 1) * 255).round().to(torch.uint8)
    array = pixels[0].numpy() if len(pixels) == 1 else pixels[:3].permute(1, 2, 0).contiguous().numpy()
    written = io.BytesIO()
    Image.fromarray(array).save(written, format="PNG", optimize=True)
    return base64.b64encode(written.getvalue()).decode()
