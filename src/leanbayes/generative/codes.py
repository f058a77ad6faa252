"""Latent codes with ordered Gaussian dimensions and a random length.

    z ~ Downhill(beta, tau),   h_i = z_i (mu_i + sigma_i eps_i)                                             (eq. 23)

With kappa_i = KL(N(mu_i, sigma_i^2) || prior of i), and beta_j the probability that a code ends after dimension j,

    KL = sum_j beta_j [log(beta_j / p_j) + sum_{i<=j} kappa_i].                                    (eq. 24, 30, A.5)

(30) and (A18) print kappa_j for the sum, but tail j keeps all dimensions up to j. Dropped dimensions are zero for the
decoder; the wide distribution that the paper gives them is the same in prior and posterior and cancels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.distributions.ordered import downhill, gumbel, log_tails_of, tail_kl

SMALLEST_STD = 1e-4

LIMIT = 10.0
"""Logits of keep probabilities are clamped to [-LIMIT, LIMIT]."""


@dataclass(frozen=True)
class Code:
    """The distribution of the codes of B inputs, D dimensions each.

    Attributes:
        mean: (B, D).
        std: (B, D).
        log_tails: log probabilities that a code ends after each dimension (B, D); None: codes have all dimensions.
    """

    mean: Tensor
    std: Tensor
    log_tails: Tensor | None = None

    @staticmethod
    def of(mean: Tensor, raw_std: Tensor, keep_logits: Tensor | None = None) -> Code:
        """Build a code from network outputs: softplus for standard deviations, logits (B, D - 1) for tails.

        At least in float32: noise and divergences need it under autocast.
        """
        std = F.softplus(_exact(raw_std)) + SMALLEST_STD
        tails = None if keep_logits is None else log_tails_of(_exact(keep_logits).clamp(-LIMIT, LIMIT))
        return Code(_exact(mean), std, tails)

    @property
    def keep(self) -> Tensor:
        """Probability that each dimension is used (B, D)."""
        if self.log_tails is None:
            return torch.ones_like(self.mean)
        beyond = self.log_tails.exp().flip(-1).cumsum(-1).flip(-1)
        return beyond / beyond[..., :1]  # the first is exactly one

    @property
    def length(self) -> Tensor:
        """Expected number of dimensions in use (B,)."""
        return self.keep.sum(-1)

    def rsample(self, temperature: float | Tensor = 1.0, *, hard: bool = True) -> Tensor:
        """Draw a code for each input, differentiable in all parameters; `hard` is straight-through in the tails."""
        return self.at(torch.randn_like(self.mean), torch.rand_like(self.mean), temperature, hard=hard)

    def at(self, normal: Tensor, uniform: Tensor, temperature: float | Tensor = 1.0, *, hard: bool = True) -> Tensor:
        """Return the codes of given noise, standard normal and uniform, (B, D) each."""
        h = self.mean + self.std * normal
        return h if self.log_tails is None else h * downhill(self.log_tails, temperature, gumbel(uniform), hard)

    def cut(self, length: int | None) -> Code:
        """Return codes of a fixed length, with all probability in one tail; None changes nothing."""
        if length is None:
            return self
        last = torch.zeros_like(self.mean)
        last[..., check_length(length, self.mean.shape[-1]) - 1] = 1
        return replace(self, mean=truncated(self.mean, length), log_tails=last.log())

    def kl(self, prior: Code) -> Tensor:
        """Return the divergence to a prior code for each input, in nats (B,)."""
        each = gaussian_kl(self, prior)
        if self.log_tails is None and prior.log_tails is None:
            return each.sum(-1)
        if self.log_tails is None or prior.log_tails is None:
            raise ValueError("expected code and prior both with tails or both without, got one of each; cut the other")
        return tail_kl(self.log_tails, prior.log_tails) + (self.log_tails.exp() * each.cumsum(-1)).sum(-1)


def gaussian_kl(q: Code, p: Code) -> Tensor:
    """Return KL(N(m_q, s_q^2) || N(m_p, s_p^2)) = log(s_p / s_q) + (s_q^2 + (m_q - m_p)^2) / (2 s_p^2) - 1/2 (B, D)."""
    ratio = q.std / p.std
    return 0.5 * (ratio.square() + ((q.mean - p.mean) / p.std).square() - 1) - ratio.log()


def standard(like: Tensor, log_tails: Tensor | None = None) -> Code:
    """Return the prior of an autoencoder: independent standard normal numbers, with given tails."""
    return Code(torch.zeros_like(like), torch.ones_like(like), log_tails)


def truncated(h: Tensor, length: int) -> Tensor:
    """Return codes (..., D) that are zero after a length."""
    return h.masked_fill(torch.arange(h.shape[-1], device=h.device) >= check_length(length, h.shape[-1]), 0.0)


def check_length(length: int, dimensions: int) -> int:
    """Return a code length; raise unless it is a whole number from 1 to the number of dimensions."""
    if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= dimensions:
        raise ValueError(f"expected a code length from 1 to {dimensions}, got {length!r}")
    return length


def _exact(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
