"""Error, density and coverage of predictions of real targets.

A prediction with S draws is the mixture 1 / S sum_s Normal(m_s, v_s) of means (S, B, D) and variances (S, B, D).
Targets are (B, D); a last axis of one may be missing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from leanbayes.metrics._validate import finite, matched


def rmse(mean: Tensor, y: Tensor) -> Tensor:
    """Return the root mean squared error over all rows and targets."""
    mean = finite(mean, "predictions")
    return (mean - matched(y, mean)).square().mean().sqrt()


def lpd(samples: Tensor, variances: Tensor, y: Tensor) -> Tensor:
    """Return the log predictive density: the mean over rows of log 1 / S sum_s prod_d Normal(y_d | m_sd, v_sd).

    For targets that were divided by their standard deviation, subtract its logarithm: this gives the density in the
    targets' own units.
    """
    means, variances, y = _mixture(samples, variances, y)
    each = -0.5 * ((y - means).square() / variances + variances.log() + math.log(2 * math.pi))
    return (each.flatten(2).sum(2).logsumexp(0) - math.log(len(means))).mean()


def crps(samples: Tensor, variances: Tensor, y: Tensor) -> Tensor:
    """Return the continuous ranked probability score of the mixture, averaged over rows and targets; less is better.

    The closed form of Grimit et al. (2006), with A(m, v) = E|N(m, v)|:
    mean_s A(y - m_s, v_s) - 1/2 mean_s mean_t A(m_s - m_t, v_s + v_t).
    """
    means, variances, y = _mixture(samples, variances, y)
    distance = _absolute_mean(y - means, variances).mean(0)
    between = torch.zeros_like(y)
    for s in range(len(means)):  # one draw against the later ones, to save memory
        pairs = _absolute_mean(means[s] - means[s + 1 :], variances[s] + variances[s + 1 :]).sum(0)
        between += 2 * pairs + 2 * (variances[s] / math.pi).sqrt()  # A(0, 2 v) = 2 sqrt(v / pi)
    return (distance - 0.5 * between / len(means) ** 2).mean()


def crps_gaussian(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    """Return the score of one Gaussian per target, means and variances (B, D).

    std [z (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi)] with z = (y - mean) / std: a mixture of one.
    """
    return crps(mean.unsqueeze(0), variance.unsqueeze(0), y)


def interval_coverage(low: Tensor, high: Tensor, y: Tensor) -> Tensor:
    """Return the share of targets within their intervals, ends included."""
    low, high = finite(low, "lower ends"), finite(high, "upper ends")
    y = matched(y, low)
    if low.shape != high.shape or (low > high).any():
        raise ValueError("expected lower and upper ends of the same shape, low <= high; are they swapped?")
    return ((low <= y) & (y <= high)).double().mean()


def scaled_interval(low: Tensor, high: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Return the intervals c -+ factor * h with the same centres c and half-widths h."""
    centre, half = (low + high) / 2, (high - low) / 2
    return centre - factor * half, centre + factor * half


def interval_factor(low: Tensor, high: Tensor, y: Tensor, coverage: float = 0.95) -> float:
    """Return the smallest factor with which `scaled_interval` holds at least a share `coverage` of the targets.

    It is the ceil(coverage * n)-th smallest |y - c| / h of n targets.
    """
    if not 0 < coverage <= 1:
        raise ValueError(f"expected a coverage above 0 and at most 1, got {coverage!r}")
    low, high = finite(low, "lower ends"), finite(high, "upper ends")
    y = matched(y, low)
    if low.shape != high.shape or (low >= high).any():
        raise ValueError("expected lower and upper ends of the same shape, low < high; are they swapped?")
    ratios = ((y - (low + high) / 2).abs() / ((high - low) / 2)).flatten()
    return float(ratios.kthvalue(math.ceil(coverage * len(ratios) - 1e-9)).values)


def _absolute_mean(mean: Tensor, variance: Tensor) -> Tensor:
    """Return E|X| of X ~ Normal(mean, variance): 2 std phi(z) + mean (2 Phi(z) - 1), z = mean / std."""
    std = variance.sqrt()
    z = mean / std
    return math.sqrt(2 / math.pi) * std * (-0.5 * z.square()).exp() + mean * torch.erf(z / math.sqrt(2))


def _mixture(samples: Tensor, variances: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return draws' means and variances (S, B, ...) and targets (B, ...), checked, in float64."""
    if samples.dim() < 2 or samples.shape != variances.shape:
        raise ValueError(
            f"expected means and variances of the draws, (S, B, D) both, got {tuple(samples.shape)} and "
            f"{tuple(variances.shape)}"
        )
    means, variances = finite(samples, "means"), finite(variances, "variances")
    if (variances <= 0).any():
        raise ValueError(f"expected variances above zero, got {variances.min().item():.6g}")
    return means, variances, matched(y, means[0])
