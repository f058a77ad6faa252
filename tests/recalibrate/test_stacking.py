"""Stacking: weights at the optimum, and predictions under them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from scipy import optimize, stats

import leanbayes as lb
from leanbayes.core.prediction import Prediction
from leanbayes.recalibrate import Conformal, Stacking, Temperature
from leanbayes.recalibrate.calibrators import best_weights
from tests.recalibrate.problems import each_problem, of_yes, over_classes, over_reals, record


def likelihoods(p: Prediction, y: torch.Tensor) -> np.ndarray:
    """Return p(y_i | draw s) (S, N), computed target by target."""
    samples = p.samples.double().numpy()
    if isinstance(p.likelihood, lb.Gaussian):
        return stats.norm(samples, p.variances.double().sqrt().numpy()).pdf(y.double().numpy()).prod(2)
    if isinstance(p.likelihood, lb.Bernoulli):
        return np.where(y.numpy() == 1, samples, 1 - samples).reshape(len(samples), -1)
    return np.stack([[draw[i, c] for i, c in enumerate(y.tolist())] for draw in samples])


def random_logs(draws: int, targets: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(draws, targets, generator=generator, dtype=torch.float64)


def gradient(logs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return mean_i p_si / (w . p)_i, in logarithms."""
    return (logs - (logs + weights.log()[:, None]).logsumexp(0)).exp().mean(1)


def value(logs: torch.Tensor, weights: torch.Tensor) -> float:
    return (logs + weights.log()[:, None]).logsumexp(0).mean().item()


# ------------------------------------------------------------------------------- weights


@each_problem
@pytest.mark.parametrize("seed", range(3))
def test_two_draws_get_the_weights_that_scipy_finds(problem, seed):
    whole, y = problem(200, seed, spread=1.0)
    p = dataclasses.replace(
        whole, samples=whole.samples[:2], variances=None if whole.variances is None else whole.variances[:2]
    )
    first, second = likelihoods(p, y)

    def slope(w: float) -> float:
        return ((first - second) / (w * first + (1 - w) * second)).mean()

    expected = 0.0 if slope(0.0) <= 0 else 1.0 if slope(1.0) >= 0 else optimize.brentq(slope, 0, 1, xtol=1e-12)
    # Probabilities are float32, and 1 - p is rounded where p is near one.
    assert Stacking().fit(p, y).weights.tolist() == pytest.approx([expected, 1 - expected], abs=1e-4)


def test_one_target_goes_to_the_likeliest_draw():
    weights = best_weights(torch.tensor([[-2.0], [-1.0], [-3.0]], dtype=torch.float64))
    assert weights.tolist() == pytest.approx([0, 1, 0], abs=1e-8)


def test_two_disjoint_draws_get_the_shares_of_their_targets():
    """Draw 0 explains 3 of 10 targets, draw 1 the other 7: the likelihood w^3 (1 - w)^7 is largest at 0.3."""
    logs = torch.full((2, 10), -1e4, dtype=torch.float64)
    logs[0, :3], logs[1, 3:] = -1.0, -2.0
    assert best_weights(logs).tolist() == pytest.approx([0.3, 0.7], abs=1e-8)


@pytest.mark.parametrize("scale", [1e-3, 0.3, 1.0, 10.0, 1e3])
@pytest.mark.parametrize(("draws", "targets"), [(1, 5), (2, 1), (5, 3), (16, 400), (60, 200)])
def test_weights_are_optimal(draws, targets, scale):
    logs = random_logs(draws, targets, seed=draws, scale=scale)
    weights = best_weights(logs)
    slopes = gradient(logs, weights)
    assert weights.sum().item() == pytest.approx(1)
    assert weights.min() >= 0
    assert slopes.max() <= 1 + 1e-8
    # Where a weight is not zero, its gradient is one.
    assert (weights * (1 - slopes)).abs().max() < 1e-8


@pytest.mark.parametrize("seed", range(5))
def test_weights_are_those_of_a_general_optimiser(seed):
    logs = random_logs(4, 50, seed)
    free = optimize.minimize(
        lambda w: -np.log(w @ np.exp(logs.numpy())).mean(),
        np.full(4, 0.25),
        bounds=[(1e-12, 1)] * 4,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        options={"ftol": 1e-14, "maxiter": 500},
    )
    np.testing.assert_allclose(best_weights(logs).numpy(), free.x, atol=1e-5)


