"""Softplus parameters: positive numbers stored as real ones; and the point mass, a distribution without scale."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import constraints, Distribution

SMALLEST = 1e-7  # added after the softplus: a scale stays above zero, so its logarithm is finite
SMALLEST_STD = 1e-6  # the smallest standard deviation that survives `inverse_softplus` in float32


def softplus(raw: Tensor) -> Tensor:
    """Map a real tensor to a positive one: `log(1 + exp(raw)) + 1e-7`."""
    return F.softplus(raw) + SMALLEST


def inverse_softplus(value: Tensor) -> Tensor:
    """Return `raw` such that `softplus(raw)` equals `value` (which must exceed 1e-7)."""
    shifted = value - SMALLEST
    return shifted + (-(-shifted).expm1()).log()


class PointMass(Distribution):
    """All probability at `loc`. It has samples, a mean and a variance of zero, but no density."""

    arg_constraints: dict[str, Any] = {"loc": constraints.real}  # noqa: RUF012  (torch's own declaration)
    has_rsample = True

    def __init__(self, loc: Tensor) -> None:
        self.loc = loc
        super().__init__(loc.shape, validate_args=False)

    @property
    def mean(self) -> Tensor:
        return self.loc

    @property
    def variance(self) -> Tensor:
        return torch.zeros_like(self.loc)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        return self.loc.expand(self._extended_shape(torch.Size(sample_shape)))
