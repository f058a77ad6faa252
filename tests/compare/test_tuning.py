"""`--tune`: trials on held-out rows, the best values, resumption, and the same trials for every row."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge

import leanbayes as lb
from leanbayes.cli.compare import comparison_options, parse, plan_of
from leanbayes.cli.main import main
from leanbayes.compare import tuning
from leanbayes.compare.baselines import default_values, held_out_nll
from leanbayes.compare.experiment import Experiment
from leanbayes.compare.job import DataSpec, EvaluationSpec, Job
from leanbayes.compare.progress import plan, RunProgress
from leanbayes.compare.row_training import FOLDS, validation_nll
from leanbayes.compare.run import perform, row_of, tuned
from leanbayes.compare.run_all import run_all, tune_all
from leanbayes.data.holdout import fold_of, held_out
from leanbayes.methods import all_methods
from leanbayes.report import load_results, markdown
from leanbayes.report.page import build
from leanbayes.training.diagnostics import TrainingError
from tests.report import make

pytest.importorskip("optuna", reason="needs Optuna, of the extra tune")

JUDGING = EvaluationSpec(samples=2, shift=False, test_images=40)
DIGITS = DataSpec(name="digits", train_rows=120, validation=0.25)
RECIPE = lb.Recipe(epochs=4, batch_size=64, lr=0.05, accelerator="cpu")
TABLE = lb.Recipe(
    epochs=3, batch_size=32, lr=0.02, optimizer="adam", schedule="constant", patience=2, accelerator="cpu"
)


def job(method=None, tune=5, **changes):
    recipe = replace(RECIPE, **changes)
    return Job(source=DIGITS, net="small", method=method, recipe=recipe, evaluation=JUDGING, tune=tune)


@pytest.fixture(scope="module")
def digits():
    return Experiment(DIGITS, "small", JUDGING)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Return a job and the experiment of a table with real targets."""
    path = tmp_path_factory.mktemp("table") / "rows.csv"
    generator = np.random.default_rng(0)
    x = generator.normal(size=(70, 3))
    rows = np.column_stack([x, x[:, 0] - x[:, 1] + 0.3 * generator.normal(size=70)])
    path.write_text("\n".join(["a,b,c,y", *(",".join(f"{value:.6f}" for value in row) for row in rows)]))
    source = DataSpec(name=str(path), validation=0.1, task="regression")
    one = Job(source=source, net="mlp", method=None, recipe=TABLE, evaluation=JUDGING, tune=3)
    return one, Experiment(source, "mlp", JUDGING)


@pytest.fixture
def parabola(monkeypatch):
    """Replace the training of a trial by a parabola of the log rate; return the rates that were tried."""
    tried = []

    def nll(row, report):
        tried.append(row.recipe.lr)
        value = (math.log(row.recipe.lr) - math.log(0.1)) ** 2
        for step in range(1, 5):
            report(step, value + 1 / step)
        return value

    monkeypatch.setattr(tuning, "validation_nll", nll)
    return tried


def trials_of(folder):
    """Read a journal without Optuna: the values, the scores and the states of its trials."""
    found = {}
    for line in (folder / "journal.jsonl").read_text().splitlines():
        log = json.loads(line)
        if log["op_code"] == 5:
            found.setdefault(log["trial_id"], {})[log["param_name"]] = log["param_value_internal"]
        if log["op_code"] == 6:
            own = found.setdefault(log["trial_id"], {})
            own["state"], own["nll"] = log["state"], (log["values"] or [None])[0]
    return found


def run(one, experiment, out, progress=None):
    return tuned(one, experiment, out, progress or RunProgress("", ""))


@pytest.mark.parametrize("kind", all_methods().values(), ids=all_methods())
def test_the_space_of_a_method_names_its_fields_around_their_defaults(kind):
    method = kind()
    assert set(kind.space) <= {field.name for field in fields(kind)}
    for name, (low, high) in kind.space.items():
        assert low < getattr(method, name) < high
        assert {getattr(replace(method, **{name: end}), name) for end in (low, high)} == {low, high}


def test_every_noisy_method_has_a_noise_level_to_choose():
    """An ensemble has no noise, and the evidence chooses the prior precision of a Laplace posterior."""
    assert {name for name, kind in all_methods().items() if not kind.space} == {"deep_ensemble", "laplace"}


