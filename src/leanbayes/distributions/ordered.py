"""Ordered masks (nested dropout): an element is kept only if all elements before it are kept.

K elements have K such masks. Mask j keeps elements 1 to j; j is its *tail*, the last element kept. The first element is
always kept. A distribution over masks is K log tail probabilities; -inf is a tail that never occurs.

* `BernoulliChain`: masks from conditional keep probabilities, the prior.
* `Downhill`: masks relaxed into [0, 1], the posterior. At temperature zero it is a Bernoulli chain.

Variational Nested Dropout, sections 2.1 to 2.3, equation (11), appendices A.1 and A.2. Misprints in property 1,
equation (3), the geometric distribution and equation (11) are corrected here. Compiled layers call the functions with
their own noise; the classes call the same functions.
"""

from __future__ import annotations

import math
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import constraints, Distribution, register_kl
from typing_extensions import override

TOLERANCE = 1e-6  # allowed rounding error of the first element and of a step upwards


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
    scores = _divided(log_tails + gumbel, temperature)
    if not hard:
        return _at_or_beyond(scores.softmax(-1))
    mask = torch.arange(scores.shape[-1], device=scores.device) <= scores.argmax(-1, keepdim=True)
    if not scores.requires_grad:
        return mask.to(scores.dtype)
    steps = scores.softmax(-1)
    soft = steps - steps.cumsum(-1)  # less one: the bracket below is exactly zero, only its gradient counts
    return mask + (soft - soft.detach())


def log_tails_of(keep_logits: Tensor, always_on: int = 1) -> Tensor:
    """Return log[(1 - pi_{j+1}) prod_{k<=j} pi_k] (..., K) for pi = sigmoid(keep_logits), pi_1 := 1, pi_{K+1} := 0.

    Args:
        keep_logits: logits of the conditional keep probabilities of elements 2 to K (..., K - 1).
        always_on: number of first elements that are always kept; logits of elements 2 to `always_on` are not used.
    """
    _check_always_on(keep_logits.shape[-1] + 1, always_on)
    if always_on > 1:
        return F.pad(log_tails_of(keep_logits[..., always_on - 1 :]), (always_on - 1, 0), value=-math.inf)
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


def geometric_tails(count: int, stop: float, always_on: int = 1) -> Tensor:
    """Return P(I = i) = (1 - stop)^(i-1) stop, counted from the last element that is always on (Rippel et al., 2014).

    The last element takes the remaining probability: the tails of the Bernoulli chain with pi = 1 - stop.
    """
    _check_always_on(count, always_on)
    if not 0 <= stop <= 1:
        raise ValueError(f"expected a probability of stopping in [0, 1], got {stop}; take 0.05, for instance")
    keep = torch.full((count,), 1 - stop, dtype=torch.float64)
    keep[:always_on] = 1.0
    return BernoulliChain(keep).tails.to(torch.get_default_dtype())


def uniform_tails(count: int, always_on: int = 1) -> Tensor:
    """Return equal probabilities for all tails that `always_on` allows (Cui et al., 2020)."""
    _check_always_on(count, always_on)
    free = count - always_on + 1
    return F.pad(torch.full((free,), 1 / free), (always_on - 1, 0))


class OrderedMask(constraints.Constraint):
    """Vectors that begin with one and never rise, up to rounding; only zeros and ones if `discrete`."""

    event_dim = 1

    def __init__(self, discrete: bool) -> None:
        self.is_discrete = discrete

    @override
    def check(self, value: Tensor) -> Tensor:
        ordered = ((value[..., 0] - 1).abs() <= TOLERANCE) & (_drops(value) >= -TOLERANCE).all(-1)
        return ordered & ((value == 0) | (value == 1)).all(-1) if self.is_discrete else ordered


