"""The record of a prediction: probabilities of targets, intervals, rejection, and what it cannot do without draws."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

import leanbayes as lb
from leanbayes.core.prediction import concatenate, decompose, Prediction

DRAWS, ROWS = 7, 5


def record(likelihood, outputs: torch.Tensor, keep: bool = True) -> Prediction:
    """Build a prediction from the outputs (S, B, ...) of some draws."""
    each = [likelihood.predictive(output) for output in outputs]
    samples, own = torch.stack([mean for mean, _ in each]), torch.stack([own for _, own in each])
    parts = decompose(samples, own, likelihood.measure)
    noise = own if likelihood.measure == "variance" else None
    return Prediction(*parts, samples if keep else None, noise if keep else None, likelihood)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def over_classes(*space: int, keep: bool = True) -> Prediction:
    return record(lb.Categorical(), 2 * normal(DRAWS, ROWS, 3, *space), keep)


def over_reals(targets: int = 2, keep: bool = True) -> Prediction:
    return record(lb.Gaussian(heteroscedastic=True), 2 * normal(DRAWS, ROWS, 2 * targets), keep)


# ------------------------------------------------------------------------------- probabilities of targets


@pytest.mark.parametrize("space", [(), (2, 3)])
@pytest.mark.parametrize("keep", [True, False])
def test_log_probability_of_a_class_is_that_of_the_mean(space, keep):
    p = over_classes(*space, keep=keep)
    y = torch.randint(3, (ROWS, *space), generator=torch.Generator().manual_seed(1))
    samples = over_classes(*space).samples
    log_prob = p.log_prob(y)
    assert log_prob.shape == y.shape
    for position in np.ndindex(*y.shape):
        row, place = position[0], position[1:]
        direct = np.mean([samples[(s, row, y[position].item(), *place)].item() for s in range(DRAWS)])
        assert log_prob[position].item() == pytest.approx(math.log(direct), abs=1e-5)


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 1)])
def test_log_probability_of_a_yes_is_that_of_the_mean(shape):
    p = record(lb.Bernoulli(), normal(DRAWS, ROWS, 1))
    y = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])
    direct = torch.where(y == 1, p.samples.mean(0)[:, 0], 1 - p.samples.mean(0)[:, 0]).log()
    torch.testing.assert_close(p.log_prob(y.view(shape))[:, 0], direct)


def test_log_density_of_real_targets_is_that_of_the_mixture():
    p, y = over_reals(), normal(ROWS, 2, seed=1)
    density = stats.norm(p.samples.numpy(), p.variances.sqrt().numpy()).pdf(y.numpy()).prod(2).mean(0)
    torch.testing.assert_close(p.log_prob(y), torch.from_numpy(density).log().float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [ROWS - 2, ROWS + 1])
def test_targets_of_another_number_of_rows_are_refused(rows):
    with pytest.raises(ValueError, match=rf"targets of shape \({ROWS},.*of shape \({rows},"):
        over_classes().log_prob(torch.zeros(rows, dtype=torch.long))
    with pytest.raises(ValueError, match=rf"targets of shape \({ROWS}, 2\), got \({rows}, 2\)"):
        over_reals().log_prob(torch.zeros(rows, 2))


# ------------------------------------------------------------------------------- spread


def test_std_of_real_targets_is_the_root_of_the_total_variance():
    p = over_reals()
    expected = np.sqrt(p.variances.numpy().mean(0) + p.samples.numpy().var(0))
    np.testing.assert_allclose(p.std.numpy(), expected, rtol=1e-5)
    np.testing.assert_allclose(over_reals(keep=False).std.numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize(
    "p", [over_classes(), over_classes(2, 3), record(lb.Bernoulli(), normal(DRAWS, ROWS, 1))], ids=["c", "dense", "b"]
)
def test_std_of_probabilities_is_their_spread_between_draws(p):
    np.testing.assert_allclose(p.std.numpy(), p.samples.numpy().std(0), atol=1e-6)
    assert p.std.shape == p.mean.shape


# ------------------------------------------------------------------------------- intervals


def quantile(means: np.ndarray, stds: np.ndarray, level: float) -> float:
    """Find a quantile of a mixture of normals by root finding on its distribution function."""
    reach = np.abs(means).max() + 20 * stds.max()
    return optimize.brentq(lambda z: stats.norm(means, stds).cdf(z).mean() - level, -reach, reach, xtol=1e-12)


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.999])
def test_interval_has_the_quantiles_of_the_mixture(level):
    p = over_reals()
    low, high = p.interval(level)
    assert low.shape == high.shape == p.mean.shape
    for row, target in np.ndindex(ROWS, 2):
        means, stds = p.samples[:, row, target].double().numpy(), p.variances[:, row, target].double().sqrt().numpy()
        assert low[row, target].item() == pytest.approx(quantile(means, stds, (1 - level) / 2), abs=2e-3)
        assert high[row, target].item() == pytest.approx(quantile(means, stds, (1 + level) / 2), abs=2e-3)


def test_interval_of_draws_far_apart_is_found_although_the_density_between_them_vanishes():
    outputs = torch.tensor([-100.0, 100.0])[:, None, None]
    low, high = record(lb.Gaussian(std=1.0), outputs).interval(0.9)
    expected = stats.norm().ppf(0.1)  # 5 % of the mixture is 10 % of the lower draw
    assert low.item() == pytest.approx(-100 + expected, abs=1e-3)
    assert high.item() == pytest.approx(100 - expected, abs=1e-3)


@settings(deadline=None, derandomize=True, max_examples=30)
@given(level=st.floats(0.01, 0.99), draws=st.integers(1, 6), seed=st.integers(0, 50))
def test_interval_holds_its_share_of_the_mixture(level, draws, seed):
    p = record(lb.Gaussian(heteroscedastic=True), normal(draws, 3, 2, seed=seed))
    low, high = p.interval(level)
    mixture = stats.norm(p.samples.double().numpy(), p.variances.double().sqrt().numpy())
    inside = mixture.cdf(high.double().numpy()).mean(0) - mixture.cdf(low.double().numpy()).mean(0)
    np.testing.assert_allclose(inside, level, atol=1e-5)


def test_interval_without_draws_is_that_of_the_normal_with_the_same_moments():
    p = over_reals(keep=False)
    low, high = p.interval(0.95)
    expected = stats.norm(p.mean.numpy(), p.total.sqrt().numpy())
    np.testing.assert_allclose(low.numpy(), expected.ppf(0.025), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(high.numpy(), expected.ppf(0.975), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("level", [0.5, 0.8, 0.95])
def test_interval_covers_simulated_targets_at_its_level(level):
    rows = 20_000
    p = record(lb.Gaussian(heteroscedastic=True), 2 * normal(5, rows, 2))
    generator = torch.Generator().manual_seed(1)
    pick = torch.randint(5, (1, rows, 1), generator=generator)
    mean, variance = p.samples.gather(0, pick)[0], p.variances.gather(0, pick)[0]
    y = mean + variance.sqrt() * torch.randn(rows, 1, generator=generator)
    low, high = p.interval(level)
    covered = ((low <= y) & (y <= high)).double().mean().item()
    assert abs(covered - level) < 4 * math.sqrt(level * (1 - level) / rows)


# ------------------------------------------------------------------------------- weights


TENTHS = [0.1, 0.4, 0.0, 0.2, 0.0, 0.3, 0.0]


def weighted(p: Prediction) -> tuple[Prediction, Prediction]:
    """Return a prediction whose draws weigh some tenths, and its exact twin whose draws are repeated as often."""
    weights = torch.tensor(TENTHS)
    index = [s for s, tenths in enumerate(TENTHS) for _ in range(round(10 * tenths))]
    samples, noise = p.samples[index], None if p.variances is None else p.variances[index]
    own = noise if noise is not None else torch.special.entr(samples).sum(2)
    parts = decompose(samples, own, p.likelihood.measure)._asdict()
    return (
        dataclasses.replace(p, weights=weights, **parts),
        dataclasses.replace(p, samples=samples, variances=noise, **parts),
    )


@pytest.mark.parametrize("space", [(), (2, 3)])
def test_weighted_classes_are_as_likely_as_repeated_draws(space):
    p, twin = weighted(over_classes(*space))
    y = torch.randint(3, (ROWS, *space), generator=torch.Generator().manual_seed(1))
    y[0] = -100
    torch.testing.assert_close(p.log_prob(y), twin.log_prob(y), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(p.std, twin.std, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", [0.5, 0.95])
def test_weighted_densities_and_intervals_are_those_of_repeated_draws(level):
    p, twin = weighted(over_reals())
    y = normal(ROWS, 2, seed=1)
    torch.testing.assert_close(p.log_prob(y), twin.log_prob(y), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(p.interval(level), twin.interval(level), rtol=1e-4, atol=1e-4)


def test_weights_move_and_stay_with_the_draws():
    p, _ = weighted(over_classes())
    assert p.to("meta").weights.device.type == "meta"
    assert concatenate([p, p]).weights is p.weights


@pytest.mark.parametrize(("keep", "weights"), [(True, torch.ones(2) / 2), (False, torch.ones(DRAWS) / DRAWS)])
def test_weights_without_their_draws_are_refused(keep, weights):
    with pytest.raises(ValueError, match=r"one weight for each of the [07] draws, got weights of shape \([27],\)"):
        dataclasses.replace(over_classes(keep=keep), weights=weights)


# ------------------------------------------------------------------------------- rejection


@pytest.mark.parametrize(("coverage", "kept"), [(0.0, 0), (0.4, 2), (0.6, 3), (1.0, 5)])
def test_rejection_keeps_the_least_uncertain_share(coverage, kept):
    p = over_classes()
    rejected = p.reject(coverage)
    assert rejected.dtype == torch.bool
    assert rejected.shape == (ROWS,)
    assert (~rejected).sum() == kept
    order = sorted(range(ROWS), key=lambda row: p.total[row].item())
    assert {row for row in range(ROWS) if not rejected[row]} == set(order[:kept])


@pytest.mark.parametrize("p", [over_reals(), over_classes(2, 3)], ids=["targets", "pixels"])
def test_rejection_averages_over_the_targets_of_a_row(p):
    per_row = [p.total[row].mean().item() for row in range(ROWS)]
    (worst,) = np.flatnonzero(p.reject(0.8).numpy())
    assert worst == int(np.argmax(per_row))


@pytest.mark.parametrize("coverage", [-0.1, 1.1, math.nan])
def test_rejection_refuses_a_coverage_that_is_no_share(coverage):
    with pytest.raises(ValueError, match="coverage between 0 and 1"):
        over_classes().reject(coverage)


# ------------------------------------------------------------------------------- devices, parts, errors


@pytest.mark.parametrize("keep", [True, False])
def test_all_tensors_move_and_the_original_stays(keep):
    p = over_reals(keep=keep)
    there = p.to("meta")
    for field in dataclasses.fields(p):
        here, moved = getattr(p, field.name), getattr(there, field.name)
        if isinstance(here, torch.Tensor):
            assert (here.device.type, moved.device.type) == ("cpu", "meta")
        else:
            assert moved is here


@pytest.mark.parametrize("make", [over_classes, over_reals])
@pytest.mark.parametrize("keep", [True, False])
def test_joined_parts_are_the_whole(make, keep):
    whole = make(keep=keep)

    def rows(start: int, stop: int) -> Prediction:
        cut = {"samples": 1, "variances": 1}
        parts = {}
        for field in dataclasses.fields(whole):
            value = getattr(whole, field.name)
            is_tensor = isinstance(value, torch.Tensor)
            parts[field.name] = value.narrow(cut.get(field.name, 0), start, stop - start) if is_tensor else value
        return Prediction(**parts)

    joined = concatenate([rows(0, 2), rows(2, 3), rows(3, ROWS)])
    for field in dataclasses.fields(whole):
        one, other = getattr(whole, field.name), getattr(joined, field.name)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one is other


def test_a_prediction_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        over_classes().mean = torch.zeros(1)


def test_spread_of_probabilities_without_draws_says_how_to_get_them():
    with pytest.raises(ValueError, match=r"spread of probabilities needs the draws.*keep_samples=True"):
        _ = over_classes(keep=False).std


def test_density_of_real_targets_without_draws_says_how_to_get_them():
    with pytest.raises(ValueError, match="keep_samples=True"):
        over_reals(keep=False).log_prob(torch.zeros(ROWS, 2))


@pytest.mark.parametrize("likelihood", [lb.Categorical(), lb.Bernoulli()], ids=["categorical", "bernoulli"])
def test_interval_over_classes_is_refused(likelihood):
    with pytest.raises(TypeError, match="interval needs real targets"):
        record(likelihood, normal(DRAWS, ROWS, 3)).interval()


@pytest.mark.parametrize("level", [0.0, 1.0, 95, -0.5, math.nan])
def test_interval_refuses_a_level_that_is_no_probability(level):
    with pytest.raises(ValueError, match="level between 0 and 1"):
        over_reals().interval(level)


def test_targets_of_numpy_are_refused_in_words():
    p = lb.predict(lb.convert(torch.nn.Linear(3, 2), lb.Rank1()), torch.randn(4, 3))
    with pytest.raises(TypeError, match="expected y as a tensor of targets, got ndarray"):
        p.log_prob(np.zeros(4, dtype=int))
