"""Scores of class probabilities: accuracy, likelihood, out-of-distribution detection, diversity of the draws.

Inputs are probabilities (B, C) with classes (B,), or dense (B, C, ...) with (B, ...). Targets of -100 are dropped.

Detection takes scores of uncertainty in any shape, and *out-of-distribution rows are the positives*: a higher score
means further outside. Scores of a prediction p: `p.total` (entropy), `p.epistemic` (mutual information),
`doubt(p.mean)` (one minus confidence). Diversity takes the probabilities (S, B, C, ...) of S >= 2 draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from leanbayes.metrics._validate import check_whole, finite, flatten, log_probabilities, pick

# S draws, N targets, C classes


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


def pairwise_disagreement(samples: Tensor, y: Tensor) -> Tensor:
    """Return how often two draws predict different classes, averaged over all pairs of draws and all rows."""
    return _disagreement(_votes(samples, y)[0], samples.shape[2])


def disagreement(samples: Tensor, y: Tensor, error: Literal["mean", "members"] = "mean") -> Tensor:
    """Return the pairwise disagreement of the draws divided by an error; NaN if the error is zero.

    Networks that err more differ more without being more diverse, hence the ratio (Fort et al., 2019). error="mean"
    divides by the error of the averaged prediction, error="members" by the average error of the draws.
    """
    if error not in ("mean", "members"):
        raise ValueError(f"expected error to be mean or members, got {error!r}")
    votes, classes = _votes(samples, y)
    if error == "mean":
        # Summed draw by draw: a float64 copy of all samples would be twice their size.
        pooled = sum((sample.double() for sample in samples[1:]), start=samples[0].double()) / len(samples)
        wrong = (flatten(pooled, y)[0].argmax(1) != classes).double().mean()
    else:
        wrong = (votes != classes).double().mean()
    return torch.where(wrong > 0, _disagreement(votes, samples.shape[2]) / wrong, torch.nan)


class Equivalent(NamedTuple):
    """A number of independent networks, and whether it is only a bound; prints as `1.4` or `at least 4`."""

    networks: float
    bound: Literal["", "at most", "at least"] = ""

    def __str__(self) -> str:
        return f"{self.bound} {self.networks:.3g}".strip()


def ensemble_equivalent(cnll: float, curve: Mapping[int, float]) -> Equivalent:
    """Return how many independent networks give the same calibrated NLL (Ashukha et al., 2020).

    Between two measured ensembles the curve is a + b / K in the number K of networks: the second network brings half
    of the whole gain, so a straight line in K would overstate small gains. A larger ensemble that is worse than a
    smaller one by chance counts as equally good. Worse than the smallest ensemble is "at most" its size; better than
    the best is "at least" the largest size.

    Args:
        cnll: calibrated negative log-likelihood, as from `calibrated_nll`.
        curve: that of deep ensembles by their number of networks, {1: 0.180, 2: 0.160, ...}.
    """
    sizes = sorted(curve)
    if not sizes or sizes[0] < 1 or not all(math.isfinite(value) for value in (cnll, *curve.values())):
        raise ValueError(
            f"expected a finite likelihood and a curve {{1: nll, 2: nll, ...}} of finite ones, got {cnll!r} and "
            f"{dict(curve)!r}"
        )
    best = list(accumulate((curve[size] for size in sizes), min))
    if cnll > best[0]:
        return Equivalent(float(sizes[0]), "at most")
    if cnll < best[-1]:
        return Equivalent(float(sizes[-1]), "at least")
    reached = next(i for i, value in enumerate(best) if value <= cnll)
    if best[reached] == cnll:
        return Equivalent(float(sizes[reached]))
    share = (best[reached - 1] - cnll) / (best[reached - 1] - best[reached])
    fewer, more = sizes[reached - 1], sizes[reached]
    return Equivalent(1 / ((1 - share) / fewer + share / more))


def _votes(samples: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the class that each draw predicts (S, N), and the targets (N,)."""
    if samples.dim() < 3 or len(samples) < 2:
        raise ValueError(
            f"expected the probabilities of at least two draws, (S, B, C), got shape {tuple(samples.shape)}; "
            f"predict with samples=2 or more and keep_samples=True"
        )
    rows = [flatten(sample, y) for sample in samples]
    return torch.stack([each.argmax(1) for each, _ in rows]), rows[0][1]


def _disagreement(votes: Tensor, classes: int) -> Tensor:
    """Return 1 - mean of sum_c n_c (n_c - 1) / (S (S - 1)), n_c the number of votes for class c."""
    agreeing = torch.zeros(votes.shape[1], dtype=torch.float64, device=votes.device)
    for c in range(classes):
        count = (votes == c).sum(0).double()
        agreeing += count * (count - 1)
    return 1 - (agreeing / (len(votes) * (len(votes) - 1))).mean()
