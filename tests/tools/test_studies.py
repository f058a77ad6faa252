"""The studies of tables and of the advice: pages equal their files, and the rule study counts what it says."""

from __future__ import annotations

import base64
import json
import math
import random
import statistics
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import t as student

from leanbayes.compare.row_training import noise_scale
from leanbayes.methods import all_methods
from leanbayes.report.load import Run
from leanbayes.report.losses import compared, losses_of
from tools import rule_study, temperature_study, uci_study

PAGES = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture(autouse=True)
def _fewer_repetitions(monkeypatch):
    monkeypatch.setattr(rule_study, "REPETITIONS", 30)
    monkeypatch.setattr(rule_study, "SHUFFLES", 30)


def test_the_page_on_tables_equals_its_file():
    found = json.loads(uci_study.FILE.read_text(encoding="utf-8"))
    page = (PAGES / "tables.md").read_text(encoding="utf-8")
    for table in uci_study.tables(found):
        assert table in page


def test_the_trials_of_the_initial_noise_equal_their_file():
    found = json.loads(uci_study.NOISE_FILE.read_text(encoding="utf-8"))
    page = (PAGES / "tables.md").read_text(encoding="utf-8")
    scored = uci_study.noise_test_table(json.loads(uci_study.NOISE_TEST_FILE.read_text(encoding="utf-8")))
    for table in (*uci_study.noise_tables(found), scored):
        assert table in page
    for one in found:  # the rule of the library gave the fields of these trials
        share = noise_scale(math.log(one["noise"]) + 0.5 * math.log(2 * math.pi * math.e))
        for trial in one["trials"]:
            if "squared 0.25" in trial.get("rules", ()) and "fields" in trial:
                usual = all_methods()[trial["method"]]()
                assert trial["fields"]["init_std"] == pytest.approx(share * usual.init_std, rel=0.01, abs=2e-5)


def test_the_sentences_on_targets_with_little_noise_are_those_of_the_file():
    found = {(o["set"], o["rows"]): o for o in json.loads(uci_study.NOISE_FILE.read_text(encoding="utf-8"))}

    def trial(one, method="rank1", recipe=None, **fields):
        fit = [t for t in found[one]["trials"] if t["method"] == method and t.get("fields", {}) == fields]
        return next(t for t in fit if t.get("recipe", {}) == (recipe or {}))

    yacht, energy, naval, boston = ("yacht", 277), ("energy", 691), ("naval", 3000), ("boston", 455)
    kin8nm, usual, plain = ("kin8nm", 3000), trial(("yacht", 277)), found[("yacht", 277)]["plain"]
    small = [trial(one, "patch", init_spread=0.01)["nll"] for one in (yacht, energy, naval)]
    late = [trial(one, "patch", {"late": 0.7})["nll"] for one in (yacht, energy, naval, kin8nm)]
    linear = [
        next(t["nll"] for t in found[one]["trials"] if "linear 0.5" in t.get("rules", ())) for one in (boston, kin8nm)
    ]
    whole = {t["rules"][0]: t["nll"] for t in found["naval", 10741]["trials"] if t["method"] == "rank1"}
    said = (
        f"the draws differ by {usual['spread']:.3f} (standard",
        f"an RMSE of {usual['rmse']:.3f}, the plain network {plain['rmse']:.3f}.",
        f"scaled by {usual['noise_factor']:.3f}, it brings the NLL from {usual['nll_before']:.3f} to "
        f"{usual['nll']:.3f} (plain: {plain['nll']:.3f})",
        f"(`--recipe.beta 0`) the NLL is {trial(yacht, recipe={'beta': 0.0})['nll']:.3f}.",
        f"instead of 30 the NLL is {trial(yacht, recipe={'patience': 200})['nll']:.3f}.",
        f"the weights' gives {trial(yacht, recipe={'posterior_rate': 10})['nll']:.3f}.",
        f"`--rank1.init-std 0.01` the NLL is {trial(yacht, init_std=0.01)['nll']:.3f}:",
        f"`rank1` has {trial(boston)['nll']:.3f} with the default and {trial(boston, init_std=0.01)['nll']:.3f} "
        f"with 0.01 (plain: {found[boston]['plain']['nll']:.3f})",
        f"({linear[0]:.3f} and {linear[1]:.3f} for `rank1`)",
        f"the default of `rank1` is, by {whole['squared 0.25'] - whole['default']:.3f}.",
        f"gives {small[0]:.3f} on yacht, {small[1]:.3f} on energy and {small[2]:.3f} on 3,000",
        f"({late[0]:.3f}, {late[1]:.3f}, {late[2]:.3f}) and harms kin8nm ({late[3]:.3f})",
    )
    page = " ".join((PAGES / "tables.md").read_text(encoding="utf-8").split())
    assert [sentence for sentence in said if sentence not in page] == []


