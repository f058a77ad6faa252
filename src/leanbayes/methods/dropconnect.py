"""DropConnect (Wan et al., 2013): every weight is dropped on its own, and each mask is a posterior draw.

    W_ij = m_ij M_ij / (1 - p),      m_ij ~ Bernoulli(1 - p)

It is ensemble model patching with two components, a matrix and zero, and an index for every element. A mask serves a
whole batch: a mask per row would need a weight matrix per row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn, Tensor
from typing_extensions import override

from leanbayes.distributions.assignment import Assignment, pick
from leanbayes.layers.family import LINEAR_MAPS, LinearFamily
from leanbayes.methods._base import Method, Space, StochasticLayer
from leanbayes.methods._checks import check_rate
from leanbayes.runtime.noise import Noise, NoiseSpec
from leanbayes.runtime.passes import Variables, Width


class DropConnectLayer(StochasticLayer):
    """A linear map some of whose weights are zero in each draw."""

    method: DropConnect
    family: LinearFamily
    row_noise = False

    def __init__(self, base: Any, method: DropConnect) -> None:
        super().__init__(base, method)
        self.nodes = base.weight.numel()
        self.log_choices = self.nodes * math.log(2)

    @override
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        weight = self.state.variables_of(self, x.shape[0])["weight"][0]
        y = self.family.linear(self.base, x, weight, *args)
        return y if self.base.bias is None else y + self.spread(self.base.bias[None], y)

    @override
    def kl(self) -> Tensor:
        return torch.zeros((), device=self.device)

    @override
    def noise_specs(self, shared: bool) -> tuple[NoiseSpec, ...]:
        return (NoiseSpec("uniform", tuple(self.base.weight.shape), per_row=False, counted=True),)

    @override
    def sample(self, component: Assignment | None, noise: Noise | None, width: Width) -> Variables:
        """Return the "weight" (R, ...), R = 1 unless several draws are fixed."""
        weight = self.weight_now
        if noise is None:
            return {"weight": weight[None]}
        keep = 1 - self.method.rate
        return {"weight": weight * (pick(noise[0], (self.method.rate, keep)) / keep).to(weight.dtype)}

    @override
    def fold(self, variables: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"weight": variables["weight"]}


@dataclass(frozen=True, kw_only=True)
class DropConnect(Method):
    """Weights dropped one by one, in training and in prediction.

    Attributes:
        rate: probability that a weight is dropped.

    Example:
        >>> bnn = lb.convert(net, lb.DropConnect(rate=0.1))
    """

    name: ClassVar[str] = "dropconnect"
    late: ClassVar[float] = 0.0
    targets: ClassVar[tuple[type[nn.Module], ...]] = LINEAR_MAPS
    space: ClassVar[Space] = MappingProxyType({"rate": (0.02, 0.5)})

    rate: float = 0.1

    def __post_init__(self) -> None:
        check_rate(rate=self.rate)

    @override
    def wrap(self, layer: nn.Module) -> DropConnectLayer:
        return DropConnectLayer(layer, self)
