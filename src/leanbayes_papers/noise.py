"""Predictive entropy as images turn into noise: figure 8 of the implicit-nodes paper.

Gaussian (its eq. 28): (1 - g) x + g e with e standard normal, of network inputs, which are standardised. Salt and
pepper: each number of an image is 0 or 1 with probability p (half each), before it is standardised.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn, Tensor

from leanbayes.core.predictor import predict
from leanbayes.data import DataSet
from leanbayes_papers.study import Case, new_figure, Numbers, save_figure

STRENGTHS = {"quick": 5, "short": 11, "full": 11}
LOOKED_AT = {"quick": 100, "short": 2000, "full": 10_000}


def gaussian(data: DataSet, x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Mix raw images with standard normal noise; returns network inputs."""
    clean = data.inputs(x)
    return (1 - strength) * clean + strength * torch.randn(clean.shape, generator=generator, device=generator.device)


def salt_and_pepper(data: DataSet, x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Set each number of raw images to 0 or to its largest with probability `strength`; returns network inputs."""
    hit = torch.rand(x.shape, generator=generator, device=generator.device) < strength
    white = torch.rand(x.shape, generator=generator, device=generator.device) < 0.5
    salt = white.to(x.dtype) * (255 if x.dtype == torch.uint8 else 1)
    return data.inputs(torch.where(hit, salt, x))


KINDS = {"gaussian": gaussian, "salt and pepper": salt_and_pepper}


def noise_curves(case: Case) -> Numbers:
    """Return mean total, aleatoric and epistemic entropy by data set, noise, label and strength, over all seeds."""
    found: Numbers = {}
    for job in case.jobs:
        model, experiment = case.trained(job)
        x = experiment.test[0][: LOOKED_AT[case.budget]]
        for kind in KINDS:
            curve = entropies(model, experiment.data, x, kind, STRENGTHS[case.budget], job.evaluation.samples)
            place = found.setdefault(experiment.data.name, {}).setdefault(kind, {}).setdefault(job.label, {})
            place[str(job.seed)] = curve
    return found


def entropies(
    model: nn.Module, data: DataSet, x: Tensor, kind: str, count: int, samples: int
) -> list[dict[str, float]]:
    """Return the mean entropies of a model at `count` strengths of noise from none to nothing else."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for step in range(count):
        strength = step / (count - 1)
        p = predict(model, KINDS[kind](data, x, strength, generator), samples=samples, keep_samples=False).to("cpu")
        measures = {"total": p.total, "aleatoric": p.aleatoric, "epistemic": p.epistemic}
        rows.append({"strength": strength} | {name: float(value.double().mean()) for name, value in measures.items()})
    return rows


def say_noise(numbers: Numbers) -> list[str]:
    """Tell the entropy of clean images and of pure noise, and which share of the latter is epistemic."""
    lines = []
    for data, kinds in numbers.items():
        for kind, labels in kinds.items():
            for label, seeds in labels.items():
                first, last = (_mean_row(seeds, at) for at in (0, -1))
                share = 100 * last["epistemic"] / last["total"] if last["total"] > 0 else 0.0
                lines.append(
                    f"{data}, {kind}, {label}: entropy {first['total']:.3f} clean, {last['total']:.3f} as pure noise, "
                    f"{share:.0f} % of it epistemic"
                )
    return lines


def draw_noise(numbers: Numbers, path: Path) -> None:
    """Draw entropy over the strength of noise, epistemic on top of aleatoric, for every data set, noise and label."""
    lines = [(data, kind) for data, kinds in numbers.items() for kind in kinds]
    labels = list(dict.fromkeys(label for kinds in numbers.values() for found in kinds.values() for label in found))
    figure = new_figure(3 * len(labels), 2.6 * len(lines))
    axes = figure.subplots(len(lines), len(labels), sharey="row", squeeze=False)
    for position, (data, kind) in enumerate(lines):
        for axis, label in zip(axes[position], labels, strict=True):
            seeds = numbers[data][kind][label]
            rows = [_mean_row(seeds, at) for at in range(len(next(iter(seeds.values()))))]
            parts = [[row[part] for row in rows] for part in ("aleatoric", "epistemic")]
            axis.stackplot([row["strength"] for row in rows], *parts, labels=("aleatoric", "epistemic"))
            axis.set_title(f"{data}, {kind}: {label}", fontsize=8)
            axis.set(xlabel="strength", ylabel="mean entropy, nats")
    axes[0, 0].legend(fontsize=7)
    save_figure(figure, path)


def _mean_row(seeds: dict[str, list[dict[str, float]]], at: int) -> dict[str, float]:
    """Average one point of a curve over seeds."""
    rows = [curve[at] for curve in seeds.values()]
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
