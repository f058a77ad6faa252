"""Laws of one multiplicative factor, written as a transform of standard noise.

A factor is `z = sample(loc, scale, noise)`, where `noise` has no parameters. Whoever holds the noise holds the
draw: it can be made before the forward pass, kept, repeated, and moved between devices.

| law         | z                       | centre        | noise    |
|-------------|-------------------------|---------------|----------|
| normal      | loc + scale * n         | mean          | normal   |
| cauchy      | loc + scale * c(u)      | median        | uniform  |
| log_normal  | exp(loc + scale * n)    | mean          | normal   |
| half_cauchy | scale * abs(c(u))       | median        | uniform  |
| point       | loc                     | loc           | none     |

with c(u) = tan(pi (u - 1/2)), which has a Cauchy distribution.

The centre is the mean where there is one and the median where there is none.
"""

from __future__ import annotations

import abc
import math
from typing import ClassVar, get_args, Literal

import torch
from torch import Tensor
from torch.distributions import Cauchy, Distribution, HalfCauchy, LogNormal, Normal
from typing_extensions import override

from leanbayes.distributions.positive import PointMass
from leanbayes.distributions.random import Kind

LawName = Literal["normal", "cauchy", "log_normal", "half_cauchy", "point"]

LIMIT = 10.0
"""Heavy-tailed draws are clipped to [-10, 10], as in the rank-1 paper's code: one wild factor ruins a batch."""


class Law(abc.ABC):
    """One row of the table above; stateless."""

    noise: ClassVar[Kind] = "normal"
    has_loc: ClassVar[bool] = True
    has_scale: ClassVar[bool] = True
    positive: ClassVar[bool] = False

    @abc.abstractmethod
    def sample(self, loc: Tensor, scale: Tensor, noise: Tensor) -> Tensor:
        """Turn noise into factors; differentiable in `loc` and `scale`."""

    @abc.abstractmethod
    def distribution(self, loc: Tensor, scale: Tensor) -> Distribution:
        """Return the law as a `torch.distributions` object."""

    def centre(self, loc: Tensor, scale: Tensor) -> Tensor:
        """Return the mean, or the median where there is no mean."""
        return loc

    def locate(self, centre: Tensor, scale: Tensor) -> Tensor:
        """Return the `loc` whose centre is `centre`."""
        return centre

    def prior(self, around: float, std: float) -> Distribution:
        """Return the prior of this law with scale `std` and, where it has a location, centred at `around`."""
        scale = torch.tensor(std, device="cpu")
        return self.distribution(self.locate(torch.tensor(around, device="cpu"), scale), scale)


class NormalLaw(Law):
    """z = loc + scale * n."""

    @override
    def sample(self, loc: Tensor, scale: Tensor, noise: Tensor) -> Tensor:
        return torch.addcmul(loc, scale, noise.to(loc.dtype))

    @override
    def distribution(self, loc: Tensor, scale: Tensor) -> Distribution:
        return Normal(loc, scale, validate_args=False)


class CauchyLaw(Law):
    """z = loc + scale * tan(pi (u - 1/2)), clipped."""

    noise = "uniform"

    @override
    def sample(self, loc: Tensor, scale: Tensor, noise: Tensor) -> Tensor:
        return torch.addcmul(loc, scale, _cauchy(noise).to(loc.dtype)).clamp(-LIMIT, LIMIT)

    @override
    def distribution(self, loc: Tensor, scale: Tensor) -> Distribution:
        return Cauchy(loc, scale, validate_args=False)


class LogNormalLaw(Law):
    """z = exp(loc + scale * n); its mean is exp(loc + scale^2 / 2)."""

    positive = True

    @override
    def sample(self, loc: Tensor, scale: Tensor, noise: Tensor) -> Tensor:
        return torch.addcmul(loc, scale, noise.to(loc.dtype)).exp().clamp(max=LIMIT)

    @override
    def distribution(self, loc: Tensor, scale: Tensor) -> Distribution:
        return LogNormal(loc, scale, validate_args=False)

    @override
    def centre(self, loc: Tensor, scale: Tensor) -> Tensor:
        return (loc + scale.square() / 2).exp()

    @override
    def locate(self, centre: Tensor, scale: Tensor) -> Tensor:
        return centre.log() - scale.square() / 2


class HalfCauchyLaw(Law):
    """z = scale * abs(tan(pi (u - 1/2))), clipped; its median is the scale, it has no mean."""

    noise = "uniform"
    has_loc = False
    positive = True

    @override
    def sample(self, loc: Tensor, scale: Tensor, noise: Tensor) -> Tensor:
        return (scale * _cauchy(noise).abs().to(scale.dtype)).clamp(max=LIMIT)

    @override
    def distribution(self, loc: Tensor, scale: Tensor) -> Distribution:
        return HalfCauchy(scale, validate_args=False)

    @override
    def centre(self, loc: Tensor, scale: Tensor) -> Tensor:
        return scale


class PointLaw(Law):
    """z = loc, always."""

    has_scale = False

    @override
    def sample(self, loc: Tensor, scale: Tensor, noise: Tensor) -> Tensor:
        return loc

    @override
    def distribution(self, loc: Tensor, scale: Tensor) -> Distribution:
        return PointMass(loc)


def _cauchy(uniform: Tensor) -> Tensor:
    """Turn uniform numbers in [0, 1) into standard Cauchy ones."""
    return torch.tan(math.pi * (uniform - 0.5))


LAWS: dict[str, Law] = {
    "normal": NormalLaw(),
    "cauchy": CauchyLaw(),
    "log_normal": LogNormalLaw(),
    "half_cauchy": HalfCauchyLaw(),
    "point": PointLaw(),
}


def law(name: str) -> Law:
    """Look a law up by its name."""
    if name not in LAWS:
        raise ValueError(f"expected a law out of {', '.join(get_args(LawName))}, got {name!r}")
    return LAWS[name]
