"""Layers of variational nested dropout: linear maps and norms whose output channels are ordered and masked.

    f_j = z_j b_j,   b_j = sum_i h_i w_ij,   w_ij ~ Normal(theta_ij, alpha_ij theta_ij^2),   z ~ Downhill(q, tau)

The divergence is eq. (18) of Cui et al. (2021), with P_j the probability that channel j is kept and K(alpha) the
divergence of a weight (eq. 17),

    KL = sum_j q_j log(q_j / p_j) + sum_j P_j sum_i K(alpha_ij).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self, TYPE_CHECKING

import torch
from torch import nn, Tensor
from typing_extensions import override

from leanbayes.distributions.assignment import Assignment
from leanbayes.distributions.log_uniform import peaked_log_uniform_kl
from leanbayes.layers.channels import activates, follow
from leanbayes.layers.family import TRANSPOSED
from leanbayes.layers.hooks import copy_hooks
from leanbayes.layers.streams import Channels
from leanbayes.methods._base import plain_copy, StochasticLayer
from leanbayes.methods._gaussian import GaussianLayer
from leanbayes.methods.nested.eligibility import build_example, Inputs
from leanbayes.methods.nested.units import Chains, OrderingUnit
from leanbayes.runtime.noise import Noise, NoiseSpec
from leanbayes.runtime.passes import PassState, Variables, Width

if TYPE_CHECKING:
    from leanbayes.methods.nested.config import NestedDropout


class NestedLayer(GaussianLayer):
    """A linear map with multiplicative Gaussian noise on its weights, whose output channels are ordered.

    Attributes:
        masked: whether this layer masks its output; otherwise the norm after it does.
        again: whether its input was masked already (a depthwise convolution).
        leads: whether the divergence of its unit counts here: in one of the layers that share it.
    """

    method: NestedDropout

    def __init__(self, base: Any, method: NestedDropout, *, log_alpha: float | None = None) -> None:
        super().__init__(base, method)
        self.masked = self.leads = self.again = False
        self.posterior.order = None
        if method.weight_noise:
            start = method.init_log_alpha if log_alpha is None else log_alpha
            self.posterior.log_alpha = nn.Parameter(torch.full_like(base.weight, start, dtype=self.wide))
        else:
            self.nodes, self.log_choices = 0, 0.0

    def join(self, unit: OrderingUnit, *, masked: bool, leads: bool, again: bool) -> None:
        """Take an ordering unit."""
        self.posterior.order, self.masked, self.leads, self.again, self.ordered = unit, masked, leads, again, True
        self.row_noise = False  # one mask for all rows of a pass
        self.nodes += unit.groups if leads else 0
        if leads and not self.method.weight_noise:
            self.log_choices = math.log(unit.groups - unit.always_on + 1) if self.method.hard else math.inf

    def leave(self) -> None:
        """Drop the ordering unit: the layer keeps its width."""
        self.posterior.order, self.masked, self.leads, self.ordered = None, False, False, False

    @override
    def attach(self, state: PassState, path: str) -> None:
        super().attach(state, path)
        if self.posterior.order is not None and self.leads:
            self.posterior.order.attach(state, path)

    @property
    @override
    def scales(self) -> Tensor:
        log_alpha: Tensor = self.posterior.log_alpha
        weight = self.weight_now.to(log_alpha.dtype)
        return weight * (0.5 * log_alpha).exp()

    @override
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        y: Tensor = super().forward(x, *args) if self.method.weight_noise else self.base(x, *args)
        return y * self.spread(self.factors(), y) if self.masked else y

    def factors(self) -> Tensor:
        """Return the factors of the output channels in the current pass: (R, outputs)."""
        found: Tensor = self.posterior.order.factors(again=self.again)
        return found

    def at_width(self, width: float | int) -> dict[str, Tensor]:
        """Return the tensors of the plain layer with the factors of a fixed width folded in; none without a mask."""
        if not self.masked:
            return {}
        return self.family.masked(self.base, self.base.weight, self.posterior.order.at_width(width, again=self.again))

    @override
    @classmethod
    def kl_of(cls, layers: Sequence[Self]) -> Tensor:
        method = layers[0].method
        ordered = [layer for layer in layers if layer.posterior.order is not None]
        whole = [layer for layer in layers if layer.posterior.order is None]
        leaders = [layer.posterior.order for layer in ordered if layer.leads and method.order_prior]
        chains = Chains([layer.posterior.order for layer in ordered], leaders=leaders)
        terms = [chains.kl()] if leaders and chains.learned else []
        costs = [layer._fixed_cost() for layer in ordered if method.weight_cost > 0]
        if method.weight_noise:
            costs, of_whole = _noise_costs(ordered, whole)
            terms += [torch.cat(of_whole).sum()] if whole else []
        if costs:
            terms.append((torch.cat(costs) * chains.keep_of_channels()).sum())
        return torch.stack(terms).sum() if terms else torch.zeros((), device=layers[0].device)

    def _fixed_cost(self) -> Tensor:
        outputs, weight = self.family.outputs(self.base), self.base.weight
        cost = self.method.weight_cost * weight.numel() / outputs
        return torch.full((outputs,), cost, device=weight.device)

    def _over_outputs(self, each: Tensor) -> Tensor:
        """Return the sum or the mean over the weights of each output channel.

        A transposed map has its outputs on the second axis, in each of its groups.
        """
        outputs = self.family.outputs(self.base)
        reduce = torch.mean if self.method.kl_over == "mean" else torch.sum
        base: Any = self.base
        if not isinstance(base, TRANSPOSED):
            return reduce(each.view(outputs, -1), 1)
        groups, pixels = getattr(base, "groups", 1), math.prod(self.posterior.log_alpha.shape[2:])
        return reduce(each.view(groups, -1, outputs // groups, pixels), (1, 3)).flatten()

    @override
    def noise_specs(self, shared: bool) -> tuple[NoiseSpec, ...]:
        return super().noise_specs(shared) if self.method.weight_noise else ()

    @override
    def sample(self, component: Assignment | None, noise: Noise | None, width: Width) -> Variables:
        """Return the "weight" (R, ...) of fixed draws, and the "mask" (R, outputs) of a masked layer."""
        noisy = self.method.weight_noise
        weights = super().sample(component, noise, width) if noisy else {"weight": self.weight_now[None]}
        return {**weights, "mask": self.factors()} if self.masked else weights

    @override
    def fold(self, variables: Mapping[str, Tensor]) -> dict[str, Tensor]:
        weight = variables["weight"]
        return self.family.masked(self.base, weight, variables["mask"]) if self.masked else {"weight": weight}


class NestedNorm(StochasticLayer):
    """A norm of ordered channels: dropped channels stay zero after it.

    Attributes:
        parts: for each stream, its number of channels and the number of repeats of each; several streams come from a
            concatenation, repeats from flattening.
        again: whether its input was masked already.
    """

    method: NestedDropout
    row_noise = False
    ordered = True

    def __init__(
        self,
        base: Any,
        method: NestedDropout,
        units: Sequence[OrderingUnit | None],
        parts: Sequence[tuple[int, int]],
        *,
        again: bool,
    ) -> None:
        super().__init__(base, method)
        self.parts, self.again = tuple(parts), again
        self.nodes, self.log_choices = 0, 0.0
        self.posterior.orders = nn.ModuleDict({str(k): unit for k, unit in enumerate(units) if unit is not None})

    @override
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        factors = self.factors()
        if activates(self.base):  # the mask goes before the activation, as in a fold
            return _called_with(self.base, self.fold({"mask": factors[0]}), x)
        y: Tensor = self.base(x, *args)
        return y * self.spread(factors, y)

    def factors(self) -> Tensor:
        """Return the factors of the channels in the current pass: (R, channels)."""
        return self._joined({name: unit.factors(again=self.again) for name, unit in self.posterior.orders.items()})

    def at_width(self, width: float | int) -> nn.Module:
        """Return the plain norm with the factors of a fixed width folded in."""
        orders = self.posterior.orders.items()
        factors = self._joined({name: unit.at_width(width, again=self.again)[None] for name, unit in orders})
        plain = plain_copy(self.base, self.fold({"mask": factors[0]}))
        copy_hooks(self, plain)
        return plain

    def _joined(self, factors: Mapping[str, Tensor]) -> Tensor:
        """Concatenate the factors of all streams, with ones for streams that are not ordered."""
        rows = max(len(factor) for factor in factors.values())
        parts: list[Tensor] = []
        for k, (size, repeat) in enumerate(self.parts):
            factor = factors.get(str(k))
            factor = torch.ones(rows, size, device=self.device) if factor is None else factor
            parts.append(factor if repeat == 1 else factor.repeat_interleave(repeat, 1))
        return parts[0] if len(parts) == 1 else torch.cat([part.expand(rows, -1) for part in parts], 1)

    @override
    @classmethod
    def kl_of(cls, layers: Sequence[Self]) -> Tensor:
        return torch.zeros((), device=layers[0].device)

    @override
    def noise_specs(self, shared: bool) -> tuple[NoiseSpec, ...]:
        return ()

    @override
    def sample(self, component: Assignment | None, noise: Noise | None, width: Width) -> Variables:
        """Return the "mask" of the channels (R, channels)."""
        return {"mask": self.factors()}

    @override
    def fold(self, variables: Mapping[str, Tensor]) -> dict[str, Tensor]:
        mask = variables["mask"]
        tensors = {name: getattr(self.base, name) for name in ("weight", "bias")}
        return {name: (value * mask).to(value.dtype) for name, value in tensors.items() if value is not None}


def _called_with(layer: nn.Module, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Call a layer with other tensors as parameters, which keep their gradients.

    Eager code calls a shallow copy, since other threads may use the layer itself.
    """
    if torch.compiler.is_compiling():
        y: Tensor = torch.func.functional_call(layer, dict(tensors), (x,))
    else:
        twin = copy.copy(layer)
        twin._parameters = {name: p for name, p in layer._parameters.items() if name not in tensors}
        twin.__dict__.update(tensors)
        y = twin(x)
    return y


def _noise_costs(*groups: Sequence[NestedLayer]) -> list[list[Tensor]]:
    """Return the cost of the weights of each output channel under noise, by group of layers, in one operation."""
    layers = [layer for group in groups for layer in group]
    log_alphas = [layer.posterior.log_alpha.flatten() for layer in layers]
    each = peaked_log_uniform_kl(torch.cat(log_alphas).float(), layers[0].method.kl_constant)
    parts = torch.split_with_sizes(each, [len(part) for part in log_alphas])
    costs = iter([layer._over_outputs(part) for layer, part in zip(layers, parts, strict=True)])
    return [[next(costs) for _ in group] for group in groups]


def plain_layer(layer: nn.Module) -> nn.Module:
    """Return the layer inside a stochastic layer, any other layer unchanged."""
    return layer.base if isinstance(layer, StochasticLayer) else layer


def channels_of(model: nn.Module, inputs: Inputs = ()) -> Channels:
    """Follow the channels of a network; a converted one has the example inputs in its method."""
    known = (layer.method.inputs for layer in model.modules() if isinstance(layer, (NestedLayer, NestedNorm)))
    inputs = inputs or next((found for found in known if found), ())
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    return follow(model, base_of=plain_layer, example=build_example(inputs, device) if inputs else None)
