"""Rank-1 factors on CIFAR (Dusenberry et al., 2020, Tables 2 and 3), and what its other suite shares with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from leanbayes.compare.job import EvaluationSpec, Job, recipe_for, stretched
from leanbayes.compare.job import recipe as recipe_of
from leanbayes.methods._base import Method
from leanbayes.methods.ensemble import DeepEnsemble
from leanbayes.methods.mc_dropout import MCDropout
from leanbayes.methods.mean_field import MeanField
from leanbayes.methods.rank1 import BatchEnsemble, Rank1
from leanbayes.training import Recipe
from leanbayes_papers.equal import equal_parameters
from leanbayes_papers.suite import printed, Row, Setting, Suite, Table

PAPER = "Efficient and Scalable Bayesian Neural Nets with Rank-1 Factors (Dusenberry et al., 2020)"
CLASSES = {"cifar10": 10, "cifar100": 100}
SHAPE = (3, 32, 32)
COMPONENTS = 4
ROWS_OF_ALL_COMPONENTS = 512
"""K times the unique rows of a batch, which the paper keeps constant: 128 rows for each of 4 components."""

FROM_SCRATCH: dict[str, Any] = {"init": "random_sign", "sign_probability": 0.5, "init_std": 0.0316, "prior_std": 0.1}
"""Factors as the paper starts and holds them on CIFAR."""

MEAN_FIELD = MeanField(prior_std=1.0, init_std=0.01, estimator="flipout")
"""The paper gives no hyper-parameters but the estimator."""

MEASURES = ("nll", "accuracy", "ece", "c_nll", "c_accuracy", "c_ece", "parameters")
CIFAR10 = {  # Table 2: NLL, accuracy, ECE, cNLL / cA / cECE, parameters in millions
    "Deterministic": "0.159 96.0 0.023 1.05 76.1 0.153 36.5",
    "BatchEnsemble": "0.143 96.2 0.020 1.02 77.5 0.129 36.6",
    "MC Dropout": "0.160 95.9 0.024 1.27 68.8 0.166 36.5",
    "MFVI BNN": "0.214 94.7 0.029 1.46 71.3 0.181 73",
    "Rank-1 BNN, Gaussian": "0.128 96.3 0.008 0.84 76.7 0.080 36.6",
    "Rank-1 BNN, Cauchy": "0.120 96.5 0.009 0.74 80.5 0.090 36.6",
    "Deep ensemble, equal parameters": "0.115 96.3 0.008 0.84 77.2 0.089 36.68",
    "Deep ensemble": "0.114 96.6 0.010 0.81 77.9 0.087 146",
}
CIFAR100 = {  # Table 3
    "Deterministic": "0.875 79.8 0.085 2.70 51.3 0.239 36.5",
    "BatchEnsemble": "0.734 81.5 0.033 2.49 54.1 0.191 36.6",
    "MC Dropout": "0.830 79.6 0.050 2.33 51.5 0.148 36.5",
    "MFVI BNN": "1.030 77.3 0.111 3.48 48.0 0.299 73",
    "Rank-1 BNN, Gaussian": "0.692 81.3 0.018 2.24 53.8 0.117 36.6",
    "Rank-1 BNN, Cauchy": "0.689 82.4 0.012 2.04 57.8 0.142 36.6",
    "Deep ensemble, equal parameters": "0.694 81.5 0.017 2.19 53.7 0.111 36.68",
    "Deep ensemble": "0.666 82.7 0.021 2.27 54.1 0.138 146",
}
CLAIMS = {
    "cifar10": "both rank-1 networks outperform single networks of their size on NLL, accuracy and ECE, and more so "
    "under corruption; they outperform the deep ensemble of their size on accuracy, not the one of four times it.",
    "cifar100": "Cauchy factors outperform BatchEnsemble and ensembles of their size on every measure; Gaussian ones "
    "have slightly worse accuracy than BatchEnsemble and better NLL and ECE.",
}


def rank1_cifar(setting: Setting) -> Suite:
    """Rank-1 factors against their baselines on CIFAR-10 and CIFAR-100, clean and corrupted (Tables 2 and 3)."""
    tables = [
        Table(
            title=f"Rank-1 paper, Table {number}: {data}, {network(setting)} (paper: WRN-28-10)",
            measures=MEASURES,
            rows=tuple(
                Row(name=name, job=job, paper=printed(MEASURES, lines[name]))
                for name, job in _jobs(setting, data).items()
            ),
            claim=CLAIMS[data],
        )
        for number, data, lines in ((2, "cifar10", CIFAR10), (3, "cifar100", CIFAR100))
    ]
    return Suite(paper=PAPER, tables=tuple(tables))


def network(setting: Setting) -> str:
    """Return the network of a budget."""
    return setting.pick(quick="lenet", short="wrn-16-4", full="wrn-28-10")


def recipe(setting: Setting) -> Recipe:
    """Return the recipe of the plain network, which the others start from."""
    chosen = recipe_of(setting.budget, kind="image", rows=50_000, augment="crop_flip")
    if setting.budget == "quick":
        chosen = replace(stretched(chosen, 6), batch_size=64, lr=0.05)
    return setting.recipe(chosen)


def judging(setting: Setting, samples: int) -> EvaluationSpec:
    """Return how to evaluate: in full with so many draws, else all alike, so that they share what is loaded."""
    return EvaluationSpec(
        samples=setting.pick(quick=16, short=16, full=samples),
        ood=("svhn",) if setting.has("svhn", foreign=True) else (),
        shift_images=setting.pick(quick=50, short=1000, full=10_000),
        test_images=setting.pick(quick=1000, short=0, full=0),
    )


def job(setting: Setting, label: str, method: Method | None, data: str = "cifar10", **changes: Any) -> Job:
    """Return the job of a method without components: from scratch in full, else converted late.

    Args:
        setting: the flags.
        label: what the version is called.
        method: None for the plain network.
        data: the data set.
        changes: fields of the recipe that differ from the plain network's.
    """
    plain = replace(recipe(setting), **changes)
    if setting.budget == "full":  # one rate for everything, as in the paper; late factors learn at the method's own
        plain = replace(plain, posterior_lr=plain.posterior_lr or plain.lr)
    late = 0.0 if method is None else min(method.late, setting.pick(quick=0.5, short=0.7, full=0.0))
    return Job(
        source=setting.source(data, quick_rows=2000),
        net=network(setting),
        method=method,
        label=label,
        recipe=recipe_for(method, plain, late),
        evaluation=judging(setting, 16),
    )


def factor_job(
    setting: Setting, label: str, method: Rank1 | BatchEnsemble, data: str = "cifar10", **changes: Any
) -> Job:
    """Return the job of a network with factors, every row of a batch in every component.

    In full, from scratch as in the paper: K times the unique rows stay 512, at a rate of 0.1 for every 128 unique rows.
    Else the plain network is trained first, factors are put into it, and only from there are rows repeated.
    """
    made = job(setting, label, method, data, **changes)
    late = made.recipe
    if setting.budget != "full":
        return replace(made, recipe=replace(late, tile_last_epochs=late.epochs - late.convert_at_epoch))
    rows = ROWS_OF_ALL_COMPONENTS // method.components
    rate = rows / late.batch_size
    assert late.posterior_lr is not None
    chosen = replace(late, batch_size=rows, lr=late.lr * rate, posterior_lr=late.posterior_lr * rate, tile=True)
    return replace(made, recipe=chosen, evaluation=judging(setting, _draws(method)))


def rank1(setting: Setting, **fields: Any) -> Rank1:
    """Return rank-1 factors: the paper's where they are there from the start, the library's where they come late."""
    return Rank1(**(setting.pick(quick={}, short={}, full=FROM_SCRATCH) | fields))


def batch_ensemble_job(setting: Setting, data: str = "cifar10") -> Job:
    """Return BatchEnsemble: factors at half the rate of the weights; in full spread by 0.5 and with an L2 of 3e-4."""
    plain = recipe(setting)
    decay = setting.pick(quick=plain.weight_decay, short=plain.weight_decay, full=2 * 3e-4)
    method = BatchEnsemble(components=COMPONENTS, init_spread=setting.pick(quick=0.25, short=0.25, full=0.5))
    return factor_job(setting, "batch_ensemble", method, data, weight_decay=decay, posterior_lr=plain.lr / 2)


def _jobs(setting: Setting, data: str) -> dict[str, Job]:
    """Return the jobs of a table by the names that the paper gives them."""
    heavy = rank1(setting, components=COMPONENTS, posterior="cauchy", prior="cauchy", init_std=0.0316)
    clip = setting.pick(quick=1.0, short=1.0, full=None)  # heavy tails at the high rates of short trainings
    ensemble = job(setting, "deep_ensemble", DeepEnsemble(components=COMPONENTS), data)
    narrow = equal_parameters(network(setting), COMPONENTS, num_outputs=CLASSES[data], input_shape=SHAPE)
    return {
        "Deterministic": job(setting, "plain", None, data),
        "BatchEnsemble": batch_ensemble_job(setting, data),
        "MC Dropout": job(setting, "mc_dropout", MCDropout(rate=0.1), data),
        "MFVI BNN": job(setting, "mean_field", MEAN_FIELD, data),
        "Rank-1 BNN, Gaussian": factor_job(setting, "rank1-gaussian", rank1(setting, components=COMPONENTS), data),
        "Rank-1 BNN, Cauchy": factor_job(setting, "rank1-cauchy", heavy, data, clip_norm=clip),
        "Deep ensemble, equal parameters": replace(ensemble, net=narrow, label="deep_ensemble-narrow"),
        "Deep ensemble": ensemble,
    }


def _draws(method: Rank1 | BatchEnsemble) -> int:
    """Return how many draws the paper predicts with: one of every component, four under Cauchy factors."""
    heavy = isinstance(method, Rank1) and method.posterior != "normal"
    return (4 if heavy else 1) * method.components
