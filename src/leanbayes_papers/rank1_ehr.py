"""Deaths in intensive care: Table 4 of the rank-1 paper, with PhysioNet 2012 in the place of MIMIC-III.

Every measurement is embedded by its variable and by the bin of its value (`leanbayes.data`), and an LSTM reads the
sums hour by hour (`leanbayes.models.EHRNet`). Networks learn from set a and are judged on sets b and c.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn, Tensor

from leanbayes import metrics
from leanbayes.data import DataSet, Split
from leanbayes.evaluation.evaluate import evaluate
from leanbayes.evaluation.statistics import Estimate, estimate
from leanbayes.methods.ensemble import Ensemble
from leanbayes.runtime._files import write_text
from leanbayes_papers.ehr_networks import Converted, DATA, DETERMINISTIC, networks, SAMPLES
from leanbayes_papers.overview import Overview
from leanbayes_papers.study import Case, new_figure, Numbers, save_figure, Study
from leanbayes_papers.suite import printed, Setting, Suite
from leanbayes_papers.trained import loaded, train, Trainee

Scores = dict[str, dict[str, float]]
"""Measures by set and name."""

PAPER = "Dusenberry, Jerfel, Wen, Ma, Snoek, Heller, Lakshminarayanan, Tran, 2020: Rank-1 factors"
STUDY = "ehr"
ENSEMBLE = "Deep ensemble"
COUNTS = "Logistic regression on counts"
MEMBERS = {"quick": 2, "short": 4, "full": 4}
APART = 1000
"""Members of an ensemble have the seeds s, s + 1000, ...; the first one is the deterministic network of seed s."""

SETS = {"set-b": "set b", "set-c": "set c"}
MEASURES = {"nll": ("NLL", 4, -1), "aupr": ("AUC-PR", 3, 1), "ece": ("ECE", 4, -1)}
"""By name: head, decimals, and 1 where more is better."""

COLUMNS = [f"{part} {measure}" for part in ("validation", "test") for measure in MEASURES]
PRINTED = {
    name: printed(COLUMNS, line)
    for name, line in {
        DETERMINISTIC: "0.211 0.446 0.0160 0.213 0.390 0.0135",
        "BatchEnsemble": "0.215 0.447 0.0171 0.215 0.391 0.0162",
        "Bayesian embeddings": "0.213 0.449 0.0193 0.212 0.391 0.0160",
        "Fully Bayesian": "0.220 0.424 0.0162 0.221 0.373 0.0161",
        "Rank-1, Gaussian": "0.209 0.451 0.0156 0.209 0.391 0.0132",
        "Rank-1, Cauchy": "0.207 0.446 0.0148 0.211 0.383 0.0130",
        ENSEMBLE: "0.202 0.453 0.0132 0.206 0.396 0.0103",
    }.items()
}
INVERSE_PENALTY = 3e-3
"""Scikit-learn's C of the logistic regression: the best of 1e-3, 3e-3, 1e-2 and 1e-1 on held-out stays of set a."""


def rank1_ehr(setting: Setting) -> Suite:
    """Mortality from health records: deterministic, BatchEnsemble, Bayesian, rank-1 LSTMs, an ensemble (Table 4)."""
    study = Study(
        name=STUDY,
        title="Rank-1 paper, Table 4: who dies in intensive care, PhysioNet 2012 in the place of MIMIC-III",
        claim="Gaussian rank-1 networks are better than all baselines of their size in every measure, Cauchy ones in "
        "NLL and ECE but not in AUC-PR; fully Bayesian ones are worse than deterministic ones; only deep ensembles are "
        "better than rank-1. Its numbers are of other patients: only the order of rows compares with ours.",
        data=(DATA,),
        measure=partial(measure, setting=setting),
        draw=draw,
        say=say,
    )
    return Suite(paper=PAPER, tables=(), studies=(study,), overview=lambda numbers: overview(numbers[STUDY]))


