"""Predictions with targets, for every likelihood."""

from __future__ import annotations

import pytest
import torch

import leanbayes as lb
from leanbayes.core.prediction import decompose, Prediction


def record(likelihood, outputs: torch.Tensor, keep: bool = True) -> Prediction:
    """Build a prediction from the outputs (S, B, ...) of some draws."""
    each = [likelihood.predictive(output) for output in outputs]
    samples, own = torch.stack([mean for mean, _ in each]), torch.stack([own for _, own in each])
    parts = decompose(samples, own, likelihood.measure)
    noise = own if likelihood.measure == "variance" else None
    return Prediction(*parts, samples if keep else None, noise if keep else None, likelihood)


def over_classes(rows: int, seed: int, *space: int, sure: float = 1.0, spread: float = 0.0, keep: bool = True):
    """Return draws whose logits are too large by `sure`, and targets of the mixture of the right ones."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(rows, 4, *space, generator=generator)
    draws = logits + spread * torch.randn(3, rows, 4, *space, generator=generator)
    right = draws.softmax(2).mean(0).movedim(1, -1).reshape(-1, 4)
    y = torch.multinomial(right, 1, generator=generator)[:, 0].view(rows, *space)
    return record(lb.Categorical(), sure * draws, keep), y


def of_yes(rows: int, seed: int, sure: float = 1.0, spread: float = 0.0, keep: bool = True):
    """Return draws of the probability of yes, too sure by `sure`, and targets of the mixture of the right ones."""
    generator = torch.Generator().manual_seed(seed)
    draws = 2 * torch.randn(rows, 1, generator=generator) + spread * torch.randn(3, rows, 1, generator=generator)
    y = torch.bernoulli(draws.sigmoid().mean(0), generator=generator)
    return record(lb.Bernoulli(), sure * draws, keep), y


def over_reals(rows: int, seed: int, sure: float = 1.0, spread: float = 0.5, keep: bool = True):
    """Return draws that are too narrow around their mean by `sure`, and targets of the mixture of the right ones."""
    generator = torch.Generator().manual_seed(seed)
    centre, raw = torch.randn(2, rows, 2, generator=generator)
    means = centre + spread * torch.randn(3, rows, 2, generator=generator)
    variances = torch.nn.functional.softplus(raw).expand(3, rows, 2)
    pick, row = torch.randint(3, (rows,), generator=generator), torch.arange(rows)
    y = means[pick, row] + variances[pick, row].sqrt() * torch.randn(rows, 2, generator=generator)
    means, variances = means.mean(0) + (means - means.mean(0)) / sure, variances / sure**2
    parts = decompose(means, variances, "variance")
    return Prediction(*parts, means if keep else None, variances if keep else None, lb.Gaussian()), y


PROBLEMS = {"classes": over_classes, "yes": of_yes, "reals": over_reals}
each_problem = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
