"""Mean-field variational inference: an independent Gaussian over every weight, the textbook baseline.

    W_ij ~ Normal(M_ij, sigma_ij^2),      KL to Normal(0, s^2) in closed form, summed over weights

A pass samples one table of an embedding for all rows (`_gaussian.py`). Biases have no noise. Three estimators of the
gradient have the same mean:

* local reparameterisation samples the pre-activations (`_gaussian.py`);
* Flipout (Wen et al., 2018) samples one weight matrix and flips its signs for every row,
  y = M x + r * ((sigma eps) (x * s)),  s and r random signs;
* "weights" samples one weight matrix for the whole batch (Blundell et al., 2015).

The first two give every row of a batch its own noise and need two linear maps. The third needs one, at about the price
of the plain network. Its gradient has more variance: all rows share the noise, so the part of the variance that comes
from the weights does not fall with the size of the batch.

A draw is a sampled weight matrix in all cases.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, get_args, Literal

import torch
from torch import nn, Tensor
from typing_extensions import override

from leanbayes.distributions.normal_kl import normal_kl, sum_of_normal_kl
from leanbayes.distributions.positive import inverse_softplus, softplus
from leanbayes.layers.family import EMBEDDINGS, LINEAR_MAPS
from leanbayes.methods._base import Method, Space
from leanbayes.methods._checks import check_choice, check_positive, check_std
from leanbayes.methods._gaussian import GaussianLayer
from leanbayes.methods._scaled_map import is_ordinary
from leanbayes.runtime.noise import NoiseSpec

Estimator = Literal["local", "flipout", "weights"]


class MeanFieldLayer(GaussianLayer):
    """A linear map with a Gaussian over every weight, whose standard deviations are free parameters."""

    method: MeanField

    def __init__(self, base: Any, method: MeanField) -> None:
        super().__init__(base, method)
        stds = torch.full_like(base.weight.detach(), method.init_std, dtype=self.wide)
        self.posterior.rho = nn.Parameter(inverse_softplus(stds))
        if method.estimator == "weights":
            self.samples_weights, self.row_noise = True, False

    @property
    @override
    def scales(self) -> Tensor:
        stds: Tensor = softplus(self.posterior.rho)
        return stds

    @override
    def local(self, x: Tensor, args: Any) -> Tensor:
        return super().local(x, args) if self.method.estimator == "local" else self._flipout(x, args)

    @override
    def kl(self) -> Tensor:
        prior, rho, weight = self.method.prior_std, self.posterior.rho, self.weight_now
        single = rho.dtype == weight.dtype == torch.float32
        if single and self.padding is None and is_ordinary(rho, weight):
            return sum_of_normal_kl(rho, weight, prior)
        stds, means = self.random(self.scales).float(), self.random(weight).float()
        return normal_kl(stds, means, prior).sum()

    @override
    def noise_specs(self, shared: bool) -> tuple[NoiseSpec, ...]:
        """Declare Flipout's noise in a pass: a weight matrix for all rows, signs of inputs and outputs for each."""
        table = super().noise_specs(shared)
        if shared or self.sequential or self.method.estimator != "flipout":
            return table
        sides = (self.family.inputs(self.base), self.family.outputs(self.base))
        return *super().noise_specs(shared=True), *(NoiseSpec("normal", (n,), counted=True) for n in sides)

    def _flipout(self, x: Tensor, args: Any) -> Tensor:
        _, noise, _ = self.state.inputs_of(self, x.shape[0])
        assert noise is not None
        drawn, signs_in, signs_out = noise
        flipped = self.linear(x * self.spread(signs_in.sign(), x), self.deviations(drawn)[0], args, bias=False)
        return self.linear(x, self.weight_now, args) + flipped * self.spread(signs_out.sign(), flipped)


@dataclass(frozen=True, kw_only=True)
class MeanField(Method):
    """An independent Gaussian over every weight: twice the parameters, and a KL that grows with the network.

    Embeddings are converted, too; use `where` to choose or exclude them. A layer whose weight is tied to that of an
    embedding shares its means, not its deviations or its noise.

    Attributes:
        prior_std: standard deviation of the prior Normal(0, s^2) over weights.
        init_std: initial standard deviation of the weights.
        estimator: noise per row in training, by "local" reparameterisation or "flipout"; or one sample of the "weights"
            for a batch, at half their price and with more variance of the gradient.

    Example:
        >>> bnn = lb.convert(net, lb.MeanField(prior_std=1.0))
        >>> words = lb.convert(net, lb.MeanField(), where="embedding")
    """

    name: ClassVar[str] = "mean_field"
    targets: ClassVar[tuple[type[nn.Module], ...]] = (*LINEAR_MAPS, *EMBEDDINGS)
    things: ClassVar[str] = "linear maps and embeddings"
    space: ClassVar[Space] = MappingProxyType({"prior_std": (0.1, 3.0), "init_std": (0.001, 0.1)})

    prior_std: float = 1.0
    init_std: float = 0.01
    estimator: Estimator = "local"

    def __post_init__(self) -> None:
        check_positive(prior_std=self.prior_std)
        check_std(init_std=self.init_std)
        check_choice("estimator", self.estimator, get_args(Estimator))

    @override
    def wrap(self, layer: nn.Module) -> MeanFieldLayer:
        return MeanFieldLayer(layer, self)

    @override
    @classmethod
    def examples(cls) -> dict[str, Method]:
        return {"default": cls(), "flipout": cls(estimator="flipout", init_std=0.05)}
