"""A trained network made Bayesian in fifteen epochs (Trinh, Kaski, Heinonen, 2020, Table 7), with controls.

The paper gives weights a rate of 1e-4 and node posteriors one of 0.2, which goes down to 0.05 in four epochs from epoch
6 on; batches of 256, a prior of N(1, 0.1). It does not say how far apart the components start, nor with what deviation:
methods have their defaults here.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn, Tensor

from leanbayes.core.checkpoint import load, save
from leanbayes.core.conversion import convert
from leanbayes.core.predictor import predict
from leanbayes.distributions.likelihoods import Categorical
from leanbayes.methods._base import Method
from leanbayes.methods.implicit import ImplicitNodes
from leanbayes.methods.patch import ModelPatch
from leanbayes.methods.rank1 import Rank1
from leanbayes.metrics import ece
from leanbayes.runtime._files import write_text
from leanbayes.training import Recipe
from leanbayes_papers.implicit_cifar import MEASURES, PAPER
from leanbayes_papers.pretrained_page import draw, say
from leanbayes_papers.study import Case, Numbers, Study
from leanbayes_papers.suite import printed, Setting, Suite
from leanbayes_papers.trained import train, Trained, Trainee

TABLE7 = {  # error in per cent, NLL, ECE; ResNet-50 on ImageNet, one run each
    "SGD": "23.87 0.9618 0.0373",
    "iBNN-4": "23.22 0.9310 0.0350",
    "iBNN-8": "23.15 0.9237 0.0323",
    "iBNN-16": "23.12 0.9118 0.0232",
}
EPOCHS = 15
WEIGHT_RATE, POSTERIOR_RATE = 1e-4, 0.2
ANNEALED = (6, 7, 8, 9)
"""Epochs at which the rate of the posterior goes down, to a quarter in all: 0.05."""

AGAIN = 0.02
"""Rate of the control that trains the plain network on in earnest."""

PATCH_RATE = 0.02
SAMPLES = {"quick": 16, "short": 16, "full": 80}
LEGEND = (
    "Ours: mean ± standard error over seeds, which share nothing. The paper has one run of ResNet-50 on ImageNet, "
    "which is not here: compare what changes from row to row."
)


@dataclass(frozen=True, kw_only=True)
class Sequel(Trainee):
    """A trained network that is converted, or not, and trained on.

    Attributes:
        start: the folder of the network's first training, which decides what this one is, too.
    """

    start: str

    def begin(self, plain: nn.Module, seed: int) -> nn.Module:
        """Return what is trained on: a copy of the plain network, or what it is converted to."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if self.method is None:
                return copy.deepcopy(plain)
            return convert(plain, self.method, likelihood=Categorical())


def implicit_pretrained(setting: Setting) -> Suite:
    """Error, NLL and ECE of a trained network before and after 15 epochs with implicit nodes (Table 7)."""
    data = setting.pick(quick="digits", short="fashion-mnist", full="cifar10")
    plain = plain_network(setting, data)
    study = Study(
        name=f"pretrained-{data}",
        title=f"Implicit-nodes paper, Table 7: a trained network on {data}, {plain.net} (paper: ImageNet, ResNet-50)",
        claim="fifteen epochs with implicit nodes improve error, NLL and ECE of a trained network, the more the more "
        "components.",
        data=(data,),
        measure=partial(measure, plain=plain, sequels=sequels_of(setting, plain)),
        draw=draw,
        say=say,
    )
    return Suite(paper=PAPER, tables=(), studies=(study,), legend=LEGEND)


def plain_network(setting: Setting, data: str) -> Trainee:
    """Return the network that is trained first, by the recipe that is usual for its data."""
    rows = setting.pick(quick=0, short=10_000, full=0)
    recipe = Recipe(
        epochs=setting.pick(quick=15, short=20, full=100),
        batch_size=setting.pick(quick=32, short=128, full=128),
        lr=setting.pick(quick=0.05, short=0.05, full=0.1),
        warmup_epochs=1,
        augment=setting.pick(quick="none", short="none", full="crop_flip"),
    )
    return Trainee(
        name=f"{data}-plain",
        source=replace(setting.source(data, quick_rows=0), train_rows=rows),
        net=setting.pick(quick="mlp", short="lenet", full="resnet50"),
        recipe=setting.recipe(recipe),
    )


