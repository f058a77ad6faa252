"""The smaller suites of ensemble model patching: Table 3 to the digit, and predictions by number of draws."""

from __future__ import annotations

import math

import pytest
import torch

import leanbayes as lb
from leanbayes_papers import SUITES
from leanbayes_papers.patch_overhead import counted, METHODS, NETWORKS, PRINTED, say_counts
from leanbayes_papers.sample_size import averages, say_sizes, scores
from leanbayes_papers.suite import Setting


@pytest.mark.parametrize("method", METHODS)
def test_the_deep_mlp_has_the_printed_parameters(method):
    """The other networks of Table 3 are counted in tests/methods/test_patch.py."""
    row = counted(NETWORKS["MLP"], METHODS[method])
    assert row["parameters"] == PRINTED[method][0]
    layers, width, k = 99, 100, 5
    expected = {
        "EMP": (layers + 1) * math.log10(k),
        "ECMP": (2 * layers * width + width**2) * math.log10(k),
        "Dropout": layers * width * math.log10(2),  # masks behind every linear map but the last
        "DropConnect": (width + layers * width**2) * math.log10(2),
        "Explicit Ensemble": math.log10(k),
    }
    assert row["log10_networks"] == pytest.approx(expected[method])


def test_counts_that_differ_from_the_paper_are_told():
    rows = {"EMP": {"MLP": {"parameters": 7, "log10_networks": 2.0, "paper": 8}}}
    assert say_counts(rows) == ["EMP, MLP: 7 parameters (paper: 8), 10^2.0 networks"]


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
    line = say_sizes({"emp": {"0": [{"samples": 20, **found}]}})
    assert line == ["emp, S = 20: top-5 100.00 %, top-1 81.82 %, ECE 10.91 %, MCE 15.00 %"]


def test_full_samples_are_the_papers(tmp_path):
    suite = SUITES["patch-samples"](Setting(budget="full", root=str(tmp_path)))
    jobs = {row.name: row.job for row in suite.tables[0].rows}
    assert jobs["EMP"].net == "pyramidnet-110-270"
    assert jobs["Dropout"].net == "pyramidnet-110-270+dropout"
    recipe = jobs["ECMP"].recipe
    assert (recipe.optimizer, recipe.lr, recipe.epochs, recipe.batch_size) == ("adam", 1e-3, 400, 256)
    assert jobs["ECMP"].method == lb.ModelPatch(components=5, crossed=True)
    assert jobs["ECMP"].judging.samples == 200
