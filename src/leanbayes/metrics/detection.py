"""Out-of-distribution detection by a score of uncertainty: AUROC, average precision, FPR at 95 % recall.

*Out-of-distribution rows are the positives*: a higher score means further outside. Scores of a prediction p:
`p.total` (entropy), `p.epistemic` (mutual information), `doubt(p.mean)` (one minus confidence).
Scores have any shape; every element counts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from leanbayes.metrics._validate import finite


class Detection(NamedTuple):
    """Area under the ROC curve, average precision, and false positive rate at 95 % recall."""

    auroc: Tensor
    aupr: Tensor
    fpr95: Tensor


def detect(inside: Tensor, outside: Tensor) -> Detection:
    """Return all three measures for scores of in-distribution (`inside`) and out-of-distribution rows (`outside`)."""
    return Detection(auroc(inside, outside), aupr(inside, outside), fpr95(inside, outside))


def auroc(inside: Tensor, outside: Tensor) -> Tensor:
    """Return the probability that an out-of-distribution row scores higher than another row; ties count half."""
    return _scalar(_sklearn_metrics().roc_auc_score(*_labelled(inside, outside)), inside)


def aupr(inside: Tensor, outside: Tensor) -> Tensor:
    """Return the average precision, sum_k (recall_k - recall_{k-1}) precision_k over the distinct scores.

    Chance is the share of out-of-distribution rows: compare values only between sets of the same sizes.
    """
    return _scalar(_sklearn_metrics().average_precision_score(*_labelled(inside, outside)), inside)


def fpr95(inside: Tensor, outside: Tensor) -> Tensor:
    """Return the share of in-distribution rows with score >= t, t the highest threshold with at least 95 % recall."""
    false, true, _ = _sklearn_metrics().roc_curve(*_labelled(inside, outside), drop_intermediate=False)
    return _scalar(false[np.argmax(true >= 0.95)], inside)


def _labelled(inside: Tensor, outside: Tensor) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return labels (1 is out-of-distribution) and all scores, as numpy arrays."""
    first, second = (
        finite(scores, f"scores of {rows} rows").detach().flatten().cpu().numpy()
        for scores, rows in ((inside, "in-distribution"), (outside, "out-of-distribution"))
    )
    return np.repeat([0, 1], [len(first), len(second)]), np.concatenate((first, second))


def _scalar(value: float, like: Tensor) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64, device=like.device)


def _sklearn_metrics() -> Any:
    from sklearn import metrics  # type: ignore[import-untyped]  # slow to import: one second

    return metrics
