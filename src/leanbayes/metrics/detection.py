"""Detection: does the uncertainty tell foreign rows from those the network was made for?

One convention throughout: *foreign rows are the positives*, and a higher score means more foreign. Scores that fit, of
a prediction p: `p.total` (entropy), `p.epistemic` (mutual information), `doubt(p.mean)` (one minus confidence). Scores
have any shape; every element counts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from leanbayes.metrics._validate import finite


class Detection(NamedTuple):
    """How well a score separates: area under the ROC curve, average precision, false positives at 95 % found."""

    auroc: Tensor
    aupr: Tensor
    fpr95: Tensor


def detect(inside: Tensor, outside: Tensor) -> Detection:
    """Return all three measures for scores of known rows (`inside`) and foreign ones (`outside`)."""
    return Detection(auroc(inside, outside), aupr(inside, outside), fpr95(inside, outside))


def auroc(inside: Tensor, outside: Tensor) -> Tensor:
    """Return the probability that a foreign row scores higher than a known one; ties count half."""
    return _scalar(_scikit().roc_auc_score(*_labelled(inside, outside)), inside)


def aupr(inside: Tensor, outside: Tensor) -> Tensor:
    """Return the average precision, sum_k (recall_k - recall_{k-1}) precision_k over the distinct scores.

    Chance is the share of foreign rows, so figures compare only between sets of the same sizes.
    """
    return _scalar(_scikit().average_precision_score(*_labelled(inside, outside)), inside)


def fpr95(inside: Tensor, outside: Tensor) -> Tensor:
    """Return the share of known rows taken for foreign when at least 95 % of the foreign ones are found.

    Of the thresholds that find them, the highest counts: score >= threshold is called foreign.
    """
    false, true, _ = _scikit().roc_curve(*_labelled(inside, outside), drop_intermediate=False)
    return _scalar(false[np.argmax(true >= 0.95)], inside)


def _labelled(inside: Tensor, outside: Tensor) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return who is foreign and all scores, as numpy arrays."""
    known, foreign = (
        finite(scores, what).detach().flatten().cpu().numpy()
        for scores, what in ((inside, "scores of known rows"), (outside, "scores of foreign rows"))
    )
    return np.repeat([0, 1], [len(known), len(foreign)]), np.concatenate((known, foreign))


def _scalar(value: float, like: Tensor) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64, device=like.device)


def _scikit() -> Any:
    """Return scikit-learn's metrics, which take a second to import."""
    from sklearn import metrics  # type: ignore[import-untyped]

    return metrics
