"""Ordered masks as torch distributions: densities, moments and divergences of the masks that the library draws.

* `BernoulliChain`: masks from conditional keep probabilities, the prior.
* `Downhill`: masks relaxed into [0, 1], the posterior. At temperature zero it is a Bernoulli chain.

Variational Nested Dropout, definition 1, equations (1) to (3) and (11), appendix A. Misprints in equation (3) are
corrected here.
"""

from __future__ import annotations

import math
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import constraints, Distribution, register_kl
from typing_extensions import override

from leanbayes.distributions.ordered import at_or_beyond, downhill, gumbel, tail_kl

TOLERANCE = 1e-6  # allowed rounding error of the first element and of a step upwards


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
        return at_or_beyond(self.tails)

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


def _drops(mask: Tensor) -> Tensor:
    """Return c_i = z_i - z_{i+1} with z_{K+1} := 0."""
    return mask - F.pad(mask[..., 1:], (0, 1))


def _log(probability: Tensor) -> Tensor:
    """Return the logarithm; at zero it is -inf with a gradient of zero, not infinite."""
    zero = probability == 0
    return probability.masked_fill(zero, 1.0).log().masked_fill(zero, -math.inf)
