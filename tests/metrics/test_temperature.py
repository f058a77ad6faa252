"""Temperatures against scipy's minimiser, on data with a known one, and where there is none."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, special

from leanbayes import metrics

few = settings(deadline=None, derandomize=True, max_examples=20)


def softmax_problem(rows: int, classes: int, temperature: float, seed: int, draws: int = 1, noise: float = 0.0):
    """Return probabilities (S, N, C) that are too sure by a known temperature, and targets of the right ones."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    y = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    jitter = noise * torch.randn(draws, rows, classes, generator=generator, dtype=torch.float64)
    return ((logits + jitter) * temperature).softmax(2), y


def loss_at(samples: np.ndarray, y: np.ndarray, log_temperature: float) -> float:
    tempered = special.softmax(np.log(samples) / np.exp(log_temperature), axis=2).mean(0)
    return -np.log(tempered[np.arange(len(y)), y]).mean()


def scipy_minimum(samples: torch.Tensor, y: torch.Tensor) -> float:
    result = optimize.minimize_scalar(
        lambda t: loss_at(samples.numpy(), y.numpy(), t), bounds=(-4, 4), method="bounded", options={"xatol": 1e-9}
    )
    return math.exp(result.x)


@few
@given(st.sampled_from([0.3, 1.0, 2.5]), st.integers(2, 6), st.integers(0, 1000))
def test_best_temperature_is_the_minimum_scipy_finds(temperature, classes, seed):
    samples, y = softmax_problem(150, classes, temperature, seed)
    best = metrics.best_temperature(samples[0], y).item()
    assert best == pytest.approx(scipy_minimum(samples, y), rel=1e-6)


@few
@given(st.sampled_from([0.5, 2.0]), st.integers(2, 5), st.integers(0, 1000))
def test_best_joint_temperature_is_the_minimum_scipy_finds(temperature, draws, seed):
    samples, y = softmax_problem(150, 4, temperature, seed, draws, noise=0.7)
    best = metrics.best_joint_temperature(samples, y).item()
    assert best == pytest.approx(scipy_minimum(samples, y), rel=1e-5)


@few
@given(st.sampled_from([0.3, 1.0, 2.5]), st.sampled_from([0.1, 0.5, 2.0]), st.integers(0, 1000))
def test_with_a_prior_it_is_the_mode_of_the_posterior(temperature, prior, seed):
    samples, y = softmax_problem(30, 4, temperature, seed)

    def posterior(t: float) -> float:
        return len(y) * loss_at(samples.numpy(), y.numpy(), t) + t * t / (2 * prior * prior)

    found = optimize.minimize_scalar(posterior, bounds=(-4, 4), method="bounded", options={"xatol": 1e-9})
    assert metrics.best_temperature(samples[0], y, prior).item() == pytest.approx(math.exp(found.x), rel=1e-5)


@pytest.mark.parametrize("temperature", [0.4, 1.0, 3.0])
def test_a_known_temperature_is_found_again(temperature):
    samples, y = softmax_problem(20_000, 5, temperature, seed=0)
    # The standard error of 1 / T is one over the root of the information: rows times the variance of log p.
    logs, right = samples[0].log(), metrics.temper(samples[0], temperature)
    information = len(y) * ((right * logs**2).sum(1) - (right * logs).sum(1) ** 2).mean().item()
    best = metrics.best_temperature(samples[0], y).item()
    assert abs(1 / best - 1 / temperature) < 4 / math.sqrt(information)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_temper_is_the_softmax_of_divided_logits(dtype):
    logits = 3 * torch.randn(4, 5, 2, 3, dtype=torch.float64)
    tempered = metrics.temper(logits.softmax(1).to(dtype), 1.7)
    assert tempered.dtype == dtype
    np.testing.assert_allclose(tempered.numpy(), special.softmax(logits.numpy() / 1.7, axis=1), atol=1e-6)


# ------------------------------------------------------------------------------- no minimum


def test_right_answers_alone_do_not_make_certain():
    p = torch.full((200, 3), 0.05)
    p[:, 0] = 0.9
    y = torch.zeros(200, dtype=torch.long)
    best = metrics.best_temperature(p, y).item()
    assert 0.1 < best < 0.8

    # The loss itself falls without end; with a normal prior of log T, worth one row, it has a minimum.
    def penalised(t: float) -> float:
        return loss_at(p.double().numpy()[None], y.numpy(), t) + t**2 / 2 / len(y)

    result = optimize.minimize_scalar(penalised, bounds=(-4, 4), method="bounded", options={"xatol": 1e-9})
    assert best == pytest.approx(math.exp(result.x), rel=1e-5)


def test_uniform_probabilities_have_temperature_one():
    assert metrics.best_temperature(torch.full((6, 4), 0.25), torch.arange(6) % 4).item() == pytest.approx(1, abs=1e-6)


def test_answers_worse_than_chance_are_softened_within_bounds():
    p = torch.tensor([[0.9, 0.1]]).repeat(50, 1)
    assert 5 < metrics.best_temperature(p, torch.ones(50, dtype=torch.long)).item() <= 100.001


def test_certain_and_wrong_probabilities_are_finite():
    p, y = torch.eye(4), (torch.arange(4) + 1) % 4
    assert metrics.best_temperature(p, y).isfinite()
    assert metrics.calibrated_nll(p, y).isfinite()


# ------------------------------------------------------------------------------- calibrated likelihood


def test_calibrated_likelihood_is_that_of_two_halves_scored_by_each_other():
    samples, y = softmax_problem(101, 4, 3.0, seed=0)
    p = samples[0]
    order = torch.randperm(101, generator=torch.Generator().manual_seed(5)).numpy()
    first, second = np.array_split(order, 2)
    total = 0.0
    for fitted, scored in ((first, second), (second, first)):
        best = math.log(scipy_minimum(samples[:, fitted], y[fitted]))
        total += len(scored) * loss_at(samples[:, scored].numpy(), y[scored].numpy(), best)
    assert metrics.calibrated_nll(p, y, seed=5).item() == pytest.approx(total / 101, abs=1e-9)
    assert metrics.calibrated_nll(p, y, seed=6) != metrics.calibrated_nll(p, y, seed=5)


def test_calibrated_likelihood_does_not_care_for_the_temperature():
    samples, y = softmax_problem(2000, 4, 1.0, seed=0)
    right = metrics.nll(samples[0], y).item()
    figures = [metrics.calibrated_nll(metrics.temper(samples[0], t), y).item() for t in (0.3, 1.0, 4.0)]
    assert figures == pytest.approx([figures[0]] * 3, abs=1e-6)
    assert figures[0] == pytest.approx(right, abs=0.005)
    assert metrics.nll(metrics.temper(samples[0], 0.3), y) > right + 0.1


def test_dense_predictions_are_split_by_images():
    # Within an image all pixels are alike: split by pixels, each half would know the other.
    samples, y = softmax_problem(40, 3, 2.0, seed=0)
    dense, wide = samples[0][:, :, None, None].expand(40, 3, 4, 4), y[:, None, None].expand(40, 4, 4)
    torch.testing.assert_close(metrics.calibrated_nll(dense, wide), metrics.calibrated_nll(samples[0], y))


def test_one_row_cannot_be_split_so_there_is_no_such_number():
    assert metrics.calibrated_nll(torch.tensor([[0.5, 0.5]]), torch.tensor([0])).isnan()
    with pytest.raises(ValueError, match="expected"):
        metrics.calibrated_nll(torch.tensor([[0.5, 0.5]]), torch.tensor([2]))