def test_the_page_of_the_documentation_has_the_spaces_of_the_code():
    text = (Path(__file__).parents[2] / "docs" / "compare.md").read_text()
    section = text.partition("## Tuning")[2].partition("\n## ")[0]
    written = {}
    for line in section.splitlines():
        if line.startswith("| `"):
            names, space = line.strip("| ").split(" | ")
            ranges = re.findall(r"`?(\w+)`? (-?[\d.,]+) to (-?[\d.,]*\d)", space)
            found = {field: (float(low), float(high.replace(",", ""))) for field, low, high in ranges}
            written |= dict.fromkeys(re.findall(r"`(\w+)`", names), found)
    assert written.pop("plain") == {}
    usual = {name: tuning.own_values(space, name) for name, space in tuning.BASELINE_SPACES.items()}
    ends = {name: {key: (each.low, each.high) for key, each in space.items()} for name, space in usual.items()}
    assert written == {name: dict(kind.space) for name, kind in all_methods().items()} | ends
    assert "from a fifth of the recipe's to five times" in section
    assert tuning.AROUND == 5


def test_a_field_that_the_user_set_is_kept():
    assert set(tuning.space_of(job(lb.Rank1()))) == {"recipe.lr", "rank1.prior_std", "rank1.init_std"}
    assert set(tuning.space_of(job(lb.Rank1(prior_std=0.3)))) == {"recipe.lr", "rank1.init_std"}


def test_chosen_values_reach_recipe_and_method_and_the_posterior_keeps_its_ratio():
    one = tuning.with_values(job(lb.Rank1(), posterior_lr=0.1), {"recipe.lr": 0.2, "rank1.prior_std": 0.3})
    assert (one.recipe.lr, one.recipe.posterior_lr, one.method.prior_std, one.tune) == (0.2, 0.4, 0.3, 0)
    for rate in (0.05, 0.025):  # to the bit what --recipe.lr gives, where the rate of the posterior follows
        one = tuning.with_values(job(lb.Rank1(), posterior_lr=rate), {"recipe.lr": 0.0123456789})
        assert one.recipe.posterior_lr == 0.0123456789 * (rate / 0.05)
    same = job(lb.Rank1(), tune=0, posterior_lr=0.03)
    assert tuning.with_values(same, {"recipe.lr": same.recipe.lr}) == same


def test_initial_noise_that_trials_choose_is_not_scaled():
    one = replace(job(lb.Rank1()), scaled=True)
    assert tuning.with_values(one, {"rank1.init_std": 0.1, "rank1.prior_std": 0.3}).scaled
    assert not tuning.with_values(one, {"rank1.init_std": 0.2}).scaled


def test_ids_and_settings_without_trials_are_those_from_before():
    assert "tune" not in job(tune=0).settings()
    assert job(tune=5).id != job(tune=0).id
    assert job(tune=5).folder != job(tune=0).folder


def test_the_values_of_the_best_complete_trial_are_chosen(parabola, digits, tmp_path):
    one = job(tune=12)
    found = run(one, digits, tmp_path)
    trials = trials_of(tuning.folder_of(one, tmp_path))
    assert len(trials) == len(parabola) == 12
    complete = [trial for trial in trials.values() if trial["state"] == 1]
    best = min(complete, key=lambda trial: trial["nll"])
    assert found["chosen"] == {"recipe.lr": best["recipe.lr"]}
    assert found["best_nll"] == best["nll"] == (math.log(best["recipe.lr"]) - math.log(0.1)) ** 2
    assert (found["trials"], found["complete"]) == (12, len(complete))
    assert 0 < found["pruned"] == 12 - len(complete)
    assert trials[0]["recipe.lr"] == 0.05  # the first trial has the values of the recipe
    assert found["first_nll"] == trials[0]["nll"]
    assert all(0.01 <= trial["recipe.lr"] <= 0.25 for trial in trials.values())
    assert abs(math.log(found["chosen"]["recipe.lr"] / 0.1)) < abs(math.log(0.05 / 0.1))


