"""Scores on held-out data after an epoch, from the mean of a few draws."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leanbayes.core.prediction import Prediction
from leanbayes.core.predictor import predict
from leanbayes.distributions.likelihoods import Likelihood, match_shape
from leanbayes.runtime._files import finite
from leanbayes.runtime.batches import Output
from leanbayes.training.data import Batches
from leanbayes.training.objective import NetworkWithLikelihood

DRAWS = 4
"""Draws of a prediction: enough to follow a training, a quarter of the default of `predict`."""


def validate(
    model: NetworkWithLikelihood, batches: Batches, likelihood: Likelihood, output: Output | None, fabric: Any
) -> dict[str, float | None]:
    """Return valid_nll, and valid_accuracy or valid_rmse.

    Every process predicts its own rows; the sums over all processes count each row once.
    """
    regression = likelihood.measure == "variance"
    sums = torch.zeros(3, dtype=torch.float64, device=fabric.device)  # -log p, squared errors or hits, targets
    for x, y in batches.in_order():
        with model.autocast():
            prediction = predict(model.network, x, likelihood, samples=DRAWS, output=output)
        sums += torch.stack(_sums(prediction, y, regression)).to(sums)
    nll, second, count = fabric.all_reduce(sums, reduce_op="sum").tolist()
    if regression:
        return {"valid_nll": finite(nll / count), "valid_rmse": finite((second / count) ** 0.5)}
    return {"valid_nll": finite(nll / count), "valid_accuracy": second / count}


def _sums(prediction: Prediction, y: Tensor, regression: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of -log p, the sum of squared errors (or of hits), and the number of targets."""
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
