"""Calibration error against a loop over bins, and at the ends of its scale."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leanbayes import metrics


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
