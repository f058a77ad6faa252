"""Disagreement against a loop over pairs; ensemble equivalents on curves with known answers."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leanbayes import metrics

few = settings(deadline=None, derandomize=True, max_examples=40)
CURVE = {1: 0.180, 2: 0.160, 3: 0.153, 4: 0.150}


def draw(draws: int, rows: int, classes: int, seed: int, *space: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    samples = (2 * torch.randn(draws, rows, classes, *space, generator=generator, dtype=torch.float64)).softmax(2)
    return samples, torch.randint(classes, (rows, *space), generator=generator)


@few
@given(st.integers(2, 6), st.integers(1, 30), st.integers(2, 5), st.integers(0, 1000))
def test_disagreement_is_counted_over_all_pairs(draws, rows, classes, seed):
    samples, y = draw(draws, rows, classes, seed)
    votes = samples.numpy().argmax(2)
    differ = np.mean([(votes[a] != votes[b]).mean() for a, b in combinations(range(draws), 2)])
    of_mean = (samples.numpy().mean(0).argmax(1) != y.numpy()).mean()
    of_members = np.mean([(vote != y.numpy()).mean() for vote in votes])
    assert metrics.pairwise_disagreement(samples, y).item() == pytest.approx(differ, abs=1e-12)
    for kind, error in (("mean", of_mean), ("members", of_members)):
        ratio = metrics.disagreement(samples, y, error=kind).item()
        assert ratio == pytest.approx(differ / error, abs=1e-9) if error else math.isnan(ratio)


def test_dense_disagreement_counts_pixels():
    samples, y = draw(3, 4, 5, 0, 2, 3)
    rows = samples.movedim(2, -1).reshape(3, 24, 5)
    torch.testing.assert_close(metrics.disagreement(samples, y), metrics.disagreement(rows, y.flatten()))


def test_draws_that_agree_have_no_disagreement():
    samples, y = draw(1, 20, 3, 0)
    assert metrics.disagreement(samples.expand(4, 20, 3), y) == 0


def test_independent_guesses_disagree_by_chance():
    # Uniform votes over C classes: two differ with probability 1 - 1 / C, and so does each from the target.
    samples, y = draw(8, 20_000, 4, 0)
    error = math.sqrt(0.75 * 0.25 / 20_000)
    assert abs(metrics.pairwise_disagreement(samples, y).item() - 0.75) < 4 * error
    assert abs(metrics.disagreement(samples, y, error="members").item() - 1) < 4 * error / 0.75 * math.sqrt(2)


def test_one_draw_is_refused():
    samples, y = draw(1, 5, 3, 0)
    with pytest.raises(ValueError, match=r"at least two draws, \(S, B, C\), got shape \(1, 5, 3\)"):
        metrics.disagreement(samples, y)
    with pytest.raises(ValueError, match="expected error to be mean or members, got 'worst'"):
        metrics.disagreement(samples, y, error="worst")


# ------------------------------------------------------------------------------- ensemble equivalents


@pytest.mark.parametrize(
    ("cnll", "networks"),
    [(0.180, 1), (0.175, 8 / 7), (0.170, 4 / 3), (0.160, 2), (0.153, 3), (0.1515, 24 / 7), (0.150, 4)],
)
def test_equivalents_lie_on_curves_of_one_over_the_number_of_networks(cnll, networks):
    assert metrics.ensemble_equivalent(cnll, CURVE) == (pytest.approx(networks), "")


def test_two_measured_ensembles_are_enough_where_the_curve_is_a_plus_b_over_k():
    """One and four networks alone give the sizes in between, which a straight line would get wrong."""
    curve = {size: 0.138 + 0.042 / size for size in (1, 4)}
    for size in (1.1, 1.5, 2, 3):
        assert metrics.ensemble_equivalent(0.138 + 0.042 / size, curve).networks == pytest.approx(size)


def test_equivalents_are_those_of_numpy():
    sizes, values = np.array(list(CURVE)), np.array(list(CURVE.values()))
    for cnll in np.random.default_rng(0).uniform(0.150, 0.180, 50):
        expected = 1 / np.interp(-cnll, -values, 1 / sizes)
        assert metrics.ensemble_equivalent(float(cnll), CURVE).networks == pytest.approx(expected, abs=1e-9)


def test_beyond_the_curve_there_are_only_bounds():
    assert metrics.ensemble_equivalent(0.2, CURVE) == (1, "at most")
    assert metrics.ensemble_equivalent(0.1, CURVE) == (4, "at least")
    assert str(metrics.ensemble_equivalent(0.2, CURVE)) == "at most 1"
    assert str(metrics.ensemble_equivalent(0.1, CURVE)) == "at least 4"
    assert str(metrics.ensemble_equivalent(0.168, CURVE)) == "1.43"


def test_a_larger_ensemble_is_never_worth_less():
    noisy = {4: 0.150, 1: 0.180, 2: 0.160, 3: 0.165}  # three networks were unlucky, and sizes come in any order
    assert metrics.ensemble_equivalent(0.160, noisy).networks == 2
    assert metrics.ensemble_equivalent(0.155, noisy).networks == pytest.approx(24 / 7)
    falling = [metrics.ensemble_equivalent(v, noisy).networks for v in np.linspace(0.18, 0.15, 30).tolist()]
    assert falling == sorted(falling)


@pytest.mark.parametrize(("cnll", "curve"), [(0.1, {}), (math.nan, CURVE), (0.1, {1: math.inf}), (0.1, {0: 0.2})])
def test_a_curve_needs_finite_likelihoods(cnll, curve):
    with pytest.raises(ValueError, match="expected a finite likelihood and a curve"):
        metrics.ensemble_equivalent(cnll, curve)
