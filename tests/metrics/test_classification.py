"""Accuracy, top k, likelihood and Brier score against scikit-learn, torchmetrics and loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk
from torchmetrics.functional import classification as tm

from leanbayes import metrics

few = settings(deadline=None, derandomize=True, max_examples=30)
cases = st.tuples(st.integers(1, 60), st.integers(2, 9), st.sampled_from([0.1, 1.0, 4.0]), st.integers(0, 1000))


def draw(case) -> tuple[torch.Tensor, torch.Tensor]:
    rows, classes, scale, seed = case
    generator = torch.Generator().manual_seed(seed)
    p = (scale * torch.randn(rows, classes, generator=generator, dtype=torch.float64)).softmax(1)
    return p, torch.randint(classes, (rows,), generator=generator)


@few
@given(cases)
def test_accuracy_is_that_of_scikit_learn(case):
    p, y = draw(case)
    assert metrics.accuracy(p, y).item() == pytest.approx(sk.accuracy_score(y.numpy(), p.numpy().argmax(1)), abs=1e-12)


@few
@given(cases, st.integers(1, 9))
def test_top_k_accuracy_is_that_of_scikit_learn(case, k):
    p, y = draw(case)
    k = min(k, p.shape[1] - 1)
    if p.shape[1] == 2:  # scikit-learn wants one column of a binary problem
        expected = (y == p.argmax(1)).double().mean().item()
    else:
        expected = sk.top_k_accuracy_score(y.numpy(), p.numpy(), k=k, labels=np.arange(p.shape[1]))
    assert metrics.top_k_accuracy(p, y, k=k).item() == pytest.approx(expected, abs=1e-12)


def test_top_k_accuracy_of_ties_is_accuracy_at_one_and_grows_to_one():
    p, y = torch.full((4, 4), 0.25), torch.arange(4)
    assert [metrics.top_k_accuracy(p, y, k=k).item() for k in range(1, 6)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert metrics.accuracy(p, y) == 0.25


@few
@given(cases)
def test_likelihood_is_that_of_scikit_learn(case):
    p, y = draw(case)
    expected = sk.log_loss(y.numpy(), p.numpy(), labels=np.arange(p.shape[1]))
    assert metrics.nll(p, y).item() == pytest.approx(expected, abs=1e-10)


@few
@given(cases)
def test_brier_score_is_the_sum_over_classes(case):
    p, y = draw(case)
    expected = np.mean(
        [sum((q - (c == t)) ** 2 for c, q in enumerate(row)) for row, t in zip(p.tolist(), y.tolist(), strict=True)]
    )
    assert metrics.brier(p, y).item() == pytest.approx(expected, abs=1e-12)
    assert metrics.brier(torch.eye(3), torch.tensor([1, 2, 0])) == 2


def test_a_probability_of_zero_counts_as_the_smallest_positive_one():
    p, y = torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([1, 1])
    smallest = torch.finfo(torch.float32).smallest_normal * torch.finfo(torch.float32).eps
    assert metrics.nll(p, y).item() == pytest.approx((-math.log(smallest) + math.log(2)) / 2)
    assert metrics.nll(p.double(), y).isfinite()


def test_small_probabilities_keep_their_likelihood():
    p = torch.tensor([[1.0, 1e-42]])  # a subnormal number of float32
    assert metrics.nll(p, torch.tensor([1])).item() == pytest.approx(-math.log(p[0, 1].item()), rel=1e-9)


def test_doubt_tells_rows_apart_that_float32_confidence_ties():
    p = torch.tensor([[1.0, 1e-12, 0.0], [1.0, 0.0, 1e-10], [0.25, 0.5, 0.25]])
    assert (1 - p.amax(1))[0] == (1 - p.amax(1))[1] == 0
    np.testing.assert_allclose(metrics.doubt(p).numpy(), [1e-12, 1e-10, 0.5], rtol=1e-6)


def test_doubt_is_one_minus_the_confidence_of_dense_predictions_too():
    p = torch.randn(3, 4, 2, 5, dtype=torch.float64).softmax(1)
    torch.testing.assert_close(metrics.doubt(p), 1 - p.amax(1))


def test_accuracy_and_top_five_are_those_of_torchmetrics():
    p, y = draw((200, 12, 1.0, 0))
    for k in (1, 5):
        expected = tm.multiclass_accuracy(p, y, num_classes=12, top_k=k, average="micro")
        assert metrics.top_k_accuracy(p, y, k=k).item() == pytest.approx(expected.item(), abs=1e-6)
