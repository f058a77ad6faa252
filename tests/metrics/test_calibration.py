"""Calibration errors against loops over bins and torchmetrics, and at the ends of their scale."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.functional.classification import multiclass_calibration_error

from leanbayes import metrics

few = settings(deadline=None, derandomize=True, max_examples=40)
cases = st.tuples(st.integers(1, 80), st.integers(2, 6), st.sampled_from([0.1, 1.0, 5.0]), st.integers(0, 1000))


def draw(case) -> tuple[torch.Tensor, torch.Tensor]:
    rows, classes, scale, seed = case
    generator = torch.Generator().manual_seed(seed)
    p = (scale * torch.randn(rows, classes, generator=generator, dtype=torch.float64)).softmax(1)
    return p, torch.randint(classes, (rows,), generator=generator)


def by_loop(probabilities: np.ndarray, y: np.ndarray, bins: int) -> float:
    """Sum n_b / n |accuracy - confidence| over bins ((b - 1) / bins, b / bins], one bin and one row at a time."""
    total = 0.0
    for b in range(bins):
        hits, confidences = [], []
        for row, target in zip(probabilities, y, strict=True):
            confidence = float(row.max())
            inside = b / bins < confidence <= (b + 1) / bins or (b == 0 and confidence == 0)
            if inside:
                hits.append(float(int(row.argmax()) == target))
                confidences.append(confidence)
        if hits:
            total += len(hits) / len(y) * abs(np.mean(hits) - np.mean(confidences))
    return total


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    rows=st.integers(1, 80),
    classes=st.integers(2, 6),
    bins=st.integers(1, 20),
    scale=st.sampled_from([0.1, 1.0, 5.0]),
    seed=st.integers(0, 1000),
)
def test_error_equals_the_loop_over_bins(rows, classes, bins, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    p = (scale * torch.randn(rows, classes, generator=generator)).softmax(1)
    y = torch.randint(classes, (rows,), generator=generator)
    assert metrics.ece(p, y, bins=bins).item() == pytest.approx(by_loop(p.double().numpy(), y.numpy(), bins), abs=1e-6)


def test_fifteen_bins_are_the_default():
    generator = torch.Generator().manual_seed(0)
    p, y = (5 * torch.randn(200, 3, generator=generator)).softmax(1), torch.randint(3, (200,), generator=generator)
    assert metrics.ece(p, y).item() == pytest.approx(by_loop(p.double().numpy(), y.numpy(), 15), abs=1e-6)
    assert metrics.ece(p, y).item() != pytest.approx(by_loop(p.double().numpy(), y.numpy(), 10), abs=1e-6)


def test_right_as_often_as_it_says_is_no_error():
    # Four answers at 0.75, three of them right; two at 0.5, one of them right.
    p = torch.tensor([[0.75, 0.25, 0.0]] * 4 + [[0.25, 0.25, 0.5]] * 2)
    y = torch.tensor([0, 0, 1, 0, 2, 0])
    assert metrics.ece(p, y) == 0


def test_certain_and_always_right_is_no_error():
    assert metrics.ece(torch.eye(4), torch.arange(4)) == 0


def test_certain_and_always_wrong_is_the_whole_error():
    assert metrics.ece(torch.eye(4), (torch.arange(4) + 1) % 4) == 1


def test_certain_over_chance_answers_misses_by_all_but_chance():
    p = torch.tensor([[1.0, 0.0, 0.0, 0.0]]).expand(8, 4)
    assert metrics.ece(p, torch.arange(8) % 4).item() == pytest.approx(0.75)


def test_errors_of_opposite_sign_cancel_within_a_bin_but_not_between_bins():
    p = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.6, 0.4], [0.6, 0.4]])
    y = torch.tensor([0, 0, 1, 1])  # too modest by 0.1, then too sure by 0.6
    assert metrics.ece(p, y, bins=10).item() == pytest.approx(0.5 * 0.1 + 0.5 * 0.6, abs=1e-6)
    assert metrics.ece(p, y, bins=1).item() == pytest.approx(abs(0.5 * 0.1 - 0.5 * 0.6), abs=1e-6)


def test_bins_are_closed_on_the_right():
    # Of two bins, 0.5 belongs to the lower one and 0.75 to the upper: nothing cancels.
    p = torch.tensor([[0.5, 0.5], [0.75, 0.25]], dtype=torch.float64)
    y = torch.tensor([0, 1])  # gaps +0.5 and -0.75
    assert metrics.ece(p, y, bins=2).item() == pytest.approx((0.5 + 0.75) / 2)
    assert metrics.ece(p, y, bins=1).item() == pytest.approx((0.75 - 0.5) / 2)


def test_large_calibrated_samples_err_by_no_more_than_chance():
    # Labels drawn from the probabilities: each bin's gap has standard error sqrt(sum p (1 - p)) / n.
    generator = torch.Generator().manual_seed(0)
    p = (2 * torch.randn(50_000, 4, generator=generator, dtype=torch.float64)).softmax(1)
    y = torch.multinomial(p, 1, generator=generator)[:, 0]
    confidence = p.max(1).values
    errors = [
        math.sqrt((c * (1 - c)).sum().item()) / len(p)
        for b in range(15)
        if len(c := confidence[(confidence > b / 15) & (confidence <= (b + 1) / 15)])
    ]
    assert metrics.ece(p, y) < 4 * sum(errors) / math.sqrt(len(errors))


# ------------------------------------------------------------------------------- bins, one by one


def bins_by_loop(confidence: np.ndarray, hit: np.ndarray, bins: int) -> list[tuple[float, float, int]]:
    """Return mean confidence, share of hits and number of rows of every bin that is not empty."""
    found = []
    for b in range(bins):
        inside = (confidence > b / bins) & (confidence <= (b + 1) / bins) | ((b == 0) & (confidence == 0))
        if inside.any():
            found.append((confidence[inside].mean(), hit[inside].mean(), int(inside.sum())))
    return found


def answers(p: torch.Tensor, y: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    return p.numpy().max(1), (p.numpy().argmax(1) == y.numpy()).astype(float)


@few
@given(cases, st.integers(1, 20))
def test_reliability_lists_the_bins_that_are_not_empty(case, bins):
    p, y = draw(case)
    records = [(b.confidence, b.accuracy, b.count) for b in metrics.reliability(p, y, bins=bins)]
    np.testing.assert_allclose(records, bins_by_loop(*answers(p, y), bins), atol=1e-12)
    assert sum(count for _, _, count in records) == len(y)


@few
@given(cases, st.integers(1, 20), st.integers(0, 8))
def test_small_bins_are_dropped_as_in_the_paper_on_model_patching(case, bins, smallest):
    p, y = draw(case)
    kept = [b for b in bins_by_loop(*answers(p, y), bins) if b[2] > smallest]
    error, worst = (metric(p, y, bins=bins, smallest=smallest).item() for metric in (metrics.ece, metrics.mce))
    if kept:
        gaps = [abs(accuracy - confidence) for confidence, accuracy, _ in kept]
        assert worst == pytest.approx(max(gaps), abs=1e-9)
        assert error == pytest.approx(sum(g * b[2] for g, b in zip(gaps, kept, strict=True)) / len(y), abs=1e-9)
    else:
        assert math.isnan(error)
        assert math.isnan(worst)


@few
@given(cases, st.integers(1, 20))
def test_expected_and_maximum_error_are_those_of_torchmetrics(case, bins):
    # Its bins are closed on the left: the same, as no confidence lies on an edge.
    p, y = draw(case)
    for metric, norm in ((metrics.ece, "l1"), (metrics.mce, "max")):
        expected = multiclass_calibration_error(p, y, num_classes=p.shape[1], n_bins=bins, norm=norm)
        assert metric(p, y, bins=bins).item() == pytest.approx(expected.item(), abs=1e-6)


# ------------------------------------------------------------------------------- other bins


@few
@given(cases, st.integers(1, 20), st.booleans())
def test_adaptive_error_has_equally_full_bins(case, bins, tied):
    p, y = draw(case)
    p = (6 * p).round().softmax(1) if tied else p
    confidence, hit = answers(p, y)
    hit = np.array([hit[confidence == c].mean() for c in confidence])
    order = np.argsort(confidence)
    n = len(y)
    members = [[i for rank, i in enumerate(order) if rank * bins // n == b] for b in range(bins)]
    sizes = [len(m) for m in members]
    assert max(sizes) - min(sizes) <= 1
    expected = sum(abs(hit[m].sum() - confidence[m].sum()) for m in members) / n
    assert metrics.adaptive_ece(p, y, bins=bins).item() == pytest.approx(expected, abs=1e-9)


@few
@given(cases, st.integers(1, 20))
def test_classwise_error_is_the_average_over_one_class_against_the_rest(case, bins):
    p, y = draw(case)
    errors = [
        sum(n / len(y) * abs(accuracy - confidence) for confidence, accuracy, n in found)
        for found in (bins_by_loop(p[:, c].numpy(), (y == c).double().numpy(), bins) for c in range(p.shape[1]))
    ]
    assert metrics.classwise_ece(p, y, bins=bins).item() == pytest.approx(np.mean(errors), abs=1e-9)


def test_small_bins_must_be_a_number():
    with pytest.raises(ValueError, match="smallest to be a whole number of at least 0, got -1"):
        metrics.ece(*draw((5, 2, 1.0, 0)), smallest=-1)
