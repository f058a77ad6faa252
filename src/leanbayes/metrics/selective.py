"""Selective prediction: how good are the answers that remain when the uncertain ones are withheld?"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from leanbayes.metrics.classification import doubt
from leanbayes.metrics.rows import average_over_ties, finite, flatten


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
