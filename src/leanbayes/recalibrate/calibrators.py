"""Temperature scaling, stacking of draws, and conformal sets, each fitted to predictions of held-out rows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, Self

import torch
from torch import Tensor
from torch.distributions import Normal

from leanbayes.core.prediction import average, decompose, Decomposition, over_classes, Prediction
from leanbayes.distributions.likelihoods import (
    Bernoulli,
    binary_entropy,
    Categorical,
    class_numbers,
    entropy,
    Gaussian,
    Likelihood,
    match_shape,
)
from leanbayes.metrics._validate import finite, flatten, log_probabilities, matched, pick
from leanbayes.metrics.calibration import best_inverse, best_joint_temperature, temper

# S draws, B rows, N targets, C classes, D targets of a row

Scale = Literal["draws", "mean"]

TOLERANCE = 1e-10
"""Largest distance of the mean log-likelihood of stacked draws from the best, in nats."""

MOST_STEPS = 100
"""Newton's method takes ten to twenty steps; rounding may keep it from the tolerance."""


class _Calibrator:
    """Base of the three: remembers the likelihood that was fitted, and checks predictions against it."""

    _likelihood: type | None = None

    def _check_fitted(self, prediction: Prediction) -> None:
        if self._likelihood is None:
            raise RuntimeError(
                f"{type(self).__name__} is not fitted yet: call fit(prediction, y) with rows that trained nothing"
            )
        _check_prediction(prediction)
        if type(prediction.likelihood) is not self._likelihood:
            raise TypeError(
                f"expected a prediction with {self._likelihood.__name__}, as fitted, got "
                f"{type(prediction.likelihood).__name__}; fit another one"
            )


class Temperature(_Calibrator):
    """Temperature scaling: one number T that maximises the likelihood of a prediction.

    *Classes.* With scale="draws" each draw becomes softmax(log p_s / T), and T minimises the mean of
    -log mean_s softmax(log p_s / T)_y. Mean, entropies and mutual information follow from the new draws. With
    scale="mean" the mean becomes softmax(log mean / T), as in `metrics.calibrated_nll`. It can sharpen even if
    confident draws contradict each other. No draws average to it: `samples` is None, and the entropy keeps its
    proportion of aleatoric and epistemic.

    *Real targets.* T multiplies the standard deviation, and every variance grows by T^2. scale="draws" fits the mixture
    of the draws, scale="mean" the Gaussian of the same mean and variance.

    If the likelihood has no maximum (every answer is correct), see `metrics.best_temperature`. A few correct answers
    with one error prove little, too: with less than some hundred rows, give a `prior`.

    Args:
        scale: apply the temperature to "draws" or "mean"; None chooses draws if the fitted prediction has them with
            equal weights, else the mean.
        prior: standard deviation s of a prior log T ~ Normal(0, s^2), such as 0.5; None is the likelihood alone.

    Attributes:
        temperature: above one for an overconfident model; None before `fit`.
    """

    def __init__(self, scale: Scale | None = None, prior: float | None = None) -> None:
        if scale not in (None, "draws", "mean"):
            raise ValueError(f"expected scale to be draws, mean or None, got {scale!r}")
        if prior is not None and not 0 < prior < math.inf:
            raise ValueError(f"expected prior to be a number above zero, or None, got {prior!r}")
        self.scale, self.prior = scale, prior
        self.temperature: float | None = None
        self._scale: Scale = "mean"

    @classmethod
    def of(cls, temperature: float, likelihood: Likelihood) -> Self:
        """Return a temperature of the mean that is known already, for predictions with this kind of likelihood."""
        if not temperature > 0:
            raise ValueError(f"expected a temperature above zero, got {temperature}")
        found = cls("mean")
        found.temperature, found._likelihood = float(temperature), type(likelihood)
        return found

    def fit(self, prediction: Prediction, y: Tensor) -> Self:
        """Find the temperature from held-out predictions and targets; return itself."""
        _check_prediction(prediction)
        equal = prediction.samples is not None and prediction.weights is None
        scale: Scale = self.scale or ("draws" if equal else "mean")
        if isinstance(prediction.likelihood, Gaussian):
            self.temperature = _best_stretch(prediction, y, scale, self.prior)
        else:
            draws = [over_classes(draw, prediction) for draw in _draws(prediction, scale)]
            targets = _class_targets(prediction, y)
            self.temperature = best_joint_temperature(draws, targets, self.prior).item()
        self._likelihood, self._scale = type(prediction.likelihood), scale
        return self

    def __call__(self, prediction: Prediction) -> Prediction:
        """Return the prediction at the fitted temperature."""
        self._check_fitted(prediction)
        assert self.temperature is not None
        if isinstance(prediction.likelihood, Gaussian):
            return _stretched(prediction, self.temperature)
        return _tempered(prediction, self.temperature, self._scale)