def test_a_trial_that_diverges_counts_and_is_not_chosen(monkeypatch, digits, tmp_path):
    def nll(row, report):
        if row.recipe.lr > 0.05:
            raise TrainingError("the loss is not finite")
        return math.nan if row.recipe.lr < 0.05 else 1.0

    monkeypatch.setattr(tuning, "validation_nll", nll)
    found = run(job(), digits, tmp_path)
    assert (found["complete"], found["failed"], found["chosen"]) == (1, 4, {"recipe.lr": 0.05})


def test_without_a_complete_trial_the_run_fails_with_the_reason(monkeypatch, digits, tmp_path):
    def nll(row, report):
        raise TrainingError("the loss is not finite")

    monkeypatch.setattr(tuning, "validation_nll", nll)
    result = perform(job(tune=2), digits, tmp_path)
    assert result["status"] == "failed"
    assert "none of the 2 trials of plain was completed" in result["error"]
    assert "the loss is not finite" in result["error"]


def test_a_full_disk_is_no_failed_trial(monkeypatch, digits, tmp_path):
    def nll(row, report):
        raise TrainingError("no room") from OSError("no room")

    monkeypatch.setattr(tuning, "validation_nll", nll)
    with pytest.raises(TrainingError):
        run(job(), digits, tmp_path)
    assert trials_of(tuning.folder_of(job(), tmp_path))[0]["state"] == 0  # still to be run


def test_a_kill_keeps_finished_trials_and_changes_nothing(parabola, monkeypatch, digits, tmp_path):
    whole = run(job(tune=12), digits, tmp_path / "whole")
    tried, normal = list(parabola), tuning.validation_nll
    parabola.clear()

    def killed(row, report):
        if len(parabola) == 6:
            report(1, 0.5)  # in the middle of a trial
            raise KeyboardInterrupt
        return normal(row, report)

    monkeypatch.setattr(tuning, "validation_nll", killed)
    with pytest.raises(KeyboardInterrupt):
        run(job(tune=12), digits, tmp_path / "killed")
    journal = tuning.folder_of(job(), tmp_path / "killed") / "journal.jsonl"
    journal.write_text(journal.read_text() + '{"op_code":7,"worker')  # a line that was cut off
    monkeypatch.setattr(tuning, "validation_nll", normal)
    again = run(job(tune=12), digits, tmp_path / "killed")
    assert parabola == tried  # six before, six after: none twice, and the same values
    assert again["chosen"] == whole["chosen"]
    assert len(trials_of(journal.parent)) == 12


def test_more_trials_continue_and_fewer_take_the_first_ones(parabola, digits, tmp_path):
    few = run(job(tune=4), digits, tmp_path)
    run(job(tune=9), digits, tmp_path)
    assert len(parabola) == 9
    again = run(job(tune=4), digits, tmp_path)
    assert len(parabola) == 9
    assert (again["chosen"], again["best_nll"]) == (few["chosen"], few["best_nll"])


def test_trials_with_other_settings_are_refused_before_any_work(parabola, digits, tmp_path):
    run(job(), digits, tmp_path)
    for other in (job(lr=0.1), job(epochs=9)):
        with pytest.raises(ValueError, match=r"holds trials of --tune with other settings \(recipe.*--fresh"):
            run_all([other], tmp_path, progress=False)
    assert not job().folder(tmp_path).exists()


@pytest.mark.parametrize("content", ["[]", "{", '{"key": 3}', '{"chosen": {}}'])
def test_a_damaged_outcome_is_one_sentence(parabola, digits, tmp_path, content):
    run(job(), digits, tmp_path)
    path = tuning.folder_of(job(), tmp_path) / "tuning.json"
    key = json.loads(path.read_text())["key"]
    path.write_text(content.replace('{"chosen"', f'{{"key": {json.dumps(key)}, "trials": 5, "chosen"'))
    with pytest.raises(ValueError, match=r"--fresh"):
        run(job(), digits, tmp_path)


@pytest.mark.parametrize(
    "line", ["no json\n", "[" * 5000 + "\n", '{"op_code": 4}\n', '{"op_code": 99, "worker_id": ""}\n']
)
def test_a_damaged_journal_is_one_sentence(parabola, digits, tmp_path, line):
    folder = tuning.folder_of(job(), tmp_path)
    folder.mkdir(parents=True)
    (folder / "journal.jsonl").write_text(line * 2)
    with pytest.raises(ValueError, match=r"journal.jsonl' is damaged .* --fresh begins again"):
        run(job(), digits, tmp_path)


