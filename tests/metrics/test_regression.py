"""Distances, densities, ranked scores and coverage against scipy: its densities, and quadrature of its integrals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from sklearn.metrics import root_mean_squared_error
from torchmetrics.functional.regression import continuous_ranked_probability_score

from leanbayes import metrics

few = settings(deadline=None, derandomize=True, max_examples=20)
cases = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.integers(0, 1000))


def draw(case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draws, rows, targets, seed = case
    generator = np.random.default_rng(seed)
    means, variances = generator.normal(size=(draws, rows, targets)), generator.gamma(1.0, size=(draws, rows, targets))
    return (
        torch.from_numpy(means),
        torch.from_numpy(variances + 0.05),
        torch.from_numpy(generator.normal(size=(rows, targets))),
    )


@few
@given(cases)
def test_error_is_that_of_scikit_learn(case):
    means, _, y = draw(case)
    expected = root_mean_squared_error(y.numpy().ravel(), means[0].numpy().ravel())
    assert metrics.rmse(means[0], y).item() == pytest.approx(expected, abs=1e-12)


@few
@given(cases)
def test_density_is_that_of_the_mixture(case):
    means, variances, y = draw(case)
    each = stats.norm(means.numpy(), np.sqrt(variances.numpy())).pdf(y.numpy()).prod(2)
    assert metrics.lpd(means, variances, y).item() == pytest.approx(np.log(each.mean(0)).mean(), abs=1e-9)


def test_far_targets_have_a_finite_density():
    density = metrics.lpd(torch.zeros(2, 1, 1), torch.ones(2, 1, 1), torch.full((1, 1), 100.0))
    assert density.item() == pytest.approx(-5000 - 0.5 * math.log(2 * math.pi))


@few
@given(cases)
def test_ranked_score_is_the_integral_over_its_thresholds(case):
    means, variances, y = draw(case)
    m, s = means.numpy(), np.sqrt(variances.numpy())
    scores = []
    for row, target in np.ndindex(*y.shape):
        law, at = stats.norm(m[:, row, target], s[:, row, target]), y[row, target].item()
        below, _ = integrate.quad(lambda x, law=law: law.cdf(x).mean() ** 2, -30, at, epsabs=1e-10, limit=200)
        above, _ = integrate.quad(lambda x, law=law: law.sf(x).mean() ** 2, at, 30, epsabs=1e-10, limit=200)
        scores.append(below + above)
    assert metrics.crps(means, variances, y).item() == pytest.approx(np.mean(scores), abs=1e-6)


@few
@given(cases)
def test_ranked_score_of_one_gaussian_has_its_closed_form(case):
    means, variances, y = draw(case)
    mean, std = means[0].numpy(), np.sqrt(variances[0].numpy())
    z = (y.numpy() - mean) / std
    expected = std * (z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z) - 1 / math.sqrt(math.pi))
    assert metrics.crps_gaussian(means[0], variances[0], y).item() == pytest.approx(expected.mean(), abs=1e-9)


def test_ranked_score_of_narrow_components_is_that_of_their_points():
    # As the noise vanishes, the mixture is its points; torchmetrics scores those.
    generator = np.random.default_rng(0)
    points, y = generator.normal(size=(6, 10)), generator.normal(size=10)
    expected = continuous_ranked_probability_score(torch.from_numpy(points.T.copy()), torch.from_numpy(y))
    means = torch.from_numpy(points)[..., None]
    score = metrics.crps(means, torch.full_like(means, 1e-14), torch.from_numpy(y))
    assert score.item() == pytest.approx(expected.item(), abs=1e-6)


def test_ranked_score_is_the_expected_distance_less_half_the_spread():
    generator = np.random.default_rng(0)
    means, variances, y = np.array([-1.0, 2.0]), np.array([0.5, 2.0]), 0.3
    x, other = (generator.normal(means[k], np.sqrt(variances[k])) for k in generator.integers(2, size=(2, 400_000)))
    values = np.abs(x - y) - 0.5 * np.abs(x - other)
    score = metrics.crps(
        torch.tensor(means)[:, None, None], torch.tensor(variances)[:, None, None], torch.tensor([[y]])
    )
    assert abs(score.item() - values.mean()) < 4 * values.std() / math.sqrt(len(values))


def test_coverage_is_the_share_inside_ends_included():
    low, high = torch.tensor([[0.0], [0.0], [0.0], [0.0]]), torch.tensor([[1.0], [1.0], [1.0], [1.0]])
    assert metrics.interval_coverage(low, high, torch.tensor([0.0, 0.5, 1.0, 1.1])) == 0.75


def test_intervals_of_a_gaussian_cover_their_level():
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(20_000, 1, generator=generator)
    half = torch.full_like(y, stats.norm.ppf(0.95))
    assert abs(metrics.interval_coverage(-half, half, y).item() - 0.9) < 4 * math.sqrt(0.9 * 0.1 / 20_000)


def test_impossible_inputs_are_refused():
    one = torch.ones(1, 2, 1)
    with pytest.raises(ValueError, match="expected variances above zero, got 0"):
        metrics.crps(one, 0 * one, one[0])
    with pytest.raises(ValueError, match=r"\(S, B, D\) both, got \(1, 2, 1\) and \(2, 1\)"):
        metrics.lpd(one, one[0], one[0])
    with pytest.raises(ValueError, match="are they swapped"):
        metrics.interval_coverage(one[0], 0 * one[0], one[0])