class _Ordered(Distribution):
    """Common part of both distributions; `stored` names the parameter (..., K)."""

    stored: str
    log_tails: Tensor

    @property
    def tails(self) -> Tensor:
        """P(j is the last kept); of a chain, (1 - pi_{j+1}) prod_{k<=j} pi_k with pi_{K+1} := 0 (A9)."""
        return self.log_tails.exp()

    @override
    def expand(self, batch_shape: Any, _instance: Any = None) -> Self:
        new: Self = self.__new__(type(self)) if _instance is None else _instance
        new.__dict__.update(self.__dict__)
        new._batch_shape = torch.Size(batch_shape)
        setattr(new, self.stored, getattr(self, self.stored).expand(new._batch_shape + self.event_shape))
        return new

    def _checks(self, name: str, parameter: Tensor, validate_args: bool | None) -> bool:
        """Raise unless the parameter is a vector; return whether to check values, which waits for the device."""
        if parameter.dim() == 0 or parameter.shape[-1] == 0 or not parameter.is_floating_point():
            raise ValueError(f"expected {name} (..., K) of floats, got {parameter.dtype} {tuple(parameter.shape)}")
        return self._validate_args if validate_args is None else validate_args

    def _drops_of(self, value: Tensor) -> Tensor:
        if value.shape[-1:] != self.event_shape:
            raise ValueError(f"expected masks (..., {self.event_shape[0]}), got a tensor of shape {tuple(value.shape)}")
        return _drops(value)


class BernoulliChain(_Ordered):
    """Masks whose element i is kept with probability pi_i if element i - 1 was, and never otherwise (equation 1)."""

    arg_constraints: dict[str, Any] = {  # noqa: RUF012  (torch's own declaration)
        "keep": constraints.independent(constraints.unit_interval, 1)  # type: ignore[no-untyped-call]
    }
    support = OrderedMask(discrete=True)
    stored = "keep"

    def __init__(self, keep: Tensor, validate_args: bool | None = None) -> None:
        """Take conditional keep probabilities (..., K). The first must be one, up to 1e-6: it is always kept."""
        if self._checks("keep", keep, validate_args) and ((keep[..., 0] - 1).abs() > TOLERANCE).any():
            raise ValueError(f"expected keep probabilities that begin with 1, got {keep[..., 0]}; put a 1 in front")
        self.keep = F.pad(keep[..., 1:], (1, 0), value=1.0)
        super().__init__(keep.shape[:-1], keep.shape[-1:], validate_args=validate_args)

    @property
    def mean(self) -> Tensor:
        """P(z_i = 1) = prod_{k<=i} pi_k (equation 2)."""
        return self.keep.cumprod(-1)

    @property
    def variance(self) -> Tensor:
        return self.mean * (1 - self.mean)

    @property
    def log_tails(self) -> Tensor:  # type: ignore[override]
        """Logarithms of the tail probabilities, -inf for a tail that never occurs."""
        stop = F.pad(1 - self.keep[..., 1:], (0, 1), value=1.0)
        return _log(self.keep).cumsum(-1) + _log(stop)

    @override
    def sample(self, sample_shape: Any = ()) -> Tensor:
        with torch.no_grad():
            # A product of independent variables: no loop over elements.
            return torch.bernoulli(self.keep.expand(self._extended_shape(torch.Size(sample_shape)))).cumprod(-1)

    @override
    def log_prob(self, value: Tensor) -> Tensor:
        value = value.to(self.keep.dtype)  # a mask may be boolean
        log_prob = torch.where(self._drops_of(value) == 1, self.log_tails, 0.0).sum(-1)
        return log_prob.masked_fill(~self.support.check(value), -math.inf)

    @override
    def entropy(self) -> Tensor:
        return -tail_kl(self.log_tails, torch.zeros_like(self.keep))


