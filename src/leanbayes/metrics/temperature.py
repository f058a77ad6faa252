"""Temperature scaling softmax(log p / T): fitted temperatures and the calibrated likelihood.

A calibrated likelihood separates a better function from a better temperature (Ashukha et al., 2020).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from leanbayes.metrics._validate import flatten, log_probabilities, pick

LARGEST = 100.0
"""Temperatures are between 1 / LARGEST and LARGEST."""


def temper(probabilities: Tensor, temperature: float | Tensor) -> Tensor:
    """Return softmax(log p / T) over axis 1 in the same dtype; T above one is softer, below one sharper."""
    return (log_probabilities(probabilities) / temperature).softmax(1).to(probabilities.dtype)


def best_temperature(probabilities: Tensor, y: Tensor) -> Tensor:
    """Return the temperature T that minimises the mean of -log softmax(log p / T)_y.

    The loss is convex in 1 / T. If it has no minimum (every answer is correct, or none is better than chance), a
    standard normal prior of log T with the weight of one row is added: a few correct answers do not prove certainty.
    """
    return best_joint_temperature([probabilities], y)


def best_joint_temperature(samples: Tensor | Sequence[Tensor], y: Tensor) -> Tensor:
    """Return the temperature that minimises the mean of -log mean_s softmax(log p_s / T)_y over S draws.

    Each draw of (S, B, C, ...) is tempered, then they are averaged; with one draw this is `best_temperature`.
    """
    rows = [flatten(sample, y) for sample in samples]
    logs, classes = [log_probabilities(each) for each, _ in rows], rows[0][1]

    def slope(inverse: float) -> float:
        # d/db log softmax(b l)_y = l_y - sum_c softmax(b l)_c l_c, weighted by a draw's share of the likelihood.
        tempered = [(inverse * each).log_softmax(1) for each in logs]
        gains = [pick(each, classes) - (t.exp() * each).sum(1) for each, t in zip(logs, tempered, strict=True)]
        shares = torch.stack([pick(t, classes) for t in tempered]).softmax(0)
        return -(shares * torch.stack(gains)).sum(0).mean().item()

    return torch.tensor(1 / best_inverse(slope, len(classes)), dtype=torch.float64, device=classes.device)


def calibrated_nll(probabilities: Tensor, y: Tensor, seed: int = 0) -> Tensor:
    """Return the cross-fitted negative log-likelihood after temperature scaling, in nats; NaN for a single row.

    The rows are split in two by the seed; the temperature of each half is scored on the other. Dense predictions are
    split by images, not by pixels.
    """
    flatten(probabilities, y)  # checks the whole input before it is split
    if len(probabilities) < 2:
        return torch.tensor(torch.nan, device=probabilities.device)
    return torch.cat([losses for _, losses in cross_fitted(probabilities, y, seed)]).mean()


def cross_fitted(probabilities: Tensor, y: Tensor, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Return both halves of the rows, each with its losses at the temperature of the other half.

    The losses are -log softmax(log p / T)_y, one for each target that counts, in the order of the row numbers.
    """
    order = torch.randperm(len(probabilities), generator=torch.Generator().manual_seed(seed), device="cpu")
    first, second = order.tensor_split(2)
    scored = []
    for fitted, half in ((first, second), (second, first)):
        p, q = (probabilities[rows.to(probabilities.device)] for rows in (fitted, half))
        y_p, y_q = (y[rows.to(y.device)] for rows in (fitted, half))
        each, classes = flatten(q, y_q)
        logits = log_probabilities(each) / best_temperature(p, y_p)
        scored.append((half, -pick(logits.log_softmax(1), classes)))
    return scored


def best_inverse(slope: Callable[[float], float], rows: int) -> float:
    """Return the inverse temperature b = 1 / T of the least mean loss over `rows` rows, from the slope of the loss.

    Bisection on the logarithm, to nine digits. If the slope does not change its sign, a standard normal prior of
    log T with the weight of one row is added: its slope is log b / (b rows).
    """
    chosen = slope
    if slope(1 / LARGEST) >= 0 or slope(LARGEST) <= 0:

        def chosen(inverse: float) -> float:
            return slope(inverse) + math.log(inverse) / (inverse * rows)

    low, high = -math.log(LARGEST), math.log(LARGEST)
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if chosen(math.exp(middle)) < 0 else (low, middle)
    return math.exp((low + high) / 2)
