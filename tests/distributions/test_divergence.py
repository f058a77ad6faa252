"""Divergences against integration, against samples, and against known values at special points."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributions import Cauchy, Distribution, HalfCauchy, LogNormal, Normal

from leanbayes.distributions.divergence import finite_priors, kl, on, prior_on
from leanbayes.distributions.positive import PointMass
from tests.oracle.monte_carlo import kl_monte_carlo

LAWS: dict[str, type[Distribution]] = {
    "normal": Normal,
    "cauchy": Cauchy,
    "log_normal": LogNormal,
    "half_cauchy": HalfCauchy,
}

CLOSED = [
    ("normal", "normal"),
    ("cauchy", "cauchy"),
    ("log_normal", "normal"),
    ("log_normal", "log_normal"),
    ("half_cauchy", "log_normal"),
    ("half_cauchy", "half_cauchy"),
]
QUADRATURE = [
    ("normal", "cauchy"),
    ("log_normal", "cauchy"),
    ("log_normal", "half_cauchy"),
    ("half_cauchy", "cauchy"),
]
FINITE = CLOSED + QUADRATURE
INFINITE = [(q, p) for q in LAWS for p in LAWS if (q, p) not in FINITE]

LOCS = (0.5, 1.0, 2.0)


def make(name: str, loc, scale, dtype: torch.dtype = torch.float64) -> Distribution:
    """Build a distribution from its location and scale; a log-normal is given by its mean."""
    loc, scale = torch.as_tensor(loc, dtype=dtype), torch.as_tensor(scale, dtype=dtype)
    if name == "half_cauchy":
        return HalfCauchy(scale.expand_as(loc) if scale.dim() < loc.dim() else scale)
    if name == "log_normal":
        loc = loc.log() - scale.square() / 2
    return LAWS[name](loc, scale.expand_as(loc))


# ------------------------------------------------------------------------------- the oracle


def log_density(law: Distribution) -> Callable[[float], float]:
    """Write the logarithm of a density down once more, in plain floats."""
    scale = law.scale.item()
    loc = 0.0 if isinstance(law, HalfCauchy) else law.loc.item()
    if isinstance(law, Normal):
        return lambda z: -0.5 * ((z - loc) / scale) ** 2 - math.log(scale * math.sqrt(2 * math.pi))
    if isinstance(law, LogNormal):
        return lambda z: (
            -0.5 * ((math.log(z) - loc) / scale) ** 2 - math.log(scale * math.sqrt(2 * math.pi)) - math.log(z)
        )
    sides = 2 if isinstance(law, HalfCauchy) else 1
    return lambda z: math.log(sides / (math.pi * scale)) - math.log1p(((z - loc) / scale) ** 2)


def peak(law: Distribution) -> float:
    if isinstance(law, HalfCauchy):
        return 0.0
    return math.exp(law.loc.item()) if isinstance(law, LogNormal) else law.loc.item()


def integrated(q: Distribution, p: Distribution) -> float:
    """Integrate q (log q - log p) adaptively, in a variable in which q is smooth and light-tailed.

    Normal: z = loc + scale t; log-normal: its exponential; t is standard normal. Half-Cauchy: z = scale exp(t);
    Cauchy: z = loc + scale sinh(t); t has the density 1 / (pi cosh t).
    """
    log_q, log_p, scale = log_density(q), log_density(p), q.scale.item()
    loc = 0.0 if isinstance(q, HalfCauchy) else q.loc.item()
    place, back, heavy = {
        Normal: (lambda t: loc + scale * t, lambda z: (z - loc) / scale, False),
        LogNormal: (lambda t: math.exp(loc + scale * t), lambda z: (math.log(z) - loc) / scale, False),
        Cauchy: (lambda t: loc + scale * math.sinh(t), lambda z: math.asinh((z - loc) / scale), True),
        HalfCauchy: (lambda t: scale * math.exp(t), lambda z: math.log(z / scale), True),
    }[type(q)]
    reach = 38.0 if heavy else 14.0

    def integrand(t: float) -> float:
        density = 1 / (math.pi * math.cosh(t)) if heavy else math.exp(-t * t / 2) / math.sqrt(2 * math.pi)
        z = place(t)
        return density * (log_q(z) - log_p(z))

    positive = isinstance(q, (LogNormal, HalfCauchy))
    kinks = [0.0] if positive and peak(p) <= 0 else [0.0, back(peak(p))]
    kinks = [t for t in kinks if -reach < t < reach]
    value, error = integrate.quad(integrand, -reach, reach, points=kinks, limit=500, epsabs=1e-11, epsrel=1e-10)
    assert error < 1e-8 * max(1.0, abs(value)), "the oracle itself is unsure"
    return value


def each(q: Distribution, p: Distribution) -> torch.Tensor:
    """Integrate element by element."""

    def element(law: Distribution, i: int) -> Distribution:
        return type(law)(*(getattr(law, name)[i] for name in law.arg_constraints))

    return torch.tensor([integrated(element(q, i), element(p, i)) for i in range(len(q.scale))], dtype=torch.float64)


# ------------------------------------------------------------------------------- against integration


@pytest.mark.parametrize("prior_std", [0.05, 0.4, 2.0])
@pytest.mark.parametrize("std", [0.01, 0.3, 2.0])
@pytest.mark.parametrize(("q", "p"), CLOSED)
def test_closed_form_equals_the_integral(q, p, std, prior_std):
    posterior, prior = make(q, LOCS, std), make(p, (1.0, 1.0, 1.3), prior_std)
    torch.testing.assert_close(kl(posterior, prior), each(posterior, prior), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("prior_std", [0.05, 0.1, 0.3, 2.0])
@pytest.mark.parametrize("std", [0.01, 0.1, 0.5, 2.0])
@pytest.mark.parametrize(("q", "p"), QUADRATURE)
def test_fixed_nodes_equal_the_integral(q, p, std, prior_std):
    posterior, prior = make(q, LOCS, std), make(p, (1.0, 1.0, 1.3), prior_std)
    torch.testing.assert_close(kl(posterior, prior), each(posterior, prior), rtol=1e-4, atol=0)


@pytest.mark.parametrize(("q", "p"), FINITE)
def test_formula_lies_within_four_standard_errors_of_a_million_samples(q, p):
    torch.manual_seed(0)
    posterior, prior = make(q, 1.2, 0.3), make(p, 1.0, 0.4)
    estimate = kl_monte_carlo(posterior, prior, 1_000_000)
    assert estimate.standard_error < 0.02 * estimate.value
    assert abs(kl(posterior, prior) - estimate.value) < 4 * estimate.standard_error


def test_monte_carlo_standard_error_is_calibrated():
    torch.manual_seed(0)
    posterior, prior = make("normal", [1.2] * 400, 0.3), make("normal", [1.0] * 400, 0.4)
    estimate = kl_monte_carlo(posterior, prior, 500)
    z = (estimate.value - kl(posterior, prior)) / estimate.standard_error
    assert abs(z.mean()) < 4 / math.sqrt(400)
    assert abs(z.std() - 1) < 4 / math.sqrt(2 * 400)


@pytest.mark.parametrize(("q", "p"), FINITE)
def test_gradient_equals_the_derivative_of_the_integral(q, p):
    step = 1e-4

    def integral(scale: float) -> float:
        return integrated(LAWS[q](*base, torch.tensor(scale, dtype=torch.float64)), prior)

    base = [torch.tensor(0.2, dtype=torch.float64)] if q != "half_cauchy" else []
    prior = make(p, 1.0, 0.4)
    scale = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    kl(LAWS[q](*base, scale), prior).backward()
    slope = (integral(0.3 + step) - integral(0.3 - step)) / (2 * step)
    assert scale.grad.item() == pytest.approx(slope, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(("q", "p"), FINITE)
def test_autograd_agrees_with_differences_in_every_parameter(q, p):
    counts = [1 if name == "half_cauchy" else 2 for name in (q, p)]

    def formula(*parameters: torch.Tensor) -> torch.Tensor:
        return kl(LAWS[q](*parameters[: counts[0]]), LAWS[p](*parameters[counts[0] :]))

    values = [[0.9, 1.3], [0.25, 0.4]], [[1.0, 1.1], [0.5, 0.35]]
    parameters = [
        torch.tensor(row, dtype=torch.float64, requires_grad=True)
        for count, rows in zip(counts, values, strict=True)
        for row in rows[2 - count :]
    ]
    assert torch.autograd.gradcheck(formula, parameters)


# ------------------------------------------------------------------------------- float32


@pytest.mark.parametrize(("q", "p"), FINITE)
def test_float32_keeps_five_digits(q, p):
    single = kl(make(q, LOCS, 0.05, torch.float32), make(p, [1.0] * 3, 0.1, torch.float32))
    double = kl(make(q, LOCS, 0.05), make(p, [1.0] * 3, 0.1))
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prior_std", [0.01, 0.001])
def test_half_cauchy_to_a_narrow_cauchy_is_finite_in_float32(prior_std):
    # A posterior as wide as one and a prior of 0.01: the far nodes, squared, must not leave float32.
    value = kl(make("half_cauchy", 1.0, 1.0, torch.float32), make("cauchy", 1.0, prior_std, torch.float32))
    assert value.item() == pytest.approx(
        integrated(make("half_cauchy", 1.0, 1.0), make("cauchy", 1.0, prior_std)), rel=1e-3
    )


# ------------------------------------------------------------------------------- known values

locs = st.floats(0.5, 2.0)
stds = st.floats(0.01, 2.0)
prior_stds = st.floats(0.05, 2.0)
few = settings(deadline=None, derandomize=True, max_examples=40)


@pytest.mark.parametrize(("q", "p"), FINITE)
@few
@given(loc=locs, std=stds, prior_loc=locs, prior_std=prior_stds)
def test_divergence_is_never_negative(q, p, loc, std, prior_loc, prior_std):
    assert kl(make(q, loc, std), make(p, prior_loc, prior_std)) >= -1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("law", ["normal", "cauchy", "half_cauchy"])
@few
@given(loc=locs, std=stds)
def test_divergence_of_a_law_from_itself_is_exactly_zero(law, dtype, loc, std):
    assert kl(make(law, loc, std, dtype), make(law, loc, std, dtype)) == 0


@few
@given(loc=locs, std=stds, prior_loc=locs, prior_std=prior_stds)
def test_cauchy_divergence_is_symmetric(loc, std, prior_loc, prior_std):
    one, other = make("cauchy", loc, std), make("cauchy", prior_loc, prior_std)
    torch.testing.assert_close(kl(one, other), kl(other, one), rtol=1e-12, atol=0)


def test_divergence_broadcasts_a_scalar_prior_over_components_and_factors():
    posterior = Normal(torch.ones(3, 5), torch.full((3, 5), 0.2))
    assert kl(posterior, Normal(torch.tensor(1.0), torch.tensor(0.1))).shape == (3, 5)
    assert kl(posterior, Cauchy(torch.tensor(1.0), torch.tensor(0.1))).shape == (3, 5)


# ------------------------------------------------------------------------------- refusals

PRIORS = {
    "normal": {"normal", "cauchy"},
    "cauchy": {"cauchy"},
    "log_normal": {"normal", "cauchy", "log_normal", "half_cauchy"},
    "half_cauchy": {"cauchy", "log_normal", "half_cauchy"},
}


@pytest.mark.parametrize(("q", "p"), INFINITE)
def test_infinite_divergence_is_refused_with_the_priors_that_would_do(q, p):
    with pytest.raises(ValueError, match=f"a {q} posterior and a {p} prior .*infinite") as caught:
        kl(make(q, 1.0, 0.2), make(p, 1.0, 0.2))
    offered = str(caught.value).rsplit("out of ", 1)[1].split(", ")
    assert set(offered) == PRIORS[q]


@pytest.mark.parametrize("q", LAWS)
def test_a_density_has_no_divergence_to_a_point(q):
    with pytest.raises(ValueError, match=f"a {q} posterior and a point prior"):
        kl(make(q, 1.0, 0.2), PointMass(torch.ones(())))


@pytest.mark.parametrize(("law", "names"), PRIORS.items())
def test_finite_priors_names_exactly_the_finite_pairs(law, names):
    assert set(finite_priors(LAWS[law])) == names


# ------------------------------------------------------------------------------- point masses


@pytest.mark.parametrize(
    ("prior", "twin", "mode"),
    [
        (Normal(torch.tensor(1.0), torch.tensor(0.3)), stats.norm(1.0, 0.3), 1.0),
        (Cauchy(torch.tensor(1.0), torch.tensor(0.3)), stats.cauchy(1.0, 0.3), 1.0),
        (
            LogNormal(torch.tensor(0.2), torch.tensor(0.5)),
            stats.lognorm(s=0.5, scale=math.exp(0.2)),
            math.exp(0.2 - 0.25),
        ),
        (HalfCauchy(torch.tensor(0.3)), stats.halfcauchy(scale=0.3), 0.0),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Distribution) else "",
)
def test_point_mass_pays_the_negative_log_prior_from_the_mode(prior, twin, mode):
    values = torch.tensor([0.2, 0.7, 1.0, 1.9])
    expected = [twin.logpdf(mode) - twin.logpdf(value) for value in values.tolist()]
    penalty = kl(PointMass(values), prior)
    torch.testing.assert_close(penalty, torch.tensor(expected, dtype=torch.float32), rtol=1e-5, atol=1e-6)
    assert (penalty >= 0).all()


@pytest.mark.parametrize(
    ("prior", "mode"),
    [
        (Normal(torch.tensor(1.0), torch.tensor(0.3)), 1.0),
        (Cauchy(torch.tensor(1.0), torch.tensor(0.3)), 1.0),
        (LogNormal(torch.tensor(0.0), torch.tensor(0.5)), math.exp(-0.25)),
    ],
    ids=["normal", "cauchy", "log_normal"],
)
def test_point_mass_at_the_mode_pays_nothing_and_is_not_pulled(prior, mode):
    loc = torch.tensor([mode], requires_grad=True)
    penalty = kl(PointMass(loc), prior).sum()
    penalty.backward()
    assert penalty.item() == pytest.approx(0, abs=1e-6)
    assert loc.grad.item() == pytest.approx(0, abs=1e-5)


def test_point_mass_without_a_prior_pays_exactly_nothing():
    assert torch.equal(kl(PointMass(torch.tensor([0.3, -4.0])), PointMass(torch.tensor(1.0))), torch.zeros(2))


# ------------------------------------------------------------------------------- devices


@pytest.mark.parametrize("law", LAWS)
def test_a_law_moves_to_another_device_with_all_its_parameters(law):
    here = make(law, 1.0, 0.2)
    there = on(here, torch.device("meta"))
    assert type(there) is type(here)
    assert all(getattr(there, name).device.type == "meta" for name in there.arg_constraints)


def test_a_prior_is_made_once_and_outlives_inference_mode():
    device = torch.device("cpu")
    with torch.inference_mode():
        first = prior_on(device, "normal", 1.0, 0.123)
    assert prior_on(device, "normal", 1.0, 0.123) is first
    loc = torch.zeros(3, requires_grad=True)
    kl(Normal(loc, torch.ones(3)), first).sum().backward()
    torch.testing.assert_close(loc.grad, torch.full((3,), -1 / 0.123**2))


def test_a_prior_that_is_made_under_fake_tensors_is_not_kept():
    device = torch.device("cpu")
    with FakeTensorMode():
        made = prior_on(device, "normal", 1.0, 0.321)
        assert isinstance(made.loc, FakeTensor)
    assert not isinstance(prior_on(device, "normal", 1.0, 0.321).loc, FakeTensor)


def test_a_prior_that_is_made_inside_a_transform_is_not_kept():
    device = torch.device("cpu")

    def scaled(x):
        return (x / prior_on(device, "normal", 1.0, 0.432).scale).sum()

    torch.func.grad(scaled)(torch.ones(3))
    assert not torch._C._functorch.is_functorch_wrapped_tensor(prior_on(device, "normal", 1.0, 0.432).scale)
