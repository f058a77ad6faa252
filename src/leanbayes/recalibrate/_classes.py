"""Probabilities of classes in one form, whichever likelihood they come from."""

from __future__ import annotations

import torch
from torch import Tensor

from leanbayes.likelihoods import Bernoulli, binary_entropy, Categorical, entropy, match_shape
from leanbayes.prediction import Prediction

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
