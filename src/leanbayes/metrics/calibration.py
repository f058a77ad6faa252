"""Calibration errors, reliability diagrams, risk-coverage curves and temperature scaling.

Rows are put into bins of similar confidence. In each bin, the accuracy should equal the mean confidence. A likelihood
after temperature scaling, softmax(log p / T), separates a better function from a better temperature (Ashukha et al.,
2020). Inputs are probabilities (B, C) with classes (B,), or dense (B, C, ...) with (B, ...). Targets of -100 are
dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from leanbayes.metrics._validate import (
    average_over_ties,
    check_whole,
    finite,
    flatten,
    log_probabilities,
    pick,
)
from leanbayes.metrics.classification import doubt

LARGEST = 100.0
"""Temperatures are between 1 / LARGEST and LARGEST."""


@dataclass(frozen=True)
class Bin:
    """One bin of a reliability diagram: mean confidence, accuracy, number of rows."""

    confidence: float
    accuracy: float
    count: int


def reliability(probabilities: Tensor, y: Tensor, bins: int = 15) -> list[Bin]:
    """Return the non-empty bins of a reliability diagram, from the lowest confidence to the highest."""
    sums = equal_bins(*_answers(probabilities, y), bins)
    return [
        Bin(confidence / rows, hits / rows, int(rows))
        for rows, confidence, hits in zip(*(each.tolist() for each in sums), strict=True)
        if rows
    ]


def ece(probabilities: Tensor, y: Tensor, bins: int = 15, smallest: int = 0) -> Tensor:
    """Return the expected calibration error: sum_b (n_b / n) |accuracy_b - confidence_b| over equal bins.

    Bins of the confidence (max probability) are closed on the right. Those with at most `smallest` rows are dropped,
    but n counts all rows; NaN if no bin is left. The paper on model patching has bins=20, smallest=5.
    """
    gaps, sums = _gaps(probabilities, y, bins, smallest)
    return gaps.sum() / sums.rows.sum() if len(gaps) else gaps.new_tensor(torch.nan)


def mce(probabilities: Tensor, y: Tensor, bins: int = 15, smallest: int = 0) -> Tensor:
    """Return the maximum calibration error: max_b |accuracy_b - confidence_b| over the bins of `ece`."""
    gaps, sums = _gaps(probabilities, y, bins, smallest)
    return (gaps / sums.rows[sums.rows > smallest]).max() if len(gaps) else gaps.new_tensor(torch.nan)


def adaptive_ece(probabilities: Tensor, y: Tensor, bins: int = 15) -> Tensor:
    """Return the calibration error over bins with equal numbers of rows (to within one), sorted by confidence.

    Rows of equal confidence share their mean accuracy, so that their order has no effect.
    """
    check_whole(bins, "bins")
    confidence, hit = _answers(probabilities, y)
    hit = average_over_ties(confidence, hit)
    order = confidence.argsort()
    index = torch.arange(len(order), device=order.device) * bins // len(order)
    sums = _sum_bins(confidence[order], hit[order], index, bins)
    return (sums.hits - sums.confidence).abs().sum() / len(order)


def classwise_ece(probabilities: Tensor, y: Tensor, bins: int = 15) -> Tensor:
    """Return the calibration error of the probability of each class, averaged over classes (Kull et al., 2019).

    1 / C sum_c sum_b (n_bc / n) |share of class c in bin b - mean p_c in bin b|, over equal bins of p_c.
    """
    probabilities, y = flatten(probabilities, y)
    errors = []
    for c in range(probabilities.shape[1]):
        sums = equal_bins(probabilities[:, c].double().contiguous(), (y == c).double(), bins)
        errors.append((sums.hits - sums.confidence).abs().sum() / len(y))
    return torch.stack(errors).mean()


class _Sums(NamedTuple):
    """Number of rows, sum of confidences and number of correct answers, for each bin."""

    rows: Tensor
    confidence: Tensor
    hits: Tensor


def _answers(probabilities: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the confidence of every answer and whether it is correct, as float64 (N,)."""
    probabilities, y = flatten(probabilities, y)
    confidence, predicted = probabilities.double().max(1)
    return confidence, (predicted == y).double()


def equal_bins(confidence: Tensor, hit: Tensor, bins: int) -> _Sums:
    """Sum over bins ((b - 1) / bins, b / bins]; zero belongs to the first."""
    check_whole(bins, "bins")
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device=confidence.device)
    return _sum_bins(confidence, hit, torch.bucketize(confidence, edges[1:-1]), bins)


def _sum_bins(confidence: Tensor, hit: Tensor, index: Tensor, bins: int) -> _Sums:
    values = torch.stack((torch.ones_like(confidence), confidence, hit))
    sums = torch.zeros(3, bins, dtype=torch.float64, device=confidence.device).index_add_(1, index, values)
    return _Sums(*sums)


