"""A factor: K distributions over n numbers, started where they should start."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from leanbayes.distributions.assignment import Assignment
from leanbayes.distributions.factor import Factor, joint_distribution, random_signs, spread_around
from leanbayes.distributions.law import LAWS, LIMIT
from tests.readings import cauchy, noise_of

CPU = torch.device("cpu")
POSITIVE = ["log_normal", "half_cauchy"]
few = settings(deadline=None, derandomize=True, max_examples=30)


def make(name: str, components: int = 3, count: int = 4, *, dtype: torch.dtype = torch.float64) -> Factor:
    torch.manual_seed(0)
    centres = 0.5 + torch.rand(components, count, dtype=dtype)
    return Factor(name, centres, 0.05 + 0.2 * torch.rand(components, count, dtype=dtype))


def draw_noise(factor: Factor, rows: int, generator: torch.Generator | None) -> torch.Tensor:
    return noise_of(factor.law, (rows, factor.count if factor.law.has_scale else 0), generator)


def by_hand(factor: Factor, name: str, k: int, noise: torch.Tensor) -> torch.Tensor:
    """Write out z for one component from the raw parameters."""
    loc = factor.loc[k] if name != "half_cauchy" else None
    if name == "point":
        return loc
    scale = factor.rho[k].exp().log1p() + 1e-7
    return {
        "normal": lambda: loc + scale * noise,
        "cauchy": lambda: (loc + scale * noise).clip(-LIMIT, LIMIT),
        "log_normal": lambda: (loc + scale * noise).exp().clip(max=LIMIT),
        "half_cauchy": lambda: (scale * noise).clip(max=LIMIT),
    }[name]()


@pytest.mark.parametrize("name", LAWS)
@few
@given(components=st.integers(1, 5), count=st.integers(1, 6), rows=st.integers(1, 7))
def test_shapes_are_components_or_rows_by_factors(name, components, count, rows):
    factor = make(name, components, count)
    component = Assignment(torch.arange(rows) % components)
    noise = draw_noise(factor, rows, None)
    assert noise.shape == ((rows, 0) if name == "point" else (rows, count))
    assert factor(component, noise).shape == (rows, count)
    assert factor(component, None).shape == (rows, count)
    assert factor(None, None).shape == (1, count)
    assert all(parameter.shape == (components, count) for parameter in factor.parameters_of_all())
    assert factor.distribution().batch_shape == (components, count)


@pytest.mark.parametrize("name", LAWS)
def test_each_row_samples_the_law_of_its_component(name):
    factor = make(name)
    component = Assignment(torch.tensor([2, 0, 0, 1]))
    noise = draw_noise(factor, 4, torch.Generator().manual_seed(1))
    standard = {"cauchy": cauchy, "half_cauchy": lambda u: cauchy(u).abs()}.get(name, lambda n: n)(noise)
    z = factor(component, noise)
    for row, k in enumerate(component.rows().tolist()):
        expected = by_hand(factor, name, k, standard[row].double())
        torch.testing.assert_close(z[row], expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("normal", {"loc", "rho"}),
        ("cauchy", {"loc", "rho"}),
        ("log_normal", {"loc", "rho"}),
        ("half_cauchy", {"rho"}),
        ("point", {"loc"}),
    ],
)
def test_a_law_keeps_only_the_parameters_it_has(name, kept):
    assert {key for key, _ in make(name).named_parameters()} == kept


@pytest.mark.parametrize("name", LAWS)
def test_factor_starts_at_the_given_centres_and_scales(name):
    torch.manual_seed(0)
    centres, stds = 0.5 + torch.rand(3, 4, dtype=torch.float64), torch.full((3, 4), 0.2, dtype=torch.float64)
    factor = Factor(name, centres, stds)
    torch.testing.assert_close(factor(Assignment(torch.arange(3)), None), centres, rtol=1e-10, atol=0)
    torch.testing.assert_close(factor(None, None), centres.mean(0, keepdim=True), rtol=1e-10, atol=0)
    scale = {"half_cauchy": centres, "point": torch.zeros_like(stds)}.get(name, stds)
    torch.testing.assert_close(factor.parameters_of_all()[1], scale, rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", LAWS)
def test_component_laws_are_float32_whatever_the_parameters(name):
    law = make(name, dtype=torch.float64).distribution()
    assert all(getattr(law, parameter).dtype == torch.float32 for parameter in law.arg_constraints)


@pytest.mark.parametrize("name", LAWS)
def test_joint_laws_stand_side_by_side(name):
    factors = [make(name, 3, 4), make(name, 3, 1), make(name, 3, 2)]
    joint, alone = joint_distribution(factors), [factor.distribution() for factor in factors]
    for parameter in joint.arg_constraints:
        assert torch.equal(getattr(joint, parameter), torch.cat([getattr(law, parameter) for law in alone], 1))


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("around", [0.5, 1.0])
def test_average_centre_of_a_spread_factor_is_exactly_the_middle(name, around):
    torch.manual_seed(0)
    centres = spread_around(around, 0.05, (4, 50), device=CPU, dtype=torch.float64)
    factor = Factor(name, centres, torch.full_like(centres, 0.03))
    torch.testing.assert_close(factor(None, None), torch.full((1, 50), around).double(), rtol=1e-12, atol=1e-12)


@few
@given(components=st.integers(1, 8), count=st.integers(1, 9), around=st.floats(-2.0, 2.0), spread=st.floats(0.0, 3.0))
def test_spread_centres_average_to_the_middle_in_float32(components, count, around, spread):
    torch.manual_seed(0)
    centres = spread_around(around, spread, (components, count), device=CPU, dtype=torch.float32)
    assert centres.shape == (components, count)
    assert centres.dtype == torch.float32
    torch.testing.assert_close(centres.mean(0), torch.full((count,), around), rtol=0, atol=2e-6)


def test_one_component_starts_exactly_in_the_middle():
    torch.manual_seed(0)
    assert torch.equal(spread_around(1.0, 0.5, (1, 20), device=CPU, dtype=torch.float32), torch.ones(1, 20))


@pytest.mark.parametrize("components", [1, 2, 16])
def test_centres_that_are_not_centred_have_the_whole_spread(components):
    torch.manual_seed(0)
    count, spread = 20_000, 0.5
    shape = (components, count)
    centres = spread_around(1.0, spread, shape, device=CPU, dtype=torch.float64, centre=False)
    assert centres.shape == shape
    assert stats.kstest(((centres - 1) / spread).flatten().numpy(), "norm").pvalue > 1e-3
    average = (centres.mean(0) - 1) / (spread / math.sqrt(components))  # of K independent ones
    assert stats.kstest(average.numpy(), "norm").pvalue > 1e-3
    torch.manual_seed(0)
    centred = spread_around(1.0, spread, shape, device=CPU, dtype=torch.float64)
    torch.testing.assert_close(centres - centres.mean(0) + 1, centred)  # the same draw, moved


@pytest.mark.parametrize("components", [2, 4])
def test_spread_centres_have_the_asked_standard_deviation(components):
    # Centring removes one of K degrees of freedom: each column's sum of squares is spread^2 chi^2_{K-1}.
    torch.manual_seed(0)
    columns, spread = 20_000, 0.3
    centres = spread_around(1.0, spread, (components, columns), device=CPU, dtype=torch.float64)
    squares = (centres - 1).square().sum(0) / spread**2
    freedom = components - 1
    assert abs(squares.mean() - freedom) < 4 * math.sqrt(2 * freedom / columns)


@pytest.mark.parametrize("probability", [0.5, 0.75, 0.1])
def test_random_signs_are_positive_with_the_asked_frequency(probability):
    torch.manual_seed(0)
    signs = random_signs(probability, (100, 400), device=CPU, dtype=torch.float64)
    error = math.sqrt(probability * (1 - probability) / signs.numel())
    assert torch.equal(signs.abs(), torch.ones(100, 400, dtype=torch.float64))
    assert abs((signs > 0).double().mean() - probability) < 4 * error


@pytest.mark.parametrize(("probability", "sign"), [(0.0, -1.0), (1.0, 1.0)])
def test_certain_signs_are_all_alike(probability, sign):
    assert torch.equal(random_signs(probability, (5, 6), device=CPU, dtype=torch.float32), torch.full((5, 6), sign))


@pytest.mark.parametrize("smallest", [-0.25, 0.0])
@pytest.mark.parametrize("name", POSITIVE)
def test_positive_laws_refuse_centres_that_are_not(name, smallest):
    centres = torch.tensor([[1.0, smallest], [1.0, 2.0]])
    with pytest.raises(ValueError, match=f"is positive, but component centres start at {smallest:.3g}.*init_spread"):
        Factor(name, centres, torch.full_like(centres, 0.1))


@pytest.mark.parametrize("name", ["normal", "cauchy", "point"])
def test_real_laws_accept_centres_of_any_sign(name):
    centres = torch.tensor([[1.0, -1.0]])
    assert torch.equal(Factor(name, centres, torch.full_like(centres, 0.1))(None, None), centres)


@pytest.mark.parametrize("name", ["normal", "cauchy", "log_normal", "half_cauchy"])
def test_seeded_noise_repeats_and_unseeded_noise_does_not(name):
    factor = make(name)
    seeded = [draw_noise(factor, 5, torch.Generator().manual_seed(2)) for _ in range(2)]
    assert torch.equal(*seeded)
    assert not torch.equal(draw_noise(factor, 5, None), draw_noise(factor, 5, None))
