"""What a Normal weight pays under the priors of variance networks: log-uniform, ARD and Student's, in nats.

A weight is N(mu, sigma^2) with sigma^2 = alpha mu^2 (Variance Networks, section 4 and appendices B and C; equations
(9), (10) and (25) to (27) are misprinted there and stand corrected here). Under the improper log-uniform prior
p(w) = 1 / |w| the divergence depends on alpha alone. It is shifted to vanish as alpha grows: a weight without a mean
pays nothing.

Both log-uniform and Student's divergence rest on E log(nu + w^2), which has no elementary form for a Normal w; the
log-uniform prior is the case nu = 0. Two facts make it cheap and exact:

* With z = mu + i sqrt(nu) it is the real part of E log (z + sigma eps)^2, analytic above the real line. Exactly: move
  the path of integration away from the singularity, where the trapezoid rule converges to the last digit.
* For w ~ Cauchy(m, s) it is log(m^2 + (sqrt(nu) + s)^2), in closed form. Cheaply: replace the Normal by a signed
  mixture of Cauchy laws. The error is a harmonic function of (mu, sqrt(nu)), so it is largest at nu = 0; a mixture
  fitted there, along one curve, is as good for every nu.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

EULER = 0.5772156649015329

SMALLEST_STD = 1e-12
"""Standard deviations below pay as much as this one, so that a mean of zero under a finite alpha pays no infinity."""

SMALLEST_NU = 1e-16
"""Fewer degrees of freedom are lost in float32, and 1e-16 is the log-uniform prior for every weight beyond 1e-6."""

K1, K2, K3 = 0.63576, 1.87320, 1.48695
A1, A2, A3, A4 = 0.7294, -0.2041, 0.3492, 0.5387
NO_LOSS = 0.5471
"""The largest value of -KL of eq. (17) with C = 0."""

# Weight, distance from the mean and scale of pairs of Cauchy laws, the latter two in units of sigma. The six nodes were
# fitted to E log w^2: its error is below 2.6e-4 for every mu / sigma, that of its derivative below 9e-4. The weights
# follow from the nodes: they sum to one and give the mean and the variance of the Normal, so that the limit of many
# degrees of freedom, a Normal prior, is exact.
CAUCHY_PAIRS = (
    (2.5203295515, 0.3594, 1.4387),
    (-0.5615567481, 1.1670, 3.6138),
    (-0.9587728034, 1.8655, 1.6653),
)


def log_uniform_kl(log_alpha: Tensor) -> Tensor:
    """Return KL(N(mu, alpha mu^2) || log-uniform) per weight, by the fit of Molchanov et al. (2017).

    k1 - k1 sigmoid(k2 + k3 log alpha) + 0.5 log(1 + 1 / alpha); eq. (10) prints it without k1 and with the sign of the
    evidence. Positive, falling in alpha, and within 0.0095 of the exact divergence.
    """
    return K1 * (-K2 - K3 * log_alpha).sigmoid() + ard_kl(log_alpha)


def peaked_log_uniform_kl(log_alpha: Tensor, constant: float = -NO_LOSS) -> Tensor:
    """Return the KL of a weight as variational nested dropout fits it (eq. 17): smallest near log alpha = 1.

    -a1 exp(-e^a4 (a2 + a3 log alpha)^2) + 0.5 log(1 + 1 / alpha) - C. On [-5, 0.5] it is within 0.15 of the exact
    divergence up to a constant; beyond, it rises again, so that no weight is driven to infinite noise and the order
    alone decides what is dropped. The default C makes its minimum zero.
    """
    bump = A1 * (-math.exp(A4) * (A2 + A3 * log_alpha).square()).exp()
    return ard_kl(log_alpha) - bump - constant


def exact_log_uniform_kl(log_alpha: Tensor) -> Tensor:
    """Return 0.5 E log(c + eps)^2 - 0.5 E log eps^2 with c = 1 / sqrt(alpha), to 1e-13, in float64.

    It is eq. (9), in the mean, less its limit. The path eps + 3i keeps three away from the singularity at -c, and 37
    nodes at distance 0.5 suffice for every alpha. Over a hundred times the work of `log_uniform_kl`.
    """
    shift, step = 3.0, 0.5
    path = step * torch.arange(-18, 19, dtype=torch.float64, device=log_alpha.device) + 1j * shift
    weights = step * (-path.square() / 2).exp() / math.sqrt(2 * math.pi)
    c = (-0.5 * log_alpha.double()).exp()
    expected_log = ((c[..., None] + path).log() * weights).sum(-1).real
    return expected_log + 0.5 * (EULER + math.log(2))


def ard_kl(log_alpha: Tensor) -> Tensor:
    """Return 0.5 log(1 + 1 / alpha): the divergence to N(0, s^2) with the s^2 = mu^2 + sigma^2 that suits best."""
    return 0.5 * F.softplus(-log_alpha)


def student_kl(mean: Tensor, std: Tensor, nu: float) -> Tensor:
    """Return KL(N(mean, std^2) || Student-t(nu)) per weight, less the terms that depend on nu alone.

    -log sigma + (nu + 1) / 2 E log(nu + w^2), eq. (26) with sqrt(alpha) eps for its sqrt(alpha eps). Deterministic; the
    error is below 1.3e-4 (nu + 1). As nu -> 0 it becomes `log_uniform_kl` less 0.5 (log 2 + Euler's constant).

    Args:
        mean: mu; zero is allowed.
        std: sigma >= 0, of a shape that broadcasts with the mean; |mu| exp(log_alpha / 2) where alpha is given.
        nu: degrees of freedom, at least 1e-16.
    """
    if not SMALLEST_NU <= nu < math.inf:
        raise ValueError(f"expected finite degrees of freedom of at least {SMALLEST_NU}, got {nu}; take 1e-16 or more")
    std = std.clamp_min(SMALLEST_STD)
    return 0.5 * (nu + 1) * _expected_log(mean, std, nu) - std.log()


def _expected_log(mean: Tensor, std: Tensor, nu: float) -> Tensor:
    """Return E log(nu + w^2), w ~ N(mean, std^2), as that of a mixture of Cauchy laws (see the module)."""
    root = math.sqrt(nu)
    total = torch.zeros_like(mean)
    for weight, distance, scale in CAUCHY_PAIRS:
        height = (root + scale * std).square()
        offset = distance * std
        left, right = (mean - offset).square() + height, (mean + offset).square() + height
        total = total + 0.5 * weight * (left * right).log()
    return total
