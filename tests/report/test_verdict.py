"""The sentence at the top follows its rule."""

from __future__ import annotations

import pytest

from leanbayes.report import load_results
from leanbayes.report.load import Run
from leanbayes.report.training import training_ratio
from leanbayes.report.verdict import verdict
from tests.report import make

CHEAP = {"train_step_ratio": 1.1, "predict_ratio": 1.02, "extra_percent": 0.5}
DEAR = {"train_step_ratio": 4.0, "predict_ratio": 1.0, "extra_percent": 300.0}


def verdict_of(folder, figures, costs=None):
    """Return the verdict on {method: [nll of each seed]}."""
    for name, seeds in figures.items():
        for seed, nll in enumerate(seeds):
            record = make.record(name, seed, "digits", "lenet", "classification")
            record["metrics"] = {"test": {"nll": nll}}
            record["cost"] = dict((costs or {}).get(name, CHEAP))
            make.write(folder, record)
    (group,) = load_results(folder).groups
    return verdict(group)


def test_a_clearly_better_and_affordable_method_is_recommended(tmp_path):
    found = verdict_of(tmp_path, {"plain": [0.30, 0.32], "rank1": [0.20, 0.22]})
    assert found.choice == "rank1"
    assert found.sentence == (
        "On digits with lenet, rank1 is worth its cost: NLL 0.210 ± 0.010 against 0.310 ± 0.010 of the plain network, "
        "for 1.10 times its training, 1.02 times its forward pass and 0.5 % more parameters."
    )


def test_passes_of_an_answer_are_told(tmp_path):
    costs = {"rank1": {**CHEAP, "passes": 16}}
    found = verdict_of(tmp_path, {"plain": [0.30, 0.32], "rank1": [0.20, 0.22]}, costs)
    assert "1.02 times its forward pass (16 for an answer)" in found.sentence


def test_a_gain_within_two_standard_errors_is_not_enough(tmp_path):
    # The standard error of the difference is 0.01 sqrt(2) = 0.0141; the gain of 0.028 is just below two of them.
    found = verdict_of(tmp_path, {"plain": [0.30, 0.32], "rank1": [0.272, 0.292]})
    assert found.choice is None
    assert "stay with the plain network (NLL 0.310 ± 0.010)" in found.sentence
    assert "the best is rank1 (0.282 ± 0.010)" in found.sentence


def test_a_gain_just_beyond_two_standard_errors_is_enough(tmp_path):
    assert verdict_of(tmp_path, {"plain": [0.30, 0.32], "rank1": [0.271, 0.291]}).choice == "rank1"


def test_dear_methods_are_mentioned_and_not_recommended(tmp_path):
    figures = {"plain": [0.30, 0.32], "rank1": [0.20, 0.22], "deep_ensemble": [0.10, 0.12]}
    found = verdict_of(tmp_path, figures, {"deep_ensemble": DEAR})
    assert found.choice == "rank1"
    assert found.sentence.endswith(
        "; deep_ensemble is better (0.110 ± 0.010), at 4 times the plain network's training."
    )


@pytest.mark.parametrize("ratio", ["train_step_ratio", "predict_ratio"])
def test_each_cost_counts(tmp_path, ratio):
    costs = {"rank1": {**CHEAP, ratio: 2.01}}
    assert verdict_of(tmp_path, {"plain": [0.30, 0.32], "rank1": [0.20, 0.22]}, costs).choice is None


def test_twice_the_parameters_are_affordable_and_more_are_not(tmp_path):
    figures = {"plain": [0.30, 0.32], "rank1": [0.20, 0.22]}
    twice = {"rank1": {**CHEAP, "extra_percent": 100.0}}
    more = {"rank1": {**CHEAP, "extra_percent": 101.0}}
    assert verdict_of(tmp_path / "a", figures, twice).choice == "rank1"
    assert verdict_of(tmp_path / "b", figures, more).choice is None


def test_equals_of_the_choice_are_named(tmp_path):
    figures = {"plain": [0.30, 0.32], "rank1": [0.20, 0.22], "implicit": [0.205, 0.225], "patch": [0.206, 0.226]}
    found = verdict_of(tmp_path, figures)
    assert found.sentence.endswith("; implicit and patch are within one standard error of it.")


def test_one_seed_decides_nothing(tmp_path):
    found = verdict_of(tmp_path, {"plain": [0.30], "rank1": [0.20]})
    assert found.choice is None
    assert "one seed is too few to decide" in found.sentence
    assert "ahead of the plain network" in found.sentence