def test_the_page_on_the_advice_equals_its_files():
    page = (PAGES / "rule.md").read_text(encoding="utf-8")
    temperatures = temperature_study.table(json.loads(temperature_study.FILE.read_text(encoding="utf-8")))
    for table in (*rule_study.tables(), temperatures):
        assert table in page


def test_the_sentences_on_the_advice_are_those_of_the_files():
    files = ("outcome", "outcome_common_variance", "outcome_two_errors", "again")
    now, before, two, again = (json.loads((rule_study.FOLDER / f"{name}.json").read_text("utf-8")) for name in files)
    assert list(now) == ["cifar10", "digits", "fashion-mnist", "mnist", "notmnist"]
    assert [name for name in now if now[name]["needs"] != two[name]["needs"]] == ["digits"]
    lines = [(name, need, one) for name, data in now.items() for need, one in data["needs"].items()]
    ood, best, shifted = "Finds out-of-distribution inputs", "Best probabilities", "Robust to corrupted images"
    assert [line[:2] for line in lines if line[2]["right"] < 0.9] == [("digits", ood), ("mnist", ood)]
    digits, mnist = now["digits"]["needs"][ood], now["mnist"]["needs"][ood]
    new = [line for line in lines if line[0] in ("mnist", "cifar10")]
    runs_of = {name: rule_study.read(rule_study.FOLDER / f"{name}.json.gz") for name in now}
    mine = rule_study.spread(runs_of["fashion-mnist"])["NLL"]
    first = {name: max(abs(a - b) for a, b in zip(*one.values(), strict=True)) for name, one in again.items()}
    nulls = {name: percent(one["null"]) for name, one in now.items()}
    shuffled = {name: percent(one["null_shuffled"]) for name, one in now.items()}
    titles = list(zip(now, ("CIFAR-10", "the digits", "Fashion-MNIST", "MNIST", "notMNIST"), strict=True))
    patch = gains_of_row(runs_of["fashion-mnist"], "patch")
    said = (
        f"(b) is at most {percent(max(one['worse'] for *_, one in lines))}.",
        f"(a) is below 90 % for 2 of {len(lines)} lines, both on out-of-distribution inputs: the digits "
        f"({percent(digits['right'])}, with more seeds {percent(digits['followed']['right'])}) and MNIST "
        f"({percent(mnist['right'])}, {percent(mnist['followed']['right'])}).",
        f"in a share of {percent(digits['near_given'])} on the digits and {percent(mnist['near_given'])} on MNIST.",
        f"On the digits the best mean is right in {percent(digits['by_mean'])}, less than the rule",
        f"On MNIST it is right in {percent(mnist['by_mean'])}: the rule finds no clear difference in "
        f"{mnist['rows']['plain + temperature']} of the 200 repetitions",
        f"(c) is {nulls['cifar10']} on CIFAR-10, {nulls['digits']} on the digits, {nulls['fashion-mnist']} on "
        f"Fashion-MNIST, {nulls['mnist']} on MNIST and {nulls['notmnist']} on notMNIST.",
        "1,000 times: "
        + ", ".join(f"{shuffled[name]} on {title}" for name, title in titles[:-1])
        + f" and {shuffled['notmnist']} on notMNIST.",
        f"errs in {percent(statistics.fmean(one['null_shuffled'] for one in now.values()))} on average",
        f"gains {mine[2]:.3f} nats on Fashion-MNIST, and the standard error of three seeds is {mine[3] / 3**0.5:.3f} "
        f"({mine[1] / 3**0.5:.3f} over the plain row)",
        f"by at most {first['fashion-mnist']:.4f} on Fashion-MNIST, {first['notmnist']:.4f} on notMNIST and "
        f"{first['digits']:.4f} on the digits",
        f"a standard deviation of {patch[0]:.4f} over the plain row of its seed, and of {patch[1]:.4f} over the mean",
        f"in {now['fashion-mnist']['needs']['Recommended']['rows']['patch']} of 200 repetitions",
        f'"best probabilities" was right in {percent(before["digits"]["needs"][best]["right"])} of the repetitions',
        f"from {percent(before['digits']['needs'][shifted]['right'])} to "
        f"{percent(now['digits']['needs'][shifted]['right'])} on the digits, out-of-distribution inputs from "
        f"{percent(before['digits']['needs'][ood]['right'])} to {percent(digits['right'])} there.",
        f"without any gain exceed it in {percent(student.sf(2, 2))} of all cases, so the threshold is now the quantile "
        f"of Student's distribution, {student.ppf(0.95, 2):.2f} errors.",
        f'"Best probabilities" of the digits went from {percent(two["digits"]["needs"][best]["right"])} to '
        f"{percent(now['digits']['needs'][best]['right'])}; no line of another set moved.",
        f"There (a) is at least {percent(min(one['right'] for *_, one in new if one is not mnist))} but for "
        f"out-of-distribution inputs on MNIST, (b) is at most {percent(max(one['worse'] for *_, one in new))}, and (c) "
        f"{nulls['mnist']} and {nulls['cifar10']}.",
    )
    page = " ".join((PAGES / "rule.md").read_text(encoding="utf-8").split())
    assert [sentence for sentence in said if sentence not in page] == []


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def gains_of_row(runs, row):
    """Return the standard deviations of the gain in NLL of a row, over the plain row and over all plain networks."""
    each = compared(
        rule_study._group(runs, lambda seed: True), partial(losses_of, key=("test", "nll")), rule_study.REFERENCE
    )
    return [
        np.std([losses[rule_study.REFERENCE][seed] - loss for seed, loss in losses[row].items()], ddof=1)
        for losses in (each.losses, each.paired)
    ]


