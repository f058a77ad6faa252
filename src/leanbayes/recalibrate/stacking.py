"""Stacking: weights of posterior draws that maximise the held-out likelihood (Yao et al., 2018)."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import torch
from torch import Tensor
from torch.distributions import Normal

from leanbayes.core.prediction import average, Decomposition, over_classes, Prediction
from leanbayes.distributions.likelihoods import Gaussian
from leanbayes.metrics._validate import finite, flatten, log_probabilities, matched, pick
from leanbayes.recalibrate._shared import check_kind, check_prediction, class_targets, entropies, UNFITTED

# S draws, B rows, N targets, C classes, D targets of a row

TOLERANCE = 1e-10
"""Largest distance of the mean log-likelihood from the best, in nats."""

MOST_STEPS = 100
"""Newton's method takes ten to twenty steps; rounding may keep it from the tolerance."""


class Stacking:
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
        self._likelihood: type | None = None

    def fit(self, prediction: Prediction, y: Tensor) -> Self:
        """Find the weights from held-out predictions and targets; return itself."""
        check_prediction(prediction)
        samples = _draws(prediction)
        if isinstance(prediction.likelihood, Gaussian):
            each = _log_densities(samples, prediction, y)
        else:
            rows = [flatten(over_classes(draw, prediction), class_targets(prediction, y)) for draw in samples]
            each = torch.stack([pick(log_probabilities(p), classes) for p, classes in rows])
        self.weights = best_weights(each)
        self._likelihood = type(prediction.likelihood)
        return self

    def __call__(self, prediction: Prediction) -> Prediction:
        """Return the prediction of the same draws under the fitted weights."""
        if self._likelihood is None or self.weights is None:
            raise RuntimeError(UNFITTED.format("Stacking"))
        check_kind(self._likelihood, prediction)
        samples = _draws(prediction)
        if len(samples) != len(self.weights):
            raise ValueError(
                f"expected the {len(self.weights)} draws that were weighed, got {len(samples)}; predict with "
                f"samples={len(self.weights)} and the same seed, or fit again"
            )
        weights = self.weights.to(samples)
        return replace(prediction, weights=weights, **_decompose(samples, prediction, weights)._asdict())


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


def _draws(prediction: Prediction) -> Tensor:
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
        aleatoric = average(entropies(samples, prediction), weights)
        of_mean = entropies(mean[None], prediction)[0]
        epistemic = (of_mean - aleatoric).clamp(min=0)  # rounding may leave -1e-8
    return Decomposition(mean, aleatoric + epistemic, aleatoric, epistemic)
