"""The reference of each row: the plain network of its seed, or the mean of all plain networks of that seed."""

from __future__ import annotations

import itertools

import pytest

from leanbayes.report.load import grouped, Run
from leanbayes.report.losses import compared, losses_of
from leanbayes.report.verdict import verdict
from tests.report import make

PLAIN = (0.50, 0.60, 0.40)
FURTHER = ((0.54, 0.52), (0.44, 0.46), (0.50, 0.48))  # two more members of each seed
MEANS = (0.52, 0.50, 0.46)
REFERENCE = "plain + temperature"


def run(name, seed, nll, **changes):
    record = make.record(name, seed, "digits", "lenet", "classification")
    record["metrics"] = {"test": {"nll": nll}}
    record["cost"] = {"train_step_ratio": 1.1, "predict_ratio": 1.0, "passes": 1, "extra_percent": 0.5}
    return Run(f"{name}/seed{seed}", record | changes)


def comparison(ensemble=lambda seed: MEANS[seed] - 0.03, **changes):
    """Return plain, a row that continues its training, and an ensemble of three that gains exactly 0.03."""
    runs = []
    for seed, nll in enumerate(PLAIN):
        runs.append(run("plain", seed, nll, from_plain=True))
        runs[-1].record["metrics"]["tempered"] = {"test": {"nll": nll}}
        runs.append(run("rank1", seed, nll - 0.001 * seed, from_plain=True))
        members = [{"seed": seed + 1000 * k, "test": {"nll": one}} for k, one in enumerate((nll, *FURTHER[seed]))]
        runs.append(run("deep_ensemble", seed, ensemble(seed), **({"from_plain": False} | changes)))
        runs[-1].record["metrics"]["members"] = members
    return runs


def found(runs):
    (group,) = grouped(runs)
    return compared(group, lambda each: losses_of(each, ("test", "nll")), REFERENCE)


def test_the_reference_is_the_mean_of_all_plain_networks_each_counted_once():
    each = found(comparison())
    assert each.mean == pytest.approx(sum(MEANS) / 3)
    assert each.networks == 9
    gains = [each.paired[REFERENCE][seed] - each.paired["deep_ensemble"][seed] for seed in range(3)]
    assert gains == pytest.approx([0.03, 0.03, 0.03])
    assert each.paired["rank1"] == each.losses["rank1"]
    assert each.note("deep_ensemble") == " and 0.4933 over all 9 plain networks, which decides"
    assert each.note("rank1") == ""
    assert each.mixtures == {"deep_ensemble"}


def test_members_make_the_gain_of_an_ensemble_clear():
    (group,) = grouped(comparison())
    said = verdict(group)
    assert said.choice == "deep_ensemble"
    assert "against 0.500 ± 0.058 of plain + temperature and 0.4933 over all 9 plain networks, which" in said.sentence
    need = next(need for need in said.needs if need.name == "Best probabilities")
    assert need.choice == "deep_ensemble"
    assert need.sentence.startswith(
        "deep_ensemble (NLL 0.4633) against plain + temperature (NLL 0.5) and 0.4933 over all 9 plain "
        "networks, which decides."
    )
    (without,) = grouped(one for one in comparison() if not one.record["metrics"].pop("members", None) or True)
    assert next(need for need in verdict(without).needs if need.name == "Best probabilities").choice is None


def test_a_row_with_the_best_figure_is_named_where_the_mean_of_all_networks_hides_its_gain():
    """The ensemble has a better NLL than the plain row, by the luck of its other members alone."""
    runs = [one for one in comparison(lambda seed: MEANS[seed] + 0.001) if one.name != "rank1"]
    for one in runs:
        one.record["metrics"]["test"]["nll"] += 0.002 * (one.name == "plain")
    (group,) = grouped(runs)
    need = next(need for need in verdict(group).needs if need.name == "Best probabilities")
    assert need.choice is None
    assert need.sentence == (
        "No clear difference: deep_ensemble (NLL 0.4943), plain + temperature (NLL 0.5) and 0.4933 over all 9 plain "
        "networks, which decides."
    )


