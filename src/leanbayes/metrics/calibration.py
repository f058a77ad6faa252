"""Calibration: do probabilities mean what they say?

Rows are put into bins of similar confidence; in each, the share of right answers should be the mean confidence.
All take probabilities (B, C) with classes (B,), or dense ones (B, C, ...) with (B, ...); targets of -100 are left out.
Temperatures have a module of their own.
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
    """One bin of a reliability diagram: mean confidence, share of right answers, number of rows."""

    confidence: float
    accuracy: float
    count: int


def reliability(probabilities: Tensor, y: Tensor, bins: int = 15) -> list[Bin]:
    """Return the bins of a reliability diagram, from the lowest confidence to the highest; empty ones are left out."""
    sums = equal_bins(*_answers(probabilities, y), bins)
    return [
        Bin(confidence / rows, hits / rows, int(rows))
        for rows, confidence, hits in zip(*(each.tolist() for each in sums), strict=True)
        if rows
    ]


def ece(probabilities: Tensor, y: Tensor, bins: int = 15, smallest: int = 0) -> Tensor:
    """Return the expected calibration error: sum_b (n_b / n) |accuracy_b - confidence_b| over equal bins.

    Args:
        probabilities: (B, C), or dense (B, C, ...).
        y: classes (B,), or (B, ...).
        bins: number of equally wide bins of the confidence (max probability), closed on the right.
        smallest: bins with at most so many rows are dropped; n still counts all rows. The paper on model patching
            has bins=20, smallest=5. NaN where no bin is left.
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
    """Return the calibration error over bins with equally many rows (to within one), in the order of confidence.

    Rows of equal confidence count as equally often right, so that their order does not matter.
    """
    check_whole(bins, "bins")
    confidence, hit = _answers(probabilities, y)
    hit = average_over_ties(confidence, hit)
    order = confidence.argsort()
    index = torch.arange(len(order), device=order.device) * bins // len(order)
    sums = _sum_bins(confidence[order], hit[order], index, bins)
    return (sums.hits - sums.confidence).abs().sum() / len(order)


def classwise_ece(probabilities: Tensor, y: Tensor, bins: int = 15) -> Tensor:
    """Return the calibration error of every class's probability, averaged over classes (Kull et al., 2019).

    1 / C sum_c sum_b (n_bc / n) |share of class c among the rows of bin b - mean probability of c|, over equal bins
    of p_c.
    """
    probabilities, y = flatten(probabilities, y)
    errors = []
    for c in range(probabilities.shape[1]):
        sums = equal_bins(probabilities[:, c].double().contiguous(), (y == c).double(), bins)
        errors.append((sums.hits - sums.confidence).abs().sum() / len(y))
    return torch.stack(errors).mean()


class _Sums(NamedTuple):
    """How many rows fell into each bin, and their confidences and right answers added up."""

    rows: Tensor
    confidence: Tensor
    hits: Tensor


def _answers(probabilities: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the confidence of every answer and whether it is right, as float64 (N,)."""
    probabilities, y = flatten(probabilities, y)
    confidence, predicted = probabilities.double().max(1)
    return confidence, (predicted == y).double()


def equal_bins(confidence: Tensor, hit: Tensor, bins: int) -> _Sums:
    """Add up over bins ((b - 1) / bins, b / bins]; zero belongs to the first."""
    check_whole(bins, "bins")
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device=confidence.device)
    return _sum_bins(confidence, hit, torch.bucketize(confidence, edges[1:-1]), bins)


def _sum_bins(confidence: Tensor, hit: Tensor, index: Tensor, bins: int) -> _Sums:
    values = torch.stack((torch.ones_like(confidence), confidence, hit))
    sums = torch.zeros(3, bins, dtype=torch.float64, device=confidence.device).index_add_(1, index, values)
    return _Sums(*sums)


def _kept(sums: _Sums, smallest: int) -> Tensor:
    """Return which bins have more than so many rows."""
    check_whole(smallest, "smallest", least=0)
    return sums.rows > smallest


def _nan_if_none(kept: Tensor) -> Tensor:
    """Return NaN where every bin was dropped, else zero: no bin says nothing of calibration."""
    return torch.where(kept.any(), 0.0, torch.nan)


# -------------------- selective
# Selective prediction: how good are the answers that remain when the uncertain ones are withheld?


class RiskCoverage(NamedTuple):
    """Mean loss of the k least uncertain rows, against their share k / n, for k = 1 ... n."""

    coverage: Tensor
    risk: Tensor


def risk_coverage(uncertainty: Tensor, loss: Tensor) -> RiskCoverage:
    """Return the risk-coverage curve: answer the least uncertain rows first.

    Rows that are equally uncertain come in random order: each counts as the mean of its ties, which is the expected
    curve.

    Args:
        uncertainty: one number for every row, higher is answered later.
        loss: of every row, such as 1 for a wrong class and 0 for a right one, or a squared error; same shape.
    """
    if uncertainty.shape != loss.shape:
        raise ValueError(f"expected a loss for every uncertainty, got {tuple(loss.shape)}, {tuple(uncertainty.shape)}")
    keys, values = (
        finite(uncertainty, "uncertainties").flatten(),
        finite(loss, "losses").flatten().to(uncertainty.device),
    )
    values = average_over_ties(keys, values)[keys.argsort()]
    answered = torch.arange(1, len(values) + 1, dtype=torch.float64, device=values.device)
    return RiskCoverage(answered / len(values), values.cumsum(0) / answered)


def aurc(probabilities: Tensor, y: Tensor, uncertainty: Tensor | None = None) -> Tensor:
    """Return the area under the risk-coverage curve of wrong answers: 1 / n sum_k risk_k (Geifman et al., 2019).

    Args:
        probabilities: (B, C), or dense (B, C, ...); targets of -100 are left out.
        y: classes (B,), or (B, ...).
        uncertainty: in the shape of y; one minus the confidence if it is not given.
    """
    rows, classes = flatten(probabilities, y)
    if uncertainty is None:
        score = doubt(rows)
    elif uncertainty.shape == y.shape:
        score = uncertainty.to(rows.device)[(y.long() != -100).to(rows.device)]
    else:
        raise ValueError(f"expected an uncertainty for every target {tuple(y.shape)}, got {tuple(uncertainty.shape)}")
    return risk_coverage(score, (rows.argmax(1) != classes).double()).risk.mean()