def sequels_of(setting: Setting, plain: Trainee) -> dict[str, Sequel]:
    """Return every way to go on from the trained network, by its name in the table."""
    start = plain.folder(Path(), 0).parent.name
    recipe = Recipe(
        epochs=EPOCHS,
        batch_size=setting.pick(quick=32, short=256, full=256),
        lr=WEIGHT_RATE,
        posterior_lr=POSTERIOR_RATE,
        schedule="step",
        milestones=ANNEALED,
        decay=0.25 ** (1 / len(ANNEALED)),
        augment=plain.recipe.augment,
    )

    again = replace(recipe, lr=AGAIN, schedule="cosine", batch_size=plain.recipe.batch_size)

    def sequel(label: str, method: Method | None = None, recipe: Recipe = recipe) -> Sequel:
        return Sequel(
            name=f"{plain.source.name}-{label}",
            source=plain.source,
            net=plain.net,
            recipe=setting.recipe(recipe),
            method=method,
            start=start,
        )

    return {
        f"SGD, {EPOCHS} epochs more": sequel("same-rate"),
        f"SGD, more at {AGAIN}": sequel("again", recipe=again),
        **{f"iBNN-{k}": sequel(f"implicit-k{k}", ImplicitNodes(components=k)) for k in (4, 8, 16)},
        "iBNN-4, weights frozen": sequel(
            "implicit-k4-frozen", ImplicitNodes(components=4), replace(recipe, freeze=True)
        ),
        "Rank-1, K = 4": sequel("rank1", Rank1(components=4)),
        "Patches, K = 4": sequel("patch", ModelPatch(components=4), replace(recipe, posterior_lr=PATCH_RATE)),
    }


def measure(case: Case, *, plain: Trainee, sequels: Mapping[str, Sequel]) -> Numbers:
    """Train the plain network and all that follows from it, with every seed, and judge each before and after."""
    rows: dict[str, Numbers] = {name: {"before": [], "after": []} for name in ("SGD", *sequels)}
    for seed in case.seeds:
        first = train(plain, case, seed)
        judge = Judge(first, case)
        rows["SGD"]["after"].append(judge(first.model, plain.folder(case.out, seed) / "after.json"))
        for name, sequel in sequels.items():
            folder, model = sequel.folder(case.out, seed), sequel.begin(first.model, seed).eval()
            if sequel.method is not None and not sequel.recipe.freeze:  # it begins as its twin does
                rows[name]["before"].append(judge(model, folder / "before.json"))
            found = train(sequel, case, seed, start=model)
            rows[name]["after"].append(judge(found.model, folder / "after.json"))
            if sequel.recipe.freeze:
                rows[name]["posterior_bytes"] = kept_bytes(found, first, case)
    for name, line in TABLE7.items():
        rows[name]["paper"] = {measure: float(number.text) for measure, number in printed(MEASURES, line).items()}
    return {"seeds": list(case.seeds), "draws": SAMPLES[case.budget], "network": plain.net, "rows": rows}


class Judge:
    """Judges models of one data set alike, each once: the figures lie beside the state of its training."""

    def __init__(self, trained: Trained, case: Case) -> None:
        """Take the test data."""
        (self.x, self.y), self.case = trained.test(), case

    def __call__(self, model: nn.Module, path: Path) -> dict[str, float]:
        """Return the figures of a model, from their file where it is there."""
        if path.is_file() and not self.case.fresh:
            found: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
            return found
        found = judged(model, self.x, self.y, samples=SAMPLES[self.case.budget])
        write_text(json.dumps(found) + "\n", path)
        return found


def judged(model: nn.Module, x: Tensor, y: Tensor, *, samples: int) -> dict[str, float]:
    """Return error in per cent, NLL and ECE (15 bins) of a model."""
    device = next(model.parameters()).device
    found = predict(model, x.to(device), Categorical(), samples=samples, keep_samples=False).to("cpu")
    return {
        "error": 100 * (found.mean.argmax(1) != y).double().mean().item(),
        "nll": -found.log_prob(y).double().mean().item(),
        "ece": ece(found.mean, y).item(),
    }


def kept_bytes(tuned: Trained, plain: Trained, case: Case) -> int:
    """Return the size of a posterior's file, once it has been put on the plain network and predicts the same there.

    Raises:
        ArithmeticError: if it does not.
    """
    x, _ = plain.test(256)
    with tempfile.TemporaryDirectory(dir=case.out) as folder:
        path = Path(folder) / "posterior.safetensors"
        save(tuned.model, path, only="posterior")
        again = load(path, plain.model).eval()
        size = path.stat().st_size
    one, other = (predict(model, x.to(next(model.parameters()).device), samples=4) for model in (tuned.model, again))
    if not torch.equal(one.mean, other.mean):
        worst = (one.mean - other.mean).abs().max().item()
        raise ArithmeticError(f"expected a posterior on its plain network to predict the same, got {worst:.2g} apart")
    return size
