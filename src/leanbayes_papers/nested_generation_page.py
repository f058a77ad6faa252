"""How codes of every length are shown: sentences, curves over the length, and the table as the paper prints it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from leanbayes_papers.overview import Overview
from leanbayes_papers.study import new_figure, Numbers, save_figure

HEADS = {"frechet": "Fréchet", "inception": "inception", "reconstruction": "error"}
LABELS = {
    "frechet": "Fréchet distance (less is better)",
    "inception": "inception score (more is better)",
    "reconstruction": "reconstruction error",
}
STYLES = {"VND-AE": "o-", "VAE": "s-", "VAE, cut": "s:", "BetaVAE": "^", "JointVAE": "v", "SWAE": "D"}
COLOURS = dict(zip(STYLES, ("#08519c", "#d62728", "#f4a6a0", "#7f7f7f", "#8c6d31", "#2ca02c"), strict=True))

ROUNDING = 1e-6
"""Share of the whole fall of an error: a rise of less is none."""

PRINTED = {
    ("BetaVAE", "100"): (215.04, 2.19, 1.286),
    ("JointVAE", "100"): (154.57, 3.01, 0.774),
    ("SWAE", "100"): (119.52, 3.00, 3.820),
    ("VAE", "25"): (175.17, 2.71, 0.947),
    ("VAE", "50"): (140.70, 3.26, 0.752),
    ("VAE", "75"): (144.35, 3.19, 0.740),
    ("VAE", "100"): (147.35, 3.10, 0.743),
    ("VND-AE", "25"): (174.83, 2.83, 1.094),
    ("VND-AE", "50"): (134.95, 3.36, 0.865),
    ("VND-AE", "75"): (117.24, 3.40, 0.810),
    ("VND-AE", "100"): (114.12, 3.36, 0.805),
}
"""Tables 4, 5 and 6 on CIFAR-10: FID, inception score, reconstruction error."""


def say(numbers: Numbers) -> list[str]:
    """Tell every model at every length, and the order of dimensions."""
    real = numbers["real"]
    lines = [
        f"Features of {numbers['network']} (accuracy {numbers['accuracy']:.1f} %), {numbers['images']:,} images each; "
        f"training images have Fréchet distance {real['frechet']:.3g}, inception score {real['inception']:.2f} and "
        f"diversity {real['diversity']:.3g}."
    ]
    for name, row in numbers["methods"].items():
        told = "; ".join(f"{percent} %: {_figures(runs)}" for percent, runs in row.items())
        lines.append(f"{name}: {told}")
    return lines + [f"{name}: {_ordered(errors)}" for name, errors in numbers["order"].items()]


def overview(studies: Mapping[str, Numbers]) -> Overview:
    """Put all data sets into one table, with the paper's numbers where CIFAR-10 is among them."""
    found = [numbers for numbers in studies.values() if "methods" in numbers]
    beside = any(numbers["data"] == "cifar10" for numbers in found)
    lines = [
        [numbers["data"], name, percent, *_cells(numbers["data"], name, percent, runs, beside=beside)]
        for numbers in found
        for name, row in numbers["methods"].items()
        for percent, runs in row.items()
    ]
    seeds = {len(runs) for numbers in found for row in numbers["methods"].values() for runs in row.values()}
    says = [
        f"Seeds: {', '.join(map(str, sorted(seeds)))}. Error: mean squared difference of pixels between 0 and 1; "
        "the paper does not say what its error is of."
    ]
    columns = [f"{head}{of}" for head in HEADS.values() for of in (("", ", paper") if beside else ("",))]
    heads = ["", "model", "code, %", *columns, "diversity"]
    return Overview(title="Nested paper, Tables 4, 5 and 6", heads=heads, rows=lines, says=says)


def _cells(data: str, name: str, percent: str, runs: Sequence[Mapping[str, float]], *, beside: bool) -> list[str]:
    """Return the figures of a model at a length, the paper's beside them or an empty cell where it has none."""
    paper = PRINTED.get((name, percent)) if data == "cifar10" else None
    cells: list[str] = []
    for k, key in enumerate(HEADS):
        cells.append(told(runs, key))
        if beside:
            cells.append(f"{paper[k]:g}" if paper else "")
    return [*cells, told(runs, "diversity")]


def told(runs: Sequence[Mapping[str, float]], key: str) -> str:
    """Return the mean of a figure over seeds, with their standard deviation where there are several."""
    values = [run[key] for run in runs]
    mean = f"{statistics.fmean(values):#.4g}"
    decimals = len(mean.partition(".")[2])
    return f"{mean} ± {statistics.stdev(values):.{decimals}f}" if len(values) > 1 else mean


def draw(numbers: Numbers, path: Path) -> None:
    """Draw both errors and the inception score over the length, and the reconstruction error dimension by dimension."""
    figure = new_figure(11, 6)
    axes = figure.subplots(2, 2).flatten()
    for axis, (key, head) in zip(axes, LABELS.items(), strict=False):
        for name, style in STYLES.items():
            row = numbers["methods"][name]
            means = [statistics.fmean(run[key] for run in runs) for runs in row.values()]
            axis.plot([int(percent) for percent in row], means, style, color=COLOURS[name], ms=5, label=name)
        axis.set(xlabel="code in use, %", ylabel=head, xticks=[25, 50, 75, 100])
    for name, errors in numbers["order"].items():
        drawn = "VAE, cut" if name == "VAE" else name
        axes[3].plot(range(1, len(errors) + 1), errors, STYLES[drawn], color=COLOURS[drawn], ms=3)
    axes[3].set(xlabel="dimensions in use", ylabel=LABELS["reconstruction"])
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(STYLES), frameon=False)
    save_figure(figure, path)


def _figures(runs: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{head} {told(runs, key)}" for key, head in HEADS.items())


def _ordered(errors: Sequence[float]) -> str:
    """Say whether the reconstruction error falls with every dimension more, and from which on nothing is gained."""
    fall = max(errors) - min(errors)
    worst = max(later - earlier for earlier, later in pairwise(errors))
    enough = next(k for k, error in enumerate(errors, 1) if error <= errors[-1] + 0.01 * fall)
    rises = "never rises" if worst <= ROUNDING * fall else f"rises by {100 * worst / fall:.2g} % of the fall at most"
    return (
        f"reconstruction error of 1 to {len(errors)} dimensions: {errors[0]:.4g} to {errors[-1]:.4g}; it {rises}, and "
        f"{enough} dimensions have 99 % of the gain"
    )
