"""How far draws of class probabilities are from a Dirichlet: maximum mean discrepancy (Cui et al., 2020).

    MMD^2 = E k(p, p') + E k(a, a') - 2 E k(p, a),     p, p' ~ draws,   a, a' ~ Dirichlet(alpha)

is zero where both are the same law on the simplex, and needs no density of the draws.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributions import Dirichlet

KERNEL_WIDTHS = (0.5, 1.0, 2.0)
"""Widths of the kernels, around the size of the simplex, sqrt 2: narrower ones do not see a student that is far off."""

LOG_PRECISION = 7.0
"""Largest logarithm of the sum of concentrations; a few units more, and gradients of Dirichlet draws overflow."""

SMALLEST_CONCENTRATION = 1e-3
"""Smaller ones give draws that are zero in float32, and gradients that are not finite."""


def mmd(samples: Tensor, concentration: Tensor, *, draws: int = 32, widths: Sequence[float] = KERNEL_WIDTHS) -> Tensor:
    """Estimate the squared discrepancy between draws and a Dirichlet in every row, and average it over the rows.

    The estimator is unbiased, hence below zero at times. Draws from the Dirichlet are reparameterised: there is a
    gradient by the concentration. The kernel is the mean of exp(-|p - a|^2 / (2 w^2)) over its widths w.

    Args:
        samples: probabilities of C classes for B rows in S draws (S, B, C), two draws at least.
        concentration: of a Dirichlet for every row (B, C), positive.
        draws: how often to draw from each Dirichlet, twice at least.
        widths: of the kernel.

    Raises:
        ValueError: if shapes do not fit, or there are too few draws.
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

    The mean of this Dirichlet is softmax(logits), unless a concentration would fall below 0.001: what learns it is an
    ordinary classifier in the end. How far the draws scatter is in the common size of the logits, which a softmax does
    not see. Squeezing, other than cutting off, leaves a gradient to those who begin with a precision too large.
    """
    log_precision = logits.logsumexp(1, keepdim=True)
    squeezed = LOG_PRECISION * (log_precision / LOG_PRECISION).tanh()
    return (logits - log_precision + squeezed).exp().clamp(min=SMALLEST_CONCENTRATION)


def _kernel(a: Tensor, b: Tensor, widths: Sequence[float]) -> Tensor:
    """Return the kernel between all points of two sets (B, S, C) and (B, D, C): (B, S, D)."""
    # Differences, not scalar products, which would lose small distances.
    squares = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist").square()
    return torch.stack([(-squares / (2 * width**2)).exp() for width in widths]).mean(0)


def _between_others(kernel: Tensor) -> Tensor:
    """Return the mean over pairs of different points, of each of B matrices: a point with itself would be a bias."""
    count = kernel.shape[-1]
    return (kernel.sum((1, 2)) - kernel.diagonal(dim1=1, dim2=2).sum(1)) / (count * (count - 1))