class Downhill(_Ordered):
    """Masks relaxed into [0, 1]: 1 = z_1 >= z_2 >= ... >= z_K >= 0 (definition 1)."""

    arg_constraints: dict[str, Any] = {"log_tails": constraints.real_vector, "temperature": constraints.positive}  # noqa: RUF012
    support = OrderedMask(discrete=False)
    stored = "log_tails"
    has_rsample = True

    def __init__(
        self,
        tails: Tensor | None = None,
        logits: Tensor | None = None,
        *,
        temperature: float | Tensor,
        validate_args: bool | None = None,
    ) -> None:
        """Take tail probabilities (..., K), or logits of them, and one temperature. A tail of 0 (-inf) never occurs."""
        given = tails if logits is None else logits
        if given is None or (tails is not None and logits is not None):
            raise ValueError(f"expected tails or logits, got {'neither' if given is None else 'both'}; give one")
        checks = self._checks("logits" if tails is None else "tails", given, validate_args)
        if checks and tails is not None and ((tails < 0).any() or ((tails.sum(-1) - 1).abs() > 1e-4).any()):
            raise ValueError(f"expected tails of at least 0 that sum to 1, got {tails}; divide them by their sum")
        logits = given if tails is None else _log(given)
        self.temperature = torch.as_tensor(temperature, dtype=given.dtype, device=given.device)
        if self.temperature.dim() > 0:
            raise ValueError(f"expected one temperature, got {tuple(self.temperature.shape)}; give a number")
        self.log_tails = logits.log_softmax(-1)
        super().__init__(given.shape[:-1], given.shape[-1:], validate_args=validate_args)

    @property
    def keep(self) -> Tensor:
        """P(z_i = 1) = 1 - sum of the tails before i, of hard samples."""
        return _at_or_beyond(self.tails)

    @property
    def limit(self) -> BernoulliChain:
        """The chain at temperature zero: pi_j = P(tail >= j) / P(tail >= j - 1), one where that is 0 / 0."""
        floor = torch.finfo(self.log_tails.dtype).min  # finite: -inf less -inf is nan
        beyond = self.log_tails.clamp_min(floor).flip(-1).logcumsumexp(-1).flip(-1)
        keep = beyond.diff(dim=-1).exp().clamp_max(1.0)
        return BernoulliChain(F.pad(keep, (1, 0), value=1.0), validate_args=False)

    @override
    def rsample(self, sample_shape: Any = (), hard: bool = False) -> Tensor:
        shape = self._extended_shape(torch.Size(sample_shape))
        uniform = torch.rand(shape, dtype=self.log_tails.dtype, device=self.log_tails.device)
        return downhill(self.log_tails, self.temperature, gumbel(uniform), hard)

    @override
    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of (z_2, ..., z_K), -inf off the support.

        Gamma(K) tau^(K-1) [sum_i beta_i / c_i^tau]^(-K) prod_i beta_i / c_i^(tau+1) with c_i = z_i - z_{i+1} and
        z_{K+1} := 0; equation (3) prints z_{i-1} - z_i. K, the sum and the product omit tails that never occur, whose
        c_i must be zero. A c_i that rounding made zero counts as the smallest positive number.
        """
        drops, never = self._drops_of(value), self.log_tails == -math.inf
        count = (~never).sum(-1).to(value.dtype)
        log_drops = torch.where(never, 1.0, drops).clamp_min(torch.finfo(value.dtype).tiny).log()
        scores = self.log_tails.masked_fill(never, 0.0) - self.temperature * log_drops
        product = torch.where(never, 0.0, scores - log_drops).sum(-1)
        total = torch.where(never, -math.inf, scores).logsumexp(-1)
        density = count.lgamma() + (count - 1) * self.temperature.log() + product - count * total
        inside = self.support.check(value) & (~never | (drops.abs() <= TOLERANCE)).all(-1)
        return density.masked_fill(~inside, -math.inf)


def kl_downhill_chain(q: Downhill | BernoulliChain, p: BernoulliChain) -> Tensor:
    """Return KL(q || p) in nats (equation 11); a Downhill q counts as its zero-temperature limit, as in the paper."""
    return tail_kl(q.log_tails, p.log_tails)


register_kl(Downhill, BernoulliChain)(kl_downhill_chain)  # type: ignore[no-untyped-call]
register_kl(BernoulliChain, BernoulliChain)(kl_downhill_chain)  # type: ignore[no-untyped-call]


def _divided(scores: Tensor, temperature: float | Tensor) -> Tensor:
    """Return scores / temperature; a score of -inf gives a learned temperature the gradient 0, not 0 * inf."""
    if not (isinstance(temperature, Tensor) and temperature.requires_grad):
        return scores / temperature
    never = scores == -math.inf
    return (scores.masked_fill(never, 0.0) / temperature).masked_fill(never, -math.inf)


def _at_or_beyond(shares: Tensor) -> Tensor:
    """Return sum_{j>=i} shares_j, scaled so that the first is exactly one."""
    beyond = shares.flip(-1).cumsum(-1).flip(-1)
    return beyond / beyond[..., :1]


def _drops(mask: Tensor) -> Tensor:
    """Return c_i = z_i - z_{i+1} with z_{K+1} := 0."""
    return mask - F.pad(mask[..., 1:], (0, 1))


def _log(probability: Tensor) -> Tensor:
    """Return the logarithm; at zero it is -inf with a gradient of zero, not infinite."""
    zero = probability == 0
    return probability.masked_fill(zero, 1.0).log().masked_fill(zero, -math.inf)


def _check_always_on(count: int, always_on: int) -> None:
    if not 1 <= always_on <= count:
        raise ValueError(f"expected always_on between 1 and the number of elements ({count}), got {always_on}")
