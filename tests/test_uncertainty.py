"""Splitting uncertainty: the two decompositions, at once and draw by draw."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from leanbayes.core.prediction import decompose, RunningUncertainty
from leanbayes.distributions.likelihoods import binary_entropy, entropy

few = settings(deadline=None, derandomize=True, max_examples=40)
shapes = st.tuples(st.integers(1, 7), st.integers(1, 4), st.integers(2, 5), st.integers(0, 100))


def probabilities(draws: int, rows: int, classes: int, seed: int, *space: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(draws, rows, classes, *space, generator=generator, dtype=torch.float64)).softmax(2)


def split(draws: torch.Tensor):
    return decompose(draws, torch.stack([entropy(draw) for draw in draws]), "entropy")


# ------------------------------------------------------------------------------- entropies


@pytest.mark.parametrize("space", [(), (2, 3)])
@few
@given(shape=shapes)
def test_entropies_equal_the_batch_formula(space, shape):
    p = probabilities(*shape, *space)
    result = split(p)
    total = stats.entropy(p.numpy().mean(0), axis=1)
    aleatoric = stats.entropy(p.numpy(), axis=2).mean(0)
    np.testing.assert_allclose(result.mean.numpy(), p.numpy().mean(0), atol=1e-12)
    np.testing.assert_allclose(result.total.numpy(), total, atol=1e-12)
    np.testing.assert_allclose(result.aleatoric.numpy(), aleatoric, atol=1e-12)
    np.testing.assert_allclose(result.epistemic.numpy(), total - aleatoric, atol=1e-12)


@few
@given(shape=shapes)
def test_entropies_add_up_and_are_never_negative(shape):
    result = split(probabilities(*shape).float())
    assert torch.equal(result.total, result.aleatoric + result.epistemic)
    assert all((part >= 0).all() for part in result[1:])


@few
@given(shape=shapes)
def test_epistemic_entropy_is_the_mean_divergence_from_the_mean(shape):
    # The mutual information between target and draw, written the other way round.
    p = probabilities(*shape).numpy()
    other = stats.entropy(p, p.mean(0, keepdims=True), axis=2).mean(0)
    np.testing.assert_allclose(split(torch.from_numpy(p)).epistemic.numpy(), other, atol=1e-12)


def test_two_certain_draws_that_disagree_are_all_epistemic():
    result = split(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
    assert result.epistemic.item() == pytest.approx(math.log(2))
    assert result.aleatoric.item() == 0
    assert result.total.item() == pytest.approx(math.log(2))


def test_draws_that_agree_are_all_aleatoric():
    p = probabilities(1, 3, 4, 0).float().expand(6, 3, 4)
    result = split(p)
    torch.testing.assert_close(result.total, entropy(p[0]))
    torch.testing.assert_close(result.epistemic, torch.zeros(3), rtol=0, atol=1e-6)


def test_rounding_never_makes_epistemic_entropy_negative():
    # Draws that nearly agree: the difference of two entropies is all rounding, of either sign.
    p = probabilities(1, 500, 4, 0) + 1e-7 * torch.rand(5, 500, 4, generator=torch.Generator().manual_seed(1))
    p = p.float()
    own = torch.stack([entropy(draw) for draw in p]).mean(0)
    assert (entropy(p.mean(0)) < own).any()
    assert (split(p).epistemic >= 0).all()


@pytest.mark.parametrize("shape", [(5, 1), (5,), (5, 2, 3)])
def test_single_probabilities_use_the_binary_entropy(shape):
    p = torch.rand(4, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    result = decompose(p, binary_entropy(p), "entropy")
    both = np.stack((p.numpy(), 1 - p.numpy()))
    total, aleatoric = stats.entropy(both.mean(1), axis=0), stats.entropy(both, axis=0).mean(0)
    np.testing.assert_allclose(result.total.numpy(), total, atol=1e-12)
    np.testing.assert_allclose(result.epistemic.numpy(), total - aleatoric, atol=1e-12)


# ------------------------------------------------------------------------------- variances


@few
@given(shape=shapes)
def test_variances_obey_the_law_of_total_variance(shape):
    draws, rows, targets, seed = shape
    generator = np.random.default_rng(seed)
    means, own = generator.normal(size=(draws, rows, targets)), generator.gamma(2.0, size=(draws, rows, targets))
    result = decompose(torch.from_numpy(means), torch.from_numpy(own), "variance")
    np.testing.assert_allclose(result.mean.numpy(), means.mean(0), atol=1e-12)
    np.testing.assert_allclose(result.aleatoric.numpy(), own.mean(0), rtol=1e-12)
    np.testing.assert_allclose(result.epistemic.numpy(), means.var(0), atol=1e-12)
    # E[y^2] - E[y]^2 of the mixture itself.
    total = (own + means**2).mean(0) - means.mean(0) ** 2
    np.testing.assert_allclose(result.total.numpy(), total, atol=1e-10)


def test_total_variance_is_that_of_samples_from_the_mixture():
    generator = np.random.default_rng(0)
    means, own = np.array([[[0.0]], [[2.0]], [[3.0]]]), np.array([[[0.5]], [[1.0]], [[2.0]]])
    total = decompose(torch.from_numpy(means), torch.from_numpy(own), "variance").total.item()
    pick = generator.integers(3, size=200_000)
    y = generator.normal(means[pick, 0, 0], np.sqrt(own[pick, 0, 0]))
    squares = (y - y.mean()) ** 2
    assert abs(squares.mean() - total) < 4 * squares.std() / math.sqrt(len(y))


def test_small_epistemic_variance_survives_a_large_mean_in_float32():
    means = 1000 + 0.01 * torch.randn(200, 5, 1, generator=torch.Generator().manual_seed(0))
    result = decompose(means, torch.zeros_like(means), "variance")
    torch.testing.assert_close(result.epistemic.double(), means.double().var(0, correction=0), rtol=0.02, atol=0)


# ------------------------------------------------------------------------------- draw by draw


def test_running_result_is_that_of_the_draws_so_far():
    p = probabilities(6, 3, 4, 0)
    running = RunningUncertainty("entropy")
    for count, draw in enumerate(p, 1):
        running.add(draw, entropy(draw))
        for now, then in zip(running.result(), split(p[:count]), strict=True):
            torch.testing.assert_close(now, then)
    assert running.count == 6


@pytest.mark.parametrize("measure", ["entropy", "variance"])
def test_adding_draws_leaves_the_draws_as_they_were(measure):
    draws = probabilities(3, 2, 4, 0)
    own = draws.square() if measure == "variance" else torch.stack([entropy(draw) for draw in draws])
    before = draws.clone(), own.clone()
    decompose(draws, own, measure)
    assert torch.equal(draws, before[0])
    assert torch.equal(own, before[1])


def test_order_of_draws_does_not_matter():
    p = probabilities(6, 3, 4, 0)
    for one, other in zip(split(p), split(p.flip(0)), strict=True):
        torch.testing.assert_close(one, other)


def test_no_draws_give_no_result():
    with pytest.raises(ValueError, match="at least one draw, got none"):
        RunningUncertainty("variance").result()


def test_predictions_and_uncertainties_must_be_as_many():
    with pytest.raises(ValueError, match="shorter"):
        decompose(torch.zeros(3, 2, 1), torch.zeros(2, 2, 1), "variance")
