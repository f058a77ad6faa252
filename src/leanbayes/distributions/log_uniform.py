"""KL of a Normal weight to the priors of variance networks: log-uniform, ARD and Student's t, in nats.

A weight is N(mu, sigma^2) with sigma^2 = alpha mu^2 (Variance Networks, section 4, appendices B and C; misprints in
equations (9), (10) and (25) to (27) are corrected here). Under the improper log-uniform prior p(w) = 1 / |w| the
divergence depends on alpha alone. It is shifted to vanish as alpha grows: a weight with mean zero costs nothing.

Log-uniform (nu = 0) and Student's divergence need E log(nu + w^2), which has no elementary form for a Normal w:

* Exact: with z = mu + i sqrt(nu) it is the real part of E log (z + sigma eps)^2, analytic above the real line. The path
  of integration moves away from the singularity. There the trapezoid rule converges to the last digit.
* Cheap: for w ~ Cauchy(m, s) it is log(m^2 + (sqrt(nu) + s)^2). A signed mixture of Cauchy distributions replaces the
  Normal. The error is harmonic in (mu, sqrt(nu)), so it is largest at nu = 0. A fit there is as good for every nu.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

EULER = 0.5772156649015329

SMALLEST_STD = 1e-12
"""Smaller standard deviations count as this one: a mean of zero under a finite alpha has a finite divergence."""

SMALLEST_NU = 1e-16
"""float32 loses fewer degrees of freedom. 1e-16 is the log-uniform prior for every weight beyond 1e-6."""

K1, K2, K3 = 0.63576, 1.87320, 1.48695
A1, A2, A3, A4 = 0.7294, -0.2041, 0.3492, 0.5387
NO_LOSS = 0.5471
"""The largest value of -KL of eq. (17) with C = 0."""

# Weight, distance from the mean and scale of pairs of Cauchy distributions; distance and scale in units of sigma.
# The six nodes are fitted to E log w^2: error below 2.6e-4 for every mu / sigma, of the derivative below 9e-4. The
# weights sum to one and give the mean and variance of the Normal. The limit of many degrees of freedom is then exact.
CAUCHY_PAIRS = (
    (2.5203295515, 0.3594, 1.4387),
    (-0.5615567481, 1.1670, 3.6138),
    (-0.9587728034, 1.8655, 1.6653),
)


def log_uniform_kl(log_alpha: Tensor) -> Tensor:
    """Return KL(N(mu, alpha mu^2) || log-uniform) per weight, by the fit of Molchanov et al. (2017).

    k1 - k1 sigmoid(k2 + k3 log alpha) + 0.5 log(1 + 1 / alpha); eq. (10) prints it without k1 and with the other sign.
    Positive, decreasing in alpha, within 0.0095 of the exact divergence.
    """
    return K1 * (-K2 - K3 * log_alpha).sigmoid() + ard_kl(log_alpha)


def peaked_log_uniform_kl(log_alpha: Tensor, constant: float = -NO_LOSS) -> Tensor:
    """Return the KL of a weight as variational nested dropout fits it (eq. 17): smallest near log alpha = 1.

    -a1 exp(-e^a4 (a2 + a3 log alpha)^2) + 0.5 log(1 + 1 / alpha) - C. On [-5, 0.5] it is within 0.15 of the exact
    divergence up to a constant. Beyond, it rises again: no weight goes to infinite noise, and the order alone decides
    which weights are dropped. The default C makes the minimum zero.
    """
    bump = A1 * (-math.exp(A4) * (A2 + A3 * log_alpha).square()).exp()
    return ard_kl(log_alpha) - bump - constant


def exact_log_uniform_kl(log_alpha: Tensor) -> Tensor:
    """Return 0.5 E log(c + eps)^2 - 0.5 E log eps^2 with c = 1 / sqrt(alpha), to 1e-13, in float64.

    Eq. (9), in the mean, less its limit. The path eps + 3i keeps a distance of 3 from the singularity at -c. 37 nodes
    at distance 0.5 suffice for every alpha. It costs over a hundred times as much as `log_uniform_kl`.
    """
    shift, step = 3.0, 0.5
    path = step * torch.arange(-18, 19, dtype=torch.float64, device=log_alpha.device) + 1j * shift
    weights = step * (-path.square() / 2).exp() / math.sqrt(2 * math.pi)
    c = (-0.5 * log_alpha.double()).exp()
    expected_log = ((c[..., None] + path).log() * weights).sum(-1).real
    return expected_log + 0.5 * (EULER + math.log(2))


def ard_kl(log_alpha: Tensor) -> Tensor:
    """Return 0.5 log(1 + 1 / alpha): the divergence to N(0, s^2) with the best s^2 = mu^2 + sigma^2."""
    return 0.5 * F.softplus(-log_alpha)


def student_kl(mean: Tensor, std: Tensor, nu: float) -> Tensor:
    """Return KL(N(mean, std^2) || Student-t(nu)) per weight, less the terms that depend on nu alone.

    -log sigma + (nu + 1) / 2 E log(nu + w^2), eq. (26) with sqrt(alpha) eps for its sqrt(alpha eps). Deterministic; the
    error is below 1.3e-4 (nu + 1). As nu -> 0 it becomes `log_uniform_kl` less 0.5 (log 2 + Euler's constant).

    Args:
        mean: mu; zero is allowed.
        std: sigma >= 0, broadcasts with the mean; |mu| exp(log_alpha / 2) for a given alpha.
        nu: degrees of freedom, at least 1e-16.
    """
    if not SMALLEST_NU <= nu < math.inf:
        raise ValueError(f"expected finite degrees of freedom of at least {SMALLEST_NU}, got {nu}; take 1e-16 or more")
    std = std.clamp_min(SMALLEST_STD)
    return 0.5 * (nu + 1) * _expected_log(mean, std, nu) - std.log()


def _expected_log(mean: Tensor, std: Tensor, nu: float) -> Tensor:
    """Return E log(nu + w^2) of the Cauchy mixture that replaces w ~ N(mean, std^2)."""
    root = math.sqrt(nu)
    total = torch.zeros_like(mean)
    for weight, distance, scale in CAUCHY_PAIRS:
        height = (root + scale * std).square()
        offset = distance * std
        left, right = (mean - offset).square() + height, (mean + offset).square() + height
        total = total + 0.5 * weight * (left * right).log()
    return total
