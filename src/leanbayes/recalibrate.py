"""Recalibration: mend the probabilities of any prediction after training, with a few hundred rows set aside.

`Temperature` gives back a prediction that is as sure as it is right; `Conformal` gives sets of classes, or intervals,
that hold the target as often as they promise, whatever the model. Both are fitted on rows that trained nothing:
`fit(prediction, y)`, then called on new predictions.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, Self

import torch
from torch import Tensor

from leanbayes.likelihoods import Bernoulli, binary_entropy, Categorical, entropy, Gaussian, match_shape
from leanbayes.metrics.rows import finite, flatten, matched, pick
from leanbayes.metrics.temperature import best_inverse, best_joint_temperature, temper
from leanbayes.prediction import Prediction
from leanbayes.uncertainty import decompose, Decomposition

# S draws, B rows, C classes, D targets

Scale = Literal["draws", "mean"]


class Temperature:
    """Temperature scaling: the one number that makes the likelihood of a prediction largest.

    *Classes.* With scale="draws" every draw becomes softmax(log p_s / T), and T minimises the mean of
    -log mean_s softmax(log p_s / T)_y. The new draws are draws like others: mean, entropies and mutual information
    follow from them. With scale="mean" the mean becomes softmax(log mean / T), as in `metrics.calibrated_nll`. It can
    sharpen even where confident draws contradict each other, but no draws average to it: `samples` is None, and the
    entropy is split into aleatoric and epistemic in its old proportion.

    *Real targets.* T multiplies the standard deviation: the predictive density is stretched around its mean, and every
    variance grows by T^2. scale="draws" fits the mixture of the draws, scale="mean" the Gaussian of the same mean and
    variance.

    Where the likelihood has no maximum (every answer is right), see `metrics.best_temperature`.

    Args:
        scale: what the temperature applies to; None is the draws if the prediction that is fitted has them, else the
            mean.

    Attributes:
        temperature: above one for a model that was too sure; None before `fit`.
    """

    def __init__(self, scale: Scale | None = None) -> None:
        """Start without a temperature."""
        if scale not in (None, "draws", "mean"):
            raise ValueError(f"expected scale to be draws, mean or None, got {scale!r}")
        self.scale = scale
        self.temperature: float | None = None
        self._fitted: tuple[type, Scale] | None = None

    def fit(self, prediction: Prediction, y: Tensor) -> Self:
        """Find the temperature from predictions and targets that trained nothing; returns itself."""
        _check_prediction(prediction)
        scale: Scale = self.scale or ("mean" if prediction.samples is None else "draws")
        if isinstance(prediction.likelihood, Gaussian):
            self.temperature = _best_stretch(prediction, y, scale)
        else:
            draws = [_over_classes(draw, prediction) for draw in _draws(prediction, scale)]
            self.temperature = best_joint_temperature(draws, _class_targets(prediction, y)).item()
        self._fitted = type(prediction.likelihood), scale
        return self

    def __call__(self, prediction: Prediction) -> Prediction:
        """Return the prediction at the temperature that was fitted."""
        if self._fitted is None or self.temperature is None:
            raise RuntimeError(_UNFITTED.format("Temperature"))
        likelihood, scale = self._fitted
        _check_kind(likelihood, prediction)
        if isinstance(prediction.likelihood, Gaussian):
            return _stretched(prediction, self.temperature)
        return _tempered(prediction, self.temperature, scale)


class Conformal:
    """Split-conformal prediction: sets that hold the target with probability `level`, whatever the model.

    With scores s_i of n rows that trained nothing, q is the ceil((n + 1) level)-th smallest; a new row drawn like
    those has s <= q with a probability between level and level + 1 / (n + 1) (if no scores are tied).

    *Classes.* The score is -p(y), which ranks like the usual 1 - p(y) and is not rounded near one: a set holds every
    class with p >= -q. It gives the smallest sets on average; a set is empty where no class is probable enough, which
    happens when the model is right more often than `level`. Dense predictions count pixels. Bernoulli predictions have
    two classes, no and yes.

    *Real targets.* The score is |y - mean| / std, each target with its own q: the interval is mean -+ q std.

    Args:
        level: the share of targets to hold.

    Attributes:
        threshold: q, one for all classes or one for each target (D,); None before `fit`.
    """

    def __init__(self, level: float = 0.9) -> None:
        """Keep the level."""
        if not 0 < level < 1:
            raise ValueError(f"expected a level between 0 and 1, got {level!r}")
        self.level = level
        self.threshold: Tensor | None = None
        self._likelihood: type | None = None

    def fit(self, prediction: Prediction, y: Tensor) -> Self:
        """Find the threshold from predictions and targets that trained nothing; returns itself."""
        _check_prediction(prediction)
        if isinstance(prediction.likelihood, Gaussian):
            mean, std = finite(prediction.mean, "predictions"), finite(prediction.std, "standard deviations")
            scores = (matched(y, mean) - mean).abs() / std
        else:
            rows, classes = flatten(_over_classes(prediction.mean, prediction), _class_targets(prediction, y))
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
        """Return which classes are in each set (B, C, ...), or the ends of the intervals (B, D)."""
        if self._likelihood is None or self.threshold is None:
            raise RuntimeError(_UNFITTED.format("Conformal"))
        _check_kind(self._likelihood, prediction)
        threshold = self.threshold.to(prediction.mean.device)
        if isinstance(prediction.likelihood, Gaussian):
            half = (threshold * prediction.std).to(prediction.mean.dtype)
            return prediction.mean - half, prediction.mean + half
        return -_over_classes(prediction.mean, prediction).double() <= threshold


_UNFITTED = "{} is not fitted yet: call fit(prediction, y) with rows that trained nothing"


def _check_prediction(prediction: object) -> None:
    """Raise unless it is a prediction, and not the probabilities out of one."""
    if not isinstance(prediction, Prediction):
        raise TypeError(
            f"expected a Prediction, as lb.predict returns it, got {type(prediction).__name__}; pass all of it, not "
            "its mean"
        )


def _check_kind(likelihood: type, prediction: Prediction) -> None:
    """Raise unless the prediction is of the kind that was fitted."""
    _check_prediction(prediction)
    if type(prediction.likelihood) is not likelihood:
        raise TypeError(
            f"expected a prediction with {likelihood.__name__}, as fitted, got {type(prediction.likelihood).__name__}; "
            f"fit another one"
        )


def _draws(prediction: Prediction, scale: Scale) -> Tensor:
    """Return what is scaled: the draws (S, B, ...), or the mean as the only one."""
    if scale == "mean":
        return prediction.mean.unsqueeze(0)
    if prediction.samples is None:
        raise ValueError(
            'a temperature of draws needs the draws; call predict with keep_samples=True, or fit Temperature("mean")'
        )
    return prediction.samples


# ------------------------------------------------------------------------------- classes


def _over_classes(probabilities: Tensor, prediction: Prediction) -> Tensor:
    """Return probabilities with classes on axis 1; a yes (B, ...) has two, no and yes (B, 2, ...)."""
    if isinstance(prediction.likelihood, Categorical):
        return probabilities
    if isinstance(prediction.likelihood, Bernoulli):
        # Near one, 1 - p is rounded to zero in float32 although the network meant a small number.
        return torch.stack(((1 - probabilities).clamp(min=2**-25), probabilities), 1)
    raise TypeError(
        f"expected a prediction with Categorical, Bernoulli or Gaussian, got {type(prediction.likelihood).__name__}"
    )


def _class_targets(prediction: Prediction, y: Tensor) -> Tensor:
    """Return targets as class numbers, with -100 where they are ignored."""
    if isinstance(prediction.likelihood, Categorical):
        return y.masked_fill(y == prediction.likelihood.ignore_index, -100)
    return match_shape(y, prediction.mean, "Bernoulli").long()


def _tempered(prediction: Prediction, temperature: float, scale: Scale) -> Prediction:
    """Temper every draw, or the mean, and split the uncertainty anew."""
    binary = isinstance(prediction.likelihood, Bernoulli)
    each = [temper(_over_classes(draw, prediction), temperature) for draw in _draws(prediction, scale)]
    samples = torch.stack([draw[:, 1] if binary else draw for draw in each])
    own = torch.stack([(binary_entropy if binary else entropy)(draw) for draw in samples])
    parts = decompose(samples, own, "entropy")
    if scale == "draws":
        return replace(prediction, samples=samples, **parts._asdict())
    epistemic = parts.total * (prediction.epistemic / prediction.total).nan_to_num(0.0)  # no doubt at all: 0 / 0
    aleatoric = parts.total - epistemic
    changed = Decomposition(parts.mean, aleatoric + epistemic, aleatoric, epistemic)
    return replace(prediction, samples=None, **changed._asdict())


# ------------------------------------------------------------------------------- real targets


def _best_stretch(prediction: Prediction, y: Tensor, scale: Scale) -> float:
    """Return the factor of the standard deviation that makes the density of the targets largest.

    With b = 1 / T, residuals r = y - mean and draws at d_s around the mean, the density of a row is proportional to
    b^D sum_s exp(-1/2 sum_d (b r - d_s)^2 / v_s) / sqrt(prod_d v_s).
    """
    noise = prediction.noise if scale == "draws" else None
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
    """Stretch the predictive density around its mean."""
    samples, noise = prediction.samples, prediction.noise
    return replace(
        prediction,
        total=factor**2 * prediction.total,
        aleatoric=factor**2 * prediction.aleatoric,
        epistemic=factor**2 * prediction.epistemic,
        samples=None if samples is None else prediction.mean + factor * (samples - prediction.mean),
        noise=None if noise is None else factor**2 * noise,
    )
