"""Splitting uncertainty: what the data leave open (aleatoric), and what the model does not know (epistemic).

Entropies (classification; Depeweg et al., 2018, eq. 26-27 of the implicit paper):
    total = H(mean_s p_s),     aleatoric = mean_s H(p_s),     epistemic = total - aleatoric, a mutual information.
Variances (regression; law of total variance):
    aleatoric = mean_s var_s,  epistemic = var_s(mean_s),     total = aleatoric + epistemic.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from leanbayes.likelihoods import binary_entropy, entropy, Measure


class Decomposition(NamedTuple):
    """The mean prediction and its uncertainties; total = aleatoric + epistemic, all at least zero."""

    mean: Tensor
    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor


class RunningUncertainty:
    """Decompose uncertainty draw by draw, in memory that does not grow with their number."""

    def __init__(self, measure: Measure) -> None:
        """Start with no draws."""
        self.measure = measure
        self.count = 0

    def add(self, mean: Tensor, own: Tensor) -> None:
        """Add one draw: its prediction, and its own uncertainty (entropy or variance).

        Welford's update: no difference of large sums, so small epistemic variances survive.
        """
        self.count += 1
        if self.count == 1:
            self.mean, self.own, self.squares = mean.clone(), own.clone(), torch.zeros_like(mean)
            return
        gap = mean - self.mean
        self.mean += gap / self.count
        self.own += (own - self.own) / self.count
        if self.measure == "variance":
            self.squares += gap * (mean - self.mean)

    def result(self) -> Decomposition:
        """Return the decomposition of what was added so far."""
        if self.count == 0:
            raise ValueError("expected at least one draw, got none")
        if self.measure == "variance":
            epistemic = self.squares / self.count
        else:
            # A class axis was summed away in the entropy of a distribution; a single probability has none.
            of_mean = binary_entropy(self.mean) if self.own.shape == self.mean.shape else entropy(self.mean)
            epistemic = (of_mean - self.own).clamp(min=0)  # rounding may leave -1e-8
        return Decomposition(self.mean, self.own + epistemic, self.own, epistemic)


def decompose(means: Tensor, own: Tensor, measure: Measure) -> Decomposition:
    """Decompose the uncertainty of S draws at once: predictions (S, B, ...) and their own uncertainties."""
    running = RunningUncertainty(measure)
    for mean, uncertainty in zip(means, own, strict=True):
        running.add(mean, uncertainty)
    return running.result()
