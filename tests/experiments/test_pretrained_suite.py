"""The suite of trained networks: the paper's hyper-parameters, a tiny run on the digits, and the published page."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import log_loss
from torch import nn

import leanbayes as lb
from leanbayes.data import DataSet, Split
from leanbayes.training.recipe import posterior_rate, rate
from leanbayes_papers import pretrained_page, SUITES
from leanbayes_papers.runner import run
from leanbayes_papers.study import Case
from leanbayes_papers.suite import Setting
from leanbayes_papers.trained import Trained

pytest.importorskip("matplotlib")

pretrained = importlib.import_module("leanbayes_papers.implicit_pretrained")
PAGE = Path(__file__).parents[2] / "docs" / "results" / "pretrained.md"
NAME = "pretrained-fashion-mnist"


def sequels(budget: str) -> dict:
    setting = Setting(budget=budget)
    return pretrained.sequels_of(setting, pretrained.plain_network(setting, "cifar10"))


@pytest.mark.parametrize("budget", ["short", "full"])
def test_the_recipe_is_the_papers(budget):
    recipe = sequels(budget)["iBNN-8"].recipe
    assert (recipe.epochs, recipe.batch_size, recipe.lr, recipe.beta) == (15, 256, 1e-4, 1.0)
    rates = [recipe.posterior_lr * posterior_rate(recipe, epoch + 0.5) for epoch in range(15)]
    assert rates[:6] == [0.2] * 6
    assert rates[6:9] == sorted(rates[6:9], reverse=True)
    assert rates[9:] == pytest.approx([0.05] * 6)
    assert all(recipe.lr * rate(recipe, epoch) <= 1e-4 for epoch in range(15))


def test_rows_differ_in_one_thing():
    found = sequels("short")
    assert [found[f"iBNN-{k}"].method.components for k in (4, 8, 16)] == [4, 8, 16]
    assert {found[f"iBNN-{k}"].recipe for k in (4, 8, 16)} == {found["SGD, 15 epochs more"].recipe}
    assert found["iBNN-4, weights frozen"].method == found["iBNN-4"].method
    assert found["iBNN-4, weights frozen"].recipe == replace(found["iBNN-4"].recipe, freeze=True)
    assert found["SGD, 15 epochs more"].method is None


def test_sequels_of_another_network_have_another_folder(tmp_path):
    setting = Setting(budget="short")
    plain = pretrained.plain_network(setting, "fashion-mnist")
    other = replace(plain, recipe=replace(plain.recipe, epochs=3))
    one, two = (pretrained.sequels_of(setting, start)["iBNN-4"].folder(tmp_path, 0) for start in (plain, other))
    assert one != two
    moved = pretrained.plain_network(replace(setting, root="elsewhere"), "fashion-mnist")
    assert pretrained.sequels_of(setting, moved)["iBNN-4"].folder(tmp_path, 0) == one


def test_figures_are_those_of_other_libraries():
    torch.manual_seed(0)
    net, x, y = nn.Linear(4, 3), torch.randn(60, 4), torch.randint(3, (60,))
    found = pretrained.judged(net, x, y, samples=4)
    p = F.softmax(net(x), 1).detach()
    assert found["error"] == pytest.approx(100 * (p.argmax(1) != y).float().mean().item())
    assert found["nll"] == pytest.approx(log_loss(y, p.double().numpy() / p.double().sum(1, True).numpy()), rel=1e-5)


def made(model: nn.Module) -> Trained:
    """Return a model as if it had learned from features (N, 4) of three classes."""
    split = Split(torch.randn(40, 4, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 3)
    return Trained(model.eval(), DataSet("made up", "classification", split, split, tuple("abc"), ""), [])


def test_a_posterior_that_does_not_fit_its_network_is_noticed(tmp_path):
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    tuned = lb.convert(net, lb.ImplicitNodes(components=2))
    case = Case((), tmp_path, (0,), "quick", "cpu")
    assert pretrained.kept_bytes(made(tuned), made(net), case) < 2000
    with torch.no_grad():
        tuned.base.weight += 1
    with pytest.raises(ArithmeticError, match="expected a posterior on its plain network to predict the same"):
        pretrained.kept_bytes(made(tuned), made(net), case)


@pytest.fixture
def tiny(monkeypatch):
    """Make every training two epochs long."""
    monkeypatch.setattr(
        Setting, "recipe", lambda self, recipe: replace(recipe, epochs=2, accelerator="cpu", batch_size=128)
    )


@pytest.mark.usefixtures("tiny")
def test_the_suite_runs_on_the_digits(tmp_path):
    setting = Setting(device="cpu", root=str(tmp_path), seeds=(0, 1))
    outcome = run("implicit-pretrained", SUITES["implicit-pretrained"](setting), setting, tmp_path)
    assert outcome.remarks == []
    assert len(outcome.says["pretrained-digits"]) == 9
    numbers = json.loads((tmp_path / "studies" / "pretrained-digits.json").read_text())["numbers"]
    rows = numbers["rows"]
    assert all(len(row["after"]) == 2 for row in rows.values())
    assert rows["iBNN-4"]["before"] != rows["iBNN-4"]["after"]
    assert rows["iBNN-4, weights frozen"]["posterior_bytes"] < 10_000
    assert rows["iBNN-16"]["paper"] == {"error": 23.12, "nll": 0.9118, "ece": 0.0232}
    assert (tmp_path / "studies" / "pretrained-digits.svg").is_file()


def test_means_errors_and_gains_by_hand():
    before, after = ([{"error": a, "nll": 0.0, "ece": 0.0} for a in pair] for pair in ((4.0, 6.0), (3.0, 2.0)))
    numbers = {"rows": {"SGD": {"before": [], "after": before}, "iBNN-4": {"before": before, "after": after}}}
    assert pretrained_page.cell(before, "error") == "5.00 ± 1.00"
    assert pretrained_page.cell([], "error") == "-"
    assert pretrained_page.gain(numbers, "iBNN-4", "error") == "2.50 ± 1.50"  # 1 and 4
    assert pretrained_page.table(numbers)[1][:4] == ["iBNN-4", "5.00 ± 1.00", "2.50 ± 0.50", "-"]


# ------------------------------------------------------------------------------------ the published page


def published() -> dict:
    return json.loads((PAGE.parent / "pretrained" / f"{NAME}.json").read_text())["numbers"]


def test_the_published_table_is_that_of_its_file():
    page = PAGE.read_text()
    lines = [f"| {' | '.join(cells)} |\n" for cells in pretrained_page.table(published())]
    assert [line for line in lines if line not in page] == []


def test_the_published_page_says_what_its_file_says():
    page = PAGE.read_text()
    assert [line for line in pretrained_page.say(published()) if f"* {line}\n" not in page] == []
    assert f"(pretrained/{NAME}.svg)" in page
    assert {path.name for path in (PAGE.parent / "pretrained").iterdir()} == {f"{NAME}.json", f"{NAME}.svg"}
