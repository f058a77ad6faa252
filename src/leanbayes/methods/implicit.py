"""Implicit node posteriors (Trinh, Kaski, Heinonen, 2020): noise on the inputs of each layer instead of its weights.

    y = W (x * z) + b,      z ~ (1/K) sum_k Normal(mu_k, sigma_k^2)          (eq. 1, 19; printed with a product)

one z per input feature or channel. The KL is taken for the average of one draw per component (eq. 22-24),

    z_hat ~ Normal(mean_k mu_k, (1/K^2) sum_k sigma_k^2),     KL(z_hat || Normal(1, s^2)),

so only the average of the component means is held: each may move as far as the data want. The KL pulls each sigma_k
towards s sqrt(K) (the paper says s).

With `bias_node`, the bias has its own node: b is multiplied by a random scalar.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import nn, Tensor
from torch.distributions import Normal
from typing_extensions import override

from leanbayes.distributions.assignment import Assignment
from leanbayes.distributions.divergence import kl, prior_on
from leanbayes.distributions.factor import Factor, joint_distribution, joint_sample, spread_around
from leanbayes.distributions.positive import SMALLEST_STD
from leanbayes.layers.family import EMBEDDINGS, LINEAR_MAPS, LinearFamily
from leanbayes.methods._base import factor_noise, Method, Space, StochasticLayer
from leanbayes.methods._checks import check_at_least_zero, check_components, check_positive, check_std
from leanbayes.methods._scaled_map import first_map, scaled_map, times_inputs
from leanbayes.methods._together import scaled_rows
from leanbayes.runtime.noise import Noise, NoiseSpec
from leanbayes.runtime.passes import Variables, Width

SPREAD_OF_STD = 0.4
"""Initial standard deviations are |Normal(init_std, 0.4 init_std)|: 0.05 and 0.02 in the paper."""


class ImplicitLayer(StochasticLayer):
    """A linear map whose input nodes are random variables."""

    method: ImplicitNodes
    posterior: Factor
    family: LinearFamily
    sampled_together = True

    def __init__(self, base: Any, method: ImplicitNodes) -> None:
        """Draw the component means around one; if they are centred, their average is one exactly."""
        super().__init__(base, method)
        self.components = method.components
        self.embeds = isinstance(base, EMBEDDINGS)  # its inputs are words: its features are the nodes
        self.inputs = self.family.outputs(base) if self.embeds else self.family.inputs(base)
        self.bias_node = method.bias_node and self.bias_now is not None
        self.nodes = self.inputs + self.bias_node
        shape = (method.components, self.nodes)
        device, dtype = base.weight.device, self.wide
        means = spread_around(1.0, method.init_spread, shape, device=device, dtype=dtype, centre=method.centre)
        stds = method.init_std * (1 + SPREAD_OF_STD * torch.randn_like(means)).abs()
        self.posterior = Factor("normal", means, stds.clamp(min=SMALLEST_STD))

    @override
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        z = self.state.variables_of(self, x.shape[0])["nodes"]
        if self.embeds:
            vectors: Tensor = self.base(x, *args)
            return vectors * self.spread(z, vectors)
        if not self.bias_node:
            known = scaled_map(self, x, z, None, self.bias_now, args)
            known = first_map(self, x, z, self.bias_now, args) if known is None else known
            if known is not None:
                return known
            unchanged: Tensor = self.base(times_inputs(self, x, z), *args)
            return unchanged
        x = times_inputs(self, x, z[:, : self.inputs])
        y = self.family.linear(self.base, x, self.weight_now, *args)
        return y + self.spread(z[:, self.inputs :] * self.base.bias, y)

    @override
    @classmethod
    def kl_of(cls, layers: Sequence[Self]) -> Tensor:
        components = joint_distribution([layer.posterior for layer in layers])
        assert isinstance(components, Normal)
        std = components.scale.square().sum(0).sqrt() / components.scale.shape[0]
        average = Normal(components.loc.mean(0), std, validate_args=False)
        return kl(average, prior_on(std.device, "normal", 1.0, layers[0].method.prior_std)).sum()

    @override
    def noise_specs(self, shared: bool) -> tuple[NoiseSpec, ...]:
        return (factor_noise(self.posterior),)

    @override
    def sample(self, component: Assignment | None, noise: Noise | None, width: Width) -> Variables:
        """Return the "nodes" (R, inputs), with the bias node after them."""
        return {"nodes": self.posterior(component, None if noise is None else noise[0])}

    @override
    @classmethod
    def sample_of(
        cls, layers: Sequence[Self], component: Assignment, noise: Sequence[Noise], width: Width
    ) -> list[Variables]:
        parts = [own for (own,) in noise]
        nodes = joint_sample([layer.posterior for layer in layers], component, parts, layers[0].computed_in)
        return [{"nodes": z} for z in nodes]

    @override
    def together(self) -> nn.Module | None:
        plain = not (self.embeds or self.bias_node)
        return scaled_rows(self.family, self.base, {"input": "nodes"}, own_bias=False) if plain else None

    @override
    def fold(self, variables: Mapping[str, Tensor]) -> dict[str, Tensor]:
        z, weight = variables["nodes"], self.weight_now
        if self.embeds:
            return {"weight": self.family.scaled(self.base, weight, r=z).to(weight.dtype)}
        folded = {"weight": self.family.scaled(self.base, weight, s=z[: self.inputs]).to(weight.dtype)}
        if self.bias_node:
            folded["bias"] = (self.base.bias * z[self.inputs]).to(weight.dtype)
        return folded


@dataclass(frozen=True, kw_only=True)
class ImplicitNodes(Method):
    """Random variables on the input nodes of each layer, in K Gaussian components.

    Attributes:
        components: K, the number of mixture components; each row of a batch uses one of them.
        prior_std: s, the standard deviation of the prior around one (0.1 WRN, 0.3 VGG in the paper).
        init_spread: standard deviation of the component means around one before centring, which multiplies it by
            sqrt(1 - 1/K): 0.87 for K = 4, 0 for K = 1. The paper has 0.5 (WRN) and 0.75 (VGG), not centred, from
            scratch; a trained network bears less.
        centre: shift the means to an average of one, so that the average network is the converted one. Without it the
            standard deviation is `init_spread`, also for K = 1: the paper's start, for training from scratch.
        init_std: initial standard deviation of each component (0.05 in the paper; the KL pulls it towards s sqrt(K)).
        bias_node: give the bias its own node, one scalar per component.
        embeddings: convert embeddings, too, with a node for each feature.

    Example:
        >>> bnn = lb.convert(net, lb.ImplicitNodes(components=4))
    """

    name: ClassVar[str] = "implicit"
    targets: ClassVar[tuple[type[nn.Module], ...]] = LINEAR_MAPS
    later: ClassVar[Mapping[str, Any]] = MappingProxyType({"embeddings": False, "centre": True})
    space: ClassVar[Space] = MappingProxyType({"prior_std": (0.02, 0.5), "init_std": (0.03, 0.5)})
    scaled: ClassVar[tuple[str, ...]] = ("init_std", "init_spread")

    components: int = 4
    prior_std: float = 0.1
    init_spread: float = 0.25
    init_std: float = 0.15
    bias_node: bool = False
    embeddings: bool = False
    centre: bool = True

    def __post_init__(self) -> None:
        check_components(self.components)
        check_positive(prior_std=self.prior_std)
        check_std(init_std=self.init_std)
        check_at_least_zero(init_spread=self.init_spread)
        if self.embeddings:
            object.__setattr__(self, "targets", (*LINEAR_MAPS, *EMBEDDINGS))

    @override
    def wrap(self, layer: nn.Module) -> ImplicitLayer:
        return ImplicitLayer(layer, self)

    @override
    @classmethod
    def examples(cls) -> dict[str, Method]:
        return {"default": cls(), "bias_node": cls(bias_node=True, components=3)}
