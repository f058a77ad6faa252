"""Maximum mean discrepancy between draws of class probabilities and a Dirichlet (Cui et al., 2020).

    MMD^2 = E k(p, p') + E k(a, a') - 2 E k(p, a),     p, p' ~ draws,   a, a' ~ Dirichlet(alpha)

is zero if both distributions on the simplex are the same, and needs no density of the draws.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributions import Dirichlet

KERNEL_WIDTHS = (0.5, 1.0, 2.0)
"""Around the size of the simplex, sqrt 2. Narrower kernels have no gradient for a student that is far off."""

LOG_PRECISION = 7.0
"""Largest logarithm of the sum of concentrations; a few units more, and gradients of Dirichlet draws overflow."""

SMALLEST_CONCENTRATION = 1e-3
"""Smaller ones give draws that are zero in float32, and gradients that are not finite."""


def mmd(samples: Tensor, concentration: Tensor, *, draws: int = 32, widths: Sequence[float] = KERNEL_WIDTHS) -> Tensor:
    """Estimate the squared discrepancy between draws and a Dirichlet in each row, averaged over the rows.

    The estimator is unbiased, hence sometimes below zero, and differentiable by the concentration. The kernel is the
    mean of exp(-|p - a|^2 / (2 w^2)) over its widths w.

    Args:
        samples: probabilities of C classes for B rows in S >= 2 draws (S, B, C).
        concentration: of a Dirichlet for each row (B, C), positive.
        draws: number of draws from each Dirichlet, at least two.
        widths: of the kernel.
    """
    if samples.dim() != 3 or samples.shape[1:] != concentration.shape:
        raise ValueError(
            f"expected samples (S, B, C) and concentrations (B, C), got {tuple(samples.shape)} and "
            f"{tuple(concentration.shape)}"
        )
    if min(len(samples), draws) < 2:
        raise ValueError(f"expected at least two draws of either side, got {len(samples)} samples and draws={draws}")
    given = samples.transpose(0, 1)
    drawn = Dirichlet(concentration, validate_args=False).rsample((draws,)).transpose(0, 1)
    within = _between_others(_kernel(given, given, widths)) + _between_others(_kernel(drawn, drawn, widths))
    return (within - 2 * _kernel(given, drawn, widths).mean((1, 2))).mean()


def concentration_of(logits: Tensor) -> Tensor:
    """Return exp(logits), with their sum, the precision, squeezed between exp(-7) and exp(7).

    The mean of this Dirichlet is softmax(logits), unless a concentration is clamped at 0.001. Its variance depends on
    the common size of the logits, which a softmax ignores. Squeezing, unlike clamping, keeps a gradient for a large
    precision.
    """
    log_precision = logits.logsumexp(1, keepdim=True)
    squeezed = LOG_PRECISION * (log_precision / LOG_PRECISION).tanh()
    return (logits - log_precision + squeezed).exp().clamp(min=SMALLEST_CONCENTRATION)


def _kernel(a: Tensor, b: Tensor, widths: Sequence[float]) -> Tensor:
    """Return the kernel between all points of two sets (B, S, C) and (B, D, C): (B, S, D)."""
    # Scalar products would lose small distances.
    squares = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist").square()
    return torch.stack([(-squares / (2 * width**2)).exp() for width in widths]).mean(0)


def _between_others(kernel: Tensor) -> Tensor:
    """Return the mean over pairs of different points, of each of B matrices."""
    count = kernel.shape[-1]
    return (kernel.sum((1, 2)) - kernel.diagonal(dim1=1, dim2=2).sum(1)) / (count * (count - 1))
