"""How the number of draws at test time changes accuracy and calibration: Tables 9 to 11 of the patching paper."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn, Tensor

from leanbayes.core.predictor import distinct_draws, predict
from leanbayes.metrics import accuracy, ece, mce, top_k_accuracy
from leanbayes_papers.study import Case, new_figure, Numbers, save_figure

SIZES = {"quick": (1, 5, 20), "short": (1, 20, 100, 200), "full": (1, 20, 100, 200)}
BINS, SMALLEST = 20, 5
"""The paper's bins, and the rows up to which a bin is left out."""

ROWS = 1000
"""Rows whose samples are kept at a time."""


def by_sample_size(case: Case) -> Numbers:
    """Return accuracy and calibration by label, seed and number of draws; the draws are those of one prediction."""
    found: Numbers = {}
    for job in case.jobs:
        model, experiment = case.trained(job)
        _, x, y = experiment.test
        sizes = (1,) if distinct_draws(model) == 1 else SIZES[case.budget]
        means = averages(model, x, sizes)
        place = found.setdefault(job.label, {})
        place[str(job.seed)] = [{"samples": size, **scores(means[size], y)} for size in sizes]
    return found


def averages(model: nn.Module, x: Tensor, sizes: tuple[int, ...]) -> dict[int, Tensor]:
    """Return the mean probabilities of the first S draws, for every S in `sizes`."""
    parts: dict[int, list[Tensor]] = {size: [] for size in sizes}
    for rows in torch.split(x, ROWS):
        samples = predict(model, rows, samples=max(sizes)).to("cpu").samples
        assert samples is not None
        for size in sizes:
            parts[size].append(samples[:size].double().mean(0))
    return {size: torch.cat(found) for size, found in parts.items()}


def scores(probabilities: Tensor, y: Tensor) -> dict[str, float]:
    """Return the columns of the paper's tables."""
    classes = probabilities.shape[1]
    return {
        "top5": float(top_k_accuracy(probabilities, y, k=min(5, classes))),
        "top1": float(accuracy(probabilities, y)),
        "ece": float(ece(probabilities, y, bins=BINS, smallest=SMALLEST)),
        "mce": float(mce(probabilities, y, bins=BINS, smallest=SMALLEST)),
    }


def say_sizes(numbers: Numbers) -> list[str]:
    """Tell a line for every method and number of draws, as means over seeds."""
    return [
        f"{label}, S = {row['samples']:.0f}: top-5 {100 * row['top5']:.2f} %, top-1 {100 * row['top1']:.2f} %, "
        f"ECE {100 * row['ece']:.2f} %, MCE {100 * row['mce']:.2f} %"
        for label, seeds in numbers.items()
        for row in _mean_rows(seeds)
    ]


def draw_sizes(numbers: Numbers, path: Path) -> None:
    """Draw accuracy and calibration error over the number of draws; a plain network is a level line."""
    figure = new_figure(7, 3)
    for axis, (name, title) in zip(figure.subplots(1, 2), (("top1", "accuracy"), ("ece", "ECE, 20 bins")), strict=True):
        for label, seeds in numbers.items():
            rows = _mean_rows(seeds)
            if len(rows) == 1:
                axis.axhline(rows[0][name], linestyle=":", color="grey", label=label)
            else:
                axis.plot([row["samples"] for row in rows], [row[name] for row in rows], marker="o", label=label)
        axis.set(xscale="log", xlabel="draws", ylabel=title)
    figure.axes[0].legend(fontsize=7)
    save_figure(figure, path)


def _mean_rows(seeds: dict[str, list[dict[str, float]]]) -> list[dict[str, float]]:
    """Average the rows of all seeds."""
    tables = list(seeds.values())
    return [
        {name: sum(table[at][name] for table in tables) / len(tables) for name in tables[0][at]}
        for at in range(len(tables[0]))
    ]
