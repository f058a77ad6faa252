"""Positive numbers stored as real ones, so that configurations can speak in standard deviations."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import constraints, Distribution

SMALLEST = 1e-7
"""Added after the softplus: a scale never reaches zero, its logarithm stays finite."""


SMALLEST_STD = 1e-6
"""The smallest standard deviation that survives `inverse_softplus` in float32."""


def softplus(raw: Tensor) -> Tensor:
    """Map a real tensor to a positive one: `log(1 + exp(raw)) + 1e-7`."""
    return F.softplus(raw) + SMALLEST


def inverse_softplus(value: Tensor) -> Tensor:
    """Return `raw` such that `softplus(raw)` equals `value` (which must exceed 1e-7)."""
    shifted = value - SMALLEST
    return shifted + (-(-shifted).expm1()).log()


# -------------------- point
# The point mass: a distribution that always says the same.


class PointMass(Distribution):
    """All probability at `loc`. It has samples, a mean and a variance of zero, but no density."""

    arg_constraints: dict[str, Any] = {"loc": constraints.real}  # noqa: RUF012  (torch's own declaration)
    has_rsample = True

    def __init__(self, loc: Tensor) -> None:
        """Place the mass at `loc`."""
        self.loc = loc
        super().__init__(loc.shape, validate_args=False)

    @property
    def mean(self) -> Tensor:
        """The only value."""
        return self.loc

    @property
    def variance(self) -> Tensor:
        """Zero."""
        return torch.zeros_like(self.loc)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Repeat `loc`."""
        return self.loc.expand(self._extended_shape(torch.Size(sample_shape)))
