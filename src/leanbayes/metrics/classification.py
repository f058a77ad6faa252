"""Accuracy, likelihood and Brier score of class probabilities.

Inputs are probabilities (B, C) with classes (B,), or dense (B, C, ...) with (B, ...). Targets of -100 are dropped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leanbayes.metrics._validate import check_whole, flatten, log_probabilities, pick


def accuracy(probabilities: Tensor, y: Tensor) -> Tensor:
    """Return the share of rows whose most probable class is correct; of ties the first class counts."""
    probabilities, y = flatten(probabilities, y)
    return (probabilities.argmax(1) == y).double().mean()


def top_k_accuracy(probabilities: Tensor, y: Tensor, k: int = 5) -> Tensor:
    """Return the share of rows whose class is among the k most probable; one if there are at most k classes.

    Equally probable classes are ranked in their order, so that k = 1 is `accuracy`.
    """
    check_whole(k, "k")
    probabilities, y = flatten(probabilities, y)
    target = pick(probabilities, y).unsqueeze(1)
    earlier = torch.arange(probabilities.shape[1], device=y.device) < y.unsqueeze(1)
    ahead = (probabilities > target) | ((probabilities == target) & earlier)
    return (ahead.sum(1) < k).double().mean()


def nll(probabilities: Tensor, y: Tensor) -> Tensor:
    """Return the negative log-likelihood in nats: the mean of -log p(y).

    A probability of zero counts as the smallest positive number of its dtype.
    """
    probabilities, y = flatten(probabilities, y)
    return -pick(log_probabilities(probabilities), y).mean()


def brier(probabilities: Tensor, y: Tensor) -> Tensor:
    """Return the Brier score: the mean of sum_c (p_c - [c = y])^2, between 0 and 2 (Brier, 1950)."""
    probabilities, y = flatten(probabilities, y)
    probabilities = probabilities.double()
    # sum_c (p_c - [c = y])^2 = sum_c p_c^2 - 2 p_y + 1, without a one-hot table.
    return (probabilities.square().sum(1) - 2 * pick(probabilities, y) + 1).mean()


def doubt(probabilities: Tensor) -> Tensor:
    """Return one minus the confidence, 1 - max_c p_c, of (B, C, ...) as (B, ...).

    It is summed over the other classes: in float32, 1 - p is zero for every confidence above 1 - 3e-8.
    """
    top = probabilities.argmax(1, keepdim=True)
    return probabilities.double().scatter(1, top, 0.0).sum(1)
