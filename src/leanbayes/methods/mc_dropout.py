"""MC dropout (Gal, Ghahramani, 2016): dropout stays on when predicting, and each mask is a posterior draw.

    y = m * (W x + b) / (1 - p),      m_c ~ Bernoulli(1 - p), one for each output channel

A network without dropout layers gets such masks behind every linear map but the last: channel-wise, so that a draw
folds into the weights. A network with dropout layers keeps them where they are, at their own rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx, nn, Tensor
from typing_extensions import override

from leanbayes.distributions.assignment import pick
from leanbayes.distributions.hashing import draw_seeds, uniforms
from leanbayes.layers.family import DROPOUTS, LINEAR_MAPS
from leanbayes.layers.hooks import copy_hooks
from leanbayes.methods.base import Method, StochasticLayer
from leanbayes.methods.checks import check_rate


class MaskedLayer(StochasticLayer):
    """A linear map whose output channels are dropped at random."""

    method: MCDropout

    def __init__(self, base: Any, method: MCDropout) -> None:
        """Count the channels."""
        super().__init__(base, method)
        self.nodes = self.family.outputs(base)
        self.log_choices = self.nodes * math.log(2)

    @override
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        mask = self.sample(x.shape[0])["mask"]
        y: Tensor = self.base(x, *args)
        return y * self.spread(mask, y)

    @override
    def kl(self) -> Tensor:
        return torch.zeros((), device=self.device)

    @override
    def draw_noise(self, rows: int, generator: torch.Generator | None) -> tuple[Tensor, ...]:
        if generator is None:  # compiled code must not name a generator, not even as None
            return (torch.rand(rows, self.nodes, device=self.device),)
        return (torch.rand(rows, self.nodes, generator=generator, device=generator.device),)

    @override
    def sample(self, rows: int) -> dict[str, Tensor]:
        """Return the "mask" (R, outputs): component 0 is nothing, component 1 the channel."""
        noise = self.draws.read(self, rows).noise
        if noise is None:
            return {"mask": torch.ones(1, self.nodes, device=self.device)}
        keep = 1 - self.method.rate
        return {"mask": pick(noise[0], (self.method.rate, keep)) / keep}

    @override
    def fold(self, variables: Mapping[str, Tensor]) -> dict[str, Tensor]:
        weight, mask = self.weight_now, variables["mask"]
        assert self.family.scale is not None
        ones = weight.new_ones(self.family.inputs(self.base))
        folded = {"weight": self.family.scale(self.base, weight, ones, mask.to(weight.dtype))}
        if self.base.bias is not None:
            folded["bias"] = (self.base.bias * mask).to(weight.dtype)
        return folded


class DropoutLayer(StochasticLayer):
    """A dropout layer of the network's own; a draw drops the same entries (`Dropout2d`: channels) of all rows."""

    def __init__(self, base: Any, method: MCDropout) -> None:
        """Remember a device: the layer has no parameter to tell it."""
        super().__init__(base, method)
        self.nodes = 1
        self.posterior.register_buffer("here", torch.zeros(()), persistent=False)

    @override
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        seed, axis = self.align(self.sample(x.shape[0])["seed"], x, -1)
        return masked(x.movedim(axis, 0), seed, self.base.p, self._same_over).movedim(0, axis)

    @property
    def _same_over(self) -> str:
        """What entries share a mask: the "steps" of a sequence, the "pixels" of a channel, or none."""
        return "steps" if self.sequential else "pixels" if self.family.axis == 1 else ""

    @override
    def kl(self) -> Tensor:
        return torch.zeros((), device=self.device)

    @override
    def draw_noise(self, rows: int, generator: torch.Generator | None) -> tuple[Tensor, ...]:
        return (draw_seeds(rows, generator, self.device if generator is None else None),)

    @override
    def sample(self, rows: int) -> dict[str, Tensor]:
        """Return the "seed" (R, 1), 0 for no mask; how many entries it makes a mask for, only the input tells."""
        noise = self.draws.read(self, rows).noise
        return {"seed": torch.zeros(1, 1, dtype=torch.int64, device=self.device) if noise is None else noise[0]}

    @override
    def fold(self, variables: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"seed": variables["seed"][None]}

    @override
    def freeze(self) -> nn.Module:
        """Return the mask as a traced graph: torch's own class, nothing of leanbayes inside."""
        graph = fx.Graph()
        tracer = fx.proxy.GraphAppendingTracer(graph)  # fx.Tracer would patch the modules of all threads
        x: Any = fx.Proxy(graph.placeholder("input"), tracer)  # as torch's dropouts call it
        seed = fx.Proxy(graph.get_attr("seed"), tracer)  # stays an attribute, which the next draw may replace
        result: Any = masked(x, seed, self.base.p, self._same_over)
        graph.output(result.node)
        holder = nn.Module()
        holder.register_buffer("seed", self.sample(1)["seed"])
        plain = fx.GraphModule(holder, graph, class_name="Masked")
        plain.train(self.training)
        copy_hooks(self, plain)
        return plain


def masked(x: Tensor, seed: Any, rate: float, same_over: str) -> Tensor:
    """Multiply entries of x by a mask that is computed from a seed.

    It is the same for all pixels of a channel (B, C, ...), or for all steps of a sequence (B, T, C).
    """
    if same_over == "steps":
        return x * _mask(seed, x[:, 0], rate).unsqueeze(1)
    if same_over == "pixels":
        rows = x.flatten(2)
        return (rows * _mask(seed, rows[:, :, 0], rate).unsqueeze(2)).view_as(x)
    rows = x.flatten(1)
    return (rows * _mask(seed, rows, rate)).view_as(x)


def _mask(seed: Any, entries: Tensor, rate: float) -> Tensor:
    kept = (uniforms(seed, entries) >= rate).to(entries.dtype) / (1 - rate)
    return torch.where(seed > 0, kept, torch.ones_like(kept))


@dataclass(frozen=True, kw_only=True)
class MCDropout(Method):
    """Dropout that stays on when predicting.

    A network's own `nn.Dropout` layers become stochastic at their own rates, and nothing else changes (dropout called
    as a function inside `forward` cannot be seen). A network without any gets channel masks behind its linear maps.

    Attributes:
        rate: probability that a channel is dropped, where the network has no dropout layers of its own.

    Example:
        >>> bnn = lb.convert(net, lb.MCDropout(rate=0.1))
    """

    name: ClassVar[str] = "mc_dropout"
    late: ClassVar[float] = 0.0
    targets: ClassVar[tuple[type[nn.Module], ...]] = (*LINEAR_MAPS, *DROPOUTS)
    things: ClassVar[str] = "dropout layers or linear maps"
    partial: ClassVar[bool] = True

    rate: float = 0.1

    def __post_init__(self) -> None:
        """Check the rate."""
        check_rate(rate=self.rate)

    @override
    def wrap(self, layer: nn.Module) -> StochasticLayer:
        return DropoutLayer(layer, self) if isinstance(layer, DROPOUTS) else MaskedLayer(layer, self)

    @override
    def choose(self, layers: Sequence[tuple[str, nn.Module]]) -> set[str]:
        """Choose the network's own dropout layers; without any, all linear maps but the last of several."""
        own = {path for path, layer in layers if isinstance(layer, DROPOUTS) and 0 < _rate(layer) < 1}
        maps = [path for path, layer in layers if isinstance(layer, LINEAR_MAPS)]
        return own or set(maps[:-1] or maps)


def _rate(layer: Any) -> float:
    return float(layer.p)
