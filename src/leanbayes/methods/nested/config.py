"""Variational nested dropout (Cui et al., 2021): one network that holds a network of every width.

The channels of a layer are ordered; a pass keeps the first few of them, how many is random, and how likely each is kept
is learned. Weights have noise around them besides (eq. 14),

    f_j = z_j b_j,   b_j = sum_i h_i w_ij,   w_ij ~ Normal(theta_ij, alpha_ij theta_ij^2),   z ~ Downhill(q, tau),

and the divergence is (eq. 18), with P_j the probability that channel j is kept and K(alpha) that of a weight (eq. 17),

    KL = sum_j q_j log(q_j / p_j) + sum_j P_j sum_i K(alpha_ij).

Which channels can be dropped is found by following them through the network (`leanbayes.layers.channels`): layers whose
outputs are added share an ordering unit. A norm is masked in the place of the layer in front of it: masking that layer
would leave the norm's shift in dropped channels, spoil its running statistics, and hide the mask's size from the loss.

Fixed nested dropout (FN3) is `tail="geometric"` or "categorical". A deterministic nested network with the ordered L0
objective (eq. 13) is `weight_noise=False, weight_cost=chi`: a weight that is kept costs chi nats.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn, Tensor
from typing_extensions import override

from leanbayes.distributions.assignment import Assignment
from leanbayes.distributions.log_uniform import NO_LOSS, peaked_log_uniform_kl
from leanbayes.layers.channels import activates, Channels, follow
from leanbayes.layers.family import CHANNEL_NORMS, LINEAR_MAPS, LinearFamily, TRANSPOSED
from leanbayes.layers.hooks import copy_hooks
from leanbayes.methods._base import Method, plain_copy, StochasticLayer
from leanbayes.methods._checks import check_at_least_zero, check_choice, check_keep, check_positive
from leanbayes.methods._gaussian import GaussianLayer
from leanbayes.methods.nested.eligibility import (
    as_inputs,
    build_example,
    describe_example,
    Inputs,
    obstacles,
    removable,
    report,
    too_little,
    unordered,
)
from leanbayes.methods.nested.units import Chains, Order, OrderingUnit, Tail
from leanbayes.runtime.noise import Noise, NoiseSpec
from leanbayes.runtime.passes import PassState, Variables, Width

FIRST_LOG_ALPHA = -8.0
"""Where log alpha starts in the first layer: noise on what reads the input itself would hide it."""


class NestedLayer(GaussianLayer):
    """A linear map with multiplicative Gaussian noise on its weights, whose output channels are ordered.

    Attributes:
        masked: whether its output is masked here; otherwise the norm behind it does that.
        again: whether its input was masked already: a depthwise convolution.
        leads: whether its unit's own divergence counts here; of the layers that share a unit, one does.
    """

    method: NestedDropout

    def __init__(self, base: Any, method: NestedDropout, *, log_alpha: float | None = None) -> None:
        """Start with the given weights, every channel in its place."""
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
        self.row_noise = False  # a mask serves all rows of a pass
        self.nodes += unit.groups if leads else 0
        if leads and not self.method.weight_noise:
            self.log_choices = math.log(unit.groups - unit.always_on + 1) if self.method.hard else math.inf

    def leave(self) -> None:
        """Give up the ordering unit: the layer stays as wide as it is."""
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
        """Return what the current pass multiplies the output channels by: (R, outputs)."""
        found: Tensor = self.posterior.order.factors(again=self.again)
        return found

    def at_width(self, width: float | int) -> dict[str, Tensor]:
        """Return the tensors of the plain layer with the factors of a fixed width folded in, where it is masked."""
        if not self.masked:
            return {}
        return masked_tensors(self, self.base.weight, self.posterior.order.at_width(width, again=self.again))

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
        """Return what the weights of each output channel cost without noise."""
        outputs, weight = self.family.outputs(self.base), self.base.weight
        cost = self.method.weight_cost * weight.numel() / outputs
        return torch.full((outputs,), cost, device=weight.device)

    def _over_outputs(self, each: Tensor) -> Tensor:
        """Return the sum or the mean of what belongs to the weights of each output channel.

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
        """Return the "weight" of fixed draws, and the "mask" of the output channels where it is applied here."""
        noisy = self.method.weight_noise
        weights = super().sample(component, noise, width) if noisy else {"weight": self.weight_now[None]}
        return {**weights, "mask": self.factors()} if self.masked else weights

    @override
    def fold(self, variables: Mapping[str, Tensor]) -> dict[str, Tensor]:
        weight = variables["weight"]
        return masked_tensors(self, weight, variables["mask"]) if self.masked else {"weight": weight}


