"""How good the model is on held-out data after an epoch: a few draws, no more."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leanbayes.core.prediction import Prediction
from leanbayes.core.predictor import predict
from leanbayes.distributions.likelihoods import Likelihood, match_shape
from leanbayes.runtime.batches import Output
from leanbayes.training.data import Batches
from leanbayes.training.objective import Phase
from leanbayes.training.progress import finite

DRAWS = 4
"""Draws of a prediction: enough to follow a training, a quarter of what `predict` takes."""


def validate(
    phase: Phase, batches: Batches, likelihood: Likelihood, output: Output | None, fabric: Any
) -> dict[str, float | None]:
    """Return valid_nll, and valid_accuracy or valid_rmse, of the mean of a few draws.

    Every process predicts its own rows; the sums over all of them count each row once.
    """
    regression = likelihood.measure == "variance"
    sums = torch.zeros(3, dtype=torch.float64, device=fabric.device)  # -log p, error or hits, targets
    for x, y in batches.in_order():
        with phase.autocast():
            prediction = predict(phase.network, x, likelihood, samples=DRAWS, output=output)
        sums += torch.stack(_sums(prediction, y, regression)).to(sums)
    nll, second, count = fabric.all_reduce(sums, reduce_op="sum").tolist()
    if regression:
        return {"valid_nll": finite(nll / count), "valid_rmse": finite((second / count) ** 0.5)}
    return {"valid_nll": finite(nll / count), "valid_accuracy": second / count}


def _sums(prediction: Prediction, y: Tensor, regression: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of -log p, of the squared errors a target (or of the hits), and the number of targets."""
    nll = -prediction.log_prob(y).sum()
    mean = prediction.mean
    if regression:
        errors = (match_shape(y, mean, "validation") - mean).square().flatten(1).mean(1)
        return nll, errors.sum(), torch.tensor(float(len(errors)))
    if mean.dim() == y.dim() + 1 and mean.shape[1] > 1:  # probabilities of classes
        counted = y.long().ne(getattr(prediction.likelihood, "ignore_index", -1))
        hits = mean.argmax(1).eq(y) & counted
    else:  # probabilities of yes
        hits = mean.gt(0.5).eq(match_shape(y, mean, "validation").gt(0.5))
        counted = torch.ones_like(hits)
    return nll, hits.sum(), counted.sum()