def test_the_score_of_a_network_is_the_nll_of_its_held_out_rows(digits, tmp_path):
    one = job(tune=0)
    steps = []
    found = validation_nll(row_of(one, digits, tmp_path), lambda step, nll: steps.append((step, nll)))
    x, y = digits.data.prepared(digits.data.train)
    out = held_out(y, 0.25, 0)
    net = digits.plain(0)
    history = lb.fit(net, (x[~out], y[~out]), one.recipe, validation=(x[out], y[out]), progress=False)
    with torch.no_grad():
        direct = torch.nn.functional.cross_entropy(net.eval()(x[out]), y[out])
    assert found == pytest.approx(float(direct), rel=1e-5)
    assert steps == [(row["epoch"], row["valid_nll"]) for row in history]


def test_the_score_of_folds_is_at_the_best_noise_of_all_rows(table, tmp_path):
    one, experiment = table
    steps = []
    row = row_of(replace(one, tune=0), experiment, tmp_path)
    found = validation_nll(row, lambda step, nll: steps.append((step, nll)))
    x, y = experiment.data.prepared(experiment.data.train)
    fold, squares, variances = fold_of(y, FOLDS, 0), [], []
    for number in range(FOLDS):
        net, likelihood = row.make()
        out = fold == number
        data = (x[~out], y[~out])
        lb.fit(net, data, one.recipe, likelihood=likelihood, validation=(x[out], y[out]), progress=False)
        with torch.no_grad():
            squares.append((net.eval()(x[out]) - y[out]).double().square())
            variances.append(torch.full_like(squares[-1], float(likelihood.log_std.exp()) ** 2))
    r, v = torch.cat(squares), torch.cat(variances)
    factor = (r / v).mean()  # the maximum of the likelihood in closed form
    direct = 0.5 * (torch.log(2 * math.pi * v * factor) + r / (v * factor)).mean()
    assert found == pytest.approx(float(direct), abs=1e-5)
    assert [step for step, _ in steps] == [1, 2, 3, 4, 5]
    assert steps[-1][1] == found


def test_before_a_late_conversion_nothing_is_pruned(digits, tmp_path):
    steps = []
    one = job(lb.Rank1(components=2), tune=0, convert_at_epoch=3)
    validation_nll(row_of(one, digits, tmp_path), lambda step, nll: steps.append(step))
    assert steps == [1]


def test_an_ensemble_reports_the_epochs_of_one_member(digits, tmp_path):
    steps = []
    one = job(lb.DeepEnsemble(components=2), tune=0, epochs=2)
    validation_nll(row_of(one, digits, tmp_path), lambda step, nll: steps.append(step))
    assert steps == [1, 2]


def test_the_scores_of_linear_models_equal_those_of_scikit_learn(table):
    _, experiment = table
    x, y = experiment.data.prepared(experiment.data.train)
    fold = fold_of(y, FOLDS, 0)
    parts = [fold == number for number in range(FOLDS)]
    found = held_out_nll("linear", x, y, 0, 0, values={"penalty": 3.0}, parts=parts)
    wide, target = x.double().numpy(), y[:, 0].double().numpy()
    errors = [target[p] - Ridge(alpha=3.0).fit(wide[~p], target[~p]).predict(wide[p]) for p in map(np.asarray, parts)]
    variance = np.square(np.concatenate(errors)).mean()
    assert found == pytest.approx(0.5 * math.log(2 * math.pi * variance) + 0.5, abs=1e-5)
    labels = (y[:, 0] > 0).long()
    (part,) = [torch.arange(len(y)) % 4 == 0]
    found = held_out_nll("linear", x, labels, 2, 0, values={"penalty": 4.0}, parts=[part])
    model = LogisticRegression(C=0.25, max_iter=500).fit(wide[~part], labels[~part])
    direct = -np.log(model.predict_proba(wide[part])[np.arange(int(part.sum())), labels[part]]).mean()
    assert found == pytest.approx(direct, abs=1e-5)


