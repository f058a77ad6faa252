"""Calibration errors, reliability diagrams and risk-coverage curves.

Rows are put into bins of similar confidence. In each bin, the accuracy should equal the mean confidence.
Inputs are probabilities (B, C) with classes (B,), or dense (B, C, ...) with (B, ...). Targets of -100 are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from leanbayes.metrics._validate import average_over_ties, check_whole, finite, flatten
from leanbayes.metrics.classification import doubt


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
    sums = equal_bins(*_answers(probabilities, y), bins)
    kept = _kept(sums, smallest)
    return (sums.hits - sums.confidence)[kept].abs().sum() / sums.rows.sum() + _nan_if_none(kept)


def mce(probabilities: Tensor, y: Tensor, bins: int = 15, smallest: int = 0) -> Tensor:
    """Return the maximum calibration error: max_b |accuracy_b - confidence_b| over the bins of `ece`."""
    sums = equal_bins(*_answers(probabilities, y), bins)
    kept = _kept(sums, smallest)
    gaps = (sums.hits - sums.confidence).abs() / sums.rows
    return gaps.where(kept, 0.0).max() + _nan_if_none(kept)


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


def _kept(sums: _Sums, smallest: int) -> Tensor:
    check_whole(smallest, "smallest", least=0)
    return sums.rows > smallest


def _nan_if_none(kept: Tensor) -> Tensor:
    return torch.where(kept.any(), 0.0, torch.nan)


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
