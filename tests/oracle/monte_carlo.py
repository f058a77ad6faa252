"""Monte Carlo estimates of divergences, and equally weighted mixtures with components on the first axis."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, MixtureSameFamily

from leanbayes.distributions.divergence import kl, rebuild


class Estimate(NamedTuple):
    """A Monte Carlo estimate and the standard error of its mean."""

    value: Tensor
    standard_error: Tensor


def kl_monte_carlo(q: Distribution, p: Distribution, samples: int = 10_000) -> Estimate:
    """Estimate KL(q || p) per element from samples of q, with the standard error of the estimate."""
    draws = q.rsample(torch.Size((samples,)))
    ratio = q.log_prob(draws) - p.log_prob(draws)
    return Estimate(ratio.mean(0), ratio.std(0) / math.sqrt(samples))


def mixture(components: Distribution) -> MixtureSameFamily:
    """Mix the K distributions on the first axis of `components` with weight 1/K each.

    Example:
        >>> import torch
        >>> from torch.distributions import Normal
        >>> mixture(Normal(torch.tensor([0.0, 2.0]), torch.ones(2))).mean
        tensor(1.)
    """
    # torch expects the components on the last batch axis.
    moved = rebuild(components, lambda parameter: parameter.movedim(0, -1))
    weights = torch.ones(moved.batch_shape, device=moved.mean.device)
    return MixtureSameFamily(Categorical(weights, validate_args=False), moved, validate_args=False)


def entropy_bounds(components: Distribution) -> tuple[Tensor, Tensor]:
    """Bound the entropy of the mixture: mean_k H_k <= H <= mean_k H_k + log K."""
    lower = components.entropy().mean(0)
    return lower, lower + math.log(components.batch_shape[0])


def kl_bound(components: Distribution, prior: Distribution) -> Tensor:
    """Bound KL(mixture || prior) from above by mean_k KL(component k || prior), by convexity."""
    return kl(components, prior).mean(0)


def mixture_kl_monte_carlo(components: Distribution, prior: Distribution, samples: int = 10_000) -> Estimate:
    """Estimate KL(mixture || prior) per element, drawing equally often from every component.

    The standard error is that of the stratified estimate: strata variances, not the total variance.
    """
    count = components.batch_shape[0]
    each = math.ceil(samples / count)
    draws = components.rsample(torch.Size((each,)))
    mixed: Any = mixture(components)
    ratio: Tensor = mixed.log_prob(draws) - prior.log_prob(draws)
    error = (ratio.var(0) / each).sum(0).sqrt() / count
    return Estimate(ratio.mean((0, 1)), error)
