"""Implicit nodes on CIFAR (Trinh, Kaski, Heinonen, 2020, Tables 3 to 5), and what its other suites share with it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from leanbayes.compare.job import EvaluationSpec, Job
from leanbayes.methods._base import Method
from leanbayes.methods.implicit import ImplicitNodes
from leanbayes.methods.mc_dropout import MCDropout
from leanbayes.methods.mean_field import MeanField
from leanbayes.training import Recipe
from leanbayes_papers.suite import Printed, Row, Setting, Suite, Table

PAPER = "Scalable Bayesian neural networks by layer-wise input augmentation (Trinh, Kaski, Heinonen, 2020)"
MEASURES = ("error", "nll", "ece")
ROWS = ("SGD", "MC-dropout", "BNN-VI", "iBNN-4", "iBNN-8", "iBNN-16")
COLUMNS = (("cifar10", "VGG-16"), ("cifar10", "WRN-28-10"), ("cifar100", "VGG-16"), ("cifar100", "WRN-28-10"))
TABLE = {  # columns as in COLUMNS
    "error": {  # Table 3, in per cent
        "SGD": "6.72±0.06 3.53±0.11 26.74±0.13 18.80±0.16",
        "MC-dropout": "6.71±0.12 4.86±0.15 26.41±0.20 20.54±0.24",
        "BNN-VI": "9.63±0.35 5.96±0.28 36.37±0.32 24.13±0.40",
        "iBNN-4": "6.33±0.14 3.29±0.06 26.22±0.28 17.79±0.24",
        "iBNN-8": "6.31±0.08 3.38±0.08 25.89±0.19 17.52±0.27",
        "iBNN-16": "6.19±0.07 3.34±0.08 25.72±0.08 17.27±0.09",
    },
    "nll": {  # Table 4
        "SGD": "0.3255±0.0070 0.1280±0.0014 1.7232±0.0144 0.7730±0.0078",
        "MC-dropout": "0.2887±0.0125 0.1645±0.0082 1.4048±0.0289 0.8364±0.0104",
        "BNN-VI": "0.6601±0.0358 0.2685±0.0169 2.3733±0.0954 1.2683±0.0447",
        "iBNN-4": "0.2147±0.0036 0.1122±0.0011 1.1249±0.0189 0.6818±0.0055",
        "iBNN-8": "0.2061±0.0031 0.1093±0.0021 1.0612±0.0074 0.6601±0.0043",
        "iBNN-16": "0.1983±0.0015 0.1073±0.0020 1.0325±0.0069 0.6440±0.0049",
    },
    "ece": {  # Table 5, 15 bins
        "SGD": "0.0476±0.0004 0.0165±0.0003 0.1869±0.0017 0.0466±0.0015",
        "MC-dropout": "0.0421±0.0007 0.0149±0.0009 0.1457±0.0012 0.0485±0.0020",
        "BNN-VI": "0.0656±0.0015 0.0290±0.0018 0.1886±0.0016 0.0909±0.0032",
        "iBNN-4": "0.0173±0.0017 0.0093±0.0007 0.0807±0.0050 0.0284±0.0021",
        "iBNN-8": "0.0163±0.0010 0.0064±0.0009 0.0755±0.0018 0.0274±0.0021",
        "iBNN-16": "0.0149±0.0008 0.0048±0.0013 0.0713±0.0028 0.0287±0.0014",
    },
}
INIT_STD = 0.05
MEAN_FIELD = MeanField(prior_std=1.0, init_std=0.01)
CLAIM = (
    "implicit nodes have the lowest error, NLL and ECE of all, and improve with the number of components; mean field "
    "(BNN-VI) is worst."
)


@dataclass(frozen=True)
class Tuned:
    """Hyper-parameters of Table 2 of the paper, for one network and data set.

    Attributes:
        lr: of the weights.
        posterior_lr: of the node posteriors, constant.
        init_spread: of the component means around one.
        prior_std: of the prior around one.
        weight_decay: of the weights.
    """

    lr: float
    posterior_lr: float
    init_spread: float
    prior_std: float
    weight_decay: float


TUNED = {
    ("VGG-16", "cifar10"): Tuned(0.05, 1.2, 0.75, 0.3, 5e-4),
    ("VGG-16", "cifar100"): Tuned(0.05, 1.6, 0.75, 0.3, 3e-4),
    ("WRN-28-10", "cifar10"): Tuned(0.1, 2.4, 0.5, 0.1, 5e-4),
    ("WRN-28-10", "cifar100"): Tuned(0.1, 4.8, 0.5, 0.1, 5e-4),
}


def implicit_cifar(setting: Setting) -> Suite:
    """Implicit nodes of 4, 8 and 16 components against their baselines on CIFAR-10 and CIFAR-100 (Tables 3-5)."""
    tables = [
        Table(
            title=f"Implicit-nodes paper, Tables 3-5: {data}, {network(setting, net)} (paper: {net})",
            measures=MEASURES,
            rows=tuple(
                Row(name=name, job=job(setting, name, data, net), paper=numbers_of(name, data, net)) for name in ROWS
            ),
            claim=CLAIM,
        )
        for data, net in COLUMNS
    ]
    return Suite(paper=PAPER, tables=tuple(tables))


def numbers_of(name: str, data: str, net: str) -> dict[str, Printed]:
    """Return the paper's numbers of a row for one column of its tables; those of unknown rows are none."""
    column = COLUMNS.index((data, net))
    return {measure: Printed(lines[name].split()[column]) for measure, lines in TABLE.items() if name in lines}


