"""Table 7 of the implicit-nodes paper: a trained network made Bayesian in fifteen epochs, with controls.

The paper gives rates, batch size and prior (numbers.toml). It gives neither the spread of the components at the start
nor their deviation: methods have their defaults here.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn, Tensor

import leanbayes as lb
from leanbayes.methods._base import Method
from leanbayes_papers.harness import plot_rows, printed, Record, Run, Study, Suite, Table, Trained, TrainingSpec
from leanbayes_papers.implicit import PAPER

LARGER_RATE = 0.02  # rate of the control that trains the plain network further at a usual rate
PATCH_RATE = 0.02
SAMPLES = {"quick": 16, "short": 16, "full": 80}
TABLE = Table.of(
    "implicit", "pretrained", paper={(name, "after"): row for name, row in printed("implicit", "table7").items()}
)
COLUMNS = TABLE.columns[:3]
GAINS = Table.of_gains(
    "method", "SGD", COLUMNS, title="Gains over SGD, seed by seed", keep=lambda record: record["when"] == "after"
)
LEGEND = (
    "Ours: mean ± standard error over seeds, which share nothing. The paper has one run of ResNet-50 on ImageNet, "
    "which is not here: compare what changes from row to row."
)


def implicit_pretrained(run: Run) -> Suite:
    """Error, NLL and ECE of a trained network before and after 15 epochs with implicit nodes (Table 7)."""
    data = run.pick(quick="digits", short="fashion-mnist", full="cifar10")
    plain = plain_network(run, data)
    measured = partial(measure, plain=plain, specs=continued(run, plain))
    plot = partial(plot_rows, table=replace(TABLE, columns=COLUMNS, paper={}))
    words = {"data": data, "net": plain.net}
    study = Study.of("implicit", "pretrained", words, measure=measured, tables=(TABLE, GAINS), plot=plot)
    return Suite(paper=PAPER, studies=(study,), legend=LEGEND)


def plain_network(run: Run, data: str) -> TrainingSpec:
    """Return the network that is trained first, by the usual recipe of its data."""
    recipe = run.recipe_of("implicit", "plain")
    made = run.spec(f"{data}-plain", data, run.pick(quick="mlp", short="lenet", full="resnet50"), recipe, quick_rows=0)
    return replace(made, source=replace(made.source, train_rows=run.pick(quick=0, short=10_000, full=0)))


def continued(run: Run, plain: TrainingSpec) -> dict[str, TrainingSpec]:
    """Return every way to continue the training of the plain network, by its name in the table."""
    recipe = run.recipe_of("implicit", "pretrained", decay=0.25 ** (1 / 4))
    larger = replace(recipe, lr=LARGER_RATE, schedule="cosine", batch_size=plain.recipe.batch_size)

    def made(name: str, method: Method | None = None, recipe: lb.Recipe = recipe) -> TrainingSpec:
        return replace(
            plain,
            name=f"{plain.source.name}-{name}",
            recipe=run.recipe(recipe),
            method=method,
            options={"start": plain.folder(Path(), 0).parent.name},
        )

    frozen = replace(recipe, freeze=True)
    return {
        f"SGD, {recipe.epochs} epochs more": made("same-rate"),
        f"SGD, more at {LARGER_RATE}": made("again", recipe=larger),
        **{f"iBNN-{k}": made(f"implicit-k{k}", lb.ImplicitNodes(components=k)) for k in (4, 8, 16)},
        "iBNN-4, weights frozen": made("implicit-k4-frozen", lb.ImplicitNodes(components=4), frozen),
        "Rank-1, K = 4": made("rank1", lb.Rank1(components=4)),
        "Patches, K = 4": made("patch", lb.ModelPatch(components=4), replace(recipe, posterior_lr=PATCH_RATE)),
    }


def begin(spec: TrainingSpec, plain: nn.Module, seed: int) -> nn.Module:
    """Return a copy of the trained network, converted if there is a method."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if spec.method is None:
            return copy.deepcopy(plain)
        return lb.convert(plain, spec.method, likelihood=lb.Categorical())


def measure(run: Run, *, data: str, plain: TrainingSpec, specs: Mapping[str, TrainingSpec]) -> list[Record]:
    """Train the plain network and continue it in every way, with every seed; evaluate each before and after."""
    records: list[Record] = []
    for seed in run.seeds:
        first = run.train(plain, seed)
        x, y = first.test()

        def add(
            name: str, when: str, model: nn.Module, folder: Path, seed: int = seed, x: Tensor = x, y: Tensor = y
        ) -> None:
            found = run.cached(folder / f"{when}.json", partial(evaluate, model, x, y, samples=SAMPLES[run.budget]))
            records.append({"method": name, "when": when, "seed": seed} | found)

        add("SGD", "after", first.model, plain.folder(run.out, seed))
        for name, spec in specs.items():
            folder, model = spec.folder(run.out, seed), begin(spec, first.model, seed).eval()
            if spec.method is not None and not spec.recipe.freeze:  # a frozen network begins as its twin
                add(name, "before", model, folder)
            found = run.train(spec, seed, start=model)
            add(name, "after", found.model, folder)
            if spec.recipe.freeze:
                records[-1]["posterior_bytes"] = posterior_bytes(found, first, run.out)
    return records


def evaluate(model: nn.Module, x: Tensor, y: Tensor, *, samples: int) -> dict[str, float]:
    """Return error in percent, NLL and ECE (15 bins) of a model."""
    device = next(model.parameters()).device
    found = lb.predict(model, x.to(device), lb.Categorical(), samples=samples, keep_samples=False).to("cpu")
    return {
        "error": 100 * (found.mean.argmax(1) != y).double().mean().item(),
        "nll": -found.log_prob(y).double().mean().item(),
        "ece": lb.metrics.ece(found.mean, y).item(),
    }


def posterior_bytes(tuned: Trained, plain: Trained, out: Path) -> int:
    """Return the size of a posterior's file, after it was loaded onto the plain network and predicted the same."""
    x, _ = plain.test(256)
    with tempfile.TemporaryDirectory(dir=out) as folder:
        path = Path(folder) / "posterior.safetensors"
        lb.save(tuned.model, path, only="posterior")
        again = lb.load(path, plain.model).eval()
        size = path.stat().st_size
    one, other = (lb.predict(model, x.to(next(model.parameters()).device), samples=4) for model in (tuned.model, again))
    if not torch.equal(one.mean, other.mean):
        worst = (one.mean - other.mean).abs().max().item()
        raise ArithmeticError(f"expected a posterior on its plain network to predict the same, got {worst:.2g} apart")
    return size
