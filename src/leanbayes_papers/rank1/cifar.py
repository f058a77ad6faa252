"""Tables 2 and 3 of the rank-1 paper: CIFAR-10 and CIFAR-100, clean and corrupted."""

from __future__ import annotations

from dataclasses import replace

import leanbayes as lb
from leanbayes_papers.harness import printed, Run, Study, Suite, TrainingSpec
from leanbayes_papers.rank1 import networks as nets
from leanbayes_papers.rank1 import PAPER

MEASURES = ("nll", "accuracy", "ece", "c_nll", "c_accuracy", "c_ece", "parameters")
# The paper gives no hyper-parameters but the estimator.
MEAN_FIELD = lb.MeanField(prior_std=1.0, init_std=0.01, estimator="flipout")
TABLES = {"table2": ("cifar10", 10), "table3": ("cifar100", 100)}  # data set and number of classes


def rank1_cifar(run: Run) -> Suite:
    """Rank-1 factors against their baselines on CIFAR-10 and CIFAR-100, clean and corrupted (Tables 2 and 3)."""
    words = {"net": nets.network(run)}
    studies = (
        Study.of("rank1", table, words).compared(specs(run, data, classes), MEASURES, printed("rank1", table))
        for table, (data, classes) in TABLES.items()
    )
    return Suite(paper=PAPER, studies=tuple(studies))


def specs(run: Run, data: str, classes: int) -> dict[str, TrainingSpec]:
    """Return the networks of a table by the paper's names."""
    members, net = nets.COMPONENTS, nets.network(run)
    light = nets.rank1(run, components=members)
    heavy = nets.rank1(run, components=members, posterior="cauchy", prior="cauchy", init_std=0.0316)
    clip = run.pick(quick=1.0, short=1.0, full=None)  # heavy tails at the high rates of short trainings
    ensemble = nets.spec(run, "deep_ensemble", lb.DeepEnsemble(components=members), data)
    narrow = nets.equal_parameters(net, members, num_outputs=classes, input_shape=(3, 32, 32))
    return {
        "Deterministic": nets.spec(run, "plain", None, data),
        "BatchEnsemble": nets.batch_ensemble(run, data),
        "MC Dropout": nets.spec(run, "mc_dropout", lb.MCDropout(rate=0.1), data),
        "MFVI BNN": nets.spec(run, "mean_field", MEAN_FIELD, data),
        "Rank-1 BNN, Gaussian": nets.factor_spec(run, "rank1-gaussian", light, data),
        "Rank-1 BNN, Cauchy": nets.factor_spec(run, "rank1-cauchy", heavy, data, clip_norm=clip),
        "Deep ensemble, equal parameters": replace(ensemble, net=narrow, name="deep_ensemble-narrow"),
        "Deep ensemble": ensemble,
    }
