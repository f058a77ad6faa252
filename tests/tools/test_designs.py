"""Designs of draws: figures by hand, the page equals its file, and its sentences follow from it."""

from __future__ import annotations

import json
import math
import statistics

import pytest
import torch

from leanbayes import metrics
from tests.docs.pages import RESULTS, unsaid
from tools import designs

FILE = RESULTS / "designs" / "fashion-mnist-lenet.json"


@pytest.fixture
def found():
    return json.loads(FILE.read_text(encoding="utf-8"))


def test_parts_are_entropies_of_mixtures():
    p = torch.tensor([[[0.5, 0.5], [1.0, 0.0]], [[0.5, 0.5], [0.0, 1.0]]])
    total, epistemic = designs.parts(p)
    torch.testing.assert_close(total, torch.full((2,), math.log(2), dtype=torch.float64))
    torch.testing.assert_close(epistemic, torch.tensor([0.0, math.log(2)], dtype=torch.float64))


def test_figures_are_those_of_the_mean_of_the_draws():
    torch.manual_seed(0)
    inside, outside = (torch.randn(3, rows, 4).softmax(-1) for rows in (50, 20))
    y = torch.randint(4, (50,))
    by_hand = designs.figures(inside, y, outside)
    mean = inside.double().mean(0)
    assert by_hand["nll"] == pytest.approx(float(-mean[torch.arange(50), y].log().mean()))
    own, other = (torch.special.entr(some.double().mean(0)).sum(-1) for some in (inside, outside))
    assert by_hand["auroc_total"] == pytest.approx(float((other[:, None] > own).double().mean()))
    assert by_hand["ece"] == pytest.approx(100 * float(metrics.ece(mean, y)))


@pytest.mark.parametrize("name", ["fashion-mnist-lenet", "cifar10-wrn-10-1"])
def test_the_page_equals_its_files(name):
    found = json.loads((RESULTS / "designs" / f"{name}.json").read_text(encoding="utf-8"))
    page = (RESULTS / "designs.md").read_text(encoding="utf-8")
    assert [made for made in designs.tables(found) if made not in page] == []
    assert unsaid("docs/results/designs.md", designs.sentences(found)) == []


def test_the_summary_of_the_page_follows_from_its_file(found):
    def nll(method: str, design: str, draws: int) -> float:
        return statistics.fmean(designs.by_seed(found, method, design, draws, "nll"))

    for method in ("rank1", "implicit"):
        assert all(designs.difference(found, method, draws)[0] < 0 for draws in designs.COUNTS[1:])
    said = "four paired draws of `rank1` have a lower NLL than sixteen independent ones; of `implicit`, eight do"
    assert unsaid("docs/quickstart.md", [said]) == []
    assert nll("rank1", "paired", 4) < nll("rank1", "independent", 16)
    assert nll("implicit", "paired", 4) > nll("implicit", "independent", 16) > nll("implicit", "paired", 8)
    assert all(abs(designs.difference(found, "patch", draws)[0]) < 0.0002 for draws in designs.COUNTS)


def test_one_draw_is_the_same_under_both_designs(found):
    for method in designs.methods_of(found):
        assert designs.difference(found, method, 1)[0] == 0


def test_the_default_waits_since_one_gain_on_the_second_data_set_is_within_two_errors():
    found = json.loads((RESULTS / "designs" / "cifar10-wrn-10-1.json").read_text(encoding="utf-8"))
    gains = {method: designs.difference(found, method, designs.DECIDING) for method in ("rank1", "implicit")}
    clear = {method: mean < -2 * error for method, (mean, error) in gains.items()}
    assert clear == {"rank1": True, "implicit": False}
    areas = [
        statistics.fmean(designs.by_seed(found, method, design, draws, "auroc_epistemic"))
        for method in clear
        for design in designs.DESIGNS
        for draws in designs.COUNTS[1:]
    ]
    assert sum(area < 0.5 for area in areas) >= 0.8 * len(areas)
