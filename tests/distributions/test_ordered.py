"""Ordered masks: draws, divergences and gradients, against enumeration, quadrature and differences."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.distributions import kl_divergence, RelaxedOneHotCategorical

from leanbayes.distributions.ordered import (
    downhill,
    geometric_tails,
    gumbel,
    keep_of,
    log_tails_of,
    tail_kl,
    uniform_tails,
)
from tests.oracle.ordered import BernoulliChain, Downhill, kl_downhill_chain

DOUBLE = torch.float64
NEVER = -math.inf
KEEPS = [[1.0], [1.0, 0.3], [1.0, 0.9, 0.5, 0.2], [1.0, 1.0, 0.7, 0.0, 0.4], [1.0, 0.95, 0.95, 0.1, 0.6, 0.99]]
"""Chains of one to six elements, with steps that are sure and steps that never happen."""

TAILS = [[0.4, 0.6], [0.05, 0.95], [0.2, 0.3, 0.5], [0.9, 0.09, 0.01]]

few = settings(deadline=None, derandomize=True, max_examples=50)


def vector(values) -> torch.Tensor:
    return torch.tensor(values, dtype=DOUBLE)


def all_masks(count: int) -> list[tuple[int, ...]]:
    """Every vector of zeros and ones, ordered or not."""
    return list(itertools.product([0, 1], repeat=count))


def probability(mask: tuple[int, ...], keep: list[float]) -> float:
    """Multiply the conditional probabilities of equation (1), element by element."""
    result, before = 1.0, 1
    for value, pi in zip(mask, keep, strict=True):
        on = pi * before
        result *= on if value else 1 - on
        before = value
    return result


def numbers(count: int, shape: tuple[int, ...] = (), seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return gumbel(torch.rand((*shape, count), dtype=DOUBLE, generator=generator))


def tails_beyond(keep_logits: torch.Tensor, always_on: int) -> torch.Tensor:
    """Log tails with -inf for those before the last element that is always on, as an ordering unit has them."""
    return torch.nn.functional.pad(log_tails_of(keep_logits[..., always_on - 1 :]), (always_on - 1, 0), value=NEVER)


def is_ordered(z: torch.Tensor) -> bool:
    return bool((z.diff(dim=-1) <= 0).all() and (z[..., 0] == 1).all() and (z >= 0).all())


# ------------------------------------------------------------------------------- Gumbel noise


def test_gumbel_noise_is_the_inverse_of_its_distribution_function():
    uniform = torch.linspace(0.001, 0.999, 101, dtype=DOUBLE)
    torch.testing.assert_close(gumbel(uniform), torch.from_numpy(stats.gumbel_r.ppf(uniform.numpy())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gumbel_noise_is_finite_and_rises_at_both_ends(dtype):
    kind = torch.finfo(dtype)
    noise = gumbel(torch.tensor([0.0, kind.tiny, 1e-7, 0.5, 1 - kind.eps, 1.0], dtype=dtype))
    assert noise.isfinite().all()
    assert (noise.diff() >= 0).all()


# ------------------------------------------------------------------------------- the chain


@pytest.mark.parametrize("keep", KEEPS)
def test_chain_agrees_with_the_conditional_probabilities_on_every_vector(keep):
    chain = BernoulliChain(vector(keep))
    masks = all_masks(len(keep))
    expected = vector([probability(mask, keep) for mask in masks])
    log_prob = chain.log_prob(vector(masks))
    torch.testing.assert_close(log_prob.exp(), expected, rtol=1e-12, atol=1e-15)
    assert log_prob.exp().sum().item() == pytest.approx(1, abs=1e-12)
    assert torch.equal(log_prob == NEVER, expected == 0)


@pytest.mark.parametrize("keep", KEEPS)
def test_moments_tails_and_entropy_agree_with_enumeration(keep):
    chain, count = BernoulliChain(vector(keep)), len(keep)
    masks = all_masks(count)
    weights = vector([probability(mask, keep) for mask in masks])
    mean = weights @ vector(masks)
    torch.testing.assert_close(chain.mean, mean, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(chain.variance, weights @ (vector(masks) - mean).square(), rtol=1e-9, atol=1e-15)
    tails = vector([probability((1,) * j + (0,) * (count - j), keep) for j in range(1, count + 1)])
    torch.testing.assert_close(chain.tails, tails, rtol=1e-12, atol=1e-15)
    assert chain.tails.sum().item() == pytest.approx(1, abs=1e-12)
    assert chain.entropy().item() == pytest.approx(stats.entropy(weights.numpy()), abs=1e-12)


def test_chain_samples_are_masks_with_the_frequencies_of_their_tails():
    chain, draws = BernoulliChain(torch.tensor([1.0, 0.9, 0.5, 0.2])), 200_000
    masks = chain.sample((draws,))
    assert chain.support.check(masks).all()
    counts = torch.bincount(masks.sum(-1).long() - 1, minlength=4)
    error = (chain.tails * (1 - chain.tails) / draws).sqrt()
    assert ((counts / draws - chain.tails).abs() <= 4 * error).all()


@pytest.mark.parametrize(
    "mask", [[0, 0, 0], [0, 1, 1], [1, 0, 1], [1, 0.5, 0], [2, 1, 0], [1, 1, -1], [1, math.nan, 0]]
)
def test_what_is_no_ordered_mask_has_probability_zero(mask):
    chain = BernoulliChain(torch.tensor([1.0, 0.5, 0.5]))
    assert chain.log_prob(torch.tensor(mask)) == NEVER
    assert not chain.support.check(torch.tensor(mask))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_a_mask_may_have_any_type(dtype):
    assert BernoulliChain(torch.tensor([1.0, 0.5])).log_prob(torch.tensor([1, 1], dtype=dtype)).exp() == 0.5


def test_log_tails_stay_finite_where_probabilities_underflow():
    log_tails = BernoulliChain(torch.tensor([1.0] + 80 * [0.05])).log_tails
    expected = torch.arange(81) * math.log(0.05) + torch.tensor(80 * [math.log(0.95)] + [0.0])
    torch.testing.assert_close(log_tails, expected)


def test_batches_and_expansions_of_a_chain():
    chain = BernoulliChain(torch.tensor([[1.0, 0.5, 0.5], [1.0, 0.9, 0.1]]))
    assert (chain.batch_shape, chain.event_shape) == ((2,), (3,))
    assert chain.sample((5, 4)).shape == (5, 4, 2, 3)
    assert chain.log_prob(torch.ones(3)).shape == (2,)
    assert chain.log_prob(torch.ones(5, 2, 3)).shape == (5, 2)
    wide = chain.expand((4, 2))
    assert (wide.batch_shape, wide.event_shape, wide.entropy().shape) == ((4, 2), (3,), (4, 2))
    assert wide.sample((7,)).shape == (7, 4, 2, 3)
    assert torch.equal(wide.log_tails[3], chain.log_tails)
    assert chain.batch_shape == (2,)


# ------------------------------------------------------------------------------- tails


@pytest.mark.parametrize("logits", [[0.3], [3.0, 3.0, 3.0], [-5.0, 2.0, 0.1, 5.0]])
def test_log_tails_of_logits_are_those_of_the_chain(logits):
    keep = torch.cat((torch.ones(1, dtype=DOUBLE), vector(logits).sigmoid()))
    torch.testing.assert_close(log_tails_of(vector(logits)), BernoulliChain(keep).log_tails)


def test_log_tails_of_large_logits_are_accurate():
    # Twice a hundred: in probabilities, one minus one.
    found = log_tails_of(torch.tensor([100.0, -100.0, 100.0]))
    torch.testing.assert_close(found, torch.tensor([-100.0, 0.0, -200.0, -100.0]))


@pytest.mark.parametrize("always_on", [1, 2, 4])
def test_elements_that_are_always_on_never_end_a_mask(always_on):
    logits = torch.tensor([0.3, -1.0, 2.0], requires_grad=True)
    log_tails = tails_beyond(logits, always_on)
    assert (log_tails[: always_on - 1] == NEVER).all()
    assert log_tails.exp().sum().item() == pytest.approx(1, abs=1e-6)
    keep = torch.cat((torch.ones(always_on), logits.detach().sigmoid()[always_on - 1 :]))
    torch.testing.assert_close(log_tails.exp(), BernoulliChain(keep).tails)
    tail_kl(log_tails, torch.zeros(4)).backward()
    assert logits.grad.isfinite().all()
    assert (logits.grad[: always_on - 1] == 0).all()
    assert (logits.grad[always_on - 1 :] != 0).all()


def test_keep_probabilities_are_products_down_to_the_smallest():
    logits = torch.linspace(-5, 5, 31)
    expected = torch.cat([torch.ones(1).double(), logits.double().sigmoid().cumprod(0)])
    assert expected.min() < 1e-15
    torch.testing.assert_close(keep_of(logits).double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(keep_of(logits.double()), expected, rtol=1e-12, atol=0)


def test_log_tails_have_any_leading_shape():
    logits = torch.randn(2, 3, 4)
    torch.testing.assert_close(log_tails_of(logits)[1, 2], log_tails_of(logits[1, 2]))


@pytest.mark.parametrize(("count", "stop"), [(1, 0.3), (5, 0.3), (8, 0.05), (4, 0.5)])
def test_geometric_tails_are_a_truncated_geometric_law(count, stop):
    expected = stats.geom(stop).pmf(range(1, count + 1))
    expected[-1] = stats.geom(stop).sf(count - 1)
    torch.testing.assert_close(geometric_tails(count, stop), torch.tensor(expected.tolist()))


def test_geometric_tails_at_their_limits():
    assert geometric_tails(3, 0.0).tolist() == [0, 0, 1]
    assert geometric_tails(3, 1.0).tolist() == [1, 0, 0]


def test_uniform_tails_are_equal():
    assert uniform_tails(4).tolist() == [0.25, 0.25, 0.25, 0.25]


# ------------------------------------------------------------------------------- Downhill: density


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("tails", TAILS)
def test_density_integrates_to_one(tails, temperature):
    # With c = softmax(x, 0) the singular borders move to infinity, and dc = prod(c) dx. The mass lies around `centre`.
    step = 0.1
    line = step * torch.arange(-300, 301, dtype=DOUBLE)
    centre = (vector(tails[:-1]) / tails[-1]).log() / temperature
    x = centre + torch.cartesian_prod(*(len(tails) - 1) * [line]).reshape(-1, len(tails) - 1)
    c = torch.nn.functional.pad(x, (0, 1)).softmax(-1)
    z = c.flip(-1).cumsum(-1).flip(-1)
    density = Downhill(vector(tails), temperature=temperature).log_prob(z).exp()
    integral = (density * c.prod(-1)).sum() * step ** (len(tails) - 1)
    assert integral.item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("tails", [*TAILS, [0.1, 0.2, 0.3, 0.15, 0.25]])
def test_density_is_that_of_the_relaxed_one_hot_vector(tails, temperature):
    # z -> (z_1 - z_2, ..., z_K) has a determinant of one.
    relaxed = RelaxedOneHotCategorical(vector(temperature), probs=vector(tails))
    c = torch.randn(100, len(tails), dtype=DOUBLE).softmax(-1)
    z = 1 - torch.nn.functional.pad(c.cumsum(-1)[:, :-1], (1, 0))
    law = Downhill(vector(tails), temperature=temperature)
    torch.testing.assert_close(law.log_prob(z), relaxed.log_prob(c), rtol=1e-8, atol=1e-8)


def test_density_leaves_out_tails_that_never_occur():
    whole, part = Downhill(vector([0.0, 0.3, 0.0, 0.7]), temperature=0.7), Downhill(vector([0.3, 0.7]), temperature=0.7)
    torch.testing.assert_close(whole.log_prob(vector([1, 1, 0.4, 0.4])), part.log_prob(vector([1, 0.4])))
    assert whole.log_prob(vector([1, 0.9, 0.4, 0.4])) == NEVER


@pytest.mark.parametrize("z", [[0.9, 0.5, 0.1], [1, 0.5, 0.6], [1, 0.5, -0.1], [1, 1.1, 0.2], [1, math.nan, 0.2]])
def test_density_is_zero_off_the_support(z):
    law = Downhill(vector([0.2, 0.3, 0.5]), temperature=1.0)
    assert law.log_prob(vector(z)) == NEVER
    assert not law.support.check(vector(z))


def test_density_has_finite_gradients_where_rounding_made_a_step_zero():
    logits = torch.tensor([0.0, 1.0, NEVER, 2.0], requires_grad=True)
    Downhill(logits=logits, temperature=0.5).log_prob(torch.tensor([1.0, 1.0, 0.0, 0.0])).backward()
    assert logits.grad.isfinite().all()


# ------------------------------------------------------------------------------- Downhill: samples


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@few
@given(
    logits=st.lists(st.floats(-30, 30), min_size=1, max_size=9),
    temperature=st.floats(0.01, 20),
    never=st.integers(0, 8),
    hard=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_samples_begin_with_one_and_never_rise(dtype, logits, temperature, never, hard, seed):
    log_tails = torch.tensor(logits, dtype=dtype)
    log_tails[: min(never, len(logits) - 1)] = NEVER
    z = downhill(log_tails, temperature, numbers(len(logits), (20,), seed).to(dtype), hard)
    assert z.dtype == dtype
    assert is_ordered(z)
    assert (z[:, : min(never, len(logits) - 1) + 1] == 1).all()


def test_sample_is_one_less_the_earlier_steps():
    log_tails, noise = log_tails_of(vector([1.0, -0.5, 2.0])), numbers(4, (10,))
    c = ((log_tails + noise) / 0.7).exp()
    c = c / c.sum(-1, keepdim=True)
    expected = torch.stack([1 - c[:, :i].sum(-1) for i in range(4)], -1)
    torch.testing.assert_close(downhill(log_tails, 0.7, noise), expected)


def test_soft_samples_follow_their_density():
    # K = 2: P(z_2 <= x) by the trapezoid rule.
    law = Downhill(vector([0.3, 0.7]), temperature=1.5)
    grid = torch.linspace(1e-9, 1 - 1e-9, 20_001, dtype=DOUBLE)
    density = law.log_prob(torch.stack((torch.ones_like(grid), grid), -1)).exp()
    below = torch.cumulative_trapezoid(density, grid)
    draws = law.rsample((20_000,))[:, 1]
    assert stats.kstest(np.interp(draws, grid[1:], below), "uniform").pvalue > 1e-3


@pytest.mark.parametrize("temperature", [0.1, 2.0])
def test_hard_samples_keep_elements_as_often_as_the_tails_say(temperature):
    tails, draws = torch.tensor([0.1, 0.0, 0.3, 0.35, 0.25]), 200_000
    law = Downhill(tails, temperature=temperature)
    keep = 1 - torch.tensor([0.0, 0.1, 0.1, 0.4, 0.75])
    torch.testing.assert_close(law.keep, keep)
    masks = law.rsample((draws,), hard=True)
    assert law.limit.support.check(masks).all()
    error = (keep * (1 - keep) / draws).sqrt()
    assert ((masks.mean(0) - keep).abs() <= 4 * error).all()


def test_soft_samples_become_hard_as_the_temperature_falls():
    log_tails, noise = log_tails_of(vector([1.0, 0.0, 2.0])), numbers(4, (1000,))
    gap = (downhill(log_tails, 1e-3, noise) - downhill(log_tails, 1e-3, noise, hard=True)).abs().amax(-1)
    # They differ only where the two best scores are closer than the temperature can tell apart.
    best = (log_tails + noise).topk(2, -1).values
    assert (gap[best[:, 0] - best[:, 1] > 0.02] < 1e-8).all()
    assert (gap < 1e-8).double().mean() > 0.98


def test_batches_and_expansions_of_downhill():
    law = Downhill(logits=torch.randn(2, 3), temperature=0.5)
    assert (law.batch_shape, law.event_shape, law.has_rsample) == ((2,), (3,), True)
    assert law.rsample((5, 4)).shape == law.rsample((5, 4), hard=True).shape == (5, 4, 2, 3)
    assert law.log_prob(law.sample((5,))).shape == (5, 2)
    assert not law.sample().requires_grad
    wide = law.expand((4, 2))
    assert (wide.batch_shape, wide.event_shape, wide.limit.batch_shape) == ((4, 2), (3,), (4, 2))
    assert wide.rsample((7,)).shape == (7, 4, 2, 3)
    assert torch.equal(wide.tails[3], law.tails)
    assert law.batch_shape == (2,)


# ------------------------------------------------------------------------------- Downhill: gradients


def cost(z: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(-1, 2, z.shape[-1], dtype=z.dtype)
    return ((z * weights).sum(-1).sin() + z.square().prod(-1)).mean()


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize("always_on", [1, 3])
def test_soft_gradients_agree_with_finite_differences_on_the_same_noise(temperature, always_on):
    logits, noise, step = vector([0.5, -0.3, 1.0, 0.2]), numbers(5, (200,)), 1e-5

    def expected_cost(logits: torch.Tensor) -> torch.Tensor:
        return cost(downhill(tails_beyond(logits, always_on), temperature, noise))

    found = torch.autograd.functional.jacobian(expected_cost, logits)
    sides = [[expected_cost(logits + sign * step * axis) for sign in (1, -1)] for axis in torch.eye(4, dtype=DOUBLE)]
    differences = torch.stack([(up - down) / (2 * step) for up, down in sides])
    torch.testing.assert_close(found, differences, rtol=1e-6, atol=1e-9)


def test_gradients_reach_tails_past_tails_that_never_occur():
    tails = vector([0.0, 0.5, 0.2, 0.3, 0.0]).requires_grad_()
    cost(downhill(Downhill(tails, temperature=1.0).log_tails, 0.8, numbers(5, (50,)))).backward()
    assert tails.grad.isfinite().all()
    assert (tails.grad[[0, 4]] == 0).all()
    assert (tails.grad[1:4] != 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_straight_through_has_values_of_the_mask_and_gradients_of_the_slope(dtype):
    noise, weights = numbers(6, (100,)).to(dtype), torch.randn(100, 6, dtype=dtype)
    gradients = []
    for hard in (False, True):
        logits = torch.tensor([0.5, -0.3, 1.0, 0.2, 3.0], dtype=dtype, requires_grad=True)
        z = downhill(tails_beyond(logits, 2), 2.0, noise, hard)
        (z * weights).sum().backward()
        gradients.append(logits.grad)
    assert ((z == 0) | (z == 1)).all()
    tail = (tails_beyond(logits, 2) + noise).argmax(-1)
    assert torch.equal(z.sum(-1).long() - 1, tail)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)
    assert (gradients[0][1:] != 0).all()


# ------------------------------------------------------------------------------- Downhill: the limit


@pytest.mark.parametrize("tails", [*TAILS, [1.0], [0.0, 0.0, 0.6, 0.4], [0.5, 0.0, 0.5, 0.0, 0.0], [0.0, 1.0, 0.0]])
def test_limit_has_the_same_tails(tails):
    law = Downhill(vector(tails), temperature=1.0)
    torch.testing.assert_close(law.limit.tails, vector(tails), rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(law.limit.mean, law.keep, rtol=1e-12, atol=1e-15)
    assert ((law.limit.keep >= 0) & (law.limit.keep <= 1)).all()


def test_limit_gives_back_conditional_probabilities_that_underflow_as_products():
    logits = torch.full((80,), -3.0)
    chain = Downhill(logits=log_tails_of(logits), temperature=1.0).limit
    torch.testing.assert_close(chain.keep[1:], logits.sigmoid(), rtol=1e-4, atol=0)
    BernoulliChain(chain.keep)


def test_limit_has_finite_gradients_where_tails_never_occur():
    logits = torch.tensor([NEVER, 0.5, 1.0, NEVER, NEVER], requires_grad=True)
    Downhill(logits=logits, temperature=1.0).limit.entropy().backward()
    assert logits.grad.isfinite().all()
    assert (logits.grad[1:3] != 0).all()


# ------------------------------------------------------------------------------- divergence

PAIRS = [(q, p) for q, p in itertools.product(KEEPS, KEEPS) if len(q) == len(p)] + [
    ([1.0, 0.5, 0.5, 0.5], [1.0, 0.95, 0.95, 0.95]),
    ([1.0, 1.0, 0.3, 0.8, 0.5, 0.5], [1.0, 1.0, 0.95, 0.95, 0.95, 0.95]),
    ([1.0, 0.2, 0.0, 0.7, 1.0, 0.5], [1.0, 0.9, 0.4, 0.6, 0.7, 0.8]),
]


@pytest.mark.parametrize(("q", "p"), PAIRS)
def test_divergence_agrees_with_enumeration(q, p):
    pairs = [(probability(mask, q), probability(mask, p)) for mask in all_masks(len(q))]
    expected = sum(a * math.log(a / b) for a, b in pairs if a > 0)
    one, other = BernoulliChain(vector(q)), BernoulliChain(vector(p))
    assert kl_divergence(one, other).item() == pytest.approx(expected, abs=1e-12)
    relaxed = Downhill(one.tails, temperature=0.5)
    assert kl_divergence(relaxed, other).item() == pytest.approx(expected, abs=1e-12)
    assert kl_downhill_chain(relaxed, other).item() == pytest.approx(expected, abs=1e-12)


def test_divergence_agrees_with_a_million_samples():
    q, p = BernoulliChain(vector([1.0, 0.6, 0.9, 0.3, 0.7])), BernoulliChain(vector([1.0, 0.95, 0.8, 0.95, 0.9]))
    masks = q.sample((1_000_000,))
    ratio = q.log_prob(masks) - p.log_prob(masks)
    assert abs(ratio.mean() - kl_divergence(q, p)) <= 4 * ratio.std() / 1000


@few
@given(st.lists(st.tuples(st.floats(-8, 8), st.floats(-8, 8)), min_size=1, max_size=8), st.integers(1, 9))
def test_divergence_is_positive_and_zero_from_itself(logits, always_on):
    always_on = min(always_on, len(logits) + 1)
    q, p = (tails_beyond(vector(side), always_on) for side in zip(*logits, strict=True))
    assert tail_kl(q, p) >= -1e-12
    assert tail_kl(q, q) == 0


def test_divergence_is_infinite_where_the_prior_excludes_a_mask():
    assert tail_kl(vector([0.5, 0.5]).log(), vector([1.0, 0.0]).log()) == math.inf
    assert tail_kl(vector([1.0, 0.0]).log(), vector([0.5, 0.5]).log()).item() == pytest.approx(math.log(2))
    # A tail of exp(-200) is none in float32, and infinitely many nats of nothing are nothing.
    assert tail_kl(torch.tensor([0.0, -200.0]), torch.tensor([0.0, NEVER])) == 0


def test_divergence_and_its_gradients_are_finite_where_tails_never_occur():
    tails = torch.tensor([0.0, 0.5, 0.0, 0.5]).requires_grad_()
    keep = torch.tensor([1.0, 1.0, 0.5, 0.5]).requires_grad_()
    total = kl_divergence(Downhill(tails, temperature=0.5), BernoulliChain(keep))
    total.backward()
    assert total.item() == pytest.approx(0.5 * math.log(0.5 / 0.5) + 0.5 * math.log(0.5 / 0.25))
    assert tails.grad.isfinite().all()
    assert keep.grad.isfinite().all()


def test_divergence_broadcasts_one_prior_over_a_batch():
    q, p = log_tails_of(torch.randn(3, 2, 4)), geometric_tails(5, 0.05).log()
    assert tail_kl(q, p).shape == tail_kl(p, q).shape == (3, 2)


# ------------------------------------------------------------------------------- compilation


@pytest.mark.parametrize("hard", [False, True])
def test_drawing_compiles_into_one_graph(hard):
    def draw(logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        log_tails = tails_beyond(logits, 2)
        z = downhill(log_tails, temperature, gumbel(uniform), hard)
        return (z * z.shape[-1]).sum() + tail_kl(log_tails, geometric_tails_of_five)

    geometric_tails_of_five = geometric_tails(5, 0.05).log()
    compiled = torch.compile(draw, fullgraph=True, backend="aot_eager")
    for rows in (3, 7):
        logits, uniform = torch.randn(4), torch.rand(rows, 5)
        results = []
        for function in (draw, compiled):
            leaf = logits.clone().requires_grad_()
            value = function(leaf, torch.tensor(2.0), uniform)
            value.backward()
            results.append((value.detach(), leaf.grad))
        torch.testing.assert_close(results[0], results[1])


# ------------------------------------------------------------------------------- wrong input

HALF = torch.tensor([0.5, 0.5])


def chain(*keep: float) -> BernoulliChain:
    # Asked for in words: torch.compile switches the default off for the whole process.
    return BernoulliChain(torch.tensor(keep), validate_args=True)


def slope(tails=None, logits=None, temperature=1.0) -> Downhill:
    return Downhill(tails, logits, temperature=temperature, validate_args=True)


WRONG = {
    "first element dropped": (lambda: chain(0.5, 0.5), "begin with 1, got .*; put a 1 in front"),
    "keep above one": (lambda: chain(1.0, 1.5), "parameter keep .*found invalid values"),
    "no number kept": (lambda: chain(1.0, math.nan), "parameter keep .*found invalid values"),
    "keep without elements": (lambda: BernoulliChain(torch.tensor(1.0)), r"expected keep \(..., K\) of floats"),
    "keep of integers": (lambda: chain(1, 0), "got torch.int64"),
    "neither": (lambda: slope(), "expected tails or logits, got neither"),
    "both": (lambda: slope(HALF, HALF), "expected tails or logits, got both"),
    "sum": (lambda: slope(2 * HALF), "sum to 1, got .*; divide them by their sum"),
    "negative tail": (lambda: slope(torch.tensor([1.5, -0.5])), "tails of at least 0"),
    "no tail": (lambda: slope(logits=HALF - math.inf), "parameter log_tails .*invalid values"),
    "temperature": (lambda: slope(HALF, temperature=0.0), "parameter temperature .*invalid values"),
    "temperatures": (lambda: slope(HALF, temperature=HALF), r"expected one temperature, got \(2,\)"),
    "mask": (lambda: slope(HALF).log_prob(torch.ones(3)), r"masks \(..., 2\), got .*\(3,\)"),
    "mask of a chain": (lambda: chain(1.0, 1.0).log_prob(torch.ones(1)), r"masks \(..., 2\), got .*\(1,\)"),
}


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_input_is_refused_in_words(call, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        call()


def test_values_are_not_checked_where_checks_are_off():
    assert BernoulliChain(HALF, validate_args=False).keep.tolist() == [1.0, 0.5]
    torch.testing.assert_close(Downhill(2 * HALF, temperature=1.0, validate_args=False).tails, HALF)


def test_a_first_probability_may_be_one_up_to_rounding():
    assert chain(1 - 5e-7, 0.5).keep.tolist() == [1.0, 0.5]
