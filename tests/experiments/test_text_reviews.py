"""Text encoders on movie-review sentences: what is converted, measures by hand, a tiny run, and the published page."""

from __future__ import annotations

import importlib
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
from leanbayes.data.upstream.polarity import BEGIN, PADDING, UNKNOWN
from leanbayes.methods import all_methods
from leanbayes_papers import SUITES, text_page
from leanbayes_papers.runner import run
from leanbayes_papers.study import Case
from leanbayes_papers.suite import Setting
from leanbayes_papers.text_networks import (
    DETERMINISTIC,
    DROPPED,
    DroppedWords,
    encoder,
    LENGTH,
    readers,
    sentences,
)
from leanbayes_papers.trained import Trained
from tests.data.test_polarity import write_cache
from tests.experiments.pages import lacking, RESULTS
from tests.needs import need_transformers

reviews = importlib.import_module("leanbayes_papers.text_reviews")


@pytest.fixture
def toys(tmp_path):
    """Return a hundred made-up sentences."""
    write_cache(tmp_path)
    return lb.data.load("rt-polarity", tmp_path)


# ------------------------------------------------------------------------------------ encoders


def test_every_method_has_its_row_but_nested_dropout_which_narrows_only_inside_of_blocks():
    need_transformers()
    used = {reader.method.name for reader in readers(Setting()).values() if reader.method is not None}
    assert used == set(all_methods()) - {"nested", "deep_ensemble"}  # the ensemble is one of deterministic encoders
    with pytest.warns(UserWarning, match=r"NestedDropout: of .* cannot be traced, see line"):
        lb.convert(encoder(50, 2), lb.NestedDropout())


def test_encoders_of_one_seed_begin_with_the_same_weights(toys):
    need_transformers()
    made = {name: reader.make(toys, 7) for name, reader in readers(Setting()).items()}
    plain = made.pop(DETERMINISTIC)
    for name, model in made.items():
        assert type(model) is type(plain)
        assert any(True for _ in stochastic_layers(model)), name
        still = lb.mean(model)
        for one, other in zip(still.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other, msg=name)


def test_rows_share_the_recipe_but_for_what_their_posteriors_need():
    made = readers(Setting(budget="short"))
    plain = made[DETERMINISTIC].recipe
    own = {"posterior_lr": None, "convert_at_epoch": 0, "anneal_epochs": 0.0}
    assert {replace(reader.recipe, **own) for reader in made.values()} == {plain}
    assert (plain.posterior_lr, plain.convert_at_epoch, plain.anneal_epochs) == (None, 0, 0.0)


def test_without_transformers_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="made by transformers, which is not here; install it"):
        encoder(50, 2)


# ------------------------------------------------------------------------------------ sentences


def test_words_are_dropped_anew_in_every_epoch_and_nothing_else_is(toys):
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


def test_foreign_sentences_have_the_lengths_of_known_ones(toys):
    found = reviews.foreign(toys)
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


def seed_of(value: float) -> dict:
    apart = {name: dict.fromkeys(text_page.SCORES, value) for name in text_page.FOREIGN}
    measures = dict.fromkeys(("accuracy", "nll", "tempered", "brier", "ece", "errors", "epistemic"), value)
    return measures | {"curve": [value] * len(reviews.COVERAGES), "foreign": apart}


def numbers_of(**rows: tuple[float, ...]) -> dict:
    made = {name: {"seeds": [seed_of(v) for v in values], "parameters": 1000} for name, values in rows.items()}
    return {
        "coverages": list(reviews.COVERAGES), "rows": made, "tfidf": seed_of(0.5), "samples": 16, "members": 4,
        "sentences": {"train": 80, "test": 10},
    }  # fmt: skip


def test_gains_are_over_pairs_and_point_to_the_better():
    numbers = numbers_of(Deterministic=(0.3, 0.4, 0.5), Other=(0.28, 0.39, 0.48))
    nll, accuracy = (text_page.gain(numbers, "Other", name) for name in ("nll", "accuracy"))
    differences = np.array([0.02, 0.01, 0.02])
    assert nll.mean == pytest.approx(differences.mean())
    assert nll.sem == pytest.approx(differences.std(ddof=1) / math.sqrt(3))
    assert accuracy.mean == pytest.approx(-100 * nll.mean)
    (line,) = text_page.gains(numbers)
    assert "NLL better (+0.0167 ± 0.0033)" in line
    assert "accuracy, % worse (-1.7 ± 0.3)" in line