class Stacking(_Calibrator):
    """Weights of the draws that make held-out targets likeliest, in place of equal weights.

    w maximises sum_i log sum_s w_s p(y_i | draw s) over w >= 0, sum_s w_s = 1. A new prediction is the mixture under w:

        mean = sum_s w_s m_s,     aleatoric = sum_s w_s H_s or sum_s w_s v_s,
        epistemic = H(mean) - aleatoric or sum_s w_s (m_s - mean)^2,     total = aleatoric + epistemic,

    with entropies H of classes, variances v of real targets, and `prediction.weights` w. Equal draws share their
    weight, and many weights are almost zero. S numbers are fitted: use many more rows than draws.

    Call it on predictions of the same model, seed and number of samples. Weights of a prediction are replaced.

    Attributes:
        weights: w (S,), in float64; None before `fit`.

    Example:
        >>> stacked = lb.recalibrate.Stacking().fit(lb.predict(bnn, x_held_out, seed=0, samples=32), y_held_out)
        >>> p = stacked(lb.predict(bnn, x, seed=0, samples=32))
    """

    def __init__(self) -> None:
        self.weights: Tensor | None = None

    def fit(self, prediction: Prediction, y: Tensor) -> Self:
        """Find the weights from held-out predictions and targets; return itself."""
        _check_prediction(prediction)
        samples = _kept_draws(prediction)
        if isinstance(prediction.likelihood, Gaussian):
            each = _log_densities(samples, prediction, y)
        else:
            rows = [flatten(over_classes(draw, prediction), _class_targets(prediction, y)) for draw in samples]
            each = torch.stack([pick(log_probabilities(p), classes) for p, classes in rows])
        self.weights = best_weights(each)
        self._likelihood = type(prediction.likelihood)
        return self

    def __call__(self, prediction: Prediction) -> Prediction:
        """Return the prediction of the same draws under the fitted weights."""
        self._check_fitted(prediction)
        assert self.weights is not None
        samples = _kept_draws(prediction)
        if len(samples) != len(self.weights):
            raise ValueError(
                f"expected the {len(self.weights)} draws that were weighed, got {len(samples)}; predict with "
                f"samples={len(self.weights)} and the same seed, or fit again"
            )
        weights = self.weights.to(samples)
        return replace(prediction, weights=weights, **_decompose(samples, prediction, weights)._asdict())


class Conformal(_Calibrator):
    """Split-conformal prediction: sets that hold the target with probability `level`, for any model.

    q is the ceil((n + 1) level)-th smallest of the scores s of n held-out rows. A new row from the same distribution
    has s <= q with a probability between level and level + 1 / (n + 1) (if no scores are tied).

    *Classes.* The score is -p(y), which ranks like 1 - p(y) and is not rounded near one: a set holds every class with
    p >= -q. Sets are the smallest on average. A set may be empty if the model is correct more often than `level`.
    Dense predictions count pixels. Bernoulli predictions have two classes, no and yes.

    *Real targets.* The score is |y - mean| / std, each target with its own q: the interval is mean -+ q std.

    Args:
        level: the share of targets to hold.

    Attributes:
        threshold: q, one for all classes or one for each target (D,); None before `fit`.
    """

    def __init__(self, level: float = 0.9) -> None:
        if not 0 < level < 1:
            raise ValueError(f"expected a level between 0 and 1, got {level!r}")
        self.level = level
        self.threshold: Tensor | None = None

    def fit(self, prediction: Prediction, y: Tensor) -> Self:
        """Find the threshold from held-out predictions and targets; return itself."""
        _check_prediction(prediction)
        if isinstance(prediction.likelihood, Gaussian):
            mean, std = finite(prediction.mean, "predictions"), finite(prediction.std, "standard deviations")
            scores = (matched(y, mean) - mean).abs() / std
        else:
            rows, classes = flatten(over_classes(prediction.mean, prediction), _class_targets(prediction, y))
            scores = -pick(rows.double(), classes)
        count = len(scores)
        rank = math.ceil((count + 1) * self.level - 1e-9)  # 0.07 * 100 is a little more than 7
        if rank > count:
            raise ValueError(
                f"expected at least {math.ceil(self.level / (1 - self.level) - 1e-9)} rows for level {self.level}, got "
                f"{count}: no finite set is sure enough; set more rows aside, or lower the level"
            )
        self.threshold = scores.sort(0).values[rank - 1]
        self._likelihood = type(prediction.likelihood)
        return self

    def __call__(self, prediction: Prediction) -> Tensor | tuple[Tensor, Tensor]:
        """Return the membership of classes in each set (B, C, ...), or the ends of the intervals (B, D)."""
        self._check_fitted(prediction)
        assert self.threshold is not None
        threshold = self.threshold.to(prediction.mean.device)
        if isinstance(prediction.likelihood, Gaussian):
            half = (threshold * prediction.std).to(prediction.mean.dtype)
            return prediction.mean - half, prediction.mean + half
        return -over_classes(prediction.mean, prediction).double() <= threshold


