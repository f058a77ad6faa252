"""Recalibration: temperatures of every kind of prediction, and conformal sets that hold what they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import optimize, special, stats

import leanbayes as lb
from leanbayes.core.prediction import Prediction
from leanbayes.recalibrate import Conformal, Stacking, Temperature
from tests.recalibrate.problems import each_problem, of_yes, over_classes, over_reals


def is_consistent(p: Prediction) -> None:
    """Check a record against itself: sums, signs, and what its draws say."""
    torch.testing.assert_close(p.total, p.aleatoric + p.epistemic, rtol=1e-6, atol=1e-7)
    assert (p.aleatoric >= 0).all()
    assert (p.epistemic >= 0).all()
    if p.samples is not None:
        torch.testing.assert_close(p.mean, p.samples.mean(0), rtol=1e-5, atol=1e-6)
    if p.variances is not None:
        torch.testing.assert_close(p.aleatoric, p.variances.mean(0))
        torch.testing.assert_close(p.epistemic, p.samples.var(0, correction=0), rtol=1e-4, atol=1e-5)
    elif not isinstance(p.likelihood, lb.Bernoulli):
        torch.testing.assert_close(p.total, torch.special.entr(p.mean).sum(1), rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------- temperature


@each_problem
@pytest.mark.parametrize("sure", [0.5, 1.0, 3.0])
@pytest.mark.parametrize(("spread", "keep"), [(0.0, False), (0.0, True), (0.8, True)])
def test_a_known_temperature_is_found_again(problem, sure, spread, keep):
    # A logarithmic temperature is known to about 1 / sqrt(rows) or better: six percent are five errors or more.
    p, y = problem(8000, 0, sure=sure, spread=spread, keep=keep)
    assert Temperature().fit(p, y).temperature == pytest.approx(sure, rel=0.06)


@each_problem
@pytest.mark.parametrize("scale", ["draws", "mean"])
@pytest.mark.parametrize("sure", [0.4, 2.5])
def test_the_result_is_consistent_and_likelier_on_new_rows(problem, scale, sure):
    p, y = problem(2000, 0, sure=sure, spread=0.5)
    new, y_new = problem(2000, 1, sure=sure, spread=0.5)
    mended = Temperature(scale).fit(p, y)(new)
    is_consistent(mended)
    assert (mended.samples is None) == (scale == "mean" and problem is not over_reals)
    assert mended.log_prob(y_new).mean() > new.log_prob(y_new).mean() + 0.01
    assert mended.likelihood is new.likelihood


@each_problem
def test_a_prior_keeps_few_rows_near_one_and_gives_way_to_many(problem):
    few, y_few = problem(20, 0, sure=3.0)
    many, y_many = problem(8000, 0, sure=3.0)
    alone, kept = (Temperature(prior=prior).fit(few, y_few).temperature for prior in (None, 0.1))
    assert abs(math.log(kept)) < 0.6 * abs(math.log(alone))
    assert Temperature(prior=0.5).fit(many, y_many).temperature == pytest.approx(3.0, rel=0.06)


@pytest.mark.parametrize("prior", [0.0, -1.0, math.inf, math.nan])
def test_an_impossible_prior_is_refused(prior):
    with pytest.raises(ValueError, match="expected prior to be a number above zero"):
        Temperature(prior=prior)


@pytest.mark.parametrize("problem", [over_classes, of_yes])
def test_draws_are_fitted_as_they_are_called(problem):
    # No other temperature than the one found makes what the call returns likelier.
    p, y = problem(500, 0, sure=2.0, spread=0.8)
    fitted = Temperature().fit(p, y)

    def loss(log_temperature: float) -> float:
        trial = Temperature()
        trial.temperature = math.exp(log_temperature)
        trial._likelihood, trial._scale = fitted._likelihood, fitted._scale
        return -trial(p).log_prob(y).double().mean().item()

    best = optimize.minimize_scalar(loss, bounds=(-2, 3), method="bounded", options={"xatol": 1e-7}).x
    assert fitted.temperature == pytest.approx(math.exp(best), rel=1e-3)  # log_prob is float32


def test_a_stretch_is_the_one_scipy_finds():
    p, y = over_reals(300, 0, sure=3.0, spread=1.0)
    m, s, mean = p.samples.double().numpy(), p.variances.double().sqrt().numpy(), p.mean.double().numpy()

    def loss(log_factor: float) -> float:
        factor = math.exp(log_factor)
        each = stats.norm(mean + factor * (m - mean), factor * s).logpdf(y.numpy()).sum(2)
        return -(special.logsumexp(each, axis=0) - math.log(3)).mean()

    best = optimize.minimize_scalar(loss, bounds=(-3, 3), method="bounded", options={"xatol": 1e-9}).x
    assert Temperature().fit(p, y).temperature == pytest.approx(math.exp(best), rel=1e-5)


def test_a_stretch_without_draws_is_the_root_of_the_mean_squared_residual():
    p, y = over_reals(300, 0, sure=3.0, keep=False)
    expected = ((y - p.mean).square() / p.total).mean().sqrt().item()
    assert Temperature().fit(p, y).temperature == pytest.approx(expected, rel=1e-5)


def test_the_temperature_of_the_mean_is_that_of_the_metrics():
    p, y = over_classes(500, 0, sure=2.0, spread=0.8)
    fitted = Temperature("mean").fit(p, y)
    assert fitted.temperature == pytest.approx(lb.metrics.best_temperature(p.mean, y).item())
    torch.testing.assert_close(fitted(p).mean, (p.mean.log() / fitted.temperature).softmax(1))
    torch.testing.assert_close(fitted(p).epistemic / fitted(p).total, p.epistemic / p.total)


def test_dense_predictions_are_tempered_by_pixel_without_the_ignored():
    likelihood = lb.Categorical(ignore_index=255)
    p, y = over_classes(30, 0, 4, 5, sure=3.0)
    p = Prediction(p.mean, p.total, p.aleatoric, p.epistemic, p.samples, None, likelihood)
    flat = p.samples.movedim(2, -1).reshape(3, -1, 4)
    expected = lb.metrics.best_joint_temperature(flat[:, 20:], y.flatten()[20:]).item()
    y[0] = 255
    fitted = Temperature().fit(p, y)
    assert fitted.temperature == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(
        fitted(p).samples.movedim(2, -1).reshape(3, -1, 4),
        lb.metrics.temper(flat.flatten(0, 1), expected).view_as(flat),
    )


def test_right_answers_alone_do_not_make_certain():
    p, _ = over_classes(5, 0)
    assert 0.1 < Temperature().fit(p, p.mean.argmax(1)).temperature < 1


def test_a_fitted_temperature_may_be_fitted_again_on_another_kind():
    fitted = Temperature().fit(*over_classes(200, 0, sure=2.0))
    fitted.fit(*over_classes(200, 0, sure=2.0, keep=False))
    assert fitted(over_classes(10, 1)[0]).samples is None


# ------------------------------------------------------------------------------- conformal


@pytest.mark.parametrize("sure", [0.1, 1.0, 20.0])
@pytest.mark.parametrize("level", [0.5, 0.9, 0.95])
def test_sets_hold_the_class_as_often_as_they_promise(sure, level):
    # Given the calibration rows the coverage is Beta distributed around the level: both samples add to its error.
    known, new = 5000, 20_000
    p, y = over_classes(known, 0, sure=sure)
    q, y_new = over_classes(new, 1, sure=sure)
    sets = Conformal(level).fit(p, y)(q)
    assert sets.shape == q.mean.shape
    assert sets.dtype == torch.bool
    covered = sets.gather(1, y_new[:, None]).double().mean().item()
    assert abs(covered - level) < 4 * math.sqrt(level * (1 - level) * (1 / known + 1 / new))


@pytest.mark.parametrize("sure", [0.1, 1.0, 20.0])
@pytest.mark.parametrize("level", [0.5, 0.9, 0.95])
def test_intervals_hold_each_target_as_often_as_they_promise(sure, level):
    known, new = 5000, 20_000
    p, y = over_reals(known, 0, sure=sure)
    q, y_new = over_reals(new, 1, sure=sure)
    low, high = Conformal(level).fit(p, y)(q)
    covered = ((low <= y_new) & (y_new <= high)).double().mean(0)
    assert covered.shape == (2,)
    assert ((covered - level).abs() < 4 * math.sqrt(level * (1 - level) * (1 / known + 1 / new))).all()


def test_coverage_over_many_small_calibrations_is_the_promised_one():
    # Nineteen rows at level 0.9: the 18th of 19 scores, so the exact coverage is 18 / 20.
    hits = []
    for seed in range(400):
        p, y = over_classes(19 + 20, seed, sure=5.0)
        head = Prediction(*(t[:19] for t in (p.mean, p.total, p.aleatoric, p.epistemic)), None, None, p.likelihood)
        hits.append(Conformal(0.9).fit(head, y[:19])(p)[19:].gather(1, y[19:, None]).double().mean().item())
    assert abs(np.mean(hits) - 0.9) < 4 * np.std(hits) / math.sqrt(len(hits))


def test_yes_and_no_are_two_classes():
    p, y = of_yes(5000, 0, sure=5.0)
    q, y_new = of_yes(20_000, 1, sure=5.0)
    sets = Conformal(0.9).fit(p, y)(q)
    assert sets.shape == (20_000, 2, 1)
    covered = sets[:, :, 0].gather(1, y_new.long()).double().mean().item()
    assert abs(covered - 0.9) < 4 * math.sqrt(0.09 * (1 / 5000 + 1 / 20_000))


def test_dense_sets_have_the_shape_of_the_probabilities():
    p, y = over_classes(20, 0, 3, 5)
    y[0] = -100
    assert Conformal().fit(p, y)(p).shape == (20, 4, 3, 5)


def test_the_threshold_is_the_corrected_quantile():
    p, y = over_reals(99, 0)
    scores = ((y - p.mean).abs() / p.std).double().numpy()
    expected = np.sort(scores, 0)[90 - 1]  # ceil((99 + 1) 0.9) = 90
    np.testing.assert_allclose(Conformal(0.9).fit(p, y).threshold.numpy(), expected, rtol=1e-6)


def test_more_certain_levels_give_larger_sets():
    p, y = over_classes(1000, 0)
    sizes = [Conformal(level).fit(p, y)(p).sum().item() for level in (0.5, 0.7, 0.9, 0.99)]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 4


def test_overconfident_wrong_rows_are_not_tied():
    # Probabilities far below 1e-16: one minus them is one, and every class would be in every set.
    right, y = over_classes(4000, 0)
    sure, _ = over_classes(4000, 0, sure=40.0)
    size, expected = (Conformal(0.9).fit(p, y)(p).double().sum(1).mean().item() for p in (sure, right))
    assert size == pytest.approx(expected, rel=0.2)


def test_a_temperature_may_come_first():
    p, y = over_classes(2000, 0, sure=5.0)
    mended = Temperature().fit(p, y)(p)
    assert abs(Conformal(0.9).fit(mended, y)(mended).gather(1, y[:, None]).double().mean() - 0.9) < 0.01


# ------------------------------------------------------------------------------- wrong use


@pytest.mark.parametrize("kind", [Temperature, Conformal, Stacking])
def test_unfitted_use_says_what_to_do(kind):
    with pytest.raises(RuntimeError, match=rf"{kind.__name__} is not fitted yet: call fit\(prediction, y\)"):
        kind()(over_classes(5, 0)[0])


@pytest.mark.parametrize("kind", [Temperature, Conformal, Stacking])
def test_another_kind_of_prediction_is_refused(kind):
    fitted = kind().fit(*over_classes(50, 0))
    with pytest.raises(TypeError, match="expected a prediction with Categorical, as fitted, got Gaussian"):
        fitted(over_reals(5, 0)[0])


def test_a_temperature_of_draws_needs_draws():
    fitted = Temperature().fit(*over_classes(50, 0))
    with pytest.raises(ValueError, match=r"keep_samples=True, or fit Temperature\(\"mean\"\)"):
        fitted(over_classes(5, 0, keep=False)[0])
    with pytest.raises(ValueError, match="needs the draws"):
        Temperature("draws").fit(*over_reals(5, 0, keep=False))


@pytest.mark.parametrize(("level", "rows"), [(0.9, 9), (0.95, 19), (0.5, 1)])
def test_too_few_rows_for_the_level_are_refused(level, rows):
    p, y = over_classes(rows, 0)
    Conformal(level).fit(p, y)
    if rows > 1:
        p, y = over_classes(rows - 1, 0)
        with pytest.raises(ValueError, match=rf"at least {rows} rows for level {level}, got {rows - 1}"):
            Conformal(level).fit(p, y)


@pytest.mark.parametrize("kind", [Temperature, Conformal, Stacking])
@each_problem
def test_targets_of_another_shape_are_refused(kind, problem):
    p, y = problem(50, 0)
    with pytest.raises(ValueError, match="expected"):
        kind().fit(p, y[:-1])


@pytest.mark.parametrize("kind", [Temperature, Conformal, Stacking])
def test_nan_is_refused(kind):
    p, y = over_classes(50, 0)
    p.mean[0] = p.samples[0, 0] = math.nan
    with pytest.raises(ValueError, match="expected probabilities, got NaN"):
        kind().fit(p, y)
    p, y = over_reals(50, 0)
    y[0] = math.nan
    with pytest.raises(ValueError, match="expected finite targets, got 2 of 100"):
        kind().fit(p, y)


@pytest.mark.parametrize("kind", [Temperature, Stacking, Conformal])
def test_targets_that_are_no_classes_are_refused(kind):
    p, y = over_classes(100, 0)
    with pytest.raises(ValueError, match=r"Categorical expected targets .* class numbers, got torch\.float32"):
        kind().fit(p, y + 0.7)
    p, y = of_yes(100, 0)
    for wrong in (torch.full_like(y, 0.7, dtype=torch.float32), 2 * torch.ones_like(y)):
        with pytest.raises(ValueError, match=r"expected targets of 0 .* got others; round soft labels first"):
            kind().fit(p, wrong)


@pytest.mark.parametrize("kind", [Temperature, Conformal, Stacking])
def test_probabilities_in_place_of_a_prediction_are_refused(kind):
    p, y = over_classes(50, 0)
    with pytest.raises(
        TypeError, match=r"expected a Prediction, as lb\.predict returns it, got Tensor; pass all of it"
    ):
        kind().fit(p.mean, y)
    with pytest.raises(TypeError, match=r"expected a Prediction, .*got Tensor"):
        kind().fit(p, y)(p.mean)


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="expected a level between 0 and 1, got 90"):
        Conformal(90)
    with pytest.raises(ValueError, match="expected scale to be draws, mean or None, got 'all'"):
        Temperature("all")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@each_problem
def test_an_accelerator_gives_the_same(problem):
    p, y = problem(200, 0, sure=2.0)
    here, there = Temperature().fit(p, y), Temperature().fit(p.to("cuda"), y.cuda())
    assert there.temperature == pytest.approx(here.temperature, rel=1e-5)
    torch.testing.assert_close(there(p.to("cuda")).to("cpu").mean, here(p).mean)
    sets = Conformal().fit(p.to("cuda"), y.cuda())(p.to("cuda"))
    assert (sets[0] if isinstance(sets, tuple) else sets).is_cuda
