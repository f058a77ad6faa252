"""The risk-coverage curve against a loop, and over every order of ties."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leanbayes import metrics

few = settings(deadline=None, derandomize=True, max_examples=40)


def curve_by_loop(uncertainty: list[float], loss: list[float]) -> list[float]:
    ordered = [value for _, value in sorted(zip(uncertainty, loss, strict=True))]
    return [sum(ordered[:k]) / k for k in range(1, len(ordered) + 1)]


@few
@given(st.integers(1, 60), st.integers(2, 5), st.integers(0, 1000))
def test_area_is_that_of_the_loop(rows, classes, seed):
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(rows, classes, generator=generator, dtype=torch.float64).softmax(1)
    y = torch.randint(classes, (rows,), generator=generator)
    wrong = (p.argmax(1) != y).double().tolist()
    expected = np.mean(curve_by_loop((1 - p.amax(1)).tolist(), wrong))
    assert metrics.aurc(p, y).item() == pytest.approx(expected, abs=1e-9)
    score = torch.rand(rows, generator=generator, dtype=torch.float64)
    expected = np.mean(curve_by_loop(score.tolist(), wrong))
    assert metrics.aurc(p, y, uncertainty=score).item() == pytest.approx(expected, abs=1e-9)


@few
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=5))
def test_ties_give_the_mean_curve_over_their_orders(rows):
    curves = []
    for order in itertools.permutations(rows):
        ordered = [value for _, value in sorted(order, key=lambda row: row[0])]
        curves.append(np.cumsum(ordered) / np.arange(1, len(ordered) + 1))
    uncertainty, loss = torch.tensor(rows, dtype=torch.float32).T
    curve = metrics.risk_coverage(uncertainty, loss)
    np.testing.assert_allclose(curve.risk.numpy(), np.mean(curves, 0), atol=1e-12)
    np.testing.assert_allclose(curve.coverage.numpy(), np.arange(1, len(rows) + 1) / len(rows))


def test_the_end_of_the_curve_is_the_plain_risk():
    loss = torch.rand(3, 7)
    assert metrics.risk_coverage(torch.rand(3, 7), loss).risk[-1].item() == pytest.approx(loss.mean().item())


def test_mistakes_withheld_first_cost_least():
    wrong = torch.tensor([0.0, 0.0, 0.0, 1.0])
    assert metrics.risk_coverage(wrong, wrong).risk.tolist() == [0, 0, 0, 0.25]
    assert metrics.risk_coverage(-wrong, wrong).risk.tolist() == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])


def test_every_row_needs_its_uncertainty():
    with pytest.raises(ValueError, match=r"a loss for every uncertainty, got \(3,\), \(4,\)"):
        metrics.risk_coverage(torch.rand(4), torch.rand(3))
    with pytest.raises(ValueError, match=r"an uncertainty for every target \(2,\), got \(3,\)"):
        metrics.aurc(torch.full((2, 2), 0.5), torch.zeros(2, dtype=torch.long), torch.rand(3))
    with pytest.raises(ValueError, match="at least one number as uncertainties"):
        metrics.risk_coverage(torch.zeros(0), torch.zeros(0))
    with pytest.raises(ValueError, match="finite losses"):
        metrics.risk_coverage(torch.rand(1), torch.tensor([torch.inf]))
