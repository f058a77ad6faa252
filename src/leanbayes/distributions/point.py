"""The point mass: a distribution that always says the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints, Distribution


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