def test_the_first_member_is_the_plain_row_of_its_seed_up_to_rounding():
    """The ensembles were trained on another machine than the plain rows; digits take more and larger steps."""
    for name, most in (("fashion-mnist", 0.005), ("notmnist", 0.005), ("digits", 0.02), ("mnist", 0), ("cifar10", 0)):
        runs = rule_study.read(rule_study.FOLDER / f"{name}.json.gz")
        plain = {run.seed: run.number("metrics", "tempered", "test", "nll") for run in runs if run.name == "plain"}
        for run in runs:
            for member in run.rows("metrics", "members")[:1]:
                assert str(member["seed"]) == run.seed
                assert member["test"]["nll"] == pytest.approx(plain[run.seed], abs=most)


def test_the_simulated_references_raise_no_false_alarms():
    for one in json.loads((rule_study.FOLDER / "references.json").read_text(encoding="utf-8")):
        before, after = one["chance"]["plain"], one["chance"]["mean"]
        assert after <= before + 3 * math.sqrt(before * (1 - before) / rule_study.SIMULATED)
        assert one["gain"]["mean"] > one["gain"]["plain"]


def test_rows_that_are_there_stay_and_those_run_again_keep_their_costs(tmp_path, monkeypatch):
    monkeypatch.setattr(rule_study, "FOLDER", tmp_path / "rule")
    losses = base64.b64encode(np.ones(3, "<f2").tobytes()).decode()

    def write(folder, method, nll, step):
        one = {**run(method, 0, nll).record, "figures": {"losses": {"test": losses}}}
        one["settings"] = {"data": {"name": "/there/mine.npz"}}
        one["cost"] = {"train_step_ratio": step}
        path = tmp_path / folder / method / "result.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(one))

    write("first", "plain", 0.3, 1.0)
    write("first", "rank1", 0.2, 1.1)
    rule_study.gather(tmp_path / "first", "mine")
    write("second", "rank1", 0.25, 9.0)
    rule_study.gather(tmp_path / "second", "mine")
    found = {one.name: one for one in rule_study.read(tmp_path / "rule" / "mine.json.gz")}
    assert found["plain"].number("metrics", "test", "nll") == 0.3
    assert found["rank1"].number("metrics", "test", "nll") == 0.25
    assert found["rank1"].number("cost", "train_step_ratio") == 1.1
    assert found["rank1"].part("settings", "data", "name") == "mine.npz"
    assert set(np.load(tmp_path / "rule" / "mine.npz")) == {"plain/seed0", "rank1/seed0"}


