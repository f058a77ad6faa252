"""The smaller suites of ensemble model patching: Table 3 to the digit, and predictions by number of draws."""

from __future__ import annotations

import math

import pytest
import torch

import leanbayes as lb
from leanbayes_papers import SUITES
from leanbayes_papers.harness import printed, Run
from leanbayes_papers.patch.overhead import counted, METHODS, TABLE
from leanbayes_papers.patch.samples import averages, scores
from leanbayes_papers.patch.samples import TABLE as SIZES


@pytest.mark.parametrize("method", METHODS)
def test_the_deep_mlp_has_the_printed_parameters(method):
    """The other networks of Table 3 are counted in tests/methods/test_patch.py."""
    row = counted("MLP", METHODS[method])
    assert row["parameters"] == printed("patch", "table3")[method]["MLP"].value
    layers, width, k = 99, 100, 5
    expected = {
        "EMP": (layers + 1) * math.log10(k),
        "ECMP": (2 * layers * width + width**2) * math.log10(k),
        "Dropout": layers * width * math.log10(2),  # masks after every linear map but the last
        "DropConnect": (width + layers * width**2) * math.log10(2),
        "Explicit Ensemble": math.log10(k),
    }
    assert row["log10_networks"] == pytest.approx(expected[method])


def test_counts_are_above_the_papers():
    lines = TABLE.lines([{"method": "EMP", "net": "MLP", "parameters": 7, "log10_networks": 2.0}])
    assert lines == [["EMP", "MLP", "ours", "7", "2.0"], ["", "", "paper", "1129100", "-"]]


def test_averages_are_those_of_separate_predictions():
    torch.manual_seed(0)
    bnn = lb.convert(lb.models.MLP(5, 3, hidden=(4,)), lb.ModelPatch(patch="*", init_spread=0.5))
    x = torch.randn(6, 5)
    found = averages(bnn, x, (1, 4, 9))
    for size, mean in found.items():
        torch.testing.assert_close(mean.float(), lb.predict(bnn, x, samples=size).mean)


def test_scores_are_the_papers():
    """20 bins; one of at most five rows is left out."""
    p = torch.tensor([[0.9, 0.1]] * 8 + [[0.3, 0.7]] * 3).double()
    y = torch.tensor([0] * 6 + [1] * 2 + [1] * 3)
    found = scores(p, y)
    assert found["top1"] == pytest.approx(9 / 11)
    assert found["top5"] == 1
    assert found["ece"] == pytest.approx(8 / 11 * abs(6 / 8 - 0.9))
    assert found["mce"] == pytest.approx(abs(6 / 8 - 0.9))
    assert [column.cell([found]) for column in SIZES.columns] == ["100.00", "81.82", "10.91", "15.00"]


def test_full_samples_are_the_papers(tmp_path):
    suite = SUITES["patch-samples"](Run(budget="full", root=str(tmp_path)))
    specs = suite.studies[0].measure.keywords["specs"]
    assert specs["EMP"].net == "pyramidnet-110-270"
    assert specs["Dropout"].net == "pyramidnet-110-270+dropout"
    recipe = specs["ECMP"].recipe
    assert (recipe.optimizer, recipe.lr, recipe.epochs, recipe.batch_size) == ("adam", 1e-3, 400, 256)
    assert specs["ECMP"].method == lb.ModelPatch(components=5, crossed=True)
    assert specs["ECMP"].evaluation.samples == 200
