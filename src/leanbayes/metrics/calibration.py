"""Calibration: do probabilities mean what they say?"""

from __future__ import annotations

import torch
from torch import Tensor


def ece(probabilities: Tensor, y: Tensor, bins: int = 15) -> Tensor:
    """Return the expected calibration error: sum_b (n_b / n) |accuracy_b - confidence_b| over equal bins.

    Args:
        probabilities: (B, C).
        y: classes (B,).
        bins: number of equally wide bins of the confidence (max probability), closed on the right.
    """
    confidence, predicted = probabilities.double().max(1)
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device=probabilities.device)
    index = torch.bucketize(confidence, edges[1:-1])
    gap = (predicted == y).double() - confidence
    per_bin = torch.zeros(bins, dtype=torch.float64, device=probabilities.device).index_add_(0, index, gap)
    return (per_bin.abs().sum() / len(y)).float()
