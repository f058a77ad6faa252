"""Tables 6 and 9 to 11 of the patching paper: images, by method and by number of draws."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn, Tensor

import leanbayes as lb
from leanbayes.compare.job import recipe as recipe_of
from leanbayes.core.predictor import distinct_draws
from leanbayes.methods._base import Method
from leanbayes_papers.harness import plot_curves, printed, Record, Run, Study, Suite, Table, TrainingSpec
from leanbayes_papers.patch import PAPER

METHODS: dict[str, tuple[str, Method | None]] = {
    "Vanilla": ("plain", None),
    "Dropout": ("dropout", lb.MCDropout()),
    "EMP": ("emp", lb.ModelPatch()),
    "ECMP": ("ecmp", lb.ModelPatch(crossed=True)),
}
SIZES = {"quick": (1, 5, 20), "short": (1, 20, 100, 200), "full": (1, 20, 100, 200)}
BINS, SMALLEST = 20, 5  # the paper's bins; a bin of at most so few rows is left out
ROWS = 1000  # rows whose samples are in memory at a time
TABLE = Table.of("patch", "sample-size")


def patch_samples(run: Run) -> Suite:
    """EMP, ECMP and dropout on images by number of draws (Tables 6 and 9-11)."""
    specs = {name: spec(run, name) for name in METHODS}
    one = specs["Vanilla"]
    note = "" if one.source.name == "cifar100" else f" Its numbers are of CIFAR-100, ours of {one.source.name}."
    words = {"set": one.source.name, "net": one.net, "note": note}
    measures = ("top5", "accuracy", "ece20")
    table = Study.of("patch", "table6", words).compared(specs, measures, printed("patch", "table6"))
    measured = partial(by_sample_size, specs=table.specs)
    plot = partial(plot_curves, x="samples", columns=TABLE.some("top1", "ece"), log=True)
    sizes = Study.of("patch", "sample-size", words, measure=measured, tables=(TABLE,), plot=plot, specs=table.specs)
    return Suite(paper=PAPER, studies=(table, sizes))


def spec(run: Run, name: str) -> TrainingSpec:
    """Return the network of a row; the dropout network has a dropout layer of rate 0.005 before every norm."""
    data, net = place(run)
    label, method = METHODS[name]
    net += "+dropout" if name == "Dropout" else ""
    evaluation = run.evaluation(run.pick(quick=20, short=200, full=200), 300)
    return run.spec(label, data, net, recipe(run), quick_rows=1000, method=method, evaluation=evaluation)


def place(run: Run) -> tuple[str, str]:
    """Return data and network: the paper's in full; in short CIFAR-10 with a WRN-16-4; in quick the digits."""
    if run.budget == "quick":
        return "digits", "small"
    name = "cifar100" if run.budget == "full" and run.has("cifar100") else "cifar10"
    return name, run.pick(quick="", short="wrn-16-4", full="pyramidnet-110-270")


def recipe(run: Run) -> lb.Recipe:
    """Return the recipe of all rows; in full the paper's Adam, 400 epochs in batches of 256."""
    if run.budget == "short":
        return run.recipe(recipe_of("short", kind="image", rows=50_000, augment="crop_flip"))
    return run.recipe_of("patch", run.budget)


def by_sample_size(run: Run, *, specs: tuple[TrainingSpec, ...]) -> list[Record]:
    """Return accuracy and calibration by method, seed and number of draws; the draws are those of one prediction."""
    records = []
    for spec in specs:
        for seed in run.seeds:
            model, experiment, _ = run.train(spec, seed)
            _, x, y = experiment.test
            sizes = (1,) if distinct_draws(model) == 1 else SIZES[run.budget]
            means = averages(model, x, sizes)
            records += [{"method": spec.name, "seed": seed, "samples": n} | scores(means[n], y) for n in sizes]
    return records


def averages(model: nn.Module, x: Tensor, sizes: tuple[int, ...]) -> dict[int, Tensor]:
    """Return the mean probabilities of the first S draws, for every S in `sizes`."""
    parts: dict[int, list[Tensor]] = {size: [] for size in sizes}
    for rows in torch.split(x, ROWS):
        samples = lb.predict(model, rows, samples=max(sizes)).to("cpu").samples
        assert samples is not None
        for size in sizes:
            parts[size].append(samples[:size].double().mean(0))
    return {size: torch.cat(found) for size, found in parts.items()}


def scores(p: Tensor, y: Tensor) -> dict[str, float]:
    """Return the columns of the paper's tables from probabilities (N, C)."""
    return {
        "top5": float(lb.metrics.top_k_accuracy(p, y, k=min(5, p.shape[1]))),
        "top1": float(lb.metrics.accuracy(p, y)),
        "ece": float(lb.metrics.ece(p, y, bins=BINS, smallest=SMALLEST)),
        "mce": float(lb.metrics.mce(p, y, bins=BINS, smallest=SMALLEST)),
    }