def test_where_all_methods_are_dear_the_cheapest_is_named(tmp_path):
    figures = {"plain": [0.30, 0.32], "rank1": [0.31, 0.31], "deep_ensemble": [0.29, 0.33]}
    found = verdict_of(tmp_path, figures, {"deep_ensemble": DEAR, "rank1": {**CHEAP, "predict_ratio": 2.5}})
    assert found.choice is None
    assert found.sentence == (
        "On digits with lenet, no method costs at most 2 times the plain network (NLL 0.310 ± 0.010); the cheapest is "
        "rank1 (0.310 ± 0.000), at 2.5 times the plain network's prediction (pass for pass)."
    )


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [("train_step_ratio", 4.45, "4.45 times the plain network's training"),
     ("extra_percent", 200.0, "3 times the plain network's parameters")],
)  # fmt: skip
def test_a_price_says_of_what(tmp_path, field, value, told):
    found = verdict_of(tmp_path, {"plain": [0.1], "rank1": [0.085]}, {"rank1": {**CHEAP, field: value}})
    assert found.sentence.endswith(f"the cheapest is rank1 (0.0850), at {told}.")


def test_a_plain_network_alone_is_said_to_be_alone(tmp_path):
    assert verdict_of(tmp_path, {"plain": [0.3]}).sentence == (
        "On digits with lenet, only the plain network was run (NLL 0.300): there is no method to weigh against it."
    )
    make.write(tmp_path, make.failed("rank1", 0, "Killed"))
    (group,) = load_results(tmp_path).groups
    assert "only the plain network came to its end with a test NLL (0.300)" in verdict(group).sentence


def test_an_unmeasured_cost_is_said(tmp_path):
    found = verdict_of(tmp_path, {"plain": [0.30, 0.32], "rank1": [0.20, 0.22]}, {"rank1": {}})
    assert found.choice is None
    assert "the cost of rank1 was not measured" in found.sentence


def test_without_the_plain_network_nothing_is_recommended(tmp_path):
    found = verdict_of(tmp_path, {"rank1": [0.20, 0.22], "patch": [0.3, 0.3]})
    assert found.choice is None
    assert "the plain network did not run" in found.sentence
    assert "rank1 has the best NLL" in found.sentence


def test_without_figures_the_sentence_says_so(tmp_path):
    make.write(tmp_path, make.failed("plain", 0, "Killed"))
    (group,) = load_results(tmp_path).groups
    assert verdict(group).sentence == "On digits with lenet, no run came to its end with a test NLL."


def test_regression_is_decided_by_the_log_density(tmp_path):
    (group,) = load_results(make.regression_tree(tmp_path)).groups
    found = verdict(group)
    assert found.choice == "rank1"
    assert "LPD" in found.sentence


def test_a_late_conversion_costs_less_than_its_step(tmp_path):
    """Seven plain epochs of ten and three at 2.4 cost 1.42 trainings, though the step alone is dear."""
    for name, nll, cost in (("plain", 0.30, CHEAP), ("rank1", 0.20, {**CHEAP, "train_step_ratio": 2.4})):
        for seed in range(2):
            record = make.record(name, seed, "digits", "lenet", "classification")
            record["metrics"], record["cost"] = {"test": {"nll": nll + 0.01 * seed}}, cost
            record["recipe"] = {"epochs": 10, "convert_at_epoch": 7 if name == "rank1" else 0}
            make.write(tmp_path, record)
    (group,) = load_results(tmp_path).groups
    found = verdict(group)
    assert found.choice == "rank1"
    assert "for 1.42 times its training" in found.sentence


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ({"epochs": 10}, 2.0),
        ({"epochs": 10, "convert_at_epoch": 5}, 1.5),
        ({"epochs": 10, "convert_at_epoch": 5, "tile_last_epochs": 2}, (5 + 3 * 2 + 2 * 4 * 2) / 10),
        ({"epochs": 10, "tile": True}, 8.0),
        ({"epochs": 10, "samples": 3}, 6.0),
        ({}, 2.0),
    ],
)
def test_a_training_costs_what_its_epochs_cost(recipe, expected):
    record = {"recipe": recipe, "cost": {"train_step_ratio": 2.0}, "method": {"name": "m", "fields": {"components": 4}}}
    assert training_ratio(Run("here", record)) == pytest.approx(expected)
    assert training_ratio(Run("here", record | {"cost": {}})) is None
