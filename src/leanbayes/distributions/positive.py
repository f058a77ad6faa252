"""Positive numbers stored as real ones, so that configurations can speak in standard deviations."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

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
