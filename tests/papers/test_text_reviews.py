"""Text encoders on movie-review sentences: converted layers, measures by hand, a tiny run, and the published page."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score

import leanbayes as lb
from leanbayes.core.conversion import stochastic_layers
from leanbayes.data.upstream import BEGIN, PADDING, UNKNOWN
from leanbayes.methods import all_methods
from leanbayes_papers import SUITES
from leanbayes_papers.harness import Run, Trained
from leanbayes_papers.harness.suite import run_suite
from leanbayes_papers.text import reviews
from leanbayes_papers.text.reviews import DETERMINISTIC, DROPPED, DroppedWords, encoder, LENGTH, sentences, specs
from tests.data.test_polarity import write_cache
from tests.needs import need_transformers
from tests.papers.pages import lacking, records_of, RESULTS


@pytest.fixture
def toys(tmp_path):
    """Return a hundred made-up sentences."""
    write_cache(tmp_path)
    return lb.data.load("rt-polarity", tmp_path)


# ------------------------------------------------------------------------------------ encoders


def test_every_method_has_its_row_but_nested_dropout_which_narrows_only_inside_of_blocks():
    need_transformers()
    used = {reader.method.name for reader in specs(Run()).values() if reader.method is not None}
    assert used == set(all_methods()) - {
        "nested",
        "deep_ensemble",
        "laplace",
        "swag",
    }  # the ensemble is one of deterministic encoders
    with pytest.warns(UserWarning, match=r"NestedDropout: of .* cannot be traced, see line"):
        lb.convert(encoder(50, 2), lb.NestedDropout())


def test_encoders_of_one_seed_begin_with_the_same_weights(toys):
    need_transformers()
    made = {name: reader.make(toys, 7) for name, reader in specs(Run()).items()}
    plain = made.pop(DETERMINISTIC)
    for name, model in made.items():
        assert type(model) is type(plain)
        assert any(True for _ in stochastic_layers(model)), name
        still = lb.mean(model)
        for one, other in zip(still.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other, msg=name)


def test_rows_share_the_recipe_but_for_what_their_posteriors_need():
    made = specs(Run(budget="short"))
    plain = made[DETERMINISTIC].recipe
    own = {"posterior_lr": None, "convert_at_epoch": 0, "anneal_epochs": 0.0}
    assert {replace(reader.recipe, **own) for reader in made.values()} == {plain}
    assert (plain.posterior_lr, plain.convert_at_epoch, plain.anneal_epochs) == (None, 0, 0.0)


def test_without_transformers_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="made by transformers, which is not here; install it"):
        encoder(50, 2)


# ------------------------------------------------------------------------------------ sentences


def test_other_words_are_dropped_in_every_epoch_and_nothing_else_is(toys):
    data = DroppedWords(toys.train, seed=3)
    x = toys.train.x[:, :LENGTH]
    seen = []
    for epoch in (0, 1, 0):
        data.set_epoch(epoch)
        seen.append(torch.stack([data[row][0]["input_ids"] for row in range(len(data))]))
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])
    changed = seen[0] != x
    assert (seen[0][changed] == UNKNOWN).all()
    assert not changed[x <= BEGIN].any()
    words = int((x > BEGIN).sum())
    assert changed.sum() / words == pytest.approx(DROPPED, abs=4 * math.sqrt(DROPPED * (1 - DROPPED) / words))
    inputs, label = data[5]
    assert torch.equal(inputs["attention_mask"], (x[5] != PADDING).long())
    assert label == toys.train.y[5]


def test_out_of_distribution_sentences_have_the_lengths_of_known_ones(toys):
    found = reviews.ood_sentences(toys)
    x = toys.test.x[:, :LENGTH]
    shuffled, random = found["shuffled"].x, found["random words"].x
    assert torch.equal(shuffled.sort(1).values, x.sort(1).values)
    assert not torch.equal(shuffled, x)
    for other in (shuffled, random):
        assert torch.equal(other == PADDING, x == PADDING)
        assert (other[:, 0] == BEGIN).all()
    assert (random[x > BEGIN] > BEGIN).all()


def test_the_baseline_reads_the_words_themselves(toys):
    found = reviews.texts(toys, toys.test)
    assert all(text.startswith("the film is ") for text in found)
    assert reviews.tfidf_baseline(toys)["accuracy"] == 1.0  # good and bad say it all


# ------------------------------------------------------------------------------------ measures


def test_scores_are_those_of_other_libraries():
    random = np.random.default_rng(0)
    yes = random.uniform(0.01, 0.99, 200)
    y = (random.uniform(size=200) < yes).astype(int)
    p = torch.from_numpy(np.stack([1 - yes, yes], 1))
    found = reviews.scores(p, torch.from_numpy(y))
    right = (yes > 0.5) == y
    assert found["accuracy"] == pytest.approx(right.mean())
    assert found["nll"] == pytest.approx(log_loss(y, p.numpy()))
    assert found["brier"] == pytest.approx(2 * brier_score_loss(y, yes))
    doubt = -np.maximum(yes, 1 - yes)  # of two classes, entropy falls with confidence
    assert found["errors"] == pytest.approx(roc_auc_score(~right, doubt))
    surest = right[np.argsort(doubt)]
    for share, accuracy in zip(reviews.COVERAGES, found["curve"], strict=True):
        assert accuracy == pytest.approx(surest[: round(200 * share)].mean())


def test_a_single_network_has_no_mutual_information_to_tell_by():
    found = {column.name: 0.25 for column in reviews.OOD_TABLE.columns}
    alone = found | {name: None for name in found if name.endswith("mutual_information")}
    lines = reviews.OOD_TABLE.lines([{"method": "one", **alone}, {"method": "other", **found}, {"method": "TF-IDF"}])
    assert lines[0] == ["one", "0.2500", "0.250", "-", "0.250", "-"]
    assert lines[1:] == [["other", "0.2500", "0.250", "0.250", "0.250", "0.250"]]


def test_the_ensemble_averages_members_that_have_seeds_of_their_own(toys, tmp_path, monkeypatch):
    need_transformers()
    seen = []

    def train(self, spec, seed):
        seen.append(seed)
        return Trained(spec.make(toys, seed).eval(), toys, [])

    monkeypatch.setattr(Run, "train", train)
    plain, run = specs(Run())[DETERMINISTIC], Run(seeds=(3,), device="cpu", out=tmp_path)
    found = reviews.ensemble_scores(run, plain, 3, reviews.evaluate, 3)
    assert seen == [3, 1003, 2003]
    with torch.no_grad():
        members = [plain.make(toys, seed).eval()(**sentences(toys.test.x)).logits.softmax(1) for seed in seen]
    expected = reviews.scores(torch.stack(members).mean(0), toys.test.y)
    assert found["nll"] == pytest.approx(expected["nll"], rel=1e-4)
    assert reviews.ensemble_scores(run, plain, 3, reviews.evaluate, 3) == found
    assert len(seen) == 3, "scores are read"


# ------------------------------------------------------------------------------------ a tiny run


def test_the_suite_runs_on_made_up_sentences(tmp_path, monkeypatch):
    few = ("MC dropout", "Mean field", "Rank-1", "Patches, ECMP")  # all others are converted in the test above
    monkeypatch.setattr(reviews, "METHODS", {name: reviews.METHODS[name] for name in (DETERMINISTIC, *few)})
    monkeypatch.setitem(reviews.SAMPLES, "quick", 2)
    pytest.importorskip("matplotlib")
    need_transformers()
    write_cache(tmp_path)
    run = Run(device="cpu", root=str(tmp_path), seeds=(3,), out=tmp_path / "out")
    outcome = run_suite("text-reviews", SUITES["text-reviews"](run), run)
    assert outcome.remarks == []
    records = outcome.records["text-reviews"]
    names = [*specs(run), "Deep ensemble"]
    assert [line[0] for line in reviews.TABLE.lines(records)] == [*names, reviews.TFIDF]
    assert [line[0] for line in reviews.GAINS.lines(records)] == names[1:]
    assert [line[0] for line in reviews.OOD_TABLE.lines(records)] == names
    assert {record.get("seed") for record in records} == {3, None}
    assert all(0 < record["nll"] < 2 and 0 <= record["accuracy"] <= 1 for record in records)
    assert records[0]["epistemic"] == pytest.approx(0, abs=1e-6)
    assert next(r["parameters"] for r in records if r["method"] == "Deep ensemble") == 2
    assert (run.out / "studies" / "text-reviews.svg").is_file()


# ------------------------------------------------------------------------------------ the published page


def test_the_published_tables_are_those_of_their_files():
    records = records_of("text", "text-reviews")
    tables = (reviews.TABLE, reviews.GAINS, reviews.OOD_TABLE)
    assert lacking("text", [table.lines(records) for table in tables]) == []
    assert "(text/text-reviews.svg)" in (RESULTS / "text.md").read_text()


def test_the_published_trials_are_on_the_page():
    page, trials = (RESULTS / "text.md").read_text(), json.loads((RESULTS / "text" / "trials.json").read_text())
    rows = [
        [t["row"], t["setting"], str(t["seed"]), f"{t['accuracy']:.1f}", f"{t['nll']:.4f}", f"{t['ece']:.4f}"]
        for t in trials
    ]
    assert lacking("text", [rows]) == []
    shared = [f"{t[name]:.4f}" for t in trials for name in ("mutual_information", "nll") if name in t]
    assert [figure for figure in shared if figure not in page] == []
