"""Tables 3 to 5 of the implicit-nodes paper: CIFAR-10 and CIFAR-100, and the networks that its other suites share."""

from __future__ import annotations

from dataclasses import replace

import leanbayes as lb
from leanbayes.methods._base import Method
from leanbayes_papers.harness import printed, Run, Study, Suite, TrainingSpec
from leanbayes_papers.implicit import PAPER

MEASURES = ("error", "nll", "ece")
ROWS = ("SGD", "MC-dropout", "BNN-VI", "iBNN-4", "iBNN-8", "iBNN-16")
COLUMNS = (("cifar10", "VGG-16"), ("cifar10", "WRN-28-10"), ("cifar100", "VGG-16"), ("cifar100", "WRN-28-10"))
INIT_STD = 0.05
MEAN_FIELD = lb.MeanField(prior_std=1.0, init_std=0.01)
BASELINES: dict[str, tuple[str, Method | None]] = {
    "SGD": ("plain", None),
    "MC-dropout": ("mc_dropout", lb.MCDropout(rate=0.1)),
    "BNN-VI": ("mean_field", MEAN_FIELD),
}


def implicit_cifar(run: Run) -> Suite:
    """Implicit nodes of 4, 8 and 16 components against their baselines on CIFAR-10 and CIFAR-100 (Tables 3-5)."""
    return Suite(paper=PAPER, studies=tuple(table(run, "tables3-5", data, net, ROWS) for data, net in COLUMNS))


def table(run: Run, kind: str, data: str, net: str, rows: tuple[str, ...]) -> Study:
    """Return the study of some rows of Tables 3 to 5."""
    words = {"set": data, "ours": network(run, net), "net": net}
    study = Study.of("implicit", kind, words, name=f"{kind}-{data}-{net.lower()}")
    specs = {name: spec(run, name, data, net) for name in rows}
    return study.compared(specs, MEASURES, printed("implicit", f"{data} {net}"))


def network(run: Run, net: str) -> str:
    """Return the network in place of the paper's under a budget."""
    if net == "VGG-16":
        return run.pick(quick="lenet", short="vgg16", full="vgg16")
    return run.pick(quick="wrn-10-1", short="wrn-16-4", full="wrn-28-10")


def spec(run: Run, name: str, data: str, net: str) -> TrainingSpec:
    """Return the network of a row: "SGD", "MC-dropout", "BNN-VI" or "iBNN-K".

    Weights have a constant rate for half of the epochs, then a linear one to 1 % at nine tenths. The KL has its full
    weight after two thirds of the epochs, in the paper 200 of 300.
    """
    tuned = {field: number.value for field, number in printed("implicit", "table2")[f"{data} {net}"].items()}
    lr = tuned["lr"] * run.pick(quick=0.5, short=1.0, full=1.0)
    recipe = run.recipe_of("implicit", "cifar", lr=lr, weight_decay=tuned["weight_decay"])
    components = int(name.removeprefix("iBNN-")) if name.startswith("iBNN-") else 0
    label, method = BASELINES.get(name, (f"implicit-k{components}", None))
    if components:
        prior_std, spread = tuned["prior_std"], tuned["init_spread"]
        method = lb.ImplicitNodes(components=components, prior_std=prior_std, init_spread=spread, init_std=INIT_STD)
        method = replace(method, centre=run.budget != "full")
        recipe = replace(recipe, posterior_lr=tuned["posterior_lr"], posterior_schedule="constant")
        if run.budget == "full":  # the printed numbers are of the authors' code
            recipe = replace(recipe, samples=2, deal="draws")
    draws = run.pick(quick=32, short=80, full=5 * (components or 4))
    evaluation = run.evaluation(draws, 300, ood=run.svhn)
    ours = network(run, net)
    return run.spec(label, data, ours, recipe, quick_rows=2000, method=method, evaluation=evaluation)