def _check_prediction(prediction: object) -> None:
    """Raise unless it is a prediction, and not only its probabilities."""
    if not isinstance(prediction, Prediction):
        raise TypeError(
            f"expected a Prediction, as lb.predict returns it, got {type(prediction).__name__}; pass all of it, not "
            "its mean"
        )


def _class_targets(prediction: Prediction, y: Tensor) -> Tensor:
    """Return targets as class numbers, with -100 for ignored ones."""
    if isinstance(prediction.likelihood, Categorical):
        y = class_numbers(y, prediction.mean)
        return y.masked_fill(y == prediction.likelihood.ignore_index, -100)
    y = match_shape(y, prediction.mean, "Bernoulli")
    if ((y != 0) & (y != 1)).any():
        raise ValueError("expected targets of 0 (no) and 1 (yes), got others; round soft labels first")
    return y.long()


def _entropies(samples: Tensor, prediction: Prediction) -> Tensor:
    """Return the entropy of each draw (S, B, ...)."""
    of_draw = binary_entropy if isinstance(prediction.likelihood, Bernoulli) else entropy
    return torch.stack([of_draw(draw) for draw in samples])


def _draws(prediction: Prediction, scale: Scale) -> Tensor:
    """Return the scaled probabilities: the draws (S, B, ...), or the mean (1, B, ...)."""
    if scale == "mean":
        return prediction.mean.unsqueeze(0)
    if prediction.samples is None:
        raise ValueError(
            'a temperature of draws needs the draws; call predict with keep_samples=True, or fit Temperature("mean")'
        )
    if prediction.weights is not None:
        raise ValueError(
            "a temperature of draws expected draws that count alike, got weighted ones; temper before you stack, or "
            'fit Temperature("mean")'
        )
    return prediction.samples


def _tempered(prediction: Prediction, temperature: float, scale: Scale) -> Prediction:
    """Temper each draw, or the mean, and split the uncertainty again."""
    binary = isinstance(prediction.likelihood, Bernoulli)
    each = [temper(over_classes(draw, prediction), temperature) for draw in _draws(prediction, scale)]
    samples = torch.stack([draw[:, 1] if binary else draw for draw in each])
    parts = decompose(samples, _entropies(samples, prediction), "entropy")
    if scale == "draws":
        return replace(prediction, samples=samples, **parts._asdict())
    epistemic = parts.total * (prediction.epistemic / prediction.total).nan_to_num(0.0)  # no doubt at all: 0 / 0
    aleatoric = parts.total - epistemic
    changed = Decomposition(parts.mean, aleatoric + epistemic, aleatoric, epistemic)
    return replace(prediction, samples=None, weights=None, **changed._asdict())


