"""Table 4 of the rank-1 paper: deaths in intensive care, with PhysioNet 2012 in place of MIMIC-III.

An LSTM reads embedded measurements hour by hour (`leanbayes.models.EHRNet`), the same in all rows, dropout included. It
learns from set a; sets b and c evaluate it. Settings that the paper leaves open were chosen on 1,000 stays of set a
that were left out of training; docs/results/ehr.md lists the trials.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn, Tensor

import leanbayes as lb
from leanbayes.compare.job import KL_EPOCHS
from leanbayes.data import DataSet
from leanbayes.methods._base import Method
from leanbayes_papers.harness import plot_rows, Record, Run, Study, Suite, Table, TrainingSpec
from leanbayes_papers.rank1 import PAPER

DATA, NET, QUICK_ROWS = "physionet2012", "lstm-ehr", 256
DETERMINISTIC = "Deterministic"
ENSEMBLE = "Deep ensemble"
COUNTS = "Logistic regression on counts of tokens"
SAMPLES = 25  # draws of a prediction, as in the paper
MEMBERS = {"quick": 2, "short": 4, "full": 4}
# Members of an ensemble have the seeds s, s + 1000, ...; the first one is the deterministic network of seed s.
SEED_STEP = 1000
EMBEDDING = ("embedding",)
AFFINE = ("lstm", "head")
# For embedding vectors, which begin with a deviation of 0.05, and for all weights of the fully Bayesian network.
VECTORS = lb.MeanField(prior_std=0.1, init_std=0.02)
GAUSSIAN = lb.Rank1(components=4, prior_std=0.1, init_spread=0.1, init_std=0.03)
# Narrow at the start: a far draw is the same in all 48 hours.
CAUCHY = lb.Rank1(components=4, posterior="cauchy", prior="cauchy", prior_std=0.05, init_spread=0.1, init_std=0.003)
BATCH_ENSEMBLE = lb.BatchEnsemble(components=4, init_spread=0.1)
# Scikit-learn's C of the logistic regression: the best of 1e-3, 3e-3, 1e-2 and 1e-1 on held-out stays of set a.
INVERSE_PENALTY = 3e-3
TABLE = Table.of("rank1", "ehr")
COLUMNS = TABLE.columns[:-1]  # without the number of parameters
GAINS = Table.of_gains("method", DETERMINISTIC, COLUMNS, title="Gains over the deterministic network of the same seed")
Conversion = tuple[Method, tuple[str, ...]]


def rank1_ehr(run: Run) -> Suite:
    """Mortality from health records: deterministic, BatchEnsemble, Bayesian, rank-1 LSTMs, an ensemble (Table 4)."""
    plot = partial(plot_rows, table=replace(TABLE, paper={}, columns=COLUMNS))
    study = Study.of("rank1", "ehr", measure=measure, tables=(TABLE, GAINS), plot=plot, data=(DATA,))
    legend = (
        f"Ours: PhysioNet 2012, mean ± standard error over seeds, {SAMPLES} draws of Bayesian networks, "
        f"{MEMBERS[run.budget]} members in an ensemble. The paper's are of MIMIC-III, validation next to set b."
    )
    return Suite(paper=PAPER, studies=(study,), legend=legend)


def specs(run: Run) -> dict[str, TrainingSpec]:
    """Return the networks by the name of their row; the ensemble consists of deterministic ones."""
    epochs = run.pick(quick=2, short=8, full=8)
    plain = lb.Recipe(epochs=epochs, batch_size=128, optimizer="adam", lr=2e-3, clip_norm=1.0)
    late = replace(plain, convert_at_epoch=plain.epochs // 2)
    bayesian = replace(late, anneal_epochs=KL_EPOCHS)
    vectors: Conversion = (VECTORS, EMBEDDING)
    rows: dict[str, tuple[lb.Recipe, tuple[Conversion, ...]]] = {
        DETERMINISTIC: (plain, ()),
        "BatchEnsemble": (replace(late, posterior_lr=plain.lr / 2), ((BATCH_ENSEMBLE, AFFINE),)),
        "Bayesian embeddings": (bayesian, (vectors,)),
        "Fully Bayesian": (bayesian, (vectors, (VECTORS, AFFINE))),
        "Rank-1, Gaussian": (bayesian, (vectors, (GAUSSIAN, AFFINE))),
        "Rank-1, Cauchy": (bayesian, (vectors, (CAUCHY, AFFINE))),
    }
    return {
        name: run.spec(_file(name), DATA, NET, recipe, quick_rows=QUICK_ROWS, options={"parts": parts}, build=build)
        for name, (recipe, parts) in rows.items()
    }


def _file(name: str) -> str:
    return name.lower().replace(",", "").replace(" ", "-")


def build(spec: TrainingSpec, data: DataSet) -> nn.Module:
    """Return the network, converted part by part; networks of one seed begin with the same weights."""
    model = lb.models.build(spec.net, num_outputs=data.num_outputs, input_shape=data.input_shape)
    for method, where in spec.options["parts"]:
        model = lb.convert(model, method, where=where, likelihood=lb.Categorical())
    return model


def samples_of(spec: TrainingSpec) -> int:
    """Return the draws of a prediction; the members of a BatchEnsemble have no noise, and each predicts once."""
    return BATCH_ENSEMBLE.components if (BATCH_ENSEMBLE, AFFINE) in spec.options["parts"] else SAMPLES


def measure(run: Run) -> list[Record]:
    """Train every network with every seed, and evaluate it on both sets."""
    made, members = specs(run), MEMBERS[run.budget]
    plain = made[DETERMINISTIC]
    data = plain.load(plain.source)
    records = []
    for name, spec in made.items():
        size = parameters(spec, data)
        draws = samples_of(spec)
        scored = partial(evaluate, samples=draws)
        records += [
            {"method": name, "seed": seed, "parameters": size}
            | cached_scores(run, spec, seed, scored, f"scores-{draws}")
            for seed in run.seeds
        ]
    size = members * parameters(plain, data)
    records += [
        {"method": ENSEMBLE, "seed": seed, "parameters": size} | ensemble_scores(run, plain, seed, evaluate, members)
        for seed in run.seeds
    ]
    return [*records, {"method": COUNTS} | counts_baseline(data)]


Evaluate = Callable[..., dict[str, Any]]


def cached_scores(run: Run, spec: TrainingSpec, seed: int, scored: Evaluate, name: str) -> dict[str, Any]:
    """Train a network and evaluate it, or read its scores: they may cost as much as the training."""

    def compute() -> dict[str, Any]:
        trained = run.train(spec, seed)
        return scored(trained.model, trained.data)

    return run.cached(spec.folder(run.out, seed) / f"{name}.json", compute)


def ensemble_scores(run: Run, plain: TrainingSpec, seed: int, scored: Evaluate, members: int) -> dict[str, Any]:
    """Train plain networks and evaluate their ensemble, or read its scores."""

    def compute() -> dict[str, Any]:
        trained = [run.train(plain, seed + SEED_STEP * k) for k in range(members)]
        return scored(lb.Ensemble([one.model for one in trained]).eval(), trained[0].data, samples=members)

    return run.cached(plain.folder(run.out, seed) / f"scores-ensemble-{members}.json", compute)


def parameters(spec: TrainingSpec, data: DataSet) -> int:
    """Return the number of parameters of a network."""
    return sum(p.numel() for p in spec.make(data, 0).parameters())


def evaluate(model: nn.Module, data: DataSet, samples: int) -> dict[str, float]:
    """Return NLL, AUC-PR and ECE on both sets; a network without noise has one draw."""
    found: dict[str, float] = {}
    for part, split in (("set b", data.test), ("set c", data.further["set-c"])):
        result = lb.evaluate(model, data.prepared(split), samples=samples)
        found |= {f"{part} {name}": value for name, value in scores(result.prediction.mean, result.targets).items()}
    return found


def scores(p: Tensor, y: Tensor) -> dict[str, float]:
    """Return the measures of predictive probabilities (N, 2) of survival and death.

    AUC-PR is the average precision of finding those who died; ECE has 15 bins of confidence in the likelier outcome.
    """
    p, y = p.double().cpu(), y.cpu()
    death = p[:, 1]
    return {
        "nll": float(-p.gather(1, y[:, None]).log().mean()),
        "aupr": float(lb.metrics.aupr(death[y == 0], death[y == 1])),
        "ece": float(lb.metrics.ece(p, y)),
    }


def counts_baseline(data: DataSet) -> dict[str, float]:
    """Evaluate a logistic regression whose inputs are the hours that each variable was in each bin."""
    from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]
    from sklearn.pipeline import make_pipeline  # type: ignore[import-untyped]
    from sklearn.preprocessing import StandardScaler  # type: ignore[import-untyped]

    model = make_pipeline(StandardScaler(), LogisticRegression(C=INVERSE_PENALTY, max_iter=2000))
    model.fit(token_counts(data.train.x).numpy(), data.train.y.numpy())
    found: dict[str, float] = {}
    for part, split in (("set b", data.test), ("set c", data.further["set-c"])):
        p = torch.from_numpy(model.predict_proba(token_counts(split.x).numpy()))
        found |= {f"{part} {name}": value for name, value in scores(p, split.y).items()}
    return found


def token_counts(x: Tensor, bins: int = 10) -> Tensor:
    """Count the hours (N, V * bins) in which a variable was in a bin, for stays (N, T, V)."""
    return torch.stack([(x == b).sum(1) for b in range(1, bins + 1)], -1).flatten(1).double()
