"""Score every way to an answer with the networks of a curve: each without and with a temperature.

A temperature is fitted on held-out training rows, separately for every way, and on its own answers: the mean becomes
softmax(log mean / T), and the entropy keeps its shares. Each way has a file of its own, and one that is there is kept.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn, Tensor

from leanbayes import metrics
from leanbayes.compare.job import file_name, PLAIN
from leanbayes.compare.row_training import TEMPERATURE_PRIOR
from leanbayes.core.plain import mean
from leanbayes.core.prediction import Prediction
from leanbayes.core.predictor import Predictor
from leanbayes.data.cache import write_npz
from leanbayes.evaluation.result import commit, environment
from leanbayes.methods.ensemble import Ensemble
from leanbayes.recalibrate import Temperature
from leanbayes.runtime._files import write_text
from leanbayes.training.objective import autocast
from tools.curve_runs import LATE, MEMBERS, Runs, STUDENT

DRAWS = (2, 4, 8, 16)
LATE_DRAWS = (4, 16)
TOLERANCES = (0.016, 0.004, 0.001)
"""Nats; `core/stopping.py` has the rule."""
MEAN, ALL = "mean network", "16 draws"
SIDES = ("raw", "tempered")
Losses = dict[tuple[str, str], dict[str, Any]]
"""-log p of each test row, by method and way, then by side."""


@dataclass(frozen=True)
class Way:
    """One way to an answer.

    Attributes:
        row: the trained network that it needs last.
        method: of the network; empty for plain ones.
        name: as the tables say it.
        samples: draws, at most.
        tolerance: of early stopping.
        make: returns the model.
    """

    row: str
    method: str
    name: str
    samples: int
    tolerance: float | None
    make: Callable[[], nn.Module]

    @property
    def file(self) -> str:
        """The name of the file with its scores."""
        return f"{file_name(f'{self.row}-{self.name}')}.npz"

    def predictor(self, model: nn.Module, **options: Any) -> Predictor:
        """Return what gives the answers."""
        return Predictor(model, samples=self.samples, tolerance=self.tolerance, keep_samples=False, **options)


def ways(runs: Runs, seed: int, device: str) -> list[Way]:
    """Return all ways to an answer of a seed, cheap ones first."""
    study = runs.study
    model = partial(runs.model, seed, device=device)
    plain = [name for name in study.rows if name == PLAIN or name.startswith("member")]
    found = [Way(PLAIN, "", "plain network", 1, None, partial(model, PLAIN))]
    for count in (2, MEMBERS):
        members = plain[:count]
        found.append(Way(members[-1], "", f"ensemble of {count}", count, None, partial(_ensemble, model, members)))
    for method in study.methods:
        found.append(Way(f"{method}-{STUDENT}", method, "student", 1, None, partial(model, f"{method}-{STUDENT}")))
        found.append(Way(method, method, MEAN, 1, None, partial(_mean, model, method)))
        whole = partial(model, method)
        found += [Way(method, method, f"{count} draws", count, None, whole) for count in DRAWS]
        found += [Way(method, method, f"tolerance {t:g}", study.samples, t, whole) for t in TOLERANCES]
        for part in LATE:
            one = f"{method}-{part}"
            found += [Way(one, method, f"{part}, {n} draws", n, None, partial(model, one)) for n in LATE_DRAWS]
    return found


def _ensemble(model: Callable[[str], nn.Module], rows: Sequence[str]) -> nn.Module:
    return Ensemble([model(row) for row in rows]).eval()


def _mean(model: Callable[[str], nn.Module], row: str) -> nn.Module:
    return mean(model(row))


def score_all(runs: Runs, seeds: Sequence[int], rows: Sequence[str], device: str, into: Path) -> None:
    """Score the ways of some trained rows, and write the figures of each seed."""
    for seed in seeds:
        folder = runs.out / "scores" / f"seed{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        for way in ways(runs, seed, device):
            if way.row in rows and not (folder / way.file).is_file():
                start = time.perf_counter()
                about, losses = score(runs, seed, way, device)
                write_npz(folder / way.file, {"about": np.array(json.dumps(about)), **losses})
                said = f"seed {seed}, {way.row}, {way.name}: NLL {about['raw']['nll']:.4f}"
                sys.stderr.write(f"{said} ({time.perf_counter() - start:.0f} s)\n")
                sys.stderr.flush()
    into.mkdir(parents=True, exist_ok=True)
    name = f"{runs.study.data}-{runs.study.net}"
    every = {seed: read_scores(runs, seed, device) for seed in seeds}
    found = {f"{name}-seed{seed}": collected(runs, seed, device, *scored) for seed, scored in every.items()}
    found[f"{name}-rows"] = pooled(every)
    for file, figures in found.items():
        write_text(json.dumps(figures, indent=1, allow_nan=False) + "\n", into / f"{file}.json")


@torch.no_grad()
def score(runs: Runs, seed: int, way: Way, device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the figures of a way, and -log p of each test row without and with the temperature."""
    study, data = runs.study, runs.experiment.data
    model = way.make()
    predictor, place = way.predictor(model), torch.device(device)

    def answer(x: Tensor) -> Prediction:
        with autocast(study.precision, place):
            return predictor(x).to("cpu")

    held = data.inputs(data.test.x)  # held-out training rows
    scale = Temperature("mean", prior=TEMPERATURE_PRIOR).fit(answer(held), data.test.y)
    test, known = answer(data.inputs(runs.test.x)), runs.test.y.long()
    others = {name: answer(x) for name, (x, _) in runs.experiment.ood.items()}
    draws = float(way.samples if test.draws is None else test.draws.double().mean())
    about: dict[str, Any] = {"row": way.row, "method": way.method, "way": way.name, "draws": draws}
    about |= {"passes": multiply_adds(way, model, held[:1], draws), "temperature": scale.temperature}
    losses = {}
    for side in SIDES:
        change: Callable[[Prediction], Prediction] = scale if side == "tempered" else _unchanged
        now, far = change(test), {name: change(p) for name, p in others.items()}
        about[side] = figures(now, known, far, draws=draws)
        losses[side] = -now.log_prob(known).double().numpy()
    return about, losses