def test_a_single_network_has_no_mutual_information_to_tell_by():
    lines = text_page.foreign(numbers_of(Deterministic=(0.5,), Other=(0.25,)))
    assert lines[0] == ["Deterministic", "0.5000", "0.500", "-", "0.500", "-"]
    assert lines[1] == ["Other", "0.2500", "0.250", "0.250", "0.250", "0.250"]


def test_the_ensemble_averages_members_that_have_seeds_of_their_own(toys, tmp_path, monkeypatch):
    need_transformers()
    seen = []

    def train(reader, case, seed):
        seen.append(seed)
        return Trained(reader.make(toys, seed).eval(), toys, [])

    monkeypatch.setattr(reviews, "train", train)
    plain, case = readers(Setting())[DETERMINISTIC], Case((), tmp_path, (3,), "quick", "cpu")
    found = reviews.scored_ensemble(plain, case, 3, 3)
    assert seen == [3, 1003, 2003]
    with torch.no_grad():
        members = [plain.make(toys, seed).eval()(**sentences(toys.test.x)).logits.softmax(1) for seed in seen]
    expected = reviews.scores(torch.stack(members).mean(0), toys.test.y)
    assert found["nll"] == pytest.approx(expected["nll"], rel=1e-4)
    assert reviews.scored_ensemble(plain, case, 3, 3) == found
    assert len(seen) == 3, "what was judged is read"


# ------------------------------------------------------------------------------------ a tiny run


def test_the_suite_runs_on_made_up_sentences(tmp_path):
    pytest.importorskip("matplotlib")
    need_transformers()
    write_cache(tmp_path)
    setting = Setting(device="cpu", root=str(tmp_path), seeds=(3,))
    out = tmp_path / "out"
    outcome = run("text-reviews", SUITES["text-reviews"](setting), setting, out)
    assert outcome.remarks == []
    names = [*readers(setting), "Deep ensemble"]
    assert [line[0] for line in outcome.overview.rows] == [*names, text_page.TFIDF]
    assert len(outcome.says["text-reviews"]) == 2 * len(names) - 1
    numbers = json.loads((out / "studies" / "text-reviews.json").read_text())["numbers"]
    for row in numbers["rows"].values():
        assert [seed["seed"] for seed in row["seeds"]] == [3]
        assert all(0 < seed["nll"] < 2 and 0 <= seed["accuracy"] <= 1 for seed in row["seeds"])
    assert numbers["rows"][DETERMINISTIC]["seeds"][0]["epistemic"] == pytest.approx(0, abs=1e-6)
    assert numbers["rows"]["Deep ensemble"]["parameters"] == 2 * numbers["rows"][DETERMINISTIC]["parameters"]
    assert (out / "studies" / "text-reviews.svg").is_file()


# ------------------------------------------------------------------------------------ the published page

PAGE = RESULTS / "text.md"


def published(name: str) -> dict:
    return json.loads((PAGE.parent / "text" / f"{name}.json").read_text())


def test_the_published_page_says_what_its_files_say():
    page, numbers = PAGE.read_text(), published("text-reviews")["numbers"]
    found = text_page.overview(numbers)
    rows = [*found.rows, *text_page.foreign(numbers)]
    assert lacking("text", rows, [*found.says, *text_page.gains(numbers)]) == []
    assert "(text/text-reviews.svg)" in page


def test_the_published_trials_are_on_the_page():
    page = PAGE.read_text()
    rows = [
        f"| {t['row']} | {t['setting']} | {t['seed']} | {t['accuracy']:.1f} | {t['nll']:.4f} | {t['ece']:.4f} |\n"
        for t in published("trials")
    ]
    assert [row for row in rows if row not in page] == []
    shared = [f"{t[name]:.4f}" for t in published("trials") for name in ("mutual_information", "nll") if name in t]
    assert [figure for figure in shared if figure not in page] == []