def _best_stretch(prediction: Prediction, y: Tensor, scale: Scale, prior: float | None) -> float:
    """Return the factor of the standard deviation that maximises the density of real targets.

    With b = 1 / T, residuals r = y - mean and draws at offsets d_s from the mean, the density is proportional to
    b^D sum_s exp(-1/2 sum_d (b r - d_s)^2 / v_s) / sqrt(prod_d v_s).
    """
    noise = prediction.variances if scale == "draws" else None
    offsets = finite(_draws(prediction, scale) - prediction.mean, "predictions").flatten(2)
    variances = finite(prediction.total[None] if noise is None else noise, "variances").flatten(2)
    residuals = (matched(y, prediction.mean) - prediction.mean.double()).flatten(1)

    def slope(inverse: float) -> float:
        away = inverse * residuals - offsets
        shares = (-0.5 * (away.square() / variances + variances.log()).sum(2)).softmax(0)
        pull = (away * residuals / variances).sum(2)
        return (shares * pull).sum(0).mean().item() - residuals.shape[1] / inverse

    return 1 / best_inverse(slope, len(residuals), prior)


def _stretched(prediction: Prediction, factor: float) -> Prediction:
    """Stretch the density of real targets around its mean."""
    samples, noise = prediction.samples, prediction.variances
    return replace(
        prediction,
        total=factor**2 * prediction.total,
        aleatoric=factor**2 * prediction.aleatoric,
        epistemic=factor**2 * prediction.epistemic,
        samples=None if samples is None else prediction.mean + factor * (samples - prediction.mean),
        variances=None if noise is None else factor**2 * noise,
    )


def best_weights(log_likelihoods: Tensor) -> Tensor:
    """Return the w on the simplex that maximises mean_i log sum_s w_s p_si, from log p (S, N).

    The problem is concave, and sum_s w_s as a penalty has the same solution as the constraint. With
    g_s = mean_i p_si / sum_t w_t p_ti, the solution has w >= 0, z = 1 - g >= 0 and w z = 0. Newton's method follows
    the solutions of w z = mu as mu shrinks (a primal-dual interior point method). The mean log-likelihood is within
    max_s g_s - 1 of the best. Equal draws get equal weights.
    """
    p = (log_likelihoods - log_likelihoods.amax(0)).exp()  # only ratios within a column count
    weights = p.new_full((len(p),), 1 / len(p))
    slack = torch.ones_like(weights)
    for _ in range(MOST_STEPS):
        ratios = p / (weights @ p)
        gradient = ratios.mean(1)
        if gradient.max() * weights.sum() - 1 <= TOLERANCE:
            break
        target = 0.1 * (weights * slack).mean()
        curvature = ratios @ ratios.T / p.shape[1] + torch.diag(slack / weights)
        step = torch.linalg.solve(curvature, gradient - 1 + target / weights)
        slack_step = (target - slack * step) / weights - slack
        weights, slack = _move(weights, step), _move(slack, slack_step)
    return weights / weights.sum()


def _move(values: Tensor, step: Tensor) -> Tensor:
    """Take the whole step, or 99 % of the way to the first zero."""
    furthest = 1 / (-step / values).amax().clamp(min=1e-12)
    return values + (0.99 * furthest).clamp(max=1) * step


def _kept_draws(prediction: Prediction) -> Tensor:
    if prediction.samples is None:
        raise ValueError("stacking needs the draws; call predict with keep_samples=True")
    return prediction.samples


def _log_densities(samples: Tensor, prediction: Prediction, y: Tensor) -> Tensor:
    """Return log p(y | draw s) of real targets, summed over the targets of a row (S, B)."""
    assert prediction.variances is not None, "draws of real targets are kept with their variances"
    means, variances = finite(samples, "predictions"), finite(prediction.variances, "variances")
    each: Tensor = Normal(means, variances.sqrt()).log_prob(matched(y, prediction.mean))  # type: ignore[no-untyped-call]
    return each.flatten(2).sum(2)


def _decompose(samples: Tensor, prediction: Prediction, weights: Tensor) -> Decomposition:
    """Split the uncertainty of weighted draws; `core.prediction.decompose` has equal weights."""
    mean = average(samples, weights)
    if prediction.variances is not None:
        aleatoric = average(prediction.variances, weights)
        epistemic = average((samples - mean).square(), weights)
    else:
        aleatoric = average(_entropies(samples, prediction), weights)
        of_mean = _entropies(mean[None], prediction)[0]
        epistemic = (of_mean - aleatoric).clamp(min=0)  # rounding may leave -1e-8
    return Decomposition(mean, aleatoric + epistemic, aleatoric, epistemic)