@pytest.mark.parametrize(
    ("auroc", "found"), [(0.45, "No row: the largest AUROC by total uncertainty is 0.46."), (0.6, "rank1")]
)
def test_no_row_finds_inputs_that_look_more_familiar_than_test_inputs(auroc, found):
    runs = [one for one in comparison() if one.name != "deep_ensemble"]
    for one in runs:
        area = auroc + 0.01 * (one.name == "rank1")
        for each in (one.record["metrics"], one.record["metrics"].get("tempered", {})):
            each["ood"] = {"noise": {"scores": {"entropy": {"auroc": area}}}}
    need = next(need for need in verdict(grouped(runs)[0]).needs if need.name == "Finds out-of-distribution inputs")
    assert need.sentence.startswith(found)
    assert need.choice == (None if auroc < 0.5 else "rank1")


@pytest.mark.parametrize(
    "changes",
    [
        {"recipe": {"epochs": 300, "lr": 0.1}},
        {"settings": {"data": {"validation": 0.2}}},
        {"from_plain": True},
        {"from_plain": None},
    ],
)
def test_without_networks_that_were_trained_alike_the_plain_row_is_the_reference(changes):
    runs = comparison(**changes)
    for one in runs:
        if one.name == "plain":
            one.record.update(settings={"data": {"validation": 0.1}})
    each = found(runs)
    assert each.paired == each.losses
    assert each.mean is None
    assert not each.mixtures


def test_an_ensemble_is_a_mixture_for_log_losses_alone():
    """Noisy rows hide its gain by the common variance. AUROCs have no inequality: there the common variance counts."""
    runs = comparison()
    for seed, nll in enumerate(PLAIN):
        for name, noise in zip(
            ("mc_dropout", "nested", "patch", "variance"), itertools.permutations((0.2, -0.2, 0.1)), strict=False
        ):
            runs.append(run(name, seed, nll + noise[seed], from_plain=False))
    for metrics in (one.record["metrics"] for one in runs):
        for each in (metrics, metrics.get("tempered"), *metrics.get("members", ())):
            if each is not None:
                auroc = 0.9 - each["test"]["nll"]
                each["ood"] = {"noise": {"scores": {"entropy": {"auroc": auroc}}}}
    needs = {need.name: need for need in verdict(grouped(runs)[0]).needs}
    assert needs["Best probabilities"].choice == "deep_ensemble"
    assert needs["Finds out-of-distribution inputs"].choice is None


def test_a_reference_without_the_figure_of_a_need_is_left_out():
    runs = comparison()
    for one in runs:
        one.record["metrics"]["ood"] = {"noise": {"scores": {"entropy": {"auroc": 0.7 + 0.1 * int(one.seed)}}}}
    needs = {need.name: need for need in verdict(grouped(runs)[0]).needs}
    assert "plain + temperature" not in needs["Finds out-of-distribution inputs"].sentence


def test_one_seed_has_the_plain_row_as_its_reference():
    each = found([one for one in comparison() if one.seed == "0"])
    assert each.paired == each.losses


def test_the_posterior_fields_of_a_recipe_do_not_change_a_plain_network():
    recipe = make.record("plain", 0, "digits", "lenet", "classification")["recipe"]
    assert found(comparison(recipe=recipe | {"posterior_lr": 3.0, "seed": 9, "beta": 0.5})).mean is not None


@pytest.mark.parametrize("members", ["no list", [3], [{"test": {"nll": 0.1}}], [{"seed": "x", "test": {"nll": 0.1}}]])
def test_damaged_members_do_not_count(members):
    runs = comparison()
    for one in runs:
        if one.name == "deep_ensemble":
            one.record["metrics"]["members"] = members
    assert found(runs).mean is None
