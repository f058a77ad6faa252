"""Accuracy by three procedures: Table 1 of the variance paper, dropout and variance networks beside each other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import nn

from leanbayes.core.conversion import stochastic_layers
from leanbayes.methods.variance import VarianceLayer, VarianceLayers
from leanbayes.phase import accuracies
from leanbayes_papers.study import Case, new_figure, Numbers, save_figure, Study
from leanbayes_papers.suite import Setting, Suite
from leanbayes_papers.variance_nets import Network, train
from leanbayes_papers.variance_settings import (
    ALL_OF_LENET,
    digits_name,
    lenet,
    PAPER,
    vgg,
    VGG_LAYERS,
)

PROCEDURES = ("stochastic", "deterministic", "ensemble")
PRINTED: dict[str, dict[str, tuple[float, float, float]]] = {
    "mnist": {"Dropout": (99.1, 99.4, 99.4), "Variance": (95.9, 10.1, 99.3)},
    "cifar10": {"Dropout": (91.0, 93.1, 93.4), "Variance": (91.3, 10.0, 93.4)},
    "cifar100": {"Dropout": (77.5, 79.8, 81.7), "Variance": (76.9, 5.0, 82.2)},
}
PAPERS_ALPHA = {
    "mnist": "log alpha 6.3 in the first dense layer, the only one with a phase transition",
    "cifar10": "log alpha above 15 in the convolutions and above 12 in the dense layer",
    "cifar100": "no log alpha is given",
}
SAMPLES = {"quick": 10, "short": 50, "full": 50}
TEST_ROWS = {"quick": 300, "short": 0, "full": 0}


def variance_table1(setting: Setting) -> Suite:
    """Accuracy of dropout and variance networks: stochastic, deterministic and ensemble (Table 1)."""
    variance = VarianceLayers()
    small = {
        "Dropout": lenet(setting, "lenet-dropout", dropout=True),
        "Variance": lenet(setting, "lenet-variance", method=variance, layers=ALL_OF_LENET),
    }
    studies = [table_of(digits_name(setting), "mnist", small)]
    for data in ("cifar10", "cifar100"):
        large = {
            "Dropout": vgg(setting, data, f"{data}-dropout"),
            "Variance": vgg(setting, data, f"{data}-variance", method=variance, layers=VGG_LAYERS),
        }
        studies.append(table_of(data, data, large))
    return Suite(paper=PAPER, tables=(), studies=tuple(studies))


def table_of(data: str, printed: str, networks: Mapping[str, Network]) -> Study:
    """Return the study of one data set, beside the lines of the table that are printed for another or the same."""
    return Study(
        name=f"table1-{data}",
        title=f"Variance paper, Table 1: accuracy by three procedures on {data}",
        claim="The ensemble is as accurate as that of dropout, while the means of a variance network are a guess "
        f"({PAPERS_ALPHA[printed]}).",
        data=(data,),
        measure=partial(measure, networks=networks, printed=PRINTED[printed]),
        draw=draw,
        say=say,
    )


def measure(case: Case, *, networks: Mapping[str, Network], printed: Mapping[str, tuple[float, ...]]) -> Numbers:
    """Train every network with every seed and judge it by the three procedures, with noise on activations."""
    return {
        name: {
            "seeds": [judged(network, case, seed) for seed in case.seeds],
            "paper": dict(zip(PROCEDURES, printed[name], strict=True)),
        }
        for name, network in networks.items()
    }


def judged(network: Network, case: Case, seed: int) -> Numbers:
    """Return the accuracies of one trained network in percent, and the mean log alpha of each variance layer."""
    trained = train(network, case, seed)
    test = trained.test(TEST_ROWS[case.budget])
    found = accuracies(trained.model, test, samples=SAMPLES[case.budget], noise="activation")
    return {"seed": seed, "log_alpha": log_alphas(trained.model)} | {name: 100 * found[name] for name in PROCEDURES}


def log_alphas(model: nn.Module) -> dict[str, float | None]:
    """Return the mean log alpha of every variance layer by path; None where it is infinite, without means."""
    found = {path: layer.log_alpha for path, layer in stochastic_layers(model) if isinstance(layer, VarianceLayer)}
    means = {path: float(values.detach().mean()) for path, values in found.items()}
    return {path: value if math.isfinite(value) else None for path, value in means.items()}


def average(row: Numbers, name: str) -> float:
    """Return the mean of a number over seeds."""
    return math.fsum(seed[name] for seed in row["seeds"]) / len(row["seeds"])


def say(numbers: Numbers) -> list[str]:
    """Tell the three accuracies beside the paper's, and log alpha."""
    lines = []
    for name, row in numbers.items():
        parts = (f"{kind} {average(row, kind):.1f} % (paper: {row['paper'][kind]:.1f})" for kind in PROCEDURES)
        alphas = {path: value for path, value in row["seeds"][0]["log_alpha"].items() if value is not None}
        told = ", ".join(f"{path} {value:.1f}" for path, value in alphas.items())
        lines.append(f"{name}: {', '.join(parts)}" + (f"; log alpha: {told}" if told else ""))
    return lines


def draw(numbers: Numbers, path: Path) -> None:
    """Draw a bar for every procedure, with the paper's number as a line."""
    figure = new_figure(3 * len(numbers), 3)
    for axis, (name, row) in zip(figure.subplots(1, len(numbers), squeeze=False)[0], numbers.items(), strict=True):
        places = range(len(PROCEDURES))
        axis.bar(places, [average(row, kind) for kind in PROCEDURES], color="#6fa8dc", label="ours")
        paper = [row["paper"][kind] for kind in PROCEDURES]
        axis.hlines(paper, [place - 0.4 for place in places], [place + 0.4 for place in places], "k", label="paper")
        axis.set(title=name, ylim=(0, 105), ylabel="accuracy, %")
        axis.set_xticks(list(places), PROCEDURES, fontsize=8)
    figure.axes[0].legend(fontsize=7, loc="lower left")
    save_figure(figure, path)
