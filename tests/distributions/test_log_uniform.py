"""Log-uniform, ARD and Student divergences against integration, series, and their limits."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from scipy import integrate, special, stats
from torch.distributions import Cauchy, Normal

from leanbayes.distributions import log_uniform
from leanbayes.distributions.divergence import kl
from leanbayes.distributions.log_uniform import ard_kl, exact_log_uniform_kl, log_uniform_kl, student_kl

LOG_ALPHAS = torch.linspace(-8, 8, 33, dtype=torch.float64)
FINE = torch.linspace(-8, 8, 4001, dtype=torch.float64)
EXTREMES = torch.linspace(-20, 20, 81)
LIMIT = 0.5 * (math.log(2) + 0.5772156649015329)
"""Minus the limit of 0.5 E log(c + eps)^2 at c = 0, which `log_uniform_kl` adds."""
ZERO_MEAN = -0.5 * (math.log(4 * math.pi * math.e) + log_uniform.EULER)
"""KL(N(0, sigma^2) || 1 / |w|), the same for every sigma. `log_uniform_kl` is the divergence less this constant."""


# ------------------------------------------------------------------------------- the oracles


def normal_expectation(function: Callable[[float], float], mean: float, std: float, nu: float = 0.0) -> float:
    """Integrate function(w) over N(mean, std^2) adaptively, with nodes gathering where nu + w^2 is small."""
    place = -mean / std
    width = max(math.sqrt(nu) / std, 1e-9)
    gaps = [width * 10**k for k in range(12)]
    kinks = sorted({t for t in [place, *(place - g for g in gaps), *(place + g for g in gaps)] if -12 < t < 12})
    value, error = integrate.quad(
        lambda t: density(t) * function(mean + std * t), -12, 12, points=kinks or None, limit=500, epsabs=1e-9
    )
    assert error < 1e-5, "the oracle itself is unsure"
    return value


def density(t: float) -> float:
    return math.exp(-t * t / 2) / math.sqrt(2 * math.pi)


def log_square(w: float) -> float:
    return math.log(max(w * w, 1e-300))  # the node at the singularity itself has no weight


def integrated_log_uniform(log_alpha: float) -> float:
    """Equation (9) in the mean, less its limit: -0.5 log alpha + 0.5 E log(1 + sqrt(alpha) eps)^2 + LIMIT."""
    return -0.5 * log_alpha + 0.5 * normal_expectation(log_square, 1.0, math.exp(log_alpha / 2)) + LIMIT


def series_log_uniform(log_alpha: float) -> float:
    """(c + eps)^2 is noncentral chi-squared: one plus twice a Poisson number of degrees of freedom."""
    rate = math.exp(-log_alpha) / 2
    j = range(max(0, int(rate - 12 * math.sqrt(rate) - 60)), int(rate + 12 * math.sqrt(rate) + 60))
    mean = math.log(2) + float((stats.poisson.pmf(j, rate) * special.digamma([0.5 + k for k in j])).sum())
    return 0.5 * mean + LIMIT


def integrated_student(mean: float, std: float, nu: float) -> float:
    """Equation (26)."""
    return 0.5 * (nu + 1) * normal_expectation(lambda w: math.log(nu + w * w), mean, std, nu) - math.log(std)


def student_constant(nu: float) -> float:
    """Return what equation (25) has and (26) leaves out."""
    gammas = math.lgamma(nu / 2) - math.lgamma((nu + 1) / 2)
    return gammas - 0.5 * math.log(2 * math.e) - 0.5 * nu * math.log(nu)


# ------------------------------------------------------------------------------- log-uniform


def test_the_exact_divergence_is_the_integral() -> None:
    expected = torch.tensor([integrated_log_uniform(x) for x in LOG_ALPHAS.tolist()], dtype=torch.float64)
    torch.testing.assert_close(exact_log_uniform_kl(LOG_ALPHAS), expected, rtol=0, atol=1e-6)


def test_the_exact_divergence_is_the_series_of_digammas() -> None:
    expected = torch.tensor([series_log_uniform(x) for x in LOG_ALPHAS.tolist()], dtype=torch.float64)
    torch.testing.assert_close(exact_log_uniform_kl(LOG_ALPHAS), expected, rtol=0, atol=1e-11)


def test_the_slope_of_the_exact_divergence_is_dawsons_function() -> None:
    log_alpha = EXTREMES.double().requires_grad_()
    (slope,) = torch.autograd.grad(exact_log_uniform_kl(log_alpha).sum(), log_alpha)
    c = (-0.5 * log_alpha.detach()).exp()
    expected = -c * torch.from_numpy(special.dawsn((c / math.sqrt(2)).numpy())) / math.sqrt(2)
    torch.testing.assert_close(slope, expected, rtol=0, atol=1e-12)


def test_the_fit_is_within_a_hundredth_of_the_exact_divergence() -> None:
    gap = (log_uniform_kl(FINE) - exact_log_uniform_kl(FINE)).abs().max()
    assert gap < 0.0095


def test_the_divergence_is_positive_falls_and_has_the_right_ends() -> None:
    for divergence in (log_uniform_kl(EXTREMES), exact_log_uniform_kl(EXTREMES), ard_kl(EXTREMES)):
        assert (divergence > 0).all()
        assert (divergence.diff() < 0).all()
        assert divergence[-1] < 1e-8
    small = torch.tensor([-20.0], dtype=torch.float64)
    torch.testing.assert_close(exact_log_uniform_kl(small), -0.5 * small + LIMIT, rtol=0, atol=1e-8)
    torch.testing.assert_close(log_uniform_kl(small), -0.5 * small + LIMIT, rtol=0, atol=1e-3)


@pytest.mark.parametrize("std", [1e-6, 0.1, 30.0])
def test_a_zero_mean_pays_the_same_whatever_its_variance(std: float) -> None:
    entropy = 0.5 * math.log(2 * math.pi * math.e * std**2)
    paid = -entropy + 0.5 * normal_expectation(log_square, 0.0, std)
    assert paid == pytest.approx(ZERO_MEAN, abs=1e-6)


def test_the_zero_mean_constant_is_what_the_divergence_is_shifted_by() -> None:
    mean, std = 0.7, 0.7 * math.exp(0.5)
    paid = -0.5 * math.log(2 * math.pi * math.e * std**2) + 0.5 * normal_expectation(log_square, mean, std)
    shifted = exact_log_uniform_kl(torch.tensor(1.0)).item()
    assert shifted + ZERO_MEAN == pytest.approx(paid, abs=1e-6)


# ------------------------------------------------------------------------------- automatic relevance


def test_ard_is_the_divergence_to_the_best_normal_prior() -> None:
    mean = torch.full_like(LOG_ALPHAS, 0.3)
    std = mean * (LOG_ALPHAS / 2).exp()
    best = (mean.square() + std.square()).sqrt()
    nothing = torch.zeros_like(mean)
    torch.testing.assert_close(ard_kl(LOG_ALPHAS), kl(Normal(mean, std), Normal(nothing, best)))
    for factor in (0.9, 1.1):
        assert (kl(Normal(mean, std), Normal(nothing, factor * best)) > ard_kl(LOG_ALPHAS)).all()


# ------------------------------------------------------------------------------- Student


@pytest.mark.parametrize("nu", [1e-16, 1e-8, 1e-3, 0.1, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("mean", [0.0, 1e-6, 1e-2, 1.0, -10.0])
def test_student_is_the_integral(mean: float, nu: float) -> None:
    std = (abs(mean) or 0.1) * (LOG_ALPHAS[::2] / 2).exp()
    expected = torch.tensor([integrated_student(mean, s, nu) for s in std.tolist()], dtype=torch.float64)
    found = student_kl(torch.full_like(std, mean), std, nu)
    torch.testing.assert_close(found, expected, rtol=0, atol=1.3e-4 * (nu + 1))


@pytest.mark.parametrize("nu", [1e-16, 1e-4, 1.0, 10.0])
def test_the_slopes_of_student_are_those_of_the_integral(nu: float) -> None:
    mean = torch.tensor([0.01, 0.3, 1.0, 1.0, 4.0], dtype=torch.float64, requires_grad=True)
    std = torch.tensor([0.2, 0.2, 0.3, 3.0, 0.5], dtype=torch.float64, requires_grad=True)
    by_mean, by_std = torch.autograd.grad(student_kl(mean, std, nu).sum(), (mean, std))
    for i, (m, s) in enumerate(zip(mean.tolist(), std.tolist(), strict=True)):
        step = 1e-3 * s
        up, down = integrated_student(m + step, s, nu), integrated_student(m - step, s, nu)
        assert by_mean[i].item() * s == pytest.approx((up - down) / (2e-3), abs=1e-3 * (nu + 1))
        up, down = integrated_student(m, s + step, nu), integrated_student(m, s - step, nu)
        assert by_std[i].item() * s == pytest.approx((up - down) / (2e-3), abs=1e-3 * (nu + 1))


@pytest.mark.parametrize("mean", [1e-3, 0.1, 10.0])
def test_student_with_few_degrees_of_freedom_is_log_uniform(mean: float) -> None:
    found = student_kl(torch.full_like(FINE, mean), mean * (FINE / 2).exp(), 1e-16) + LIMIT
    torch.testing.assert_close(found, exact_log_uniform_kl(FINE), rtol=0, atol=2e-4)
    torch.testing.assert_close(found, log_uniform_kl(FINE), rtol=0, atol=0.01)


def test_student_is_log_uniform_within_a_hundredth_down_to_means_of_a_millionth() -> None:
    found = student_kl(torch.full_like(FINE, 1e-6), 1e-6 * (FINE / 2).exp(), 1e-16) + LIMIT
    for expected in (exact_log_uniform_kl(FINE), log_uniform_kl(FINE)):
        torch.testing.assert_close(found, expected, rtol=0, atol=0.01)


def test_student_with_one_degree_of_freedom_is_cauchy() -> None:
    mean = torch.linspace(-3, 3, 25, dtype=torch.float64)
    std = torch.logspace(-2, 0.5, 25, dtype=torch.float64).flip(0)
    cauchy = Cauchy(torch.zeros_like(mean), torch.ones_like(mean))
    expected = kl(Normal(mean, std), cauchy)
    torch.testing.assert_close(student_kl(mean, std, 1.0) + student_constant(1.0), expected, rtol=0, atol=3e-4)


def test_student_with_many_degrees_of_freedom_is_normal() -> None:
    mean = torch.tensor([0.0, 0.5, -2.0], dtype=torch.float64)
    std = torch.tensor([1.0, 0.1, 0.7], dtype=torch.float64)
    expected = kl(Normal(mean, std), Normal(torch.zeros_like(mean), torch.ones_like(mean)))
    torch.testing.assert_close(student_kl(mean, std, 1e6) + student_constant(1e6), expected, rtol=0, atol=0.01)


def test_the_cauchy_laws_have_the_moments_of_the_normal() -> None:
    weights, distances, scales = zip(*log_uniform.CAUCHY_PAIRS, strict=True)
    squares = [d * d - s * s for d, s in zip(distances, scales, strict=True)]
    assert sum(weights) == pytest.approx(1, abs=1e-9)
    assert sum(w * s for w, s in zip(weights, scales, strict=True)) == pytest.approx(0, abs=1e-9)
    assert sum(w * q for w, q in zip(weights, squares, strict=True)) == pytest.approx(1, abs=1e-9)


def test_a_mean_of_zero_has_finite_slopes() -> None:
    mean = torch.zeros(2, requires_grad=True)
    log_alpha = torch.tensor([-5.0, 5.0], requires_grad=True)
    tied = student_kl(mean, mean.abs() * (log_alpha / 2).exp(), 1e-16)
    free = student_kl(mean, torch.tensor([0.0, 0.3]), 1e-16)
    for paid in (tied, free):
        assert paid.isfinite().all()
    slopes = torch.autograd.grad(tied.sum() + free.sum(), (mean, log_alpha))
    for slope in slopes:
        torch.testing.assert_close(slope, torch.zeros(2))


def test_student_broadcasts_one_deviation_over_many_means() -> None:
    mean, std = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.tensor(0.5)
    torch.testing.assert_close(student_kl(mean, std, 1.0), student_kl(mean, std.expand(3, 4), 1.0))
    torch.testing.assert_close(student_kl(mean[0, 0], std.expand(3), 1.0), student_kl(mean[0, :1], std, 1.0).expand(3))


@pytest.mark.parametrize("nu", [0.0, -1.0, 1e-20, math.nan, math.inf])
def test_student_refuses_impossible_degrees_of_freedom(nu: float) -> None:
    with pytest.raises(ValueError, match="expected finite degrees of freedom"):
        student_kl(torch.ones(1), torch.ones(1), nu)


# ------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("divergence", [log_uniform_kl, exact_log_uniform_kl, ard_kl])
def test_gradients_are_those_of_finite_differences(divergence: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert torch.autograd.gradcheck(divergence, LOG_ALPHAS[::4].clone().requires_grad_())


@pytest.mark.parametrize("nu", [1e-16, 0.1, 10.0])
def test_gradients_of_student_are_those_of_finite_differences(nu: float) -> None:
    mean = torch.linspace(-3, 3, 7, dtype=torch.float64, requires_grad=True)
    log_std = torch.linspace(-3, 3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda m, s: student_kl(m, s.exp(), nu), (mean, log_std))


@pytest.mark.parametrize("divergence", [log_uniform_kl, ard_kl])
def test_single_precision_suffices(divergence: Callable[[torch.Tensor], torch.Tensor]) -> None:
    log_alpha = EXTREMES.clone().requires_grad_()
    paid = divergence(log_alpha)
    (slope,) = torch.autograd.grad(paid.sum(), log_alpha)
    assert paid.dtype == torch.float32
    assert slope.isfinite().all()
    torch.testing.assert_close(paid.double(), divergence(EXTREMES.double()), rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("nu", [1e-16, 1e-3, 10.0])
def test_single_precision_suffices_for_student(nu: float) -> None:
    mean = torch.tensor([1e-12, 1e-6, 1e-2, -1.0, 10.0])[:, None].expand(5, len(EXTREMES)).clone().requires_grad_()
    log_alpha = EXTREMES.clone().requires_grad_()
    paid = student_kl(mean, mean.abs() * (log_alpha / 2).exp(), nu)
    slopes = torch.autograd.grad(paid.sum(), (mean, log_alpha))
    assert all(slope.isfinite().all() for slope in slopes)
    exact_mean = mean.detach().double()
    exact = student_kl(exact_mean, exact_mean.abs() * (EXTREMES.double() / 2).exp(), nu)
    assert paid.dtype == torch.float32
    torch.testing.assert_close(paid.detach().double(), exact, rtol=0, atol=2e-4)