def network(setting: Setting, net: str) -> str:
    """Return what stands for a network of the paper under a budget."""
    if net == "VGG-16":
        return setting.pick(quick="lenet", short="vgg16", full="vgg16")
    return setting.pick(quick="wrn-10-1", short="wrn-16-4", full="wrn-28-10")


def job(setting: Setting, name: str, data: str, net: str) -> Job:
    """Return the job of a row: "SGD", "MC-dropout", "BNN-VI" or "iBNN-K"."""
    tuned = TUNED[net, data]
    components = int(name.removeprefix("iBNN-")) if name.startswith("iBNN-") else 0
    methods: dict[str, Method | None] = {"SGD": None, "MC-dropout": MCDropout(rate=0.1), "BNN-VI": MEAN_FIELD}
    chosen = recipe(setting, tuned)
    method = methods.get(name)
    if components:
        method = ImplicitNodes(
            components=components, prior_std=tuned.prior_std, init_spread=tuned.init_spread, init_std=INIT_STD
        )
        samples = setting.pick(quick=1, short=1, full=2)
        chosen = replace(chosen, posterior_lr=tuned.posterior_lr, posterior_schedule="constant", samples=samples)
    return Job(
        source=setting.source(data, quick_rows=2000),
        net=network(setting, net),
        method=method,
        label={"SGD": "plain", "MC-dropout": "mc_dropout", "BNN-VI": "mean_field"}.get(name, f"implicit-k{components}"),
        recipe=chosen,
        evaluation=EvaluationSpec(
            samples=setting.pick(quick=32, short=80, full=5 * (components or 4)),
            ood=("svhn",) if setting.has("svhn", foreign=True) else (),
            shift=False,
            test_images=setting.pick(quick=300, short=0, full=0),
        ),
    )


def recipe(setting: Setting, tuned: Tuned) -> Recipe:
    """Return the recipe of the weights: constant for half of the epochs, then linear to 1 % at nine tenths.

    The KL reaches its full weight after two thirds of the epochs, in the paper 200 of 300.
    """
    epochs = setting.pick(quick=4, short=40, full=300)
    batch = setting.pick(quick=64, short=256, full=128)
    return setting.recipe(
        Recipe(
            epochs=epochs,
            batch_size=batch,
            lr=tuned.lr * setting.pick(quick=0.5, short=1.0, full=1.0),
            weight_decay=tuned.weight_decay,
            schedule="linear",
            anneal_epochs=round(2 * epochs / 3),
            augment="crop_flip",
        )
    )
