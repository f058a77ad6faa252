"""Table 4 of the rank-1 paper: layers that each row converts, measures by hand, a tiny run on made-up stays."""

from __future__ import annotations

import importlib
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from leanbayes.core.conversion import stochastic_layers
from leanbayes.data import DataSet, Split
from leanbayes.data.upstream.physionet import SHAPE
from leanbayes_papers import SUITES
from leanbayes_papers.ehr_networks import DETERMINISTIC, networks
from leanbayes_papers.runner import run
from leanbayes_papers.study import Case
from leanbayes_papers.suite import Setting
from leanbayes_papers.trained import Trained
from tests.data.test_physionet import write_cache
from tests.experiments.pages import lacking, RESULTS

ehr = importlib.import_module("leanbayes_papers.rank1_ehr")

CELLS = ["lstm.cells.l0.hidden", "lstm.cells.l0.input"]
LAYERS = {
    DETERMINISTIC: {},
    "BatchEnsemble": {"batch_ensemble": [*CELLS, "head"]},
    "Bayesian embeddings": {"mean_field": ["embedding"]},
    "Fully Bayesian": {"mean_field": [*CELLS, "embedding", "head"]},
    "Rank-1, Gaussian": {"mean_field": ["embedding"], "rank1": [*CELLS, "head"]},
    "Rank-1, Cauchy": {"mean_field": ["embedding"], "rank1": [*CELLS, "head"]},
}


def stays() -> DataSet:
    x = torch.randint(11, (40, *SHAPE), generator=torch.Generator().manual_seed(3))
    split = Split(x, torch.arange(40) % 2)
    return DataSet("made up", "classification", split, split, ("survived", "died"), "", further={"set-c": split})


# ------------------------------------------------------------------------------------ networks


@pytest.mark.parametrize("name", LAYERS)
def test_a_row_converts_the_layers_that_the_paper_converts(name):
    model = networks(Setting())[name].make(stays(), 0)
    found: dict[str, list[str]] = {}
    for path, layer in stochastic_layers(model):
        found.setdefault(layer.method.name, []).append(path)
    assert {method: sorted(paths) for method, paths in found.items()} == {
        method: sorted(paths) for method, paths in LAYERS[name].items()
    }


def test_rank1_rows_are_mixtures_of_four_with_one_law_for_posterior_and_prior():
    made = networks(Setting(budget="full"))
    for name, law in (("Rank-1, Gaussian", "normal"), ("Rank-1, Cauchy", "cauchy")):
        (_, _), (factors, _) = made[name].parts
        assert (factors.components, factors.posterior, factors.prior) == (4, law, law)
        assert made[name].recipe.clip_norm == 1.0


def test_bayesian_networks_have_the_papers_draws_and_members_one_each():
    found = {name: network.samples for name, network in networks(Setting()).items()}
    assert found == dict.fromkeys(LAYERS, 25) | {"BatchEnsemble": 4}


def test_networks_of_one_seed_begin_with_the_same_weights():
    data = stays()
    plain, *others = (network.make(data, 7) for network in networks(Setting()).values())
    for other in others:
        tensors = dict(other.state_dict())
        assert torch.equal(tensors.get("head.base.weight", tensors.get("head.weight")), plain.head.weight)


def test_members_of_an_ensemble_have_seeds_of_their_own_and_scores_are_kept(tmp_path, monkeypatch):
    seen = []

    def train(network, case, seed):
        seen.append(seed)
        return Trained(network.make(stays(), seed).eval(), stays(), [])

    monkeypatch.setattr(ehr, "train", train)
    network, case = networks(Setting())[DETERMINISTIC], Case((), tmp_path, (3,), "quick", "cpu")
    found = ehr.scored_ensemble(network, case, 3, 4)
    assert seen == [3, 1003, 2003, 3003]
    data = stays()
    with torch.no_grad():
        members = [network.make(data, seed).eval()(data.test.x).softmax(1) for seed in seen]
    for part in ehr.SETS:
        assert found[part] == pytest.approx(ehr.scores(torch.stack(members).mean(0), data.test.y), rel=1e-4)
    assert ehr.scored_ensemble(network, case, 3, 4) == found
    assert len(seen) == 4, "what was judged is read"
    ehr.scored_ensemble(network, replace(case, fresh=True), 3, 4)
    assert len(seen) == 8


# ------------------------------------------------------------------------------------ measures