def test_old_rows_say_by_their_method_and_recipe_whether_they_continue_the_plain_training():
    runs = rule_study.read(rule_study.FOLDER / "digits.json.gz")
    found = {one.name for one in runs if one.part("from_plain")}
    assert found == {"plain", "batch_ensemble", "implicit", "laplace", "mean_field", "rank1", "swag"}


def test_the_null_test_has_the_members_of_the_seed_as_references():
    plain = [run("plain", seed, 0.3, 0.3) for seed in (3, 4)]
    members = [{"seed": seed + 1000 * k, "test": {"nll": 0.3 + 0.01 * k}} for seed in (3,) for k in range(3)]
    ensemble = Run("e", run("deep_ensemble", 3, 0.2).record | {"metrics": {"members": members}, "from_plain": False})
    made = [rule_study._renamed(plain[0], 0, 0), rule_study._renamed(plain[0], 0, 1)]
    made += [rule_study._renamed(plain[1], 1, position) for position in (0, 1)]
    (group,) = rule_study.grouped([*made, *(rule_study._members(ensemble, position) for position in (0, 1))])
    each = compared(group, partial(losses_of, key=("test", "nll")), rule_study.REFERENCE)
    assert each.networks == 6
    assert each.mean == pytest.approx(0.31)
    assert each.rows == {"copy1"}


def test_the_sentence_on_the_spread_of_the_auroc_is_that_of_the_files():
    spreads = []
    for path in sorted(rule_study.FOLDER.glob("*.json.gz")):
        group = rule_study._group(rule_study.read(path), lambda seed: True)
        spreads += [np.std(list(areas.values()), ddof=1) for areas in rule_study.ood_losses(group).values()]
    page = " ".join((PAGES / "rule.md").read_text(encoding="utf-8").split())
    assert f"standard deviation of {min(spreads):.2f} to {max(spreads):.2f} over seeds" in page


def test_the_scores_of_every_test_row_are_committed():
    """The mean of -log p by row, as float16, is the NLL of the run."""
    for path in sorted(rule_study.FOLDER.glob("*.json.gz")):
        runs, losses = rule_study.read(path), np.load(path.with_name(path.name.replace(".json.gz", ".npz")))
        assert {int(run.seed) for run in runs} == set(range(12))
        for run in runs:
            rows = losses[run.path].astype(float)
            assert len(rows) == run.part("data", "test")
            assert rows.mean() == pytest.approx(run.number("metrics", "test", "nll"), rel=2e-3)


def run(method, seed, nll, tempered=None):
    """Return a run with the figures that advice and study read."""
    metrics = {"test": {"nll": nll, "accuracy": 0.9}}
    if tempered is not None:
        metrics["tempered"] = {"test": {"nll": tempered, "accuracy": 0.9}}
    cost = {"train_step_ratio": 1.1, "predict_ratio": 1.0, "passes": 1, "extra_percent": 0.1, "parameters": 100}
    cost |= {"answer_ms": 0.1, "train_seconds": 5.0, "extra_parameters": 1}
    record = {
        "schema": 1,
        "status": "done",
        "seed": seed,
        "method": {"name": method, "label": method, "fields": {}},
        "network": {"name": "small", "parameters": 100},
        "data": {"name": "digits", "task": "classification", "train": 100, "test": 100},
        "recipe": {"epochs": 10},
        "settings": {},
        "metrics": metrics,
        "cost": cost,
        "commit": "0",
    }
    return Run(f"{method}/seed{seed}", record)


