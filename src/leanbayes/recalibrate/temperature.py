"""Temperature scaling of predictions, fitted on held-out rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, Self

import torch
from torch import Tensor

from leanbayes.core.prediction import decompose, Decomposition, over_classes, Prediction
from leanbayes.distributions.likelihoods import Bernoulli, Gaussian, Likelihood
from leanbayes.metrics._validate import finite, matched
from leanbayes.metrics.temperature import best_inverse, best_joint_temperature, temper
from leanbayes.recalibrate._shared import check_kind, check_prediction, class_targets, entropies, UNFITTED

# S draws, B rows, C classes, D targets

Scale = Literal["draws", "mean"]


class Temperature:
    """Temperature scaling: one number T that maximises the likelihood of a prediction.

    *Classes.* With scale="draws" each draw becomes softmax(log p_s / T), and T minimises the mean of
    -log mean_s softmax(log p_s / T)_y. Mean, entropies and mutual information follow from the new draws. With
    scale="mean" the mean becomes softmax(log mean / T), as in `metrics.calibrated_nll`. It can sharpen even if
    confident draws contradict each other. No draws average to it: `samples` is None, and the entropy keeps its
    proportion of aleatoric and epistemic.

    *Real targets.* T multiplies the standard deviation, and every variance grows by T^2. scale="draws" fits the mixture
    of the draws, scale="mean" the Gaussian of the same mean and variance.

    If the likelihood has no maximum (every answer is correct), see `metrics.best_temperature`.

    Args:
        scale: apply the temperature to "draws" or "mean"; None chooses draws if the fitted prediction has them with
            equal weights, else the mean.

    Attributes:
        temperature: above one for an overconfident model; None before `fit`.
    """

    def __init__(self, scale: Scale | None = None) -> None:
        if scale not in (None, "draws", "mean"):
            raise ValueError(f"expected scale to be draws, mean or None, got {scale!r}")
        self.scale = scale
        self.temperature: float | None = None
        self._fitted: tuple[type, Scale] | None = None

    @classmethod
    def of(cls, temperature: float, likelihood: Likelihood) -> Self:
        """Return a temperature of the mean that is known already, for predictions with this kind of likelihood."""
        if not temperature > 0:
            raise ValueError(f"expected a temperature above zero, got {temperature}")
        found = cls("mean")
        found.temperature, found._fitted = float(temperature), (type(likelihood), "mean")
        return found

    def fit(self, prediction: Prediction, y: Tensor) -> Self:
        """Find the temperature from held-out predictions and targets; return itself."""
        check_prediction(prediction)
        scale: Scale = self.scale or ("draws" if _has_equal_draws(prediction) else "mean")
        if isinstance(prediction.likelihood, Gaussian):
            self.temperature = _best_stretch(prediction, y, scale)
        else:
            draws = [over_classes(draw, prediction) for draw in _draws(prediction, scale)]
            self.temperature = best_joint_temperature(draws, class_targets(prediction, y)).item()
        self._fitted = type(prediction.likelihood), scale
        return self

    def __call__(self, prediction: Prediction) -> Prediction:
        """Return the prediction at the fitted temperature."""
        if self._fitted is None or self.temperature is None:
            raise RuntimeError(UNFITTED.format("Temperature"))
        likelihood, scale = self._fitted
        check_kind(likelihood, prediction)
        if isinstance(prediction.likelihood, Gaussian):
            return _stretched(prediction, self.temperature)
        return _tempered(prediction, self.temperature, scale)


def _has_equal_draws(prediction: Prediction) -> bool:
    return prediction.samples is not None and prediction.weights is None


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
    parts = decompose(samples, entropies(samples, prediction), "entropy")
    if scale == "draws":
        return replace(prediction, samples=samples, **parts._asdict())
    epistemic = parts.total * (prediction.epistemic / prediction.total).nan_to_num(0.0)  # no doubt at all: 0 / 0
    aleatoric = parts.total - epistemic
    changed = Decomposition(parts.mean, aleatoric + epistemic, aleatoric, epistemic)
    return replace(prediction, samples=None, weights=None, **changed._asdict())


def _best_stretch(prediction: Prediction, y: Tensor, scale: Scale) -> float:
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

    return 1 / best_inverse(slope, len(residuals))


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
