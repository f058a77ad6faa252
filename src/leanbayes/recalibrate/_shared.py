"""Checks, targets and entropies that every recalibration shares."""

from __future__ import annotations

import torch
from torch import Tensor

from leanbayes.core.prediction import Prediction
from leanbayes.distributions.likelihoods import Bernoulli, binary_entropy, Categorical, entropy, match_shape

UNFITTED = "{} is not fitted yet: call fit(prediction, y) with rows that trained nothing"


def check_prediction(prediction: object) -> None:
    """Raise unless it is a prediction, and not only its probabilities."""
    if not isinstance(prediction, Prediction):
        raise TypeError(
            f"expected a Prediction, as lb.predict returns it, got {type(prediction).__name__}; pass all of it, not "
            "its mean"
        )


def check_kind(likelihood: type, prediction: Prediction) -> None:
    """Raise unless the prediction has the likelihood that was fitted."""
    check_prediction(prediction)
    if type(prediction.likelihood) is not likelihood:
        raise TypeError(
            f"expected a prediction with {likelihood.__name__}, as fitted, got {type(prediction.likelihood).__name__}; "
            f"fit another one"
        )


def class_targets(prediction: Prediction, y: Tensor) -> Tensor:
    """Return targets as class numbers, with -100 for ignored ones."""
    if isinstance(prediction.likelihood, Categorical):
        y = y.long()  # in fewer bits, a class may equal -100
        return y.masked_fill(y == prediction.likelihood.ignore_index, -100)
    return match_shape(y, prediction.mean, "Bernoulli").long()


def entropies(samples: Tensor, prediction: Prediction) -> Tensor:
    """Return the entropy of each draw (S, B, ...)."""
    of_draw = binary_entropy if isinstance(prediction.likelihood, Bernoulli) else entropy
    return torch.stack([of_draw(draw) for draw in samples])
