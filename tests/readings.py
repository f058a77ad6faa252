"""Component and noise of a layer in the current pass, as the oracles of the tests read them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leanbayes.distributions.law import Law
from leanbayes.distributions.random import standard

CPU = torch.device("cpu")


class Reading(NamedTuple):
    component: Any
    noise: Any
    width: Any


def reading_of(layer: Any, rows: int) -> Reading:
    return Reading(*layer.state.inputs_of(layer, rows))


def noise_of(law: Law, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    return standard(law.noise, shape, CPU, generator)


def cauchy(uniform: Tensor) -> Tensor:
    return torch.tan(math.pi * (uniform - 0.5))