def runs(gain, noise=0.002):
    """Return twelve seeds of a plain network and of a row that is better by `gain`."""
    draw = random.Random(0).gauss
    plain = [run("plain", seed, 0.32 + draw(0, noise), 0.30 + draw(0, noise)) for seed in range(12)]
    return [*plain, *(run("rank1", seed, 0.30 - gain + draw(0, noise)) for seed in range(12))]


def test_a_better_row_is_recommended_and_the_advice_is_right():
    found = rule_study.outcome(runs(0.03))["needs"]["Recommended"]
    assert found["given"] == found["right"] == 1.0
    assert found["worse"] == 0.0
    assert found["rows"] == {"rank1": rule_study.REPETITIONS}


def test_without_a_difference_the_advice_is_the_reference():
    outcome = rule_study.outcome(runs(0.0))
    found = outcome["needs"]["Best probabilities"]
    assert found["given"] <= 0.1
    assert found["right"] == 1.0
    assert outcome["null"] <= 0.1


def test_a_wrong_advice_is_counted(monkeypatch):
    wrong = rule_study.Advice("Recommended", "rank1", ["plain", "rank1"], None)
    monkeypatch.setattr(rule_study, "advice", lambda group: iter([wrong]))
    found = rule_study.outcome(runs(-0.05))["needs"]["Recommended"]
    assert (found["right"], found["worse"]) == pytest.approx((0.0, 1.0))


@pytest.mark.parametrize("clear", [False, True])
def test_no_clear_difference_is_right_only_if_all_seeds_say_so(clear, monkeypatch):
    """The reference is far from the best row in both cases."""

    def advice(group):
        seeds = {run.seed for run in group.runs}
        row = "rank1" if clear and len(seeds) == 12 else None
        yield rule_study.Advice("Recommended", row, ["plain", "rank1"], None)

    monkeypatch.setattr(rule_study, "advice", advice)
    found = rule_study.outcome(runs(0.05))["needs"]["Recommended"]
    assert (found["near"], found["right"]) == (0.0, float(not clear))


def test_seeds_that_are_proposed_are_added_and_no_longer_test(monkeypatch):
    tested = []

    def advice(group):
        seeds = len({run.seed for run in group.runs})
        yield rule_study.Advice("Recommended", "rank1" if seeds >= 5 else None, ["plain", "rank1"], 5)

    def figures(group):
        tested.append(len({run.seed for run in group.runs}))
        return {"nll": {"plain": 0.3, "plain + temperature": 0.3, "rank1": 0.2}}

    monkeypatch.setattr(rule_study, "advice", advice)
    monkeypatch.setattr(rule_study, "figures", figures)
    found = rule_study.outcome(runs(0.05))["needs"]["Recommended"]
    assert found["given"] == 0.0
    assert found["followed"] == {"seeds": 5.0, "given": 1.0, "right": 1.0, "worse": 0.0}
    assert set(tested) == {3, 5, 7, 9}  # those of the advice, and all others


def test_splits_that_were_not_run_again_stay(tmp_path, monkeypatch):
    (tmp_path / "yacht" / "split1").mkdir(parents=True)
    (tmp_path / "yacht" / "split1" / "reference.json").write_text("{}")
    monkeypatch.setattr(uci_study, "gathered", lambda out, name, split: {"set": name, "split": split, "new": True})
    before = [{"set": "yacht", "split": split, "new": False} for split in (1, 0)]
    before.append({"set": "boston", "split": 2, "new": False})
    found = uci_study.merged(before, tmp_path, [("yacht", 1), ("boston", 0)])
    assert [(one["set"], one["split"], one["new"]) for one in found] == [
        ("boston", 2, False), ("yacht", 0, False), ("yacht", 1, True),
    ]  # fmt: skip
