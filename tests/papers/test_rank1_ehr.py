"""Table 4 of the rank-1 paper: layers that each row converts, measures by hand, a tiny run on made-up stays."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from leanbayes.core.conversion import stochastic_layers
from leanbayes.data import DataSet, Split
from leanbayes.data.upstream import SHAPE
from leanbayes_papers import SUITES
from leanbayes_papers.harness import printed, Run, Trained
from leanbayes_papers.harness.suite import run_suite
from leanbayes_papers.rank1 import ehr
from leanbayes_papers.rank1.ehr import DETERMINISTIC, specs
from tests.data.test_physionet import write_cache
from tests.papers.pages import lacking, records_of, RESULTS

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
    model = specs(Run())[name].make(stays(), 0)
    found: dict[str, list[str]] = {}
    for path, layer in stochastic_layers(model):
        found.setdefault(layer.method.name, []).append(path)
    assert {method: sorted(paths) for method, paths in found.items()} == {
        method: sorted(paths) for method, paths in LAYERS[name].items()
    }


def test_rank1_rows_are_mixtures_of_four_with_one_distribution_for_posterior_and_prior():
    made = specs(Run(budget="full"))
    for name, law in (("Rank-1, Gaussian", "normal"), ("Rank-1, Cauchy", "cauchy")):
        (_, _), (factors, _) = made[name].options["parts"]
        assert (factors.components, factors.posterior, factors.prior) == (4, law, law)
        assert made[name].recipe.clip_norm == 1.0


def test_bayesian_networks_have_the_papers_draws_and_members_one_each():
    found = {name: ehr.samples_of(spec) for name, spec in specs(Run()).items()}
    assert found == dict.fromkeys(LAYERS, 25) | {"BatchEnsemble": 4}


def test_networks_of_one_seed_begin_with_the_same_weights():
    data = stays()
    plain, *others = (network.make(data, 7) for network in specs(Run()).values())
    for other in others:
        tensors = dict(other.state_dict())
        assert torch.equal(tensors.get("head.base.weight", tensors.get("head.weight")), plain.head.weight)


def test_members_of_an_ensemble_have_seeds_of_their_own_and_scores_are_kept(tmp_path, monkeypatch):
    seen = []

    def train(self, spec, seed):
        seen.append(seed)
        return Trained(spec.make(stays(), seed).eval(), stays(), [])

    monkeypatch.setattr(Run, "train", train)
    plain, run = specs(Run())[DETERMINISTIC], Run(seeds=(3,), device="cpu", out=tmp_path)
    found = ehr.ensemble_scores(run, plain, 3, ehr.evaluate, 4)
    assert seen == [3, 1003, 2003, 3003]
    data = stays()
    with torch.no_grad():
        members = [plain.make(data, seed).eval()(data.test.x).softmax(1) for seed in seen]
    expected = ehr.scores(torch.stack(members).mean(0), data.test.y)
    for part in ("set b", "set c"):
        assert [found[f"{part} {name}"] for name in expected] == pytest.approx(list(expected.values()), rel=1e-4)
    assert ehr.ensemble_scores(run, plain, 3, ehr.evaluate, 4) == found
    assert len(seen) == 4, "scores are read"
    ehr.ensemble_scores(replace(run, fresh=True), plain, 3, ehr.evaluate, 4)
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


def test_the_papers_table_4():
    table = printed("rank1", "table4")
    assert table["Rank-1, Gaussian"]["set c aupr"].value == 0.391
    assert table["Rank-1, Cauchy"]["set b nll"].value == 0.207
    assert table["Fully Bayesian"]["set c nll"].value == 0.221
    assert table["Deep ensemble"]["set c ece"].value == 0.0103
    assert list(table) == [*LAYERS, "Deep ensemble"]


# ------------------------------------------------------------------------------------ a tiny run


def test_the_suite_runs_on_made_up_stays(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(ehr, "SAMPLES", 3)
    write_cache(tmp_path, rows=60)
    run = Run(device="cpu", root=str(tmp_path), seeds=(0, 1), out=tmp_path / "out")
    outcome = run_suite("rank1-ehr", SUITES["rank1-ehr"](run), run)
    assert outcome.remarks == []
    records = outcome.records["ehr"]
    lines = ehr.TABLE.lines(records)
    assert [line[0] for line in lines if line[0]] == [*LAYERS, "Deep ensemble", ehr.COUNTS]
    assert [line[1] for line in lines[:2]] == ["ours", "paper"]
    assert [line[0] for line in ehr.GAINS.lines(records)] == [*list(LAYERS)[1:], "Deep ensemble"]
    names = [column.name for column in ehr.COLUMNS]
    assert all(0 < record[name] < 1 for record in records for name in names)
    sizes = {record["method"]: record.get("parameters") for record in records}
    assert sizes["Deep ensemble"] == 2 * sizes[DETERMINISTIC]
    assert (run.out / "studies" / "ehr.svg").is_file()
    assert outcome.page().count("± ") > 40


# ------------------------------------------------------------------------------------ the published page


def test_the_published_tables_are_those_of_their_files():
    records = records_of("ehr", "ehr")
    assert lacking("ehr", [ehr.TABLE.lines(records), ehr.GAINS.lines(records)]) == []
    assert "(ehr/ehr.svg)" in (RESULTS / "ehr.md").read_text()
    assert {record.get("seed") for record in records} == {0, 1, 2, 3, 4, None}


def test_the_published_trials_are_on_the_page():
    trials = json.loads((RESULTS / "ehr" / "trials.json").read_text())
    rows = [
        [t["row"], t["setting"], str(t["seed"]), f"{t['nll']:.4f}", f"{t['aupr']:.3f}", f"{t['ece']:.4f}"]
        for t in trials
    ]
    assert lacking("ehr", [rows]) == []
