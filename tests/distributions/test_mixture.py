"""Mixtures of equally likely components: densities, bounds, and estimates that know their error."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats
from torch.distributions import Cauchy, Distribution, HalfCauchy, LogNormal, Normal

from leanbayes.distributions.divergence import kl
from tests.oracle.monte_carlo import entropy_bounds, kl_bound, mixture, mixture_kl_monte_carlo

LOCS = torch.tensor([[0.5, 1.0], [1.2, 1.1], [1.9, 0.7]], dtype=torch.float64)
SCALES = torch.tensor([[0.1, 0.4], [0.3, 0.2], [0.2, 0.6]], dtype=torch.float64)

COMPONENTS: dict[str, Distribution] = {
    "normal": Normal(LOCS, SCALES),
    "cauchy": Cauchy(LOCS, SCALES),
    "log_normal": LogNormal(LOCS.log(), SCALES),
    "half_cauchy": HalfCauchy(SCALES),
}
PRIORS: dict[str, Distribution] = {
    "normal": Normal(torch.tensor(1.0).double(), torch.tensor(0.5).double()),
    "cauchy": Cauchy(torch.tensor(1.0).double(), torch.tensor(0.5).double()),
    "log_normal": LogNormal(torch.tensor(0.0).double(), torch.tensor(0.5).double()),
    "half_cauchy": HalfCauchy(torch.tensor(0.4).double()),
}


def twin(law: Distribution, index: tuple[int, ...] = ()):
    scale = law.scale[index].item()
    loc = 0.0 if isinstance(law, HalfCauchy) else law.loc[index].item()
    return {
        Normal: lambda: stats.norm(loc, scale),
        Cauchy: lambda: stats.cauchy(loc, scale),
        LogNormal: lambda: stats.lognorm(s=scale, scale=math.exp(loc)),
        HalfCauchy: lambda: stats.halfcauchy(scale=scale),
    }[type(law)]()


def mixed_log_density(components: Distribution, column: int, z: np.ndarray) -> np.ndarray:
    each = [twin(components, (k, column)).logpdf(z) for k in range(len(components.scale))]
    return special.logsumexp(each, axis=0) - math.log(len(each))


def integral(function, components: Distribution) -> float:
    """Integrate over the real line or the positive half, by z = sinh(t) or exp(t) on a fine grid."""
    t = np.linspace(-30.0, 30.0, 120_001)
    z, slope = (np.exp(t), np.exp(t))
    if isinstance(components, (Normal, Cauchy)):
        t = np.linspace(-25.0, 25.0, 400_001)
        z, slope = np.sinh(t), np.cosh(t)
    return float(integrate.trapezoid(function(z) * slope, t))


def entropy(components: Distribution, column: int) -> float:
    def integrand(z):
        log = mixed_log_density(components, column, z)
        return -np.exp(log) * np.where(np.isneginf(log), 0.0, log)

    return integral(integrand, components)


def divergence(components: Distribution, prior: Distribution, column: int) -> float:
    def integrand(z):
        log = mixed_log_density(components, column, z)
        ratio = np.where(np.exp(log) > 0, log - twin(prior).logpdf(z), 0.0)
        return np.exp(log) * np.where(np.isfinite(ratio), ratio, 0.0)

    return integral(integrand, components)


@pytest.mark.parametrize("name", COMPONENTS)
def test_log_density_is_the_log_of_the_mean_density(name):
    z = np.array([[0.2, 0.9], [1.1, 1.1], [2.5, 7.0], [0.6, 0.01]])
    expected = np.stack([mixed_log_density(COMPONENTS[name], c, z[:, c]) for c in range(2)], 1)
    actual = mixture(COMPONENTS[name]).log_prob(torch.from_numpy(z))
    torch.testing.assert_close(actual, torch.from_numpy(expected), rtol=1e-6, atol=1e-6)


def test_mixture_has_one_law_a_factor_and_their_mean():
    mixed = mixture(COMPONENTS["normal"])
    assert mixed.batch_shape == (2,)
    torch.testing.assert_close(mixed.mean, LOCS.mean(0))
    torch.testing.assert_close(mixed.variance, SCALES.square().mean(0) + LOCS.var(0, correction=0))


@pytest.mark.parametrize("name", COMPONENTS)
def test_entropy_lies_between_its_bounds(name):
    lower, upper = entropy_bounds(COMPONENTS[name])
    for column in range(2):
        exact = entropy(COMPONENTS[name], column)
        assert lower[column] < exact < upper[column]


def test_entropy_bound_below_is_reached_by_equal_components():
    same = Normal(torch.ones(3, 1).double(), torch.full((3, 1), 0.2).double())
    assert entropy_bounds(same)[0].item() == pytest.approx(entropy(same, 0), abs=1e-6)
    assert entropy(same, 0) == pytest.approx(0.5 * math.log(2 * math.pi * math.e * 0.04), abs=1e-6)


def test_entropy_bound_above_is_reached_by_components_far_apart():
    apart = Normal(torch.tensor([[-5.0], [0.0], [5.0]]).double(), torch.full((3, 1), 0.2).double())
    assert entropy_bounds(apart)[1].item() == pytest.approx(entropy(apart, 0), abs=1e-6)


PAIRS = [
    ("normal", "normal"),
    ("normal", "cauchy"),
    ("cauchy", "cauchy"),
    ("log_normal", "normal"),
    ("log_normal", "half_cauchy"),
    ("half_cauchy", "log_normal"),
    ("half_cauchy", "half_cauchy"),
]


@pytest.mark.parametrize(("name", "prior"), PAIRS)
def test_mean_of_the_divergences_bounds_that_of_the_mixture(name, prior):
    torch.manual_seed(0)
    bound = kl_bound(COMPONENTS[name], PRIORS[prior])
    estimate = mixture_kl_monte_carlo(COMPONENTS[name], PRIORS[prior], 200_000)
    assert (bound > estimate.value - 4 * estimate.standard_error).all()
    for column in range(2):
        exact = divergence(COMPONENTS[name], PRIORS[prior], column)
        assert bound[column] > exact
        assert abs(estimate.value[column] - exact) < 4 * estimate.standard_error[column]


def test_bound_is_the_mean_over_components():
    each = kl(COMPONENTS["normal"], PRIORS["normal"])
    torch.testing.assert_close(kl_bound(COMPONENTS["normal"], PRIORS["normal"]), (each[0] + each[1] + each[2]) / 3)


def test_bound_is_the_divergence_where_components_are_equal():
    same = Normal(torch.full((4, 2), 1.1).double(), torch.full((4, 2), 0.2).double())
    one = Normal(torch.full((2,), 1.1).double(), torch.full((2,), 0.2).double())
    torch.testing.assert_close(kl_bound(same, PRIORS["normal"]), kl(one, PRIORS["normal"]))


@pytest.mark.parametrize("seed", range(3))
def test_standard_error_of_the_mixture_estimate_is_calibrated(seed):
    # Components far apart: most of the total variance lies between strata, which the estimate does not suffer.
    torch.manual_seed(seed)
    replicas = 500
    loc = torch.tensor([[0.0], [1.0], [3.0]]).double()
    scale = torch.tensor([[0.3], [0.2], [0.4]]).double()
    exact = divergence(Normal(loc, scale), PRIORS["normal"], 0)
    estimate = mixture_kl_monte_carlo(
        Normal(loc.expand(3, replicas), scale.expand(3, replicas)), PRIORS["normal"], samples=1200
    )
    z = (estimate.value - exact) / estimate.standard_error
    assert abs(z.mean()) < 4 / math.sqrt(replicas)
    assert abs(z.std() - 1) < 4 / math.sqrt(2 * replicas)
