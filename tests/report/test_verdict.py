"""The sentence at the top follows its rule."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from leanbayes.report import load_results
from leanbayes.report.load import Run
from leanbayes.report.table import answer_passes, passes_of, training_ratio
from leanbayes.report.verdict import LIMITS, RULE, verdict
from tests.report import make

CHEAP = {"train_step_ratio": 1.1, "predict_ratio": 1.02, "passes": 16, "extra_percent": 0.5}
DEAR = {"train_step_ratio": 4.0, "predict_ratio": 1.2, "passes": 4, "extra_percent": 300.0}
DEAR_IN_WORDS = "4 times the training of the plain network, 4.8 of its passes for an answer and 300 % more parameters"
ON = "On the data set digits, with the network lenet,"


def draws(count):
    return {"settings": {"judging": {"samples": count}}}


def verdict_of(folder, figures, costs=None):
    """Return the verdict on {method: [nll of each seed]}."""
    for name, seeds in figures.items():
        for seed, nll in enumerate(seeds):
            record = make.record(name, seed, "digits", "lenet", "classification")
            record["metrics"] = {"test": {"nll": nll}}
            record["cost"] = dict((costs or {}).get(name, CHEAP))
            if isinstance(nll, tuple):  # NLL, and NLL at the temperature
                record["metrics"] = {"test": {"nll": nll[0]}, "tempered": {"test": {"nll": nll[1]}}}
            make.write(folder, record)
    (group,) = load_results(folder).groups
    return verdict(group)


def test_a_clearly_better_and_affordable_method_is_recommended(tmp_path):
    found = verdict_of(tmp_path, {"plain": [0.30, 0.32], "rank1": [0.20, 0.22]})
    assert found.choice == "rank1"
    assert found.sentence == (
        f"{ON} take rank1: NLL 0.210 ± 0.010 against 0.310 ± 0.010 of plain, for 1.1 times the training of the plain "
        "network, 16.3 of its passes for an answer and 0.5 % more parameters."
    )


def test_gains_are_paired_by_seed(tmp_path):
    """Seeds differ by 0.1, the rows of a seed by 0.02: the difference is clear."""
    assert verdict_of(tmp_path, {"plain": [0.30, 0.40, 0.50], "rank1": [0.28, 0.381, 0.479]}).choice == "rank1"


def test_a_gain_within_chance_is_not_enough(tmp_path):
    found = verdict_of(tmp_path, {"plain": [0.30, 0.32, 0.31], "rank1": [0.27, 0.33, 0.30]})
    assert found.choice is None
    assert found.sentence.startswith(f"{ON} there is no clear difference: stay with plain (NLL 0.310 ± 0.006)")
    assert "the best row within the limits is rank1 (0.300" in found.sentence


def test_a_promising_gain_has_the_seeds_that_would_show_it(tmp_path):
    found = verdict_of(
        tmp_path, {"plain": [0.50, 0.52, 0.48], "rank1": [0.45, 0.49, 0.47], "patch": [0.51, 0.53, 0.47]}
    )
    assert found.choice is None
    seeds = ",".join(map(str, range(found.seeds_needed)))
    assert f" If the gain of rank1 stays, about {found.seeds_needed} seeds show it: --seeds {seeds}." in found.sentence
    (probabilities,) = (need for need in found.needs if need.name == "Best probabilities")
    assert probabilities.sentence.endswith(f"If the gain of rank1 stays, about {found.seeds_needed} seeds show it.")
    assert probabilities.seeds_needed == found.seeds_needed


def test_a_row_that_is_named_because_another_is_clear_says_so(tmp_path):
    figures = {"plain": [0.50, 0.52, 0.48], "implicit": [0.44, 0.46, 0.42], "patch": [0.500, 0.521, 0.479]}
    found = verdict_of(tmp_path, figures | {"rank1": [0.40, 0.46, 0.36]})
    assert found.choice == "rank1"
    assert (
        " Clearly better is implicit; rank1 gains more, even when one standard error is subtracted." in found.sentence
    )


def test_a_better_row_beyond_the_limits_is_not_said_to_gain_less(tmp_path):
    figures = {"plain": [0.50, 0.52, 0.48], "implicit": [0.44, 0.46, 0.42], "patch": [0.500, 0.521, 0.479]}
    figures |= {"rank1": [0.40, 0.46, 0.36], "deep_ensemble": [0.30, 0.32, 0.28]}
    found = verdict_of(tmp_path, figures, {"deep_ensemble": {**CHEAP, "extra_percent": 300.0, "parameters": 2e6}})
    assert found.choice == "rank1"
    assert " Clearly better is implicit; rank1 gains more" in found.sentence


def test_a_plain_network_with_a_temperature_is_the_reference(tmp_path):
    """Rank-1 beats the plain network, and not the plain network at its temperature."""
    figures = {"plain": [(0.30, 0.20), (0.32, 0.22), (0.31, 0.21)], "rank1": [0.20, 0.22, 0.21]}
    found = verdict_of(tmp_path, figures)
    assert found.choice is None
    assert "stay with plain + temperature (NLL 0.210" in found.sentence


BETTER = [(0.31, 0.270), (0.33, 0.292), (0.32, 0.279)]  # at its temperature by 0.03, 0.028 and 0.031
SURE = {"plain": [(0.50, 0.30), (0.52, 0.32), (0.51, 0.31)]}


def test_a_row_that_is_better_at_a_temperature_of_its_own_is_named(tmp_path):
    found = verdict_of(tmp_path, SURE | {"rank1": BETTER, "patch": [(0.45, 0.31), (0.46, 0.33), (0.44, 0.31)]})
    assert found.choice is None
    assert found.sentence.endswith(
        " At a temperature of its own, rank1 is clearly better: NLL 0.2803 against 0.31. leanbayes predict "
        "--temperature applies it."
    )


@pytest.mark.parametrize(
    ("rank1", "cost"),
    [
        ([(0.31, 0.30), (0.33, 0.33), (0.32, 0.30)], CHEAP),  # within chance
        (BETTER, DEAR | {"train_seconds": 600.0, "answer_ms": 50.0}),  # beyond the limits
        (BETTER[:1], CHEAP),  # one seed
        ([0.31, 0.33, 0.32], CHEAP),  # without held-out rows
        ([(0.25, 0.24), (0.27, 0.26), (0.26, 0.25)], CHEAP),  # recommended as it was trained
    ],
)
def test_no_other_row_is_named_for_its_temperature(tmp_path, rank1, cost):
    plain = SURE["plain"][: len(rank1)]
    found = verdict_of(tmp_path, {"plain": plain, "rank1": rank1}, {"rank1": cost})
    assert "temperature of its own" not in found.sentence


def test_dear_methods_are_named_with_their_cost_and_not_recommended(tmp_path):
    figures = {"plain": [0.30, 0.32], "rank1": [0.20, 0.22], "deep_ensemble": [0.10, 0.12]}
    found = verdict_of(tmp_path, figures, {"deep_ensemble": DEAR})
    assert found.choice == "rank1"
    assert found.sentence.endswith(
        f" deep_ensemble has the best NLL of all (0.110 ± 0.010), at {DEAR_IN_WORDS}, beyond the limits."
    )


@pytest.mark.parametrize("seeds", [1, 2])
def test_the_best_row_is_named_also_where_its_training_is_too_dear(tmp_path, seeds):
    """Of one seed as of several: a method beyond a limit is not hidden."""
    figures = {"plain": [1.05, 1.06], "rank1": [0.10, 0.11], "implicit": [1.52, 1.53]}
    costs = {"rank1": {**CHEAP, "train_step_ratio": 2.17}}
    found = verdict_of(tmp_path, {name: values[:seeds] for name, values in figures.items()}, costs)
    assert found.choice is None
    assert "rank1 has the best NLL of all (0.1" in found.sentence
    assert "at 2.17 times the training of the plain network, 16.3 of its passes for an answer" in found.sentence


def test_the_rule_states_its_limits():
    assert LIMITS == {"training_ratio": 2, "answer_passes": 20, "parameter_ratio": 2}
    assert "at most 2 trainings" in RULE
    assert "one answer at most 20 of its passes" in RULE
    assert "at most 2 times its parameters" in RULE


@pytest.mark.parametrize(
    ("field", "within", "beyond"),
    [("train_step_ratio", 1.99, 2.01), ("predict_ratio", 1.24, 1.26), ("extra_percent", 100.0, 101.0)],
)
def test_each_cost_has_a_limit_of_its_own(tmp_path, field, within, beyond):
    """16 draws of 1.24 plain passes are 19.8 passes, of 1.26 they are 20.2."""
    figures = {"plain": [0.30, 0.32], "rank1": [0.20, 0.22]}
    assert verdict_of(tmp_path / "a", figures, {"rank1": {**CHEAP, field: within}}).choice == "rank1"
    assert verdict_of(tmp_path / "b", figures, {"rank1": {**CHEAP, field: beyond}}).choice is None


@pytest.mark.parametrize(
    ("dear", "cost", "small", "large"),
    [
        ("train_step_ratio", "train_seconds", 59.0, 61.0),
        ("predict_ratio", "answer_ms", 0.9, 1.1),
        ("extra_percent", "parameters", 9e5, 2e6),
    ],
)
def test_a_small_cost_does_not_decide(tmp_path, dear, cost, small, large):
    """Nine times a millisecond of work is no reason against a method."""
    figures = {"plain": [0.30, 0.32], "rank1": [0.20, 0.22]}
    for number, (value, choice) in enumerate(((small, "rank1"), (large, None))):
        costs = {"rank1": {**CHEAP, dear: 900.0, cost: value}}
        assert verdict_of(tmp_path / str(number), figures, costs).choice == choice


def test_four_members_may_take_longer_passes_than_sixteen_draws(tmp_path):
    """Pass for pass batch_ensemble (3.0) is dearer than rank1 (1.3); an answer costs 12 plain passes against 20.8."""
    figures = {"plain": [0.30, 0.32], "rank1": [0.19, 0.21], "batch_ensemble": [0.20, 0.22]}
    costs = {
        "rank1": {**CHEAP, "predict_ratio": 1.3},
        "batch_ensemble": {**CHEAP, "predict_ratio": 3.0, "passes": 4},
    }
    found = verdict_of(tmp_path, figures, costs)
    assert found.choice == "batch_ensemble"
    assert "12 of its passes for an answer" in found.sentence


@pytest.mark.parametrize(
    ("record", "passes"),
    [
        ({"cost": {"passes": 3}, "method": {"name": "rank1"}, **draws(16)}, 3),
        ({"method": {"name": "rank1", "fields": {"components": 4}}, **draws(16)}, 16),
        ({"method": {"name": "batch_ensemble", "fields": {"components": 4}}}, 4),
        ({"method": {"name": "deep_ensemble", "fields": {"components": 4}}, **draws(3)}, 3),
        ({"method": {"name": "plain"}, **draws(16)}, 1),
        ({"method": {"name": "rank1", "fields": {"components": 4}}}, None),
    ],
)  # fmt: skip
def test_passes_are_read_or_derived(record, passes):
    run = Run("here", record)
    assert passes_of(run) == passes
    measured = Run("here", record | {"cost": {**record.get("cost", {}), "predict_ratio": 1.1}})
    assert answer_passes(measured) == (None if passes is None else pytest.approx(1.1 * passes))
    assert answer_passes(run) is None


def test_one_seed_recommends_nothing_and_names_the_best_row(tmp_path):
    found = verdict_of(tmp_path, {"plain": [0.30], "rank1": [0.20]})
    assert found.choice is None
    assert found.sentence == (
        f"{ON} for this one training, rank1 has the best NLL within the limits (0.200 against 0.300 of plain), within "
        "chance. One seed recommends nothing: run more, with --seeds 0,1,2."
    )


def test_one_seed_is_weighed_by_its_test_rows(tmp_path):
    rows = np.linspace(0.1, 0.5, 100)
    for name, losses in {"plain": rows, "rank1": rows - 0.1 + 0.001 * np.sin(rows * 900)}.items():
        record = make.record(name, 0, "digits", "lenet", "classification")
        record["metrics"], record["cost"] = {"test": {"nll": float(losses.mean())}}, CHEAP
        coded = base64.b64encode(losses.astype("<f2").tobytes()).decode()
        record["figures"] = {"losses": {"test": coded}}
        make.write(tmp_path, record)
    (group,) = load_results(tmp_path).groups
    assert "by more than chance over the test rows" in verdict(group).sentence


def test_a_plain_network_alone_is_said_to_be_alone(tmp_path):
    assert verdict_of(tmp_path, {"plain": [0.3]}).sentence == (
        f"{ON} only the plain network came to its end (NLL 0.300). There is no method to compare it with."
    )


def test_an_unmeasured_cost_is_said(tmp_path):
    found = verdict_of(tmp_path, {"plain": [0.30, 0.32], "rank1": [0.20, 0.22]}, {"rank1": {}})
    assert found.choice is None
    assert "The cost of rank1 was not measured" in found.sentence
    assert "rank1 has the best NLL of all (0.210 ± 0.010), at a cost that was not measured." in found.sentence


def test_without_the_plain_network_nothing_is_recommended(tmp_path):
    found = verdict_of(tmp_path, {"rank1": [0.20, 0.22], "patch": [0.3, 0.3]})
    assert found.choice is None
    assert "the plain network did not run" in found.sentence
    assert "The best NLL has rank1 (0.21" in found.sentence


def test_without_figures_the_sentence_says_so(tmp_path):
    make.write(tmp_path, make.failed("plain", 0, "Killed"))
    (group,) = load_results(tmp_path).groups
    assert verdict(group).sentence == f"{ON} no run came to its end with a test NLL."


def test_a_winner_without_network_names_the_best_network_too(tmp_path):
    costs = {"linear": {"train_seconds": 0.1}, "plain": {**CHEAP, "parameters": 100}}
    figures = {"plain": [0.30, 0.32], "rank1": [0.31, 0.33], "linear": [0.20, 0.22]}
    found = verdict_of(tmp_path, figures, costs)
    assert found.choice == "linear"
    assert "The best network with a split uncertainty is rank1 (0.320 ± 0.010)" in found.sentence
    sizes = [need.sentence for need in found.needs if need.name == "Smallest file"]
    assert sizes == ["No network is about as good as linear."]


def test_regression_is_decided_by_the_log_density(tmp_path):
    for name, lpd in {"plain": -2.0, "rank1": -1.5}.items():
        for seed in range(3):
            record = make.record(name, seed, "boston", "mlp", "regression")
            record["metrics"], record["cost"] = {"test": {"lpd": lpd + 0.01 * seed, "rmse": 1.0}}, CHEAP
            make.write(tmp_path, record)
    (group,) = load_results(tmp_path).groups
    found = verdict(group)
    assert found.choice == "rank1"
    assert "LPD -1.490 ± 0.006 against -1.990 ± 0.006" in found.sentence


def test_each_need_has_a_line(tmp_path):
    (group,) = load_results(make.tree(tmp_path)).groups
    found = {need.name: need for need in verdict(group).needs}
    assert list(found) == [
        "Best probabilities",
        "Robust to corrupted images",
        "Finds out-of-distribution inputs",
        "Smallest file",
        "Cheapest answer",
    ]
    assert found["Best probabilities"].choice == "deep_ensemble"
    assert found["Cheapest answer"].choice == "deep_ensemble"  # four passes, and nothing is as good
    assert "AUROC by total uncertainty" in found["Finds out-of-distribution inputs"].sentence


def test_a_need_without_data_names_its_flag(tmp_path):
    found = verdict_of(tmp_path, {"plain": [0.30, 0.32], "rank1": [0.20, 0.22]})
    needs = {need.name: need.sentence for need in found.needs}
    assert needs["Finds out-of-distribution inputs"] == "Not measured: add --ood with the name of a data set."
    assert "Robust to corrupted images" not in needs
    assert needs["Robust to shift"].startswith("Not measured: add --shift-data")
    assert "Narrow intervals" not in needs  # for real targets


def moved(folder, figures, task, **test):
    """Return the needs of {method: [[figure of each set] of each seed]} on shifted rows."""
    key = "lpd" if task == "regression" else "nll"
    for name, seeds in figures.items():
        for seed, values in enumerate(seeds):
            record = make.record(name, seed, "boston", "mlp", task)
            sets = {f"set{k}": {key: value} for k, value in enumerate(values)}
            record["metrics"] = {"test": {key: 1.0 + 0.01 * seed, **test.get(name, {})}, "shift_data": sets}
            record["metrics"]["shift"] = make.shift(0.9, 0.1 if name == "plain" else 9.0, 0.1, 0.1, lambda v, _=0: v)
            record["cost"] = CHEAP
            make.write(folder, record)
    (group,) = load_results(folder).groups
    return {need.name: need for need in verdict(group).needs}


@pytest.mark.parametrize(("task", "sign", "title"), [("classification", 1, "NLL"), ("regression", -1, "LPD")])
def test_robustness_is_the_mean_over_the_shifted_rows(tmp_path, task, sign, title):
    """Rank-1 is worse on one set and better on the mean; corruptions do not count where shifted rows are given."""
    figures = {
        "plain": [[1.0 * sign, 3.0 * sign], [1.1 * sign, 3.1 * sign]],
        "rank1": [[1.5 * sign, 1.5 * sign], [1.6 * sign, 1.6 * sign]],
    }
    needs = moved(tmp_path, figures, task)
    assert needs["Robust to shift"].choice == "rank1"
    assert needs["Robust to shift"].sentence == (
        f"rank1 (mean {title} {1.55 * sign:.4g}) against plain (mean {title} {2.05 * sign:.4g})."
    )
    assert "Robust to corrupted images" not in needs


def test_the_narrowest_validated_intervals_are_named(tmp_path):
    figures = {"plain": [[-1.0], [-1.1]], "rank1": [[-1.0], [-1.1]]}
    widths = {"plain": {"interval_width_validated": 4.0}, "rank1": {"interval_width_validated": 3.0}}
    needs = moved(tmp_path / "a", figures, "regression", **widths)
    assert needs["Narrow intervals"].choice == "rank1"
    assert "width at 95 % validation coverage 3)" in needs["Narrow intervals"].sentence
    widths["rank1"]["coverage_validated"] = 0.95 - 2.1 * (0.95 * 0.05 / 360) ** 0.5  # of 360 test rows
    needs = moved(tmp_path / "c", figures, "regression", **widths)
    assert needs["Narrow intervals"].choice is None
    assert "too few test targets: rank1 92.6 %." in needs["Narrow intervals"].sentence
    needs = moved(tmp_path / "b", figures, "regression")
    assert needs["Narrow intervals"].sentence.startswith("Not measured: add --validation")


def test_the_cheapest_row_is_about_as_good_as_the_best(tmp_path):
    figures = {"plain": [0.30, 0.32, 0.31], "rank1": [0.20, 0.22, 0.21], "patch": [0.201, 0.221, 0.211]}
    costs = {"patch": {**CHEAP, "predict_ratio": 0.5}}
    needs = {need.name: need for need in verdict_of(tmp_path, figures, costs).needs}
    assert needs["Cheapest answer"].choice == "patch"
    assert needs["Cheapest answer"].sentence == "patch (8 passes), about as good as rank1."


def test_a_row_without_a_network_is_priced_by_its_time(tmp_path):
    """Linear regression takes 0.02 ms, the plain network 0.1 ms a pass."""
    figures = {"plain": [0.30, 0.32, 0.31], "linear": [0.20, 0.22, 0.21], "rank1": [0.201, 0.221, 0.211]}
    costs = {"plain": {**CHEAP, "answer_ms": 0.1}, "linear": {"answer_ms": 0.02, "parameters": 12}}
    needs = {need.name: need for need in verdict_of(tmp_path, figures, costs).needs}
    assert needs["Cheapest answer"].sentence == "linear (0.2 passes), the best row itself."


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
    assert "for 1.42 times the training" in found.sentence


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


SPREAD = "Within the spread of the measured costs this could change: the cost of {} is near a limit."


def spread(name, low, high):
    return {**CHEAP, name: [low, high]}


@pytest.mark.parametrize(
    ("cost", "said"),
    [
        ({**spread("train_quartiles", 1.0, 2.1), "train_step_ratio": 1.9}, True),  # it may be beyond the limits
        ({**spread("train_quartiles", 1.0, 2.1), "train_step_ratio": 2.05}, True),  # it may be within
        ({**spread("train_quartiles", 1.8, 1.95), "train_step_ratio": 1.9}, False),
        ({**spread("train_quartiles", 2.01, 2.4), "train_step_ratio": 2.05}, False),
        ({**spread("train_quartiles", 1.0, 2.1), "train_seconds": 10.0}, False),  # such a training does not decide
        ({**spread("predict_quartiles", 1.2, 1.3), "predict_ratio": 1.24}, True),  # 16 passes: 19.2 to 20.8
        ({**spread("answer_quartiles", 0.9, 1.1), "predict_ratio": 3.0, "answer_ms": 1.05}, True),  # 1 ms decides
        ({**spread("train_quartiles", 1.0, None), "train_step_ratio": 1.9}, False),  # half recorded
        (CHEAP, False),
    ],
)
def test_a_verdict_that_the_spread_of_the_costs_could_change_says_so(tmp_path, cost, said):
    found = verdict_of(tmp_path, {"plain": [0.30, 0.32], "rank1": [0.20, 0.22]}, {"rank1": cost})
    assert found.sentence.endswith(SPREAD.format("rank1")) == said
    assert ("spread" in found.sentence) == said


def test_a_row_that_nothing_depends_on_may_be_near_a_limit(tmp_path):
    figures = {"plain": [0.30, 0.32], "rank1": [0.20, 0.22], "implicit": [0.25, 0.27]}
    dear = {**spread("train_quartiles", 1.0, 2.1), "train_step_ratio": 1.9}
    assert "spread" not in verdict_of(tmp_path / "a", figures, {"implicit": dear}).sentence
    assert verdict_of(tmp_path / "b", figures, {"rank1": dear}).sentence.endswith(SPREAD.format("rank1"))


def test_with_one_seed_the_best_row_within_the_limits_counts(tmp_path):
    dear = {**spread("train_quartiles", 1.0, 2.1), "train_step_ratio": 2.05}
    found = verdict_of(tmp_path, {"plain": [0.30], "rank1": [0.20]}, {"rank1": dear})
    assert found.sentence.endswith(SPREAD.format("rank1"))
