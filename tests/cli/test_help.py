"""Help that fits a screen and agrees with the code, default seeds, and suggestions for wrong names."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from leanbayes import models
from leanbayes.cli import data, names
from leanbayes.cli.compare import comparison_options, parse, plan_of
from leanbayes.cli.main import main, PURPOSE, screen
from leanbayes.compare.job import BUDGETS, FEW, MOST_EPOCHS, PATIENCE, recipe
from leanbayes.data.loading import Row
from leanbayes.methods import all_methods

MANY = 1_000_000


def planned(*flags):
    return plan_of(parse(comparison_options(), ["--methods", "plain", *flags], "compare"))


@pytest.mark.parametrize("command", PURPOSE)
def test_help_fits_a_screen_and_help_all_has_the_rest(command, capsys):
    assert main([command, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 100
    assert f"leanbayes {command} --help-all" in lines[0]
    assert main([command, "--help-all"]) == 0
    everything = capsys.readouterr().out
    assert "--rank1.components" in everything
    assert "by --budget" in " ".join(everything.replace("│", " ").split())


def test_every_flag_of_the_screen_exists(capsys):
    assert main(["compare", "--help-all"]) == 0
    there = set(re.findall(r"--[\w.-]+", capsys.readouterr().out)) | {"--help-all", "--METHOD.FIELD", "--recipe.FIELD"}
    assert set(re.findall(r"--[\w][\w.-]*\w", screen("compare"))) - {"--FLAG"} <= there


def row(name):
    """Return the numbers of a row of the table of budgets: three budgets, rate, batch."""
    (found,) = [line for line in screen("compare").splitlines() if line.strip().startswith(name + "  ")]
    numbers = found.strip().removeprefix(name).split()[:5]
    return [float(number.replace(",", "")) for number in numbers]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("images, 5,000 rows or more", {"kind": "image", "rows": FEW}),
        ("images, fewer rows", {"kind": "image", "rows": FEW - 1}),
        ("images with augmentation", {"kind": "image", "rows": FEW, "augment": "crop_flip"}),
        ("series", {"kind": "series", "rows": FEW}),
    ],
)
def test_the_epochs_of_the_screen_are_those_of_the_recipes(name, shape):
    recipes = [recipe(budget, **shape) for budget in BUDGETS]
    assert row(name) == [*(one.epochs for one in recipes), recipes[0].lr, recipes[0].batch_size]
    if name == "images with augmentation":
        assert f"full: rate {recipes[2].lr}, batch {recipes[2].batch_size}" in screen("compare")
    else:
        assert {(one.lr, one.batch_size) for one in recipes} == {(recipes[0].lr, recipes[0].batch_size)}


@pytest.mark.parametrize(("name", "validated"), [("tables", True), ("tables, --validation 0", False)])
def test_the_steps_of_the_screen_are_those_of_the_recipes(name, validated):
    *steps, rate, batch = row(name)
    large = 1999
    for budget, count in zip(BUDGETS, steps, strict=True):
        own = recipe(budget, kind="table", rows=large, validated=validated)
        expected = max(5, round(count * batch / large))
        assert own.epochs == (min(MOST_EPOCHS, expected) if validated else expected)
        assert (own.lr, own.batch_size) == (rate, batch)
    assert recipe("quick", kind="table", rows=2000, validated=validated).batch_size == 128
    assert f"at most {MOST_EPOCHS} epochs" in screen("compare")
    assert f"not improved for {PATIENCE} epochs" in screen("compare")


@pytest.mark.parametrize(("budget", "seeds"), [("quick", [0, 1, 2]), ("short", [0, 1, 2]), ("full", [0])])
def test_the_default_seeds_follow_the_budget_and_are_printed(budget, seeds):
    plan = planned("--budget", budget)
    assert [job.seed for job in plan.jobs] == seeds
    assert plan.sentence.endswith("seeds 0, 1, 2" if len(seeds) == 3 else "seed 0")


def test_given_seeds_are_taken():
    plan = planned("--seeds", "4,7")
    assert [job.seed for job in plan.jobs] == [4, 7]
    assert plan.sentence.endswith("2 runs of 40 epochs; seeds 4, 7")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["compere"], "did you mean 'compare'?"),
        (["compare", "--methods", "rank"], "did you mean 'rank1'?"),
        (["compare", "--net", "lenot"], "did you mean 'lenet'?"),
        (["train", "--net", "vgg-16"], "did you mean 'vgg16'?"),
        (["compare", "--data", "fashion-mnits"], "did you mean fashion-mnist?"),
        (["compare", "--ood", "mnits"], "did you mean mnist?"),
        (["data", "prepare", "mnits"], "did you mean mnist?"),
        (["bench", "--methods", "rank"], "did you mean 'rank1'?"),
        (["bench", "--net", "wrn162"], "did you mean 'wrn-16-2'?"),
        (["list", "net"], "did you mean 'nets'?"),
        (["reproduce", "rank1-cifer"], "did you mean 'rank1-cifar'?"),
    ],
)
def test_wrong_names_get_a_suggestion(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("spelling", ["Rank1", "RANK1", "ImplicitNodes", "batch-ensemble"])
def test_methods_are_known_in_every_spelling(spelling):
    options = parse(comparison_options(), ["--methods", spelling, "--seeds", "0"], "compare")
    assert plan_of(options).jobs[0].name in all_methods()


def test_lists_name_what_there_is():
    described = {name: text.replace("`", "") for name, text in models.describe().items()}
    assert dict(names.net_lines()) == described
    assert [name for name, _ in names.net_lines()] == models.names()
    own = {name: names.first_line(kind.__doc__) for name, kind in all_methods().items()}
    assert dict(names.method_lines()) == own
    assert all(own.values())


def test_lists_of_networks_say_nothing_of_arguments():
    assert [text for text in dict(names.net_lines()).values() if " see " in text or "arguments" in text] == []


def test_data_list_names_its_folder_once_and_is_not_cut(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    folder = tmp_path / "a-long-name-of-a-folder-that-would-be-cut-in-a-column"
    prepared = Row("mnist", "classification", 60_000, 10_000, (1, 28, 28), f"cached at {folder}", "")
    monkeypatch.setattr(data, "describe", lambda root: [prepared])
    assert main(["data", "list", "--root", str(folder)]) == 0
    said = capsys.readouterr().out
    assert said.count(folder.name) == 1
    assert re.search("1x28x28 +cached", said)


def test_data_alone_explains_both_commands(capsys):
    assert main(["data"]) == 2
    shown = capsys.readouterr().out
    assert main(["data", "--help"]) == 0
    assert capsys.readouterr().out == shown
    assert all(word in shown for word in ("list ", "prepare ", "--source", "--root"))


def test_lists_are_plain_text(capsys):
    assert main(["list", "all"]) == 0
    said = capsys.readouterr().out
    assert "`" not in said
    assert all(name in said for name in (*all_methods(), *models.names()))


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"], ["list", "methods"],
                                       ["list", "nets"]])  # fmt: skip
def test_help_and_lists_need_no_torch(arguments):
    code = f"import sys; from leanbayes.cli.main import main; main({arguments}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
