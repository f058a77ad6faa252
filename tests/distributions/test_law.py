"""Laws of a factor: draws follow the declared distribution, and depend on noise alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from leanbayes.distributions.law import law, LAWS, LIMIT
from leanbayes.distributions.positive import inverse_softplus, softplus
from tests.readings import noise_of

CPU = torch.device("cpu")
DRAWS = 50_000

CONTINUOUS = ["normal", "cauchy", "log_normal", "half_cauchy"]
CASES = [
    ("normal", 1.0, 0.1),
    ("normal", -0.5, 2.0),
    ("cauchy", 1.0, 0.1),
    ("cauchy", 0.3, 2.0),
    ("log_normal", 0.0, 0.1),
    ("log_normal", 1.0, 1.0),
    ("half_cauchy", 0.0, 0.1),
    ("half_cauchy", 0.0, 3.0),
]
"""Narrow, and so wide that some draws of a clipped law hit the limit."""

few = settings(deadline=None, derandomize=True, max_examples=50)


def twin(name: str, loc: float, scale: float):
    return {
        "normal": lambda: stats.norm(loc, scale),
        "cauchy": lambda: stats.cauchy(loc, scale),
        "log_normal": lambda: stats.lognorm(s=scale, scale=math.exp(loc)),
        "half_cauchy": lambda: stats.halfcauchy(scale=scale),
    }[name]()


def sample(name: str, loc: float, scale: float, count: int, generator: torch.Generator | None) -> torch.Tensor:
    this = law(name)
    return this.sample(torch.tensor(loc), torch.tensor(scale), noise_of(this, (count,), generator))


# ------------------------------------------------------------------------------- samples


@pytest.mark.parametrize("seeded", [True, False], ids=["generator", "global"])
@pytest.mark.parametrize(("name", "loc", "scale"), CASES)
def test_samples_follow_the_declared_distribution(name, loc, scale, seeded):
    torch.manual_seed(0)
    z = sample(name, loc, scale, DRAWS, torch.Generator().manual_seed(1) if seeded else None)
    declared = law(name).distribution(torch.tensor(loc), torch.tensor(scale))

    def below(value) -> torch.Tensor:
        return declared.cdf(torch.as_tensor(value, dtype=torch.float32)).double()

    # Clipping moves what lies outside to the limits and leaves the rest as it was.
    low, high = below(-LIMIT if name in ("normal", "cauchy") else 0.0), below(LIMIT)
    if name == "normal":
        low, high = torch.tensor(0.0), torch.tensor(1.0)
    inside = z if name == "normal" else z[z.abs() < LIMIT]
    clipped, expected = 1 - len(inside) / DRAWS, 1 - (high - low).item()
    assert abs(clipped - expected) <= 4 * math.sqrt(expected * (1 - expected) / DRAWS) + 1e-6
    test = stats.kstest(inside.double().numpy(), lambda value: ((below(value) - low) / (high - low)).numpy())
    assert test.pvalue > 1e-3


@pytest.mark.parametrize(("name", "loc", "scale"), CASES)
def test_declared_distribution_has_the_density_of_the_law(name, loc, scale):
    values = torch.tensor([0.05, 0.4, 1.0, 1.7, 6.0], dtype=torch.float64)
    declared = law(name).distribution(torch.tensor(loc).double(), torch.tensor(scale).double())
    expected = torch.from_numpy(twin(name, loc, scale).logpdf(values.numpy()))
    torch.testing.assert_close(declared.log_prob(values), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["cauchy", "log_normal", "half_cauchy"])
def test_heavy_tails_are_clipped_at_the_limit(name):
    z = sample(name, 1.0, 3.0, 10_000, torch.Generator().manual_seed(0))
    assert z.max() == LIMIT
    assert z.min() >= (-LIMIT if name == "cauchy" else 0)
    assert (z.min() == -LIMIT) == (name == "cauchy")


def test_normal_factors_are_not_clipped():
    assert sample("normal", 50.0, 1.0, 100, torch.Generator().manual_seed(0)).min() > LIMIT


def test_a_point_is_its_location_whatever_the_noise():
    loc = torch.tensor([0.3, 40.0])
    assert torch.equal(law("point").sample(loc, torch.zeros(2), torch.empty(2, 0)), loc)
    assert law("point").distribution(loc, torch.zeros(2)).mean is loc


@pytest.mark.parametrize("name", CONTINUOUS)
def test_samples_are_differentiable_in_location_and_scale(name):
    this = law(name)
    noise = torch.tensor([0.1, 0.4, 0.9, 1.5, 3.0])
    loc = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    scale = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    uniform = noise.atan() / math.pi + 0.5  # its Cauchy number is `noise`
    z = this.sample(loc, scale, uniform if this.noise == "uniform" else noise)
    along_scale = {"log_normal": z * noise, "half_cauchy": noise}.get(name, noise)
    along_loc = {"log_normal": z, "half_cauchy": torch.zeros(5)}.get(name, torch.ones(5))
    for i in range(5):
        by_loc, by_scale = torch.autograd.grad(z[i], (loc, scale), retain_graph=True, allow_unused=True)
        assert (0.0 if by_loc is None else by_loc.item()) == pytest.approx(along_loc[i].item(), rel=1e-6)
        assert by_scale.item() == pytest.approx(along_scale[i].item(), rel=1e-6)


# ------------------------------------------------------------------------------- noise


@pytest.mark.parametrize("name", CONTINUOUS)
def test_noise_depends_on_the_generator_alone(name):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = noise_of(law(name), (4, 3), torch.Generator().manual_seed(7))
    again = noise_of(law(name), (4, 3), torch.Generator().manual_seed(7))
    other = noise_of(law(name), (4, 3), torch.Generator().manual_seed(8))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_noise_without_a_generator_comes_from_the_global_one(name):
    torch.manual_seed(5)
    first, second = noise_of(law(name), (4,), None), noise_of(law(name), (4,), None)
    torch.manual_seed(5)
    assert torch.equal(noise_of(law(name), (4,), None), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("name", CONTINUOUS)
@few
@given(shape=st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple), seed=st.none() | st.integers(0, 9))
def test_noise_is_float32_and_finite_in_any_shape(name, shape, seed):
    noise = noise_of(law(name), shape, None if seed is None else torch.Generator().manual_seed(seed))
    assert noise.shape == shape
    assert noise.dtype == torch.float32
    assert noise.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", LAWS)
def test_samples_have_the_dtype_of_the_parameters(name, dtype):
    this = law(name)
    parameter = torch.full((3,), 0.5, dtype=dtype)
    assert this.sample(parameter, parameter, noise_of(this, (3,), None)).dtype == dtype


# ------------------------------------------------------------------------------- centres


@pytest.mark.parametrize("name", ["normal", "cauchy", "log_normal", "point"])
@few
@given(centre=st.floats(0.05, 5.0), scale=st.floats(0.001, 2.0))
def test_locate_inverts_centre(name, centre, scale):
    scale_ = torch.tensor(scale, dtype=torch.float64)
    loc = law(name).locate(torch.tensor(centre, dtype=torch.float64), scale_)
    assert law(name).centre(loc, scale_).item() == pytest.approx(centre, rel=1e-12)


@pytest.mark.parametrize(("name", "loc", "scale"), CASES)
def test_centre_is_the_mean_or_else_the_median(name, loc, scale):
    expected = twin(name, loc, scale)
    expected = expected.median() if "cauchy" in name else expected.mean()
    assert law(name).centre(torch.tensor(loc), torch.tensor(scale)).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("around", [0.5, 1.0])
@pytest.mark.parametrize("name", ["normal", "cauchy", "log_normal"])
def test_prior_is_centred_where_it_is_told(name, around):
    prior = law(name).prior(around, 0.3)
    assert prior.scale.item() == pytest.approx(0.3)
    assert law(name).centre(prior.loc, prior.scale).item() == pytest.approx(around, rel=1e-6)


def test_half_cauchy_prior_has_its_median_at_the_scale():
    assert law("half_cauchy").prior(1.0, 0.3).cdf(torch.tensor(0.3)).item() == pytest.approx(0.5, abs=1e-6)


def test_unknown_law_names_the_known_ones():
    with pytest.raises(ValueError, match="normal, cauchy, log_normal, half_cauchy, point, got 'laplace'"):
        law("laplace")


# ------------------------------------------------------------------------------- positive numbers


@few
@given(raw=st.floats(-60.0, 60.0))
def test_softplus_is_the_formula(raw):
    value = softplus(torch.tensor(raw, dtype=torch.float64)).item()
    assert value == pytest.approx(max(raw, 0) + math.log1p(math.exp(-abs(raw))) + 1e-7, rel=1e-8)
    assert value > 0


@few
@given(value=st.floats(2e-7, 1e3))
def test_inverse_softplus_round_trips_in_double(value):
    raw = inverse_softplus(torch.tensor(value, dtype=torch.float64))
    assert softplus(raw).item() == pytest.approx(value, rel=1e-9)


@few
@given(value=st.floats(1e-5, 1e3))
def test_inverse_softplus_round_trips_in_single(value):
    raw = inverse_softplus(torch.tensor(value, dtype=torch.float32))
    assert softplus(raw).item() == pytest.approx(value, rel=2e-6)


@few
@given(raw=st.floats(-12.0, 60.0))
def test_softplus_round_trips(raw):
    assert inverse_softplus(softplus(torch.tensor(raw, dtype=torch.float64))).item() == pytest.approx(raw, abs=1e-8)


def test_scales_stay_positive_and_their_logarithms_finite():
    value = softplus(torch.tensor([-1e4, -100.0]))
    assert torch.equal(value, torch.full((2,), 1e-7))


def test_paper_start_has_its_raw_value():
    # sigma0 = sqrt(d / (1 - d)) with d = 1e-3 is rho0 = -3.437 in the authors' code.
    assert inverse_softplus(torch.tensor(math.sqrt(1e-3 / (1 - 1e-3)))).item() == pytest.approx(-3.437, abs=1e-3)
