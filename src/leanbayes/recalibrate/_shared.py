"""What every recalibration refuses, in the same words."""

from __future__ import annotations

import torch
from torch import Tensor

from leanbayes.core.prediction import Prediction
from leanbayes.distributions.likelihoods import Bernoulli, binary_entropy, Categorical, entropy, match_shape

UNFITTED = "{} is not fitted yet: call fit(prediction, y) with rows that trained nothing"


def check_prediction(prediction: object) -> None:
    """Raise unless it is a prediction, and not the probabilities out of one."""
    if not isinstance(prediction, Prediction):
        raise TypeError(
            f"expected a Prediction, as lb.predict returns it, got {type(prediction).__name__}; pass all of it, not "
            "its mean"
        )


def check_kind(likelihood: type, prediction: Prediction) -> None:
    """Raise unless the prediction is of the kind that was fitted."""
    check_prediction(prediction)
    if type(prediction.likelihood) is not likelihood:
        raise TypeError(
            f"expected a prediction with {likelihood.__name__}, as fitted, got {type(prediction.likelihood).__name__}; "
            f"fit another one"
        )


# -------------------- _classes
# Probabilities of classes in one form, whichever likelihood they come from.


# S draws, B rows, C classes


def over_classes(probabilities: Tensor, prediction: Prediction) -> Tensor:
    """Return probabilities with classes on axis 1; a yes (B, ...) has two, no and yes (B, 2, ...)."""
    if isinstance(prediction.likelihood, Categorical):
        return probabilities
    if isinstance(prediction.likelihood, Bernoulli):
        # Near one, 1 - p is rounded to zero in float32 although the network meant a small number.
        return torch.stack(((1 - probabilities).clamp(min=2**-25), probabilities), 1)
    raise TypeError(
        f"expected a prediction with Categorical, Bernoulli or Gaussian, got {type(prediction.likelihood).__name__}"
    )


def class_targets(prediction: Prediction, y: Tensor) -> Tensor:
    """Return targets as class numbers, with -100 where they are ignored."""
    if isinstance(prediction.likelihood, Categorical):
        y = y.long()  # in fewer bits, a class may look like -100
        return y.masked_fill(y == prediction.likelihood.ignore_index, -100)
    return match_shape(y, prediction.mean, "Bernoulli").long()


def entropies(samples: Tensor, prediction: Prediction) -> Tensor:
    """Return the entropy of every draw (S, B, ...)."""
    of_draw = binary_entropy if isinstance(prediction.likelihood, Bernoulli) else entropy
    return torch.stack([of_draw(draw) for draw in samples])