def _unchanged(p: Prediction) -> Prediction:
    return p


def figures(p: Prediction, y: Tensor, others: Mapping[str, Prediction], *, draws: float) -> dict[str, Any]:
    """Return NLL, ECE, accuracy, and the AUROC of both uncertainties against each other set.

    A single pass without an epistemic part has no AUROC by it.
    """
    found: dict[str, Any] = {name: float(getattr(metrics, name)(p.mean, y)) for name in ("nll", "ece", "accuracy")}
    by = ["total", *(["epistemic"] if bool(p.epistemic.any()) and (draws > 1 or p.epistemic.max() > 1e-6) else [])]
    found["auroc"] = {
        name: {kind: float(metrics.auroc(getattr(p, kind), getattr(other, kind))) for kind in by}
        for name, other in others.items()
    }
    return found


def multiply_adds(way: Way, model: nn.Module, x: Tensor, draws: float) -> float:
    """Return the multiply-adds of an answer in plain passes; with a tolerance, those of the mean number of draws."""
    whole = Predictor(model, samples=way.samples).price(x).passes
    if way.tolerance is None:
        return whole
    first = Predictor(model, samples=1).price(x).passes
    return first + (whole - first) * (draws - 1) / (way.samples - 1)


def read_scores(runs: Runs, seed: int, device: str) -> tuple[list[dict[str, Any]], Losses]:
    """Return the figures of all ways of a seed that are scored, and their losses of every test row."""
    points: list[dict[str, Any]] = []
    losses: Losses = {}
    for way in ways(runs, seed, device):
        path = runs.out / "scores" / f"seed{seed}" / way.file
        if path.is_file():
            with np.load(path, allow_pickle=False) as arrays:
                points.append(json.loads(str(arrays["about"])))
                losses[way.method, way.name] = {side: arrays[side] for side in SIDES}
    return points, losses


def pooled(every: Mapping[int, tuple[list[dict[str, Any]], Losses]]) -> dict[str, Any]:
    """Return paired differences of losses that are averaged over seeds: their means and errors over test rows.

    All seeds have the same test rows, so the error of one seed is not divided by the root of their number.
    """
    all_losses = [losses for _, losses in every.values()]
    shared = [key for key in all_losses[0] if all(key in losses for losses in all_losses)]
    averages = {k: {s: np.mean([losses[k][s] for losses in all_losses], axis=0) for s in SIDES} for k in shared}
    points = [point for point in next(iter(every.values()))[0] if (point["method"], point["way"]) in averages]
    less = [{"row": p["row"], "way": p["way"], "less": dict(_differences(p, averages))} for p in points]
    return {"seeds": list(every), "points": less}


def collected(runs: Runs, seed: int, device: str, points: list[dict[str, Any]], losses: Losses) -> dict[str, Any]:
    """Return the figures of the ways of a seed, with their paired differences."""
    data, study = runs.experiment.data, runs.study
    for point in points:
        point["less"] = dict(_differences(point, losses))
    others = {name: len(x) for name, (x, _) in runs.experiment.ood.items()}
    rows = {"train": len(data.train), "held_out": len(data.test), "test": len(runs.test), "ood": others}
    return {
        "data": data.name,
        "sha256": data.sha256,
        "net": study.net,
        "seed": seed,
        "rows": rows,
        "samples": study.samples,
        "budget": study.budget,
        "flags": study.flags,
        "recipe": runs.jobs(seed)[PLAIN].recipe.fields(),
        "convert_at_epoch": {name: runs.jobs(seed)[name].recipe.convert_at_epoch for name in study.methods},
        "commit": commit(),
        "environment": environment(torch.device(device)),
        "points": points,
    }


def _differences(point: Mapping[str, Any], losses: Losses) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """Yield the NLL less that of other ways of the same method and side: mean and standard error over test rows."""
    own = losses[point["method"], point["way"]]
    for name, key in {ALL: (point["method"], ALL), MEAN: (point["method"], MEAN), PLAIN: ("", "plain network")}.items():
        if key in losses:
            gaps = {side: own[side] - losses[key][side] for side in SIDES}
            yield name, {s: [float(g.mean()), float(g.std(ddof=1) / len(g) ** 0.5)] for s, g in gaps.items()}