def _gaps(probabilities: Tensor, y: Tensor, bins: int, smallest: int) -> tuple[Tensor, _Sums]:
    """Return |hits - sum of confidences| of the bins with more than `smallest` rows, and the sums of all bins."""
    check_whole(smallest, "smallest", least=0)
    sums = equal_bins(*_answers(probabilities, y), bins)
    return (sums.hits - sums.confidence)[sums.rows > smallest].abs(), sums


class RiskCoverage(NamedTuple):
    """Mean loss of the k least uncertain rows, against their share k / n, for k = 1 ... n."""

    coverage: Tensor
    risk: Tensor


def risk_coverage(uncertainty: Tensor, loss: Tensor) -> RiskCoverage:
    """Return the risk-coverage curve of selective prediction: the least uncertain rows are answered first.

    Each row counts as the mean of its ties: the expected curve if ties are ordered at random. The loss, in the shape of
    the uncertainty, is for example 1 for a wrong class and 0 for a correct one.
    """
    if uncertainty.shape != loss.shape:
        raise ValueError(f"expected a loss for every uncertainty, got {tuple(loss.shape)}, {tuple(uncertainty.shape)}")
    keys = finite(uncertainty, "uncertainties").flatten()
    values = finite(loss, "losses").flatten().to(uncertainty.device)
    values = average_over_ties(keys, values)[keys.argsort()]
    answered = torch.arange(1, len(values) + 1, dtype=torch.float64, device=values.device)
    return RiskCoverage(answered / len(values), values.cumsum(0) / answered)


def aurc(probabilities: Tensor, y: Tensor, uncertainty: Tensor | None = None) -> Tensor:
    """Return the area under the risk-coverage curve of wrong answers: 1 / n sum_k risk_k (Geifman et al., 2019).

    The uncertainty is in the shape of y; default one minus the confidence.
    """
    rows, classes = flatten(probabilities, y)
    if uncertainty is None:
        score = doubt(rows)
    elif uncertainty.shape == y.shape:
        score = uncertainty.to(rows.device)[(y.long() != -100).to(rows.device)]
    else:
        raise ValueError(f"expected an uncertainty for every target {tuple(y.shape)}, got {tuple(uncertainty.shape)}")
    return risk_coverage(score, (rows.argmax(1) != classes).double()).risk.mean()


def temper(probabilities: Tensor, temperature: float | Tensor) -> Tensor:
    """Return softmax(log p / T) over axis 1 in the same dtype; T above one is softer, below one sharper."""
    return (log_probabilities(probabilities) / temperature).softmax(1).to(probabilities.dtype)


def best_temperature(probabilities: Tensor, y: Tensor, prior: float | None = None) -> Tensor:
    """Return the temperature T that minimises the mean of -log softmax(log p / T)_y.

    The loss is convex in 1 / T. If it has no minimum (every answer is correct, or none is better than chance), a
    standard normal prior of log T with the weight of one row is added: a few correct answers do not prove certainty.
    With `prior`, T maximises the posterior under log T ~ Normal(0, prior^2).
    """
    return best_joint_temperature([probabilities], y, prior)


def best_joint_temperature(samples: Tensor | Sequence[Tensor], y: Tensor, prior: float | None = None) -> Tensor:
    """Return the temperature that minimises the mean of -log mean_s softmax(log p_s / T)_y over S draws.

    Each draw of (S, B, C, ...) is tempered, then they are averaged; with one draw this is `best_temperature`. With
    `prior`, it maximises the posterior under log T ~ Normal(0, prior^2), which keeps few rows near T = 1.
    """
    rows = [flatten(sample, y) for sample in samples]
    logs, classes = [log_probabilities(each) for each, _ in rows], rows[0][1]

    def slope(inverse: float) -> float:
        # d/db log softmax(b l)_y = l_y - sum_c softmax(b l)_c l_c, weighted by a draw's share of the likelihood.
        tempered = [(inverse * each).log_softmax(1) for each in logs]
        gains = [pick(each, classes) - (t.exp() * each).sum(1) for each, t in zip(logs, tempered, strict=True)]
        shares = torch.stack([pick(t, classes) for t in tempered]).softmax(0)
        return -(shares * torch.stack(gains)).sum(0).mean().item()

    return torch.tensor(1 / best_inverse(slope, len(classes), prior), dtype=torch.float64, device=classes.device)


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


def best_inverse(slope: Callable[[float], float], rows: int, prior: float | None = None) -> float:
    """Return the inverse temperature b = 1 / T of the least mean loss over `rows` rows, from the slope of the loss.

    Bisection on the logarithm, to nine digits. A prior log T ~ Normal(0, prior^2) adds the slope
    log b / (b rows prior^2). Without one, the standard normal is added if the slope does not change its sign.
    """
    chosen = slope
    if prior is not None or slope(1 / LARGEST) >= 0 or slope(LARGEST) <= 0:
        weight = 1 / (rows * (prior or 1.0) ** 2)

        def chosen(inverse: float) -> float:
            return slope(inverse) + weight * math.log(inverse) / inverse

    low, high = -math.log(LARGEST), math.log(LARGEST)
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if chosen(math.exp(middle)) < 0 else (low, middle)
    return math.exp((low + high) / 2)
