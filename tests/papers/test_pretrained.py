"""The suite of trained networks: the paper's hyper-parameters, a tiny run on the digits, and the published page."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import log_loss
from torch import nn

import leanbayes as lb
from leanbayes.data import DataSet, Split
from leanbayes.training.recipe import posterior_rate, rate
from leanbayes_papers import SUITES
from leanbayes_papers.harness import Run, Trained
from leanbayes_papers.harness.suite import run_suite
from leanbayes_papers.implicit import pretrained
from tests.papers.pages import few_rows, lacking, records_of, RESULTS

pytest.importorskip("matplotlib")

NAME = "pretrained-fashion-mnist"


def sequels(budget: str) -> dict:
    run = Run(budget=budget)
    return pretrained.continued(run, pretrained.plain_network(run, "cifar10"))


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
    run = Run(budget="short")
    plain = pretrained.plain_network(run, "fashion-mnist")
    other = replace(plain, recipe=replace(plain.recipe, epochs=3))
    one, two = (pretrained.continued(run, start)["iBNN-4"].folder(tmp_path, 0) for start in (plain, other))
    assert one != two
    moved = pretrained.plain_network(replace(run, root="elsewhere"), "fashion-mnist")
    assert pretrained.continued(run, moved)["iBNN-4"].folder(tmp_path, 0) == one


def test_figures_are_those_of_other_libraries():
    torch.manual_seed(0)
    net, x, y = nn.Linear(4, 3), torch.randn(60, 4), torch.randint(3, (60,))
    found = pretrained.evaluate(net, x, y, samples=4)
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
    assert pretrained.posterior_bytes(made(tuned), made(net), tmp_path) < 2000
    with torch.no_grad():
        tuned.base.weight += 1
    with pytest.raises(ArithmeticError, match="expected a posterior on its plain network to predict the same"):
        pretrained.posterior_bytes(made(tuned), made(net), tmp_path)


@pytest.fixture
def tiny(monkeypatch):
    """Make every training two epochs long."""
    monkeypatch.setattr(
        Run, "recipe", lambda self, recipe: replace(recipe, epochs=2, accelerator="cpu", batch_size=128)
    )


@pytest.mark.usefixtures("tiny")
def test_the_suite_runs_on_the_digits(tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "source", few_rows)
    run = Run(device="cpu", root=str(tmp_path), seeds=(0, 1), out=tmp_path)
    outcome = run_suite("implicit-pretrained", SUITES["implicit-pretrained"](run), run)
    assert outcome.remarks == []
    records = outcome.records["pretrained-digits"]
    rows = {
        name: [r for r in records if (r["method"], r["when"]) == name]
        for name in (("iBNN-4", "before"), ("iBNN-4", "after"))
    }
    before, after = ([r["nll"] for r in found] for found in rows.values())
    assert len(before) == len(after) == 2
    assert before != after
    frozen = [r for r in records if r["method"] == "iBNN-4, weights frozen"]
    assert [(r["when"], r["posterior_bytes"] < 10_000) for r in frozen] == [("after", True)] * 2
    lines = pretrained.TABLE.lines(records)
    assert ["", "", "paper", "23.12", "0.9118", "0.0232", "-"] in lines
    assert len(pretrained.GAINS.lines(records)) == 8
    assert (tmp_path / "studies" / "pretrained-digits.svg").is_file()


def test_means_errors_and_gains_by_hand():
    values = {("SGD", "after"): (4.0, 6.0), ("iBNN-4", "before"): (4.0, 6.0), ("iBNN-4", "after"): (3.0, 2.0)}
    records = [
        {"method": name, "when": when, "seed": seed, "error": error, "nll": 0.0, "ece": 0.0}
        for (name, when), errors in values.items()
        for seed, error in enumerate(errors)
    ]
    errors = [line[3] for line in pretrained.TABLE.lines(records) if line[2] == "ours"]
    assert errors == ["5.00 ± 1.00", "5.00 ± 1.00", "2.50 ± 0.50"]
    assert pretrained.GAINS.lines(records)[0][:2] == ["iBNN-4", "level (+2.50 ± 1.50)"]  # 1 and 4


# ------------------------------------------------------------------------------------ the published page


def test_the_published_tables_are_those_of_their_file():
    records = records_of("pretrained", NAME)
    assert lacking("pretrained", [pretrained.TABLE.lines(records), pretrained.GAINS.lines(records)]) == []
    assert f"(pretrained/{NAME}.svg)" in (RESULTS / "pretrained.md").read_text()
    assert {path.name for path in (RESULTS / "pretrained").iterdir()} == {f"{NAME}.json", f"{NAME}.svg"}
