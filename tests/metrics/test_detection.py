"""Out-of-distribution detection against torchmetrics and counts over all pairs and thresholds, also with ties."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.functional import classification as tm

from leanbayes import metrics

few = settings(deadline=None, derandomize=True, max_examples=40)
cases = st.tuples(st.integers(1, 60), st.integers(1, 60), st.sampled_from([1, 3, 10, 10_000]), st.integers(0, 1000))


def draw(case) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores in [0, 1] on a grid: few steps make many ties."""
    known, ood, steps, seed = case
    generator = torch.Generator().manual_seed(seed)
    inside = torch.rand(known, generator=generator, dtype=torch.float64)
    outside = torch.rand(ood, generator=generator, dtype=torch.float64) ** 0.5
    return (steps * inside).round() / steps, (steps * outside).round() / steps


def labelled(inside: torch.Tensor, outside: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat((inside, outside)), torch.cat((torch.zeros(len(inside)), torch.ones(len(outside)))).long()


@few
@given(cases)
def test_area_is_the_share_of_pairs_in_order(case):
    inside, outside = draw(case)
    wins = [(o > i) + 0.5 * (o == i) for i in inside.tolist() for o in outside.tolist()]
    assert metrics.auroc(inside, outside).item() == pytest.approx(np.mean(wins), abs=1e-9)


@few
@given(cases)
def test_areas_are_those_of_torchmetrics(case):
    inside, outside = draw(case)
    scores, target = labelled(inside, outside)
    assert metrics.auroc(inside, outside).item() == pytest.approx(tm.binary_auroc(scores, target).item(), abs=1e-6)
    expected = tm.binary_average_precision(scores, target).item()
    assert metrics.aupr(inside, outside).item() == pytest.approx(expected, abs=1e-6)


@few
@given(cases)
def test_average_precision_is_the_sum_over_thresholds(case):
    inside, outside = (scores.numpy() for scores in draw(case))
    area, before = 0.0, 0.0
    for threshold in sorted({*inside, *outside}, reverse=True):
        found, false = (outside >= threshold).sum(), (inside >= threshold).sum()
        area += (found / len(outside) - before) * found / (found + false)
        before = found / len(outside)
    assert metrics.aupr(*draw(case)).item() == pytest.approx(area, abs=1e-9)


@few
@given(cases)
def test_false_positives_are_the_fewest_at_thresholds_that_find_95_percent(case):
    inside, outside = (scores.numpy() for scores in draw(case))
    expected = min(
        (inside >= threshold).mean()
        for threshold in {*inside, *outside}
        if (outside >= threshold).sum() * 20 >= 19 * len(outside)
    )
    assert metrics.fpr95(*draw(case)).item() == pytest.approx(expected, abs=1e-12)


def test_exactly_95_percent_is_enough():
    outside = torch.cat((torch.ones(19), torch.zeros(1)))
    assert metrics.fpr95(torch.full((10,), 0.5), outside) == 0


def test_out_of_distribution_rows_are_the_positives_and_score_high():
    known, ood = torch.zeros(30), torch.ones(10)
    assert metrics.detect(known, ood) == (1, 1, 0)
    assert metrics.detect(ood, known)[::2] == (0, 1)
    assert metrics.aupr(torch.ones(30), torch.ones(10)) == 0.25  # chance is the share of out-of-distribution rows
    assert metrics.auroc(torch.ones(30), torch.ones(10)) == 0.5


def test_scores_of_any_shape_count_by_element():
    inside, outside = torch.rand(3, 4, 5), torch.rand(2, 7)
    assert metrics.auroc(inside, outside) == metrics.auroc(inside.flatten(), outside.flatten())


@pytest.mark.parametrize("metric", [metrics.auroc, metrics.aupr, metrics.fpr95, metrics.detect])
def test_both_kinds_of_rows_are_needed(metric):
    with pytest.raises(ValueError, match="at least one number as scores of in-distribution rows"):
        metric(torch.zeros(0), torch.ones(3))
    with pytest.raises(ValueError, match="at least one number as scores of out-of-distribution rows"):
        metric(torch.ones(3), torch.zeros(0))
    with pytest.raises(ValueError, match="finite scores of out-of-distribution rows, got 1 of 2"):
        metric(torch.ones(3), torch.tensor([1.0, math.nan]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_accelerator_gives_the_same_figures():
    inside, outside = torch.rand(30), torch.rand(20)
    there = metrics.detect(inside.cuda(), outside.cuda())
    assert all(each.is_cuda for each in there)
    assert tuple(each.item() for each in there) == tuple(each.item() for each in metrics.detect(inside, outside))