class NestedNorm(StochasticLayer):
    """A norm of ordered channels: what is dropped stays zero behind it.

    Attributes:
        parts: number of channels of each stream that it normalises, and how often each of them is repeated; several
            streams come from a concatenation, repeats from flattening.
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
        """Take the units of the streams, None where one is not ordered."""
        super().__init__(base, method)
        self.parts, self.again = tuple(parts), again
        self.nodes, self.log_choices = 0, 0.0
        self.posterior.orders = nn.ModuleDict({str(k): unit for k, unit in enumerate(units) if unit is not None})

    @override
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        factors = self.factors()
        if activates(self.base):  # the mask goes in front of the activation, where a fold puts it
            return _called_with(self.base, self.fold({"mask": factors[0]}), x)
        y: Tensor = self.base(x, *args)
        return y * self.spread(factors, y)

    def factors(self) -> Tensor:
        """Return what the current pass multiplies the channels by: (R, channels)."""
        return self._joined({name: unit.factors(again=self.again) for name, unit in self.posterior.orders.items()})

    def at_width(self, width: float | int) -> nn.Module:
        """Return the plain norm with the factors of a fixed width folded in."""
        orders = self.posterior.orders.items()
        factors = self._joined({name: unit.at_width(width, again=self.again)[None] for name, unit in orders})
        plain = plain_copy(self.base, self.fold({"mask": factors[0]}))
        copy_hooks(self, plain)
        return plain

    def _joined(self, factors: Mapping[str, Tensor]) -> Tensor:
        """Put the factors of all streams side by side, ones for those that are not ordered."""
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

    In eager code the call is that of a shallow copy: other threads may use the layer itself.
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
    """Return what the weights of each output channel cost under noise, by group of layers; computed at once."""
    layers = [layer for group in groups for layer in group]
    log_alphas = [layer.posterior.log_alpha.flatten() for layer in layers]
    each = peaked_log_uniform_kl(torch.cat(log_alphas).float(), layers[0].method.kl_constant)
    parts = torch.split_with_sizes(each, [len(part) for part in log_alphas])
    costs = iter([layer._over_outputs(part) for layer, part in zip(layers, parts, strict=True)])
    return [[next(costs) for _ in group] for group in groups]


def plain_layer(layer: nn.Module) -> nn.Module:
    """Return the layer inside a stochastic one, others as they are."""
    return layer.base if isinstance(layer, StochasticLayer) else layer


def channels_of(model: nn.Module, inputs: Inputs = ()) -> Channels:
    """Follow the channels of a network, converted or not, by the inputs that its method remembers.

    Args:
        model: the network.
        inputs: of the method, where the network is not converted yet.
    """
    known = (layer.method.inputs for layer in model.modules() if isinstance(layer, (NestedLayer, NestedNorm)))
    inputs = inputs or next((found for found in known if found), ())
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    return follow(model, base_of=plain_layer, example=build_example(inputs, device) if inputs else None)


def _is_ordered(model: nn.Module) -> bool:
    return any(isinstance(module, OrderingUnit) for module in model.modules())


def _fills(layer: nn.Module) -> bool:
    """Say whether a layer would put something into channels that were dropped in front of it."""
    return isinstance(plain_layer(layer), (*LINEAR_MAPS, *CHANNEL_NORMS))


def masked_tensors(layer: StochasticLayer, weight: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return weight and bias of a linear map whose output channels are multiplied by a mask."""
    assert isinstance(layer.family, LinearFamily)
    return layer.family.masked(layer.base, weight, mask)