@pytest.mark.parametrize("name", ["linear", "boosting"])
@pytest.mark.parametrize("classes", [0, 2])
def test_defaults_of_rows_without_a_network_are_in_their_space(table, name, classes):
    _, experiment = table
    x, y = experiment.data.prepared(experiment.data.train)
    found = default_values(name, x, (y[:, 0] > 0).long() if classes else y, classes, 0)
    space = tuning.BASELINE_SPACES[name]
    assert {f"{name}.{field}" for field in found} == set(space)
    assert all(each.low <= found[key.partition(".")[2]] <= each.high * (1 + 1e-9) for key, each in space.items())


@pytest.mark.parametrize("name", ["plain", "linear", "boosting"])
def test_test_rows_are_never_used(table, tmp_path, name):
    one, experiment = table
    one = replace(one, baseline="" if name == "plain" else name, tune=2)
    found = run(one, experiment, tmp_path / "a")
    data = experiment.data
    nothing = replace(data.test, x=torch.full_like(data.test.x, math.nan), y=torch.full_like(data.test.y, math.nan))
    blind = Experiment(one.source, one.net, one.evaluation)
    blind.data = replace(data, test=nothing)
    again = run(one, blind, tmp_path / "b")
    assert not math.isnan(found["best_nll"])
    assert {**found, "seconds": 0} == {**again, "seconds": 0}


def test_a_tuned_row_is_the_row_with_the_chosen_values(table, tmp_path):
    one, experiment = table
    one = replace(one, method=lb.MCDropout(), tune=2)
    result = perform(one, experiment, tmp_path / "tuned")
    assert result["status"] == "done", result["error"]
    chosen = result["tuning"]["chosen"]
    assert result["recipe"]["lr"] == chosen["recipe.lr"]
    assert result["method"]["fields"]["rate"] == chosen["mc_dropout.rate"]
    assert result["settings"]["recipe"]["lr"] == TABLE.lr  # the settings are those that were asked for
    by_hand = perform(tuning.with_values(one, chosen), experiment, tmp_path / "by_hand")
    assert by_hand["metrics"] == result["metrics"]
    assert by_hand["validation"]["nll"] == result["validation"]["nll"]
    assert "tuning" not in by_hand


def test_all_seeds_and_the_ensemble_of_seeds_use_one_choice(table, tmp_path):
    one, _ = table
    one = replace(one, tune=1)
    seeds = [replace(one, recipe=replace(one.recipe, seed=seed)) for seed in (0, 3)]
    first, second, together = run_all([*seeds, replace(one, members=(0, 3))], tmp_path, progress=False)
    assert first["tuning"] == second["tuning"] == together["tuning"]
    assert first["tuning"]["seed"] == 0
    assert first["recipe"]["lr"] == together["recipe"]["lr"] == first["tuning"]["chosen"]["recipe.lr"]
    assert len(list(tmp_path.rglob("tuning.json"))) == 1
    kept = run_all(seeds, tmp_path, progress=False)
    assert [result["created"] for result in kept] == [first["created"], second["created"]]


def test_the_planned_trainings_of_trials_are_those_that_run(table, tmp_path):
    one, experiment = table
    for method in (None, lb.Rank1(components=2)):
        recipe = replace(one.recipe, epochs=2, convert_at_epoch=1 if method else 0)
        own = replace(one, method=method, tune=1, recipe=recipe)
        (progress,) = plan([own], experiment, "train", tuning=[own])
        planned = set(progress.parts)
        run(own, experiment, tmp_path, progress)
        assert set(progress.parts) == planned
        first = [name for name in planned if name.startswith("trial 1 of 1, fold")]
        assert len(first) == FOLDS


def test_an_evaluation_takes_the_choice_of_the_training_and_runs_no_trials(parabola, digits, tmp_path):
    one = job(tune=2, epochs=1)
    trained = perform(one, digits, tmp_path, stage="train")
    result = perform(one, digits, tmp_path, stage="evaluate")
    assert (trained["status"], result["status"], len(parabola)) == ("done", "done", 2)
    assert result["tuning"] == trained["tuning"]
    tuning.forget([one], tmp_path)
    result = perform(one, digits, tmp_path, stage="evaluate", fresh=True)
    assert "run leanbayes train with the same flags first" in result["error"]
    assert len(parabola) == 2


