"""Latent codes: Gaussian numbers in an order, of which the first few are used.

    z ~ Downhill(beta, tau),   h_i = z_i (mu_i + sigma_i eps_i)                                             (eq. 23)

A code that ends after dimension j pays for the dimensions it uses. With kappa_i = KL(N(mu_i, sigma_i^2) || prior of i),

    KL = sum_j beta_j [log(beta_j / p_j) + sum_{i<=j} kappa_i]                                     (eq. 24, 30, A.5)

where (30) and (A18) print kappa_j for the sum: tail j keeps all dimensions up to j. Dropped dimensions are zero for the
decoder; the wide law that the paper gives them is the same in prior and posterior and cancels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leanbayes.distributions.ordered import downhill, gumbel, tail_kl

SMALLEST_STD = 1e-4


@dataclass(frozen=True)
class Code:
    """The law of the codes of B inputs, D dimensions each.

    Attributes:
        mean: (B, D).
        std: (B, D).
        log_tails: logarithms of the probabilities that a code ends after each dimension (B, D); None: it never ends.
    """

    mean: Tensor
    std: Tensor
    log_tails: Tensor | None = None

    @property
    def keep(self) -> Tensor:
        """P(dimension i is used) (B, D)."""
        if self.log_tails is None:
            return torch.ones_like(self.mean)
        return self.log_tails.exp().flip(-1).cumsum(-1).flip(-1).clamp(max=1.0)

    @property
    def length(self) -> Tensor:
        """The expected number of dimensions in use (B,)."""
        return self.keep.sum(-1)

    def rsample(self, temperature: float | Tensor = 1.0, *, hard: bool = True) -> Tensor:
        """Draw a code for each input, differentiable in all parameters (hard: straight-through in the tails)."""
        h = self.mean + self.std * torch.randn_like(self.mean)
        if self.log_tails is None:
            return h
        return h * downhill(self.log_tails, temperature, gumbel(torch.rand_like(self.mean)), hard)

    def cut(self, length: int | None) -> Code:
        """Return the law of codes of a fixed length: nothing behind it, everything before. None changes nothing."""
        if length is None:
            return self
        used = torch.arange(self.mean.shape[-1], device=self.mean.device) < check_length(length, self.mean.shape[-1])
        return replace(self, mean=self.mean * used, std=self.std * used, log_tails=None)

    def kl(self, prior: Code) -> Tensor:
        """Return the divergence to a prior code, in nats, for each input (B,)."""
        each = gaussian_kl(self, prior)
        if self.log_tails is None:
            return each.sum(-1)
        assert prior.log_tails is not None, "an ordered code needs an ordered prior"
        return tail_kl(self.log_tails, prior.log_tails) + (self.log_tails.exp() * each.cumsum(-1)).sum(-1)


def gaussian_kl(q: Code, p: Code) -> Tensor:
    """Return KL(N(m_q, s_q^2) || N(m_p, s_p^2)) = log(s_p / s_q) + (s_q^2 + (m_q - m_p)^2) / (2 s_p^2) - 1/2 (B, D)."""
    ratio = q.std / p.std
    return 0.5 * (ratio.square() + ((q.mean - p.mean) / p.std).square() - 1) - ratio.log()


def standard(like: Tensor, log_tails: Tensor | None = None) -> Code:
    """Return independent standard normal numbers (the fixed prior of an autoencoder), with the tails of a chain."""
    return Code(torch.zeros_like(like), torch.ones_like(like), log_tails)


def best_log_tails(kappa: Tensor, prior_log_tails: Tensor) -> Tensor:
    """Return the tails of the smallest divergence for given kappa: beta_j proportional to p_j exp(-sum_{i<=j} kappa_i).

    The divergence there is -log C with C = sum_j p_j exp(-sum_{i<=j} kappa_i) (A.5, with the cumulative kappa).
    """
    return (prior_log_tails - kappa.cumsum(-1)).log_softmax(-1)


def check_length(length: int, dimensions: int) -> int:
    """Return a code length.

    Raises:
        ValueError: if it is no whole number from 1 to the number of dimensions.
    """
    if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= dimensions:
        raise ValueError(f"expected a code length from 1 to {dimensions}, got {length!r}")
    return length
