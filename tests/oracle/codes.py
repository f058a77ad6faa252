"""The tails of ordered codes with the smallest divergence, in closed form."""

from __future__ import annotations

from torch import Tensor


def best_log_tails(kappa: Tensor, prior_log_tails: Tensor) -> Tensor:
    """Return the tails of the smallest divergence for given kappa: beta_j proportional to p_j exp(-sum_{i<=j} kappa_i).

    The divergence there is -log C with C = sum_j p_j exp(-sum_{i<=j} kappa_i) (A.5, with the cumulative kappa).
    """
    return (prior_log_tails - kappa.cumsum(-1)).log_softmax(-1)
