"""The divergence of many independent normal weights from Normal(0, s^2), in one function of raw parameters.

    KL = sum log(s / sigma) + (sigma^2 + mu^2) / (2 s^2) - 1/2,      sigma = softplus(rho)

    dKL/drho = (sigma / s^2 - 1 / sigma) sigmoid(rho),      dKL/dmu = mu / s^2

There is a term for each weight of the network, so with autograd the operations of the expression and of its gradient
take as long as several percent of a training step. Here they are half as many.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from leanbayes.distributions.positive import softplus


def normal_kl(stds: Tensor, means: Tensor, prior: float) -> Tensor:
    """Return the divergence of each weight, by autograd."""
    each: Tensor = (prior / stds).log() + (stds.square() + means.square()) / (2 * prior**2) - 0.5
    return each


def sum_of_normal_kl(rho: Tensor, means: Tensor, prior: float) -> Tensor:
    """Return the sum of the divergences; standard deviations are softplus(rho)."""
    total: Tensor = _SumOfKL.apply(rho, means, prior)  # type: ignore[no-untyped-call]
    return total


class _SumOfKL(torch.autograd.Function):
    """The expression above; `ctx.prior` is s."""

    @staticmethod
    def forward(ctx: Any, rho: Tensor, means: Tensor, prior: float) -> Tensor:
        ctx.prior, stds = prior, softplus(rho)
        ctx.save_for_backward(rho, means, stds)
        each = stds.square().addcmul_(means, means).mul_(0.5 / prior**2).sub_(stds.log())
        return each.sum() + rho.numel() * (math.log(prior) - 0.5)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        rho, means, stds = ctx.saved_tensors
        for_rho, for_means = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():  # create_graph: the gradient has a gradient
            slope = softplus(rho)
            by_rho = g * (slope / ctx.prior**2 - 1 / slope) * rho.sigmoid() if for_rho else None
            return by_rho, g * means / ctx.prior**2 if for_means else None, None
        by_rho = None
        if for_rho:
            by_rho = stds.reciprocal().sub_(stds, alpha=ctx.prior**-2).mul_(rho.sigmoid()).mul_(-g)
        return by_rho, means * (g / ctx.prior**2) if for_means else None, None
