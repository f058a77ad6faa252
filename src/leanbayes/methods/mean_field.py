"""Mean-field variational inference: an independent Gaussian over every weight, the textbook baseline.

    W_ij ~ Normal(M_ij, sigma_ij^2),      KL to Normal(0, s^2) in closed form, summed over weights

Biases stay points. Two estimators of the gradient keep the noise of the rows of a batch apart:

* local reparameterisation (Kingma et al., 2015) samples the pre-activations,
  y = M x + eps sqrt(sigma^2 x^2), fresh eps for every entry of y;
* Flipout (Wen et al., 2018) samples one weight matrix and flips its signs for every row,
  y = M x + r * ((sigma eps) (x * s)),  s and r random signs.

A draw is a sampled weight matrix in both cases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn, Tensor
from typing_extensions import override

from leanbayes.distributions.positive import inverse_softplus, softplus
from leanbayes.layers.family import LINEAR_MAPS, spread
from leanbayes.methods.base import Method, StochasticLayer
from leanbayes.methods.checks import check_choice, check_positive, check_std

Estimator = Literal["local", "flipout"]

SMALLEST_VARIANCE = 1e-16
"""Under the square root, whose gradient at zero is infinite."""


class MeanFieldLayer(StochasticLayer):
    """A linear map with a Gaussian over every weight."""

    method: MeanField

    def __init__(self, base: Any, method: MeanField) -> None:
        """Start with the given weights as means, and one standard deviation for all."""
        super().__init__(base, method)
        weight: Tensor = base.weight
        self.nodes = weight.numel()
        dtype = torch.promote_types(weight.dtype, torch.float32)
        stds = torch.full_like(weight.detach(), method.init_std, dtype=dtype)
        self.posterior.rho = nn.Parameter(inverse_softplus(stds))

    @property
    def stds(self) -> Tensor:
        """The standard deviations of the weights."""
        stds: Tensor = softplus(self.posterior.rho)
        return stds

    @override
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        if self.draws.mean:
            return self._linear(x, self.base.weight, args, bias=True)
        if self.draws.shared:
            return self._linear(x, self.sample(1)["weight"][0], args, bias=True)
        return self._local(x, args) if self.method.estimator == "local" else self._flipout(x, args)

    @override
    def kl(self) -> Tensor:
        prior = self.method.prior_std
        stds, means = self.stds.float(), self.base.weight.float()
        per_weight: Tensor = (prior / stds).log() + (stds.square() + means.square()) / (2 * prior**2) - 0.5
        return per_weight.sum()

    @override
    def draw_noise(self, rows: int, generator: torch.Generator | None) -> tuple[Tensor, ...]:
        """Draw Flipout's noise: a weight matrix for all rows, signs of inputs and outputs for each."""
        normal = _normal((1, *self.base.weight.shape), self.device, generator)
        signs = [_normal((rows, n), self.device, generator).sign() for n in (self.inputs, self.outputs)]
        return normal, *signs

    @override
    def function_noise(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        return (_normal((1, *self.base.weight.shape), self.device, generator),)

    @override
    def sample(self, rows: int) -> dict[str, Tensor]:
        """Return the "weight" (R, ...) of fixed draws."""
        noise = self.draws.read(self, rows).noise
        weight: Tensor = self.base.weight
        return {"weight": weight[None] if noise is None else weight + (self.stds * noise[0]).to(weight.dtype)}

    @override
    def fold(self, variables: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"weight": variables["weight"]}

    @property
    def inputs(self) -> int:
        """Number of input channels."""
        return self.family.inputs(self.base)

    @property
    def outputs(self) -> int:
        """Number of output channels."""
        return self.family.outputs(self.base)

    def _local(self, x: Tensor, args: Any) -> Tensor:
        mean: Tensor = self._linear(x, self.base.weight, args, bias=True)
        with torch.autocast(x.device.type, enabled=False):  # small variances underflow in half precision
            wide = torch.promote_types(x.dtype, torch.float32)
            variance = self._linear(x.to(wide).square(), self.stds.square().to(wide), args, bias=False)
            noise = self.draws.activation_noise(self, variance).to(wide)
            return mean + (noise * (variance + SMALLEST_VARIANCE).sqrt()).to(mean.dtype)

    def _flipout(self, x: Tensor, args: Any) -> Tensor:
        noise = self.draws.read(self, x.shape[0]).noise
        assert noise is not None
        normal, signs_in, signs_out = noise
        axis, path = self.family.axis, self.path
        weight = (self.stds * normal[0]).to(self.base.weight.dtype)
        flipped = self._linear(x * spread(signs_in, x, axis, path), weight, args, bias=False)
        return self._linear(x, self.base.weight, args, bias=True) + flipped * spread(signs_out, flipped, axis, path)

    def _linear(self, x: Tensor, weight: Tensor, args: Any, *, bias: bool) -> Tensor:
        assert self.family.linear is not None
        y = self.family.linear(self.base, x, weight, *args)
        if not bias or self.base.bias is None:
            return y
        return y + spread(self.base.bias[None], y, self.family.axis, self.path)


@dataclass(frozen=True, kw_only=True)
class MeanField(Method):
    """An independent Gaussian over every weight: twice the parameters, and a KL that grows with the network.

    Attributes:
        prior_std: standard deviation of the prior Normal(0, s^2) over weights.
        init_std: initial standard deviation of the weights.
        estimator: how rows get noise of their own in training: "local" reparameterisation or "flipout".

    Example:
        >>> bnn = lb.convert(net, lb.MeanField(prior_std=1.0))
    """

    name: ClassVar[str] = "mean_field"
    targets: ClassVar[tuple[type[nn.Module], ...]] = LINEAR_MAPS

    prior_std: float = 1.0
    init_std: float = 0.01
    estimator: Estimator = "local"

    def __post_init__(self) -> None:
        """Check every field; a wrong one says what was expected."""
        check_positive(prior_std=self.prior_std)
        check_std(init_std=self.init_std)
        check_choice("estimator", self.estimator, ("local", "flipout"))

    @override
    def wrap(self, layer: nn.Module) -> MeanFieldLayer:
        return MeanFieldLayer(layer, self)

    @override
    @classmethod
    def examples(cls) -> dict[str, Method]:
        return {"default": cls(), "flipout": cls(estimator="flipout", init_std=0.05)}


def _normal(shape: tuple[int, ...], device: torch.device, generator: torch.Generator | None) -> Tensor:
    """Draw standard normal numbers; under compilation a generator must not be named, not even as None."""
    return torch.randn(shape, device=device) if generator is None else torch.randn(shape, generator=generator)
