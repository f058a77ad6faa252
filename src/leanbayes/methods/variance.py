"""Variance networks (Neklyudov, Molchanov, Ashukha, Vetrov, 2019): weights whose variances carry the information.

    w_ij ~ Normal(mu_ij, alpha mu_ij^2)                                               (eq. 5)

with alpha for each layer, output neuron or weight (eq. 17-19), a free standard deviation (eq. 20), or no mean at all,

    w_ij ~ Normal(0, sigma_ij^2)                                                      (eq. 12).

Under a log-uniform prior, p(w) ~ 1 / |w|, the KL depends on alpha alone and falls as alpha grows. So training may raise
alpha without bound, until the means carry no information (the phase transition; `leanbayes.phase`). The KL counts once
for every weight that an alpha covers.

The zero-mean layer has no parameters of its own: the plain weights, of any sign, are its standard deviations. Its KL
under the log-uniform prior is constant. A ReLU after it would zero half of its outputs; use |x| (`lb.layers`). Sparse
variational dropout (Molchanov et al., 2017) is `parameterization="additive"` with `lb.phase.prune`, which zeroes
weights of log alpha above 3. Gaussian dropout at a fixed rate is `learn=False`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn, Tensor
from typing_extensions import override

from leanbayes.distributions.log_uniform import ard_kl, log_uniform_kl, student_kl
from leanbayes.layers.family import EMBEDDINGS, LINEAR_MAPS
from leanbayes.methods._base import Method, Space
from leanbayes.methods._checks import check_choice, check_positive
from leanbayes.methods._gaussian import GaussianLayer

Parameterization = Literal["layer", "neuron", "weight", "additive", "zero_mean"]
Prior = Literal["log_uniform", "ard", "student"]

LIMIT = 20.0
"""log alpha is clamped to minus and plus this: beyond, float32 has either no noise or no mean."""

SMALLEST_SQUARE = 1e-16
"""Added to a squared mean whose logarithm is taken."""


class VarianceLayer(GaussianLayer):
    """A linear map with Gaussian weights; their standard deviations are tied to their means, or free."""

    method: VarianceLayers

    def __init__(self, base: Any, method: VarianceLayers) -> None:
        super().__init__(base, method)
        start = method.init_log_alpha
        weight = self.weight_now.detach()
        dtype = self.wide
        if method.parameterization == "additive":
            size = weight.to(dtype).square().mean().add(SMALLEST_SQUARE).log()
            self._learn("log_sigma", torch.full_like(weight, 0.5 * start, dtype=dtype) + 0.5 * size)
        elif method.parameterization != "zero_mean":
            shapes = {"layer": (), "neuron": (self.family.outputs(base),), "weight": tuple(weight.shape)}
            self._learn(
                "log_alpha", torch.full(shapes[method.parameterization], start, device=weight.device, dtype=dtype)
            )

    @property
    @override
    def means(self) -> Tensor | None:
        if self.method.parameterization == "zero_mean":
            return None
        return self.weight_now  # not super().means, which compiled code cannot call

    @property
    @override
    def scales(self) -> Tensor:
        kind = self.method.parameterization
        weight = self.weight_now.to(self.wide)
        if kind == "zero_mean":
            return weight
        if kind == "additive":
            sigma: Tensor = self.posterior.log_sigma.exp()
            return sigma
        root: Tensor = (0.5 * self.posterior.log_alpha.clamp(-LIMIT, LIMIT)).exp()
        if kind != "neuron":
            return weight * root
        return self.family.scaled(self.base, weight, r=root)

    @property
    def log_alpha(self) -> Tensor:
        """log(sigma^2 / mu^2) as used: of the layer, of each neuron, or of each weight; infinite without means."""
        kind = self.method.parameterization
        if kind == "zero_mean":
            return torch.full((), torch.inf, device=self.device)
        if kind == "additive":
            log_sigma: Tensor = self.posterior.log_sigma
            squares = self.weight_now.to(log_sigma.dtype).square() + SMALLEST_SQUARE
            return (2 * log_sigma - squares.log()).clamp(-LIMIT, LIMIT)
        found: Tensor = self.posterior.log_alpha.clamp(-LIMIT, LIMIT)
        return found

    @override
    def kl(self) -> Tensor:
        if self.method.prior == "student":
            weight, scales = self.random(self.weight_now).float(), self.random(self.scales).float()
            means = torch.zeros_like(weight) if self.means is None else weight
            return student_kl(means, scales.abs(), self.method.student_nu).sum()
        if self.method.parameterization == "zero_mean":
            return torch.zeros((), device=self.device)
        each = PRIORS[self.method.prior](self.random(self.log_alpha).float())
        return each.sum() * (self.nodes / each.numel())

    @override
    @classmethod
    def kl_of(cls, layers: Sequence[Self]) -> Tensor:
        """Return the sum of the divergences; one alpha for each layer is one operation for all of them."""
        method = layers[0].method
        if method.prior == "student" or method.parameterization != "layer":
            return super().kl_of(layers)
        raw = torch.stack([layer.posterior.log_alpha.float() for layer in layers])
        each = PRIORS[method.prior](raw.clamp(-LIMIT, LIMIT))
        return torch.stack([own * float(layer.nodes) for own, layer in zip(each.unbind(), layers, strict=True)]).sum()

    def _learn(self, name: str, value: Tensor) -> None:
        """Register a parameter, or a buffer if alpha is not learned."""
        if self.method.learn:
            self.posterior.register_parameter(name, nn.Parameter(value))
        else:
            self.posterior.register_buffer(name, value)


PRIORS: dict[str, Callable[[Tensor], Tensor]] = {"log_uniform": log_uniform_kl, "ard": ard_kl}
"""The KL of a weight as a function of log alpha alone."""


@dataclass(frozen=True, kw_only=True)
class VarianceLayers(Method):
    """Gaussian weights whose noise may grow until their means carry no information.

    Name the layers: `where=lb.layers.first(nn.Linear)`, `where=lb.layers.last(nn.Conv2d, 3)`. In the paper a batch norm
    and a ReLU follow them. Embeddings are converted only if `where` names them.

    Attributes:
        parameterization: one alpha for a "layer" (the paper's best), for each output "neuron" or "weight"; "additive",
            a free standard deviation for each weight; "zero_mean", whose deviations are the plain weights and whose
            means are zero (**which discards a trained function**).
        prior: "log_uniform" (by the tight approximation of Molchanov et al., 2017), "ard" or "student".
        init_log_alpha: initial log alpha.
        student_nu: degrees of freedom of the Student prior.
        learn: train alpha; False keeps the initial noise (Gaussian dropout).

    Example:
        >>> bnn = lb.convert(net, lb.VarianceLayers(), where=lb.layers.first(nn.Linear))
    """

    name: ClassVar[str] = "variance"
    targets: ClassVar[tuple[type[nn.Module], ...]] = (*LINEAR_MAPS, *EMBEDDINGS)
    late: ClassVar[float] = 0.0
    space: ClassVar[Space] = MappingProxyType({"init_log_alpha": (-9.0, -1.0)})

    parameterization: Parameterization = "layer"
    prior: Prior = "log_uniform"
    init_log_alpha: float = -5.0
    student_nu: float = 1e-16
    learn: bool = True

    def __post_init__(self) -> None:
        check_choice("parameterization", self.parameterization, ("layer", "neuron", "weight", "additive", "zero_mean"))
        check_choice("prior", self.prior, ("log_uniform", "ard", "student"))
        check_positive(student_nu=self.student_nu)
        if not -LIMIT <= self.init_log_alpha <= LIMIT:
            raise ValueError(f"expected init_log_alpha from {-LIMIT:g} to {LIMIT:g}, got {self.init_log_alpha!r}")

    @override
    def wrap(self, layer: nn.Module) -> VarianceLayer:
        return VarianceLayer(layer, self)

    @override
    def choose(self, layers: Sequence[tuple[str, nn.Module]]) -> set[str]:
        # Not the last: noise in the output only makes it unsure. Not embeddings: rare words would lose their vectors.
        paths = [path for path, layer in layers if isinstance(layer, LINEAR_MAPS)]
        return set(paths[:-1] or paths)

    @override
    def notice(self) -> str | None:
        if self.parameterization != "zero_mean":
            return None
        return (
            "parameterization='zero_mean' discards the function of a trained network: its weights become standard "
            "deviations, and every mean is zero. Use 'layer' to keep it."
        )

    @override
    @classmethod
    def examples(cls) -> dict[str, Method]:
        return {
            "default": cls(),
            "neuron": cls(parameterization="neuron", init_log_alpha=-1.0, prior="ard"),
            "weight": cls(parameterization="weight", init_log_alpha=0.0),
            "additive": cls(parameterization="additive", init_log_alpha=-2.0),
            "student": cls(parameterization="neuron", init_log_alpha=-1.0, prior="student"),
        }