def measure(case: Case, *, setting: Setting) -> Numbers:
    """Train every network with every seed, and judge it on both sets."""
    rows: dict[str, Any] = {}
    made = networks(setting)
    data = loaded(made[DETERMINISTIC].source)
    for name, network in made.items():
        seeds = [{"seed": seed} | scored(network, case, seed) for seed in case.seeds]
        rows[name] = {"seeds": seeds, "parameters": parameters(network, data)}
    members = MEMBERS[case.budget]
    plain = made[DETERMINISTIC]
    seeds = [{"seed": seed} | scored_ensemble(plain, case, seed, members) for seed in case.seeds]
    rows[ENSEMBLE] = {"seeds": seeds, "parameters": members * parameters(plain, data)}
    return {"members": members, "samples": SAMPLES, "rows": rows, "counts": counts_baseline(data)}


def scored(network: Converted, case: Case, seed: int) -> Scores:
    """Train a network and judge it."""

    def judge() -> Scores:
        trained = train(network, case, seed)
        return judged(trained.model, trained.data, network.samples)

    return kept(network.folder(case.out, seed) / f"scores-{network.samples}.json", case, judge)


def scored_ensemble(plain: Converted, case: Case, seed: int, members: int) -> Scores:
    """Train deterministic networks and judge their ensemble."""

    def judge() -> Scores:
        trained = [train(plain, case, seed + APART * k) for k in range(members)]
        return judged(Ensemble([one.model for one in trained]).eval(), trained[0].data, members)

    return kept(plain.folder(case.out, seed) / f"scores-ensemble-{members}.json", case, judge)


def kept(path: Path, case: Case, judge: Callable[[], Scores]) -> Scores:
    """Judge, or read what was kept beside the training: 25 draws of 8,000 stays cost as much as learning from 4,000."""
    if path.is_file() and not case.fresh:
        found: Scores = json.loads(path.read_text(encoding="utf-8"))
        return found
    found = judge()
    write_text(json.dumps(found) + "\n", path)
    return found


def parameters(network: Trainee, data: DataSet) -> int:
    """Return the number of parameters of a network."""
    return sum(p.numel() for p in network.make(data, 0).parameters())


def judged(model: nn.Module, data: DataSet, samples: int) -> Scores:
    """Return NLL, AUC-PR and ECE on both sets; a network without noise has one draw, whatever is asked for."""
    found = {}
    for name, split in judged_on(data).items():
        result = evaluate(model, data.prepared(split), samples=samples)
        found[name] = scores(result.prediction.mean, result.targets)
    return found


def judged_on(data: DataSet) -> dict[str, Split]:
    """Return the sets to judge on."""
    return {"set-b": data.test, "set-c": data.further["set-c"]}


def scores(p: Tensor, y: Tensor) -> dict[str, float]:
    """Return the measures of predictive probabilities (N, 2) of survival and death.

    AUC-PR is the average precision of finding those who died; ECE has 15 bins of confidence in the likelier outcome.
    """
    p, y = p.double().cpu(), y.cpu()
    death = p[:, 1]
    return {
        "nll": float(-p.gather(1, y[:, None]).log().mean()),
        "aupr": float(metrics.aupr(death[y == 0], death[y == 1])),
        "ece": float(metrics.ece(p, y)),
    }


def counts_baseline(data: DataSet) -> Scores:
    """Judge a logistic regression that knows only in how many hours each variable was in each bin."""
    from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]
    from sklearn.pipeline import make_pipeline  # type: ignore[import-untyped]
    from sklearn.preprocessing import StandardScaler  # type: ignore[import-untyped]

    model = make_pipeline(StandardScaler(), LogisticRegression(C=INVERSE_PENALTY, max_iter=2000))
    model.fit(token_counts(data.train.x).numpy(), data.train.y.numpy())
    found = {}
    for name, split in judged_on(data).items():
        p = torch.from_numpy(model.predict_proba(token_counts(split.x).numpy()))
        found[name] = scores(p, split.y)
    return found


def token_counts(x: Tensor, bins: int = 10) -> Tensor:
    """Count the hours (N, V * bins) in which a variable was in a bin, for stays (N, T, V)."""
    return torch.stack([(x == b).sum(1) for b in range(1, bins + 1)], -1).flatten(1).double()


# ------------------------------------------------------------------------------------ telling


def over_seeds(row: Mapping[str, Any], part: str, measure: str) -> Estimate:
    """Return the mean of a measure over seeds with its standard error."""
    found = estimate(seed[part][measure] for seed in row["seeds"])
    assert found is not None
    return found