@dataclass(frozen=True, kw_only=True)
class NestedDropout(Method):
    """Ordered channels, of which every pass keeps the first few: train once, cut to any width (`lb.slim`).

    Let the divergence come in slowly (`lb.Recipe(anneal_epochs=...)`, two thirds of the epochs): at full weight from
    the start it drops channels before they are of any use. Predict with `lb.slim.narrow(bnn, 1.0, data=x)`: as it is,
    the network answers with draws of random width.

    The output is never narrowed, and the stream of the first linear map only with `first`; where `where` names layers,
    streams are ordered whose layers are all named.

    Attributes:
        groups: groups of neighbouring channels that are dropped together, in every stream; fewer where it is narrower.
        always_on: how many first groups are never dropped.
        tail: how many are kept: "learned", or fixed as "geometric" (stopping with 1 - `prior_keep`) or "categorical".
        coupled: a pass is narrow or wide in all layers, as cut networks are; False, as in the paper: each on its own.
        prior_keep: the prior's probability to go on to the next group; None: such that half of the passes keep all (the
            paper's 0.95: a fifth, with 32 groups).
        init_keep: where the learned probabilities to go on start; None: at the prior's.
        temperature: of the relaxed masks; larger is smoother.
        hard: masks of zeros and ones, with the (biased) gradient of soft ones.
        rescale: at a fixed width, multiply what is kept by its keep probability (B.2).
        streams: "all", or only "inner" ones: those that a depthwise convolution passes on (the wide part of inverted
            residuals, C.1), or in networks without, those that no sum passes through.
        first: order the stream of the first linear map, too.
        weight_noise: multiplicative noise on all weights, alpha learned for each.
        init_log_alpha: where log alpha starts; -8 in the first layer.
        kl_over: the "mean" of a filter's weights counts, as in the authors' code, or their "sum", as in eq. (18).
        kl_constant: C of eq. (17); the default makes the smallest divergence of a weight zero.
        weight_cost: without weight noise, what a kept weight costs in nats (ordered L0, eq. 13).
        order_prior: count the divergence of the tails (Phi_1); False is eq. (13) alone.
        min_cut: refuse a network of which the narrowest width removes less than this share of the weights, unless
            `where` names layers; 0 converts it all the same, if need be with noise alone, and reports no widths.
        inputs: name, shape and dtype of example inputs, `(("pixel_values", (1, 3, 32, 32), "float32"),)`, by which a
            network is followed that cannot be traced; positional ones have the name "". `convert(example=)` sets it.

    Example:
        >>> bnn = lb.convert(net, lb.NestedDropout(groups=32, always_on=2))
        >>> small = lb.slim.extract(bnn, width=0.25, data=loader)
    """

    name: ClassVar[str] = "nested"
    targets: ClassVar[tuple[type[nn.Module], ...]] = (*LINEAR_MAPS, *CHANNEL_NORMS)
    things: ClassVar[str] = "linear maps and norms"
    late: ClassVar[float] = 0.0

    groups: int = 32
    always_on: int = 1
    tail: Tail = "learned"
    coupled: bool = True
    prior_keep: float | None = None
    init_keep: float | None = None
    temperature: float = 2.0
    hard: bool = True
    rescale: bool = True
    streams: str = "all"
    first: bool = False
    weight_noise: bool = True
    init_log_alpha: float = -5.0
    kl_over: Literal["mean", "sum"] = "mean"
    kl_constant: float = -NO_LOSS
    weight_cost: float = 0.0
    order_prior: bool = True
    min_cut: float = 0.1
    inputs: Inputs = ()

    def __post_init__(self) -> None:
        """Check every field; a wrong one says what was expected."""
        check_choice("tail", self.tail, ("learned", "geometric", "categorical"))
        check_choice("streams", self.streams, ("all", "inner"))
        check_choice("kl_over", self.kl_over, ("mean", "sum"))
        check_positive(temperature=self.temperature)
        check_at_least_zero(weight_cost=self.weight_cost)
        if not 1 <= self.always_on <= self.groups:
            raise ValueError(f"expected always_on from 1 to groups={self.groups}, got {self.always_on}")
        check_keep(prior_keep=self.prior_keep, init_keep=self.init_keep)
        if not 0 <= self.min_cut < 1:
            raise ValueError(f"expected min_cut from 0 to below 1, got {self.min_cut}; 0 allows noise alone")
        object.__setattr__(self, "inputs", as_inputs(self.inputs))  # from a file, they are lists

    @override
    def given(self, example: Any) -> NestedDropout:
        return replace(self, inputs=describe_example(example))

    @override
    def fields(self) -> dict[str, Any]:
        """Return the fields; those that say how to convert, not what, only where they were set."""
        values, usual = super().fields(), {"min_cut": NestedDropout.min_cut, "inputs": []}
        return {name: value for name, value in values.items() if name not in usual or value != usual[name]}

    @override
    def wrap(self, layer: nn.Module) -> NestedLayer:
        return NestedLayer(layer, self)

    @override
    def wrap_all(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, StochasticLayer]:
        channels, found, units = self._follow(model, layers)
        if not units and len(found) > 1 and not _is_ordered(model):
            warnings.warn(f"NestedDropout adds only noise here: {unordered(channels, found)}", stacklevel=5)
        first = channels.first if len(channels.makers) > 1 else None
        wrapped: dict[str, StochasticLayer] = {}
        for path, layer in layers.items():
            if isinstance(layer, LINEAR_MAPS):
                wrapped[path] = NestedLayer(layer, self, log_alpha=FIRST_LOG_ALPHA if path == first else None)
            elif layout := channels.outputs.get(path):
                of_streams = [units.get(channels.root(part.stream)) for part in layout]
                if any(of_streams):
                    parts = [(channels.stream(part.stream).size, part.repeat) for part in layout]
                    again = path not in channels.first_readers
                    wrapped[path] = NestedNorm(layer, self, of_streams, parts, again=again)
        self._join(channels, units, wrapped)
        if not self.weight_noise:  # then only what is ordered has anything random
            wrapped = {path: layer for path, layer in wrapped.items() if layer.ordered}
        return wrapped

    @override
    def review(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> str | None:
        """Return which share of the weights each width removes; refuse where it is too little."""
        if self.min_cut == 0 or _is_ordered(model):  # then another conversion has ordered the rest
            return None
        channels, found, units = self._follow(model, layers)
        shares = removable({path: plain_layer(layer) for path, layer in model.named_modules()}, channels, units)
        if shares.narrowest < self.min_cut:
            raise ValueError(too_little(shares, self.min_cut, channels, found))
        return report(shares, channels, found)

    def _follow(
        self, model: nn.Module, layers: Mapping[str, nn.Module]
    ) -> tuple[Channels, dict[int, str], dict[int, OrderingUnit]]:
        """Return the channels of a model, what keeps each stream from being ordered, and a unit for every other."""
        channels = channels_of(model, self.inputs)
        found = self.obstacles(channels, {path for path, layer in model.named_modules() if _fills(layer)} - set(layers))
        return channels, found, self._units(channels, found)

    def _join(self, channels: Channels, units: Mapping[int, OrderingUnit], wrapped: dict[str, StochasticLayer]) -> None:
        """Give every linear map the unit of its outputs; the first of a stream leads it."""
        led: set[int] = set()
        for path, layer in wrapped.items():
            found = channels.outputs.get(path)
            if isinstance(layer, NestedLayer) and found and (unit := units.get(channels.root(found[0].stream))):
                again = path not in channels.makers or path in channels.scores
                layer.join(unit, masked=path not in channels.normed, leads=id(unit) not in led, again=again)
                led.add(id(unit))

    def _units(self, channels: Channels, found: Mapping[int, str]) -> dict[int, OrderingUnit]:
        """Return a unit for every stream that may be ordered, by its number."""
        order = Order(**{f.name: getattr(self, f.name) for f in fields(Order)})
        return {root: OrderingUnit(channels.stream(root), order) for root, why in found.items() if not why}

    def obstacles(self, channels: Channels, left_out: set[str]) -> dict[int, str]:
        """Return what keeps each stream from being ordered, by its number; nothing keeps those with ""."""
        return obstacles(channels, left_out, first=self.first, inner=self.streams == "inner")

    @override
    @classmethod
    def examples(cls) -> dict[str, Method]:
        return {
            "default": cls(groups=4, min_cut=0),
            "soft": cls(groups=4, min_cut=0, hard=False, temperature=0.5),
            "categorical": cls(groups=4, min_cut=0, tail="categorical", rescale=False),
        }