def test_weights_do_not_depend_on_what_all_draws_share():
    logs = random_logs(5, 40, 0)
    shifted = logs + 500 * random_logs(1, 40, 1)
    torch.testing.assert_close(best_weights(shifted), best_weights(logs), rtol=0, atol=1e-8)


def test_equal_draws_share_their_weight():
    logs = random_logs(3, 40, 0)
    one, two = best_weights(logs), best_weights(logs[[0, 1, 1, 1, 2]])
    torch.testing.assert_close(two[[0, 1, 4]], torch.stack((one[0], one[1] / 3, one[2])), rtol=0, atol=1e-6)
    assert best_weights(logs[[1, 1, 1, 1]]).tolist() == [0.25] * 4


def test_known_shares_are_found_again():
    """Targets of a mixture of two sure draws with shares 0.8 and 0.2: the error of a share is 1 / sqrt(rows)."""
    rows, generator = 4000, torch.Generator().manual_seed(0)
    outputs = torch.stack((torch.full((rows, 1), -3.0), torch.full((rows, 1), 3.0)))
    y = torch.where(torch.rand(rows, 1, generator=generator) < 0.8, -3.0, 3.0)
    y += torch.randn(rows, 1, generator=generator)
    weights = Stacking().fit(record(lb.Gaussian(std=1.0), outputs), y).weights
    assert abs(weights[0].item() - 0.8) < 4 * (0.16 / rows) ** 0.5


@each_problem
@pytest.mark.parametrize("rows", [5, 50, 500])
def test_fitted_rows_never_become_less_likely(problem, rows):
    p, y = problem(rows, 0, sure=2.0, spread=0.8)
    fitted = Stacking().fit(p, y)
    each = torch.from_numpy(likelihoods(p, y)).log()
    assert value(each, fitted.weights) >= value(each, torch.full((3,), 1 / 3, dtype=torch.float64)) - 1e-6
    assert fitted(p).log_prob(y).mean() >= p.log_prob(y).mean() - 1e-6


def test_new_rows_are_likelier_where_a_draw_is_bad():
    def rows(seed):
        p, y = over_classes(1000, seed, spread=0.3)
        samples = torch.cat((p.samples, p.samples.flip(2)))  # three draws that name the wrong classes
        return record(lb.Categorical(), samples.log()), y

    fitted = Stacking().fit(*rows(0))
    assert fitted.weights[3:].sum() < 0.1
    p, y = rows(1)
    assert fitted(p).log_prob(y).mean() > p.log_prob(y).mean() + 0.1


# ------------------------------------------------------------------------------- predictions


def with_weights(p: Prediction, weights: list[float]) -> Prediction:
    """Return the prediction under given weights."""
    stacking = Stacking()
    stacking.weights, stacking._likelihood = torch.tensor(weights, dtype=torch.float64), type(p.likelihood)
    return stacking(p)