def gain(row: Mapping[str, Any], plain: Mapping[str, Any], part: str, measure: str) -> Estimate:
    """Return how much better a row is than the deterministic one, seed by seed: both began with the same weights."""
    sign = MEASURES[measure][2]
    pairs = zip(row["seeds"], plain["seeds"], strict=True)
    found = estimate(sign * (one[part][measure] - other[part][measure]) for one, other in pairs)
    assert found is not None
    return found


def verdict(found: Estimate) -> str:
    """Say whether a gain is beyond two of its standard errors; one seed decides nothing."""
    if found.sem is None or abs(found.mean) <= 2 * found.sem:
        return "level"
    return "better" if found.mean > 0 else "worse"


def say(numbers: Numbers) -> list[str]:
    """Tell for every row and measure whether it is better than the deterministic network, on sets b and c."""
    rows = numbers["rows"]
    lines = []
    for name, row in rows.items():
        if name == DETERMINISTIC:
            continue
        told = []
        for measure, (head, digits, _) in MEASURES.items():
            gains = [gain(row, rows[DETERMINISTIC], part, measure) for part in SETS]
            parts = (f"{verdict(g)} ({g.mean:+.{digits}f}{_error(g, digits)})" for g in gains)
            told.append(f"{head} {' and '.join(parts)}")
        lines.append(f"{name} against deterministic, gains on sets b and c: {'; '.join(told)}")
    found = [f"{label} {_scores(numbers['counts'][part])}" for part, label in SETS.items()]
    return [*lines, f"{COUNTS} of tokens, NLL, AUC-PR, ECE: {', '.join(found)}"]


def overview(numbers: Numbers) -> Overview:
    """Put ours above the paper's, row by row."""
    seeds = len(numbers["rows"][DETERMINISTIC]["seeds"])
    heads = [f"{label} {head}" for label in SETS.values() for head, _, _ in MEASURES.values()]
    lines = []
    for name, row in numbers["rows"].items():
        cells = (
            f"{found.mean:.{digits}f}{_error(found, digits)}"
            for part in SETS
            for measure, (_, digits, _) in MEASURES.items()
            for found in (over_seeds(row, part, measure),)
        )
        lines.append([name, "ours", *cells, f"{row['parameters']:,}"])
        lines.append(["", "paper", *(PRINTED[name][column].text for column in COLUMNS), ""])
    return Overview(
        title="Table 4 of the rank-1 paper",
        heads=["", "", *heads, "parameters"],
        rows=lines,
        says=[
            f"Ours: PhysioNet 2012, mean ± standard error over {seeds} seeds, {numbers['samples']} draws of Bayesian "
            f"networks, {numbers['members']} members in an ensemble. The paper's are of MIMIC-III, validation "
            "beside set b and test beside set c."
        ],
    )


def draw(numbers: Numbers, path: Path) -> None:
    """Draw every row as a mean with its standard error, a panel for each set and measure, the baseline as a line."""
    rows = numbers["rows"]
    figure = new_figure(10, 5)
    grid = figure.subplots(len(SETS), len(MEASURES), sharey=True, sharex="col")
    places = list(range(len(rows)))
    for axes, (part, label) in zip(grid, SETS.items(), strict=True):
        for axis, (measure, (head, _, sign)) in zip(axes, MEASURES.items(), strict=True):
            found = [over_seeds(row, part, measure) for row in rows.values()]
            axis.errorbar([f.mean for f in found], places, xerr=[f.sem or 0 for f in found], fmt="o", capsize=3)
            axis.axvline(over_seeds(rows[DETERMINISTIC], part, measure).mean, color="grey", lw=1, ls="--")
            axis.set_title(f"{head}, {label} ({'more' if sign > 0 else 'less'} is better)", fontsize=9)
            axis.set_yticks(places, list(rows), fontsize=8)
            axis.tick_params(axis="x", labelsize=7)
    grid[0][0].invert_yaxis()
    save_figure(figure, path)


def _error(found: Estimate, digits: int) -> str:
    return "" if found.sem is None else f" ± {found.sem:.{digits}f}"


def _scores(found: Mapping[str, float]) -> str:
    return " / ".join(f"{found[name]:.{digits}f}" for name, (_, digits, _) in MEASURES.items())
