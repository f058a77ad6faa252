"""Diversity of the draws: their disagreement, and the deep ensemble that their average equals.

Samples are class probabilities (S, B, C, ...) of S >= 2 draws, targets are classes (B, ...); -100 is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from leanbayes.metrics._validate import flatten

# S draws, N targets, C classes


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