def test_workers_leave_the_outcome_for_the_runs(parabola, tmp_path):
    seeds = [job(tune=2, seed=seed) for seed in (0, 1)]
    assert tuning.untuned(seeds, tmp_path) == seeds[:1]
    tune_all(seeds[:1], tmp_path)
    assert tuning.untuned(seeds, tmp_path) == []
    assert len(parabola) == 2


FLAGS = ["--recipe.epochs", "1", "--no-shift", "--ood", "none", "--train-rows", "60", "--test-images", "20"]
FLAGS += ["--seeds", "0", "--samples", "2", "--device", "cpu", "--methods", "plain,dropconnect"]


def test_the_command_line_shows_trials_space_and_choice(tmp_path, capsys):
    out = tmp_path / "out"
    command = ["compare", *FLAGS, "--out", str(out)]
    assert main([*command, "--tune", "2"]) == 0
    assert "before them 2 trials for each of 2 rows" in capsys.readouterr().err
    for method in ("plain", "dropconnect"):
        result = json.loads((out / "digits" / "small" / method / "seed0" / "result.json").read_text())
        assert result["tuning"]["trials"] == 2
        assert result["settings"]["tune"] == 2
        assert {"trials", "space", "chosen", "best_nll", "seconds"} <= set(result["tuning"])
    text = markdown(load_results(out))
    assert "* dropconnect: 2 trials" in text
    assert "dropconnect.rate" in text
    assert "never of test rows" in (out / "report.html").read_text()
    assert main([*command, "--tune", "3"]) == 2
    assert "tune: 2 there, 3 now" in capsys.readouterr().err
    assert main(command) == 2
    assert "tune: 2 there, 0 now" in capsys.readouterr().err
    assert main([*command, "--tune", "2"]) == 0  # kept


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tune", "-1"], "expected --tune to be a number of trials, at least 1, or 0 for none, got -1"),
        (
            ["--tune", "2", "--validation", "0"],
            "--tune scores its trials on held-out training rows, got --validation 0",
        ),
        (["--tune", "2", "--devices", "2"], "expected one process a network with --tune, got 2; --workers N"),
    ],
)
def test_flags_that_do_not_fit_are_one_sentence(flags, message, tmp_path, capsys):
    assert main(["compare", *FLAGS, *flags, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_without_optuna_the_message_has_the_pip_command(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tuning, "find_spec", lambda name: None)
    assert main(["compare", *FLAGS, "--tune", "5", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == (
        "leanbayes: --tune needs Optuna, not installed here; pip install leanbayes[tune]\n"
    )


def test_every_row_of_a_table_has_the_same_number_of_trials(table):
    one, _ = table
    flags = ["--data", one.source.name, "--methods", "all", "--tune", "7", "--seeds", "0,1", "--device", "cpu"]
    jobs = plan_of(parse(comparison_options(), flags, "compare")).jobs
    assert {each.name: each.tune for each in jobs} == {each.name: 7 for each in jobs} | {"mean": 0}
    assert {"plain", "linear", "boosting", "rank1"} <= {each.name for each in jobs}


def test_rows_with_other_numbers_of_trials_are_remarked(tmp_path):
    for name, trials in (("plain", 0), ("rank1", 5)):
        record = make.classification(name, 0, make.METHODS[name])
        if trials:
            space = {"recipe.lr": {"low": 0.01, "high": 0.25, "scale": "log"}}
            chosen = {"recipe.lr": 0.1}
            record["tuning"] = {"trials": 5, "space": space, "chosen": chosen, "best_nll": 0.2, "seconds": 3.0}
        make.write(tmp_path, record)
    page = build(tmp_path).read_text()
    assert "different numbers of trials (plain 0, rank1 5)" in page
    assert "<p>rank1: 5 trials, 3 s; NLL 0.2</p>" in page
    assert "<b>0.1</b>, of 0.01 to 0.25 on a log scale" in page


@pytest.mark.parametrize(
    "odd", [3, [], {"trials": "x"}, {"trials": 2, "best_nll": 1.0, "chosen": {"<b>": [1]}, "space": {}}]
)
def test_odd_fields_of_a_result_do_not_break_the_page(tmp_path, odd):
    make.write(tmp_path, make.classification("plain", 0, make.METHODS["plain"]) | {"tuning": odd})
    page = build(tmp_path).read_text()
    assert "<b>&lt;b&gt;" not in page
    assert "Comparison" in page