@each_problem
def test_uniform_weights_give_back_the_plain_prediction(problem):
    p, y = problem(40, 0, spread=0.8)
    q = with_weights(p, [1 / 3] * 3)
    for name in ("mean", "total", "aleatoric", "epistemic"):
        torch.testing.assert_close(getattr(q, name), getattr(p, name), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(q.log_prob(y), p.log_prob(y), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(q.std, p.std, rtol=1e-4, atol=1e-6)
    assert q.samples is p.samples
    assert q.likelihood is p.likelihood


@each_problem
def test_one_draw_alone_is_that_draw(problem):
    p, _ = problem(40, 0, spread=0.8)
    q = with_weights(p, [0.0, 1.0, 0.0])
    torch.testing.assert_close(q.mean, p.samples[1])
    assert q.epistemic.max() < 1e-6


@each_problem
def test_weights_of_tenths_are_draws_repeated(problem):
    """An exact twin without weights: draws that occur 1, 6 and 3 times."""
    p, y = problem(40, 0, spread=0.8)
    q = with_weights(p, [0.1, 0.6, 0.3])
    index = [0] + 6 * [1] + 3 * [2]
    noise = None if p.variances is None else p.variances[index]
    uniform = dataclasses.replace(p, samples=p.samples[index], variances=noise)
    twin = with_weights(uniform, [0.1] * 10)
    for name in ("mean", "total", "aleatoric", "epistemic", "std"):
        torch.testing.assert_close(getattr(q, name), getattr(twin, name), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(q.log_prob(y), twin.log_prob(y), rtol=1e-5, atol=1e-5)


def test_dense_rows_count_by_target_without_the_ignored():
    likelihood = lb.Categorical(ignore_index=255)
    p, y = over_classes(30, 0, 2, 3, spread=0.8)
    p = dataclasses.replace(p, likelihood=likelihood)
    flat = record(lb.Categorical(), p.samples.movedim(2, -1).reshape(3, -1, 4)[:, 6:].log())
    expected = Stacking().fit(flat, y.flatten()[6:]).weights
    y[0] = 255
    fitted = Stacking().fit(p, y)
    torch.testing.assert_close(fitted.weights, expected, rtol=0, atol=1e-5)
    assert fitted(p).mean.shape == p.mean.shape
    assert fitted(p).total.shape == y.shape
    torch.testing.assert_close(fitted(p).log_prob(y)[0], torch.zeros(2, 3), rtol=0, atol=1e-6)


def test_the_draws_of_a_model_are_weighed():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    net[2].weight.data *= 20  # sure draws: their own answers tell them apart
    bnn = lb.convert(net, lb.MCDropout(rate=0.4))
    x, new = torch.randn(2, 60, 5)
    y = lb.draw(bnn, seed=7, index=2)(x).argmax(1)
    p = lb.predict(bnn, x, seed=7, samples=8)
    fitted = Stacking().fit(p, y)
    assert fitted.weights.argmax() == 2
    q = fitted(lb.predict(bnn, new, seed=7, samples=8))
    assert q.weights.shape == (8,)
    assert q.mean.dtype == torch.float32
    torch.testing.assert_close(q.mean.sum(1), torch.ones(60))


def test_rounded_zeros_do_not_make_it_infinite():
    p, y = over_classes(50, 0, sure=400.0, spread=1.0)
    assert (p.samples == 0).any()
    assert Stacking().fit(p, y).weights.isfinite().all()


# ------------------------------------------------------------------------------- with the others


@each_problem
def test_a_temperature_may_come_before_or_after(problem):
    p, y = problem(500, 0, sure=3.0, spread=0.8)
    mended = Temperature().fit(p, y)(p)
    before = Stacking().fit(mended, y)(mended)
    stacked = Stacking().fit(p, y)(p)
    after = Temperature().fit(stacked, y)(stacked)
    assert before.log_prob(y).mean() >= mended.log_prob(y).mean() - 1e-6
    assert after.log_prob(y).mean() > stacked.log_prob(y).mean()
    assert (after.weights is None) == (after.samples is None)


def test_a_temperature_of_weighted_draws_is_refused():
    p, y = over_classes(50, 0)
    stacked = Stacking().fit(p, y)(p)
    for use in (lambda: Temperature("draws").fit(stacked, y), lambda: Temperature("draws").fit(p, y)(stacked)):
        with pytest.raises(ValueError, match="draws that count alike, got weighted ones; temper before you stack"):
            use()


@each_problem
def test_conformal_sets_may_come_after(problem):
    p, y = problem(500, 0, spread=0.8)
    stacked = Stacking().fit(p, y)(p)
    threshold = Conformal().fit(stacked, y).threshold
    assert threshold.isfinite().all()
    assert not torch.equal(threshold, Conformal().fit(p, y).threshold)


# ------------------------------------------------------------------------------- wrong use


def test_another_number_of_draws_is_refused():
    p, y = over_classes(50, 0)
    fewer = record(lb.Categorical(), p.samples[:2].log())
    with pytest.raises(ValueError, match=r"expected the 3 draws that were weighed, got 2; predict with samples=3"):
        Stacking().fit(p, y)(fewer)


@pytest.mark.parametrize("problem", [over_classes, of_yes, over_reals])
def test_predictions_without_draws_are_refused(problem):
    fitted = Stacking().fit(*problem(50, 0))
    for use in (Stacking().fit, lambda p, y: fitted(p)):
        with pytest.raises(ValueError, match="stacking needs the draws; call predict with keep_samples=True"):
            use(*problem(50, 0, keep=False))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@each_problem
def test_an_accelerator_gives_the_same(problem):
    p, y = problem(200, 0, sure=2.0, spread=0.8)
    here, there = Stacking().fit(p, y), Stacking().fit(p.to("cuda"), y.cuda())
    torch.testing.assert_close(there.weights.cpu(), here.weights, rtol=0, atol=1e-5)
    torch.testing.assert_close(there(p.to("cuda")).to("cpu").mean, here(p).mean, rtol=1e-4, atol=1e-5)
