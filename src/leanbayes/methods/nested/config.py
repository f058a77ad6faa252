"""Variational nested dropout (Cui et al., 2021): one network that holds a network of every width.

The channels of a layer are ordered. A pass keeps the first few of them: their number is random, and the probability to
keep each is learned. In addition, weights have noise (eq. 14); `nested/layer.py` has the equations.

`leanbayes.layers.channels` follows the channels through the network and finds which can be dropped. Layers whose
outputs are added share an ordering unit. A norm is masked instead of the layer before it: masking that layer would
leave the norm's shift in dropped channels, spoil its running statistics, and hide the mask's size from the loss.

Fixed nested dropout (FN3) is `tail="geometric"` or "categorical". A deterministic nested network with the ordered L0
objective (eq. 13) is `weight_noise=False, weight_cost=chi`: each kept weight costs chi nats.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from torch import nn
from typing_extensions import override

from leanbayes.distributions.log_uniform import NO_LOSS
from leanbayes.layers.family import CHANNEL_NORMS, LINEAR_MAPS
from leanbayes.layers.streams import Channels
from leanbayes.methods._base import Method, Space, StochasticLayer
from leanbayes.methods._checks import check_at_least_zero, check_choice, check_keep, check_positive
from leanbayes.methods.nested.eligibility import (
    as_inputs,
    describe_example,
    Inputs,
    obstacles,
    removable,
    report,
    too_little,
    unordered,
)
from leanbayes.methods.nested.layer import channels_of, NestedLayer, NestedNorm, plain_layer
from leanbayes.methods.nested.units import OrderingUnit, Prior, Tail

FIRST_LOG_ALPHA = -8.0  # initial log alpha of the first layer: more noise would hide the input


@dataclass(frozen=True, kw_only=True)
class NestedDropout(Method):
    """Ordered channels; every pass keeps the first few. Train once, cut to any width (`lb.slim`).

    Anneal the divergence (`lb.Recipe(anneal_epochs=...)`, two thirds of the epochs): at full weight from the start it
    drops channels before they are trained. Predict with `lb.slim.narrow(bnn, 1.0, data=x)`: the converted network
    itself answers with draws of random width.

    The output is never narrowed; the stream of the first linear map only with `first`. If `where` names layers, only
    streams whose layers are all named are ordered.

    Attributes:
        groups: groups of neighbouring channels that are dropped together, in every stream; fewer in narrow streams.
        always_on: number of first groups that are never dropped.
        tail: distribution of the width: "learned", "geometric" (stops with 1 - `prior_keep`) or "categorical".
        coupled: a pass is narrow or wide in all layers, like a cut network; False: each separately, as in the paper.
        prior_keep: the prior's probability to keep the next group; None: half of the passes keep all groups (with 32
            groups, the paper's 0.95 gives a fifth).
        prior: of learned tails: a "chain" that keeps each next group with `prior_keep`, or "uniform", the chain whose
            tails all have the same probability.
        init_keep: initial keep probabilities; None: those of the prior.
        temperature: of the relaxed masks; larger is smoother.
        hard: masks of zeros and ones, with the (biased) gradient of soft ones.
        rescale: at a fixed width, multiply kept channels by their keep probability (B.2).
        streams: "all", or only "inner" ones: those through a depthwise convolution (the wide part of inverted
            residuals, C.1), or in networks without, those that no sum passes through.
        first: order the stream of the first linear map, too.
        weight_noise: multiplicative noise on all weights, alpha learned for each.
        init_log_alpha: initial log alpha; -8 in the first layer.
        kl_over: the "mean" over a filter's weights, as in the authors' code, or their "sum", as in eq. (18).
        kl_constant: C of eq. (17); the default makes the smallest divergence of a weight zero.
        weight_cost: without weight noise, the cost of a kept weight in nats (ordered L0, eq. 13).
        order_prior: count the divergence of the tails (Phi_1); False is eq. (13) alone.
        min_cut: refuse networks whose narrowest width removes less than this share of the weights, unless `where`
            names layers; 0 converts them anyway, if need be with noise alone, and reports no widths.
        inputs: name, shape and dtype of example inputs, `(("pixel_values", (1, 3, 32, 32), "float32"),)`, to follow
            networks that cannot be traced; positional inputs have the name "". `convert(example=)` sets it.

    Example:
        >>> bnn = lb.convert(net, lb.NestedDropout(groups=32, always_on=2))
        >>> small = lb.slim.extract(bnn, width=0.25, data=loader)
    """

    name: ClassVar[str] = "nested"
    targets: ClassVar[tuple[type[nn.Module], ...]] = (*LINEAR_MAPS, *CHANNEL_NORMS)
    things: ClassVar[str] = "linear maps and norms"
    late: ClassVar[float] = 0.0
    later: ClassVar[Mapping[str, Any]] = MappingProxyType({"prior": "chain"})
    space: ClassVar[Space] = MappingProxyType({"init_log_alpha": (-9.0, -1.0)})

    groups: int = 32
    always_on: int = 1
    tail: Tail = "learned"
    coupled: bool = True
    prior_keep: float | None = None
    prior: Prior = "chain"
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
        check_choice("tail", self.tail, ("learned", "geometric", "categorical"))
        check_choice("prior", self.prior, ("chain", "uniform"))
        if self.prior == "uniform" and self.prior_keep is not None:
            raise ValueError(
                f"expected no prior_keep with prior='uniform', got {self.prior_keep}; leave one of them out"
            )
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
        """Return the fields; `min_cut` and `inputs` only if they were set."""
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
        if not self.weight_noise:  # then only ordered layers are random
            wrapped = {path: layer for path, layer in wrapped.items() if layer.ordered}
        return wrapped

    @override
    def review(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> str | None:
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
        channels = channels_of(model, self.inputs)
        plain = {path: plain_layer(layer) for path, layer in model.named_modules()}
        filling = {path for path, layer in plain.items() if isinstance(layer, self.targets)}
        found = self.obstacles(channels, filling - set(layers))  # others would fill channels that were dropped
        return (
            channels,
            found,
            {root: OrderingUnit(channels.stream(root), self) for root, why in found.items() if not why},
        )

    def _join(self, channels: Channels, units: Mapping[int, OrderingUnit], wrapped: dict[str, StochasticLayer]) -> None:
        """Give every linear map the unit of its outputs; the first of a stream leads it."""
        led: set[int] = set()
        for path, layer in wrapped.items():
            found = channels.outputs.get(path)
            if isinstance(layer, NestedLayer) and found and (unit := units.get(channels.root(found[0].stream))):
                again = path not in channels.makers or path in channels.scores
                layer.join(unit, masked=path not in channels.normed, leads=id(unit) not in led, again=again)
                led.add(id(unit))

    def obstacles(self, channels: Channels, left_out: set[str]) -> dict[int, str]:
        """Return the obstacle that keeps each stream from being ordered, by its number; "" for none."""
        return obstacles(channels, left_out, first=self.first, inner=self.streams == "inner")

    @override
    @classmethod
    def examples(cls) -> dict[str, Method]:
        return {
            "default": cls(groups=4, min_cut=0),
            "soft": cls(groups=4, min_cut=0, hard=False, temperature=0.5),
            "categorical": cls(groups=4, min_cut=0, tail="categorical", rescale=False),
        }


def _is_ordered(model: nn.Module) -> bool:
    return any(isinstance(module, OrderingUnit) for module in model.modules())
