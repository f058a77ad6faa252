"""Ordered masks (nested dropout): an element is kept only if all elements before it are kept.

K elements have K such masks. Mask j keeps elements 1 to j; j is its *tail*, the last element kept. The first element is
always kept. A distribution over masks is K log tail probabilities; -inf is a tail that never occurs.

The prior is a Bernoulli chain: masks from conditional keep probabilities. The posterior is the downhill distribution:
masks relaxed into [0, 1], at temperature zero a Bernoulli chain. `tests/oracle/ordered.py` has their densities.

Variational Nested Dropout, sections 2.1 to 2.3, equation (11), appendices A.1 and A.2. Misprints in property 1, the
geometric distribution and equation (11) are corrected here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gumbel(uniform: Tensor) -> Tensor:
    """Turn uniform numbers in [0, 1] into standard Gumbel noise -log(-log u), finite at both ends."""
    kind = torch.finfo(uniform.dtype)
    return -(-uniform.clamp(kind.tiny, 1 - kind.eps / 2).log()).log()


def downhill(log_tails: Tensor, temperature: float | Tensor, gumbel: Tensor, hard: bool = False) -> Tensor:
    """Draw masks z_i = 1 - sum_{j<i} c_j with c = softmax((log_tails + gumbel) / temperature).

    Property 1 with c_0 := 0. The sum of c_j over j >= i keeps small z_i exact; z_1 is exactly one.

    Args:
        log_tails: logarithms of tail probabilities (..., K), up to a constant. Those of -inf receive no gradient.
        temperature: positive. If it changes, pass compiled code a tensor: every new float compiles again.
        gumbel: Gumbel noise that broadcasts with `log_tails`.
        hard: return the mask of the argmax with the gradient of the soft one (straight-through). The value is a draw of
            the zero-temperature limit; the gradient is biased.
    """
    scores = (log_tails + gumbel) / temperature
    if not hard:
        return at_or_beyond(scores.softmax(-1))
    mask = torch.arange(scores.shape[-1], device=scores.device) <= scores.argmax(-1, keepdim=True)
    if not scores.requires_grad:
        return mask.to(scores.dtype)
    steps = scores.softmax(-1)
    soft = steps - steps.cumsum(-1)  # less one: the bracket below is exactly zero, only its gradient counts
    return mask + (soft - soft.detach())


def log_tails_of(keep_logits: Tensor) -> Tensor:
    """Return log[(1 - pi_{j+1}) prod_{k<=j} pi_k] (..., K) for pi = sigmoid(keep_logits), pi_1 := 1, pi_{K+1} := 0.

    The logits (..., K - 1) are those of the conditional keep probabilities of elements 2 to K.
    """
    kept = F.pad(F.logsigmoid(keep_logits).cumsum(-1), (1, 0))
    return kept - F.pad(F.softplus(keep_logits, threshold=40.0), (0, 1))


def keep_of(keep_logits: Tensor) -> Tensor:
    """Return the keep probabilities prod_{k<=j} pi_k (..., K), for the pi of `log_tails_of`.

    Exponentials of sums: small values are neither lost in a difference nor below zero.
    """
    return F.pad(F.logsigmoid(keep_logits).cumsum(-1).exp(), (1, 0), value=1.0)


def tail_kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Return sum_j q_j (log q_j - log p_j) over the last axis, in nats, with 0 log 0 = 0 (equation 11).

    Infinite if q has a tail that p never has. Tails that q never has receive no gradient.
    """
    never = log_q.exp() == 0
    log_q, log_p = log_q.masked_fill(never, 0.0), torch.where(never, 0.0, log_p)  # hence 1 * (0 - 0) below
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def geometric_tails(count: int, stop: float) -> Tensor:
    """Return P(I = i) = (1 - stop)^(i-1) stop (Rippel et al., 2014); the last takes the remaining probability."""
    keep = torch.full((count,), 1 - stop, dtype=torch.float64)
    keep[0] = 1.0
    stops = F.pad(1 - keep[1:], (0, 1), value=1.0)
    return (keep.log().cumsum(0) + stops.log()).exp().to(torch.get_default_dtype())


def uniform_tails(count: int) -> Tensor:
    """Return equal probabilities for all tails (Cui et al., 2020)."""
    return torch.full((count,), 1 / count)


def uniform_keep_logits(count: int) -> Tensor:
    """Return the logits (count - 1,) of the chain whose tails are uniform: pi_{j+1} = (K - j) / (K - j + 1)."""
    return torch.arange(count - 1, 0, -1, dtype=torch.get_default_dtype()).log()


def at_or_beyond(shares: Tensor) -> Tensor:
    """Return sum_{j>=i} shares_j, scaled so that the first is exactly one."""
    beyond = shares.flip(-1).cumsum(-1).flip(-1)
    return beyond / beyond[..., :1]
