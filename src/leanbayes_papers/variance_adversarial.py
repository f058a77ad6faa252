"""Targeted attacks on ensembles: Figure 2 of the variance paper."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import nn

from leanbayes.core.plain import mean
from leanbayes.data import DataSet
from leanbayes.methods.ensemble import Ensemble
from leanbayes.methods.variance import VarianceLayers
from leanbayes.shift import attack, fast_sign, pixel_units
from leanbayes.shift.attacks import Units
from leanbayes_papers.study import Case, new_figure, Numbers, save_figure, Study
from leanbayes_papers.suite import Setting, Suite
from leanbayes_papers.trained import Trained
from leanbayes_papers.variance_nets import Network, train
from leanbayes_papers.variance_settings import FIRST_DENSE, lenet, PAPER, vgg, VGG_LAYERS

LEVELS = 255
MEMBER_SEEDS = 1000
"""Distance between the seeds of the members of an ensemble; the first has the seed itself."""

SAMPLES = 10
MEMBERS = {"quick": 2, "short": 5, "full": 5}
STEPS = {"quick": 5, "short": 30, "full": 30}
STEP_SIZE = {"quick": 8.0, "short": 0.5, "full": 0.5}
"""In grey levels of 255. The paper's 0.5 has no unit; half a grey level is the only one that leaves room to differ."""

IMAGES = {"quick": 50, "short": 1000, "full": 10_000}
CURVES = ("success", "entropy", "accuracy")


def variance_adversarial(setting: Setting) -> Suite:
    """Success and entropy under targeted iterative fast sign attacks, five kinds of ensembles (Figure 2)."""
    variance = VarianceLayers()
    data = setting.pick(quick="digits", short="cifar10", full="cifar10")
    if data == "digits":
        networks = {
            "dropout": lenet(setting, "digits-dropout", dropout=True),
            "plain": lenet(setting, "digits-plain"),
            "variance": lenet(setting, "digits-variance", method=variance, layers=FIRST_DENSE),
        }
    else:
        networks = {
            "dropout": vgg(setting, data, f"{data}-dropout"),
            "plain": vgg(setting, data, f"{data}-plain", dropout=False),
            "variance": vgg(setting, data, f"{data}-variance", method=variance, layers=VGG_LAYERS),
        }
    study = Study(
        name="adversarial",
        title=f"Variance paper, Figure 2: targeted iterative fast sign attacks on {data}",
        claim="Variance networks resist longest and have the highest entropy, most of all in an ensemble; only theirs "
        "is higher on adversarial than on usual data.",
        data=(data,),
        measure=partial(measure, networks=networks),
        draw=draw,
        say=say,
    )
    return Suite(paper=PAPER, tables=(), studies=(study,))


def measure(case: Case, *, networks: Mapping[str, Network]) -> Numbers:
    """Attack all five models of the first seed; random targets other than the true class."""
    seed, members = case.seeds[0], MEMBERS[case.budget]
    dropout = train(networks["dropout"], case, seed)
    plain, variance = (
        [train(networks[name], case, seed + MEMBER_SEEDS * k).model for k in range(members)]
        for name in ("plain", "variance")
    )
    models = {
        "Dropout, deterministic": mean(dropout.model),
        "Dropout": dropout.model,
        "Deep ensemble": Ensemble(plain),
        "Variance": variance[0],
        "Variance ensemble": Ensemble(variance),
    }
    step = STEP_SIZE[case.budget]
    curves = {name: attacked(model, dropout, case) for name, model in models.items()}
    return {"step_size": step, "members": members, "curves": curves}


def attacked(model: nn.Module, trained: Trained, case: Case) -> Numbers:
    """Return success, entropy and accuracy after every step; nothing where there is no row to succeed on."""
    x, y = trained.test(IMAGES[case.budget])
    how = fast_sign(
        STEPS[case.budget],
        STEP_SIZE[case.budget],
        units=units_of(trained.data),
        bounds=(0, LEVELS),
        samples=SAMPLES,
        noise="activation",
        batch_size=500,
    )
    found = attack(model.eval(), x, y, how, target="random")
    return {name: [value if math.isfinite(value) else None for value in found.curve(name)] for name in CURVES}


def units_of(data: DataSet) -> Units:
    """Return grey levels."""
    return pixel_units(data.mean, data.std, levels=LEVELS)


def say(numbers: Numbers) -> list[str]:
    """Tell success half-way and in the end, and entropy on clean and on adversarial images."""
    lines = [f"Steps of {numbers['step_size']:g} grey levels of {LEVELS}, ensembles of {numbers['members']}."]
    for name, curves in numbers["curves"].items():
        success, entropy = curves["success"], curves["entropy"]
        half = len(success) // 2
        lines.append(
            f"{name}: success {_percent(success[half])} after {half} steps, {_percent(success[-1])} after "
            f"{len(success) - 1}; entropy {entropy[0]:.3f} clean, {max(entropy):.3f} at most, {entropy[-1]:.3f} in the "
            f"end; clean accuracy {_percent(curves['accuracy'][0])}"
        )
    return lines


def draw(numbers: Numbers, path: Path) -> None:
    """Draw success and entropy over steps."""
    figure = new_figure(9, 3.5)
    for axis, name in zip(figure.subplots(1, 2), ("success", "entropy"), strict=True):
        for label, curves in numbers["curves"].items():
            axis.plot([math.nan if value is None else value for value in curves[name]], label=label)
        axis.set(xlabel="step")
    left, right = figure.axes
    left.set(ylabel="share of successful attacks", ylim=(0, 1.02))
    right.set(ylabel="mean entropy, nats")
    left.legend(fontsize=7)
    save_figure(figure, path)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