def test_scores_are_those_by_hand():
    random = np.random.default_rng(0)
    death = random.uniform(0.01, 0.99, 200)
    y = (random.uniform(size=200) < 0.3).astype(int)
    found = ehr.scores(torch.from_numpy(np.stack([1 - death, death], 1)), torch.from_numpy(y))
    assert found["nll"] == pytest.approx(-np.mean(np.log(np.where(y == 1, death, 1 - death))))
    order = np.argsort(-death)  # precision at each death, averaged over deaths
    precision = np.cumsum(y[order]) / np.arange(1, 201)
    assert found["aupr"] == pytest.approx(precision[y[order] == 1].mean())
    confidence, hit = np.maximum(death, 1 - death), (death > 0.5) == y
    gaps = [
        abs((hit[rows] - confidence[rows]).sum())
        for b in range(15)
        for rows in [(confidence > b / 15) & (confidence <= (b + 1) / 15)]
    ]
    assert found["ece"] == pytest.approx(sum(gaps) / 200)


def test_tokens_are_counted_over_hours():
    x = stays().train.x[:3]
    found = ehr.token_counts(x)
    assert found.shape == (3, SHAPE[1] * 10)
    for stay, variable, b in ((0, 0, 1), (1, 5, 10), (2, 41, 3)):
        assert found[stay, 10 * variable + b - 1] == sum(int(x[stay, hour, variable] == b) for hour in range(48))


def row_of(*values: float) -> dict:
    measures = [{"nll": value, "aupr": value, "ece": value} for value in values]
    return {"seeds": [{"seed": k, "set-b": m, "set-c": m} for k, m in enumerate(measures)], "parameters": 1000}


def test_gains_are_over_pairs_and_point_to_the_better():
    plain, other = row_of(0.3, 0.4, 0.5), row_of(0.28, 0.39, 0.48)
    nll, aupr = (ehr.gain(other, plain, "set-b", name) for name in ("nll", "aupr"))
    differences = np.array([0.02, 0.01, 0.02])
    assert nll.mean == pytest.approx(differences.mean())
    assert nll.sem == pytest.approx(differences.std(ddof=1) / math.sqrt(3))
    assert aupr.mean == -nll.mean
    assert (ehr.verdict(nll), ehr.verdict(aupr)) == ("better", "worse")
    assert ehr.verdict(ehr.gain(plain, plain, "set-b", "ece")) == "level"
    assert ehr.verdict(ehr.gain(row_of(0.1), row_of(0.2), "set-b", "nll")) == "level", "one seed decides nothing"


def test_the_papers_table_4():
    assert ehr.PRINTED["Rank-1, Gaussian"]["test aupr"].value == 0.391
    assert ehr.PRINTED["Rank-1, Cauchy"]["validation nll"].value == 0.207
    assert ehr.PRINTED["Fully Bayesian"]["test nll"].value == 0.221
    assert ehr.PRINTED["Deep ensemble"]["test ece"].value == 0.0103
    assert list(ehr.PRINTED) == [*LAYERS, "Deep ensemble"]


# ------------------------------------------------------------------------------------ a tiny run


def test_the_suite_runs_on_made_up_stays(tmp_path):
    pytest.importorskip("matplotlib")
    write_cache(tmp_path, rows=120)
    setting = Setting(device="cpu", root=str(tmp_path), seeds=(0, 1))
    out = tmp_path / "out"
    outcome = run("rank1-ehr", SUITES["rank1-ehr"](setting), setting, out)
    assert outcome.remarks == []
    assert [line[0] for line in outcome.overview.rows[::2]] == [*LAYERS, "Deep ensemble"]
    assert [line[1] for line in outcome.overview.rows[:2]] == ["ours", "paper"]
    assert len(outcome.says["ehr"]) == len(LAYERS) + 1
    numbers = json.loads((out / "studies" / "ehr.json").read_text())["numbers"]
    for row in numbers["rows"].values():
        assert [seed["seed"] for seed in row["seeds"]] == [0, 1]
        assert all(0 < seed[part][name] < 1 for seed in row["seeds"] for part in ehr.SETS for name in ehr.MEASURES)
    assert numbers["rows"]["Deep ensemble"]["parameters"] == 2 * numbers["rows"][DETERMINISTIC]["parameters"]
    assert (out / "studies" / "ehr.svg").is_file()
    assert outcome.page().count("± ") > 40


# ------------------------------------------------------------------------------------ the published page

PAGE = RESULTS / "ehr.md"


def published(name: str) -> dict:
    return json.loads((PAGE.parent / "ehr" / f"{name}.json").read_text())


def test_the_published_page_says_what_its_files_say():
    page, numbers = PAGE.read_text(), published("ehr")["numbers"]
    found = ehr.overview(numbers)
    assert lacking("ehr", found.rows, [*found.says, *ehr.say(numbers)]) == []
    assert "(ehr/ehr.svg)" in page
    assert all(len(row["seeds"]) == 5 for row in numbers["rows"].values())


def test_the_published_trials_are_on_the_page():
    page = PAGE.read_text()
    rows = [
        f"| {t['row']} | {t['setting']} | {t['seed']} | {t['nll']:.4f} | {t['aupr']:.3f} | {t['ece']:.4f} |\n"
        for t in published("trials")
    ]
    assert [row for row in rows if row not in page] == []
