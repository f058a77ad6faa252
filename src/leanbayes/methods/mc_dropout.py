"""MC dropout (Gal, Ghahramani, 2016): dropout stays on when predicting, and each mask is a posterior draw.

    y = m * (W x + b) / (1 - p),      m_c ~ Bernoulli(1 - p), one for each output channel

A network without dropout layers gets such masks after every linear map but the last. They mask channels, so that a
draw folds into the weights. A network with dropout layers keeps them in place, at their own rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import fx, nn, Tensor
from typing_extensions import override

from leanbayes.distributions.assignment import Assignment, pick
from leanbayes.distributions.random import uniforms
from leanbayes.layers.family import DROPOUTS, LINEAR_MAPS, LinearFamily
from leanbayes.layers.hooks import copy_hooks
from leanbayes.methods._base import Method, plain_copy, Space, StochasticLayer
from leanbayes.methods._checks import check_rate
from leanbayes.runtime.noise import Noise, NoiseSpec
from leanbayes.runtime.passes import Mean, Variables, Width


class MaskedLayer(StochasticLayer):
    """A linear map whose output channels are dropped at random."""

    method: MCDropout
    family: LinearFamily

    def __init__(self, base: Any, method: MCDropout) -> None:
        super().__init__(base, method)
        self.nodes = self.family.outputs(base)
        self.log_choices = self.nodes * math.log(2)

    @override
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        mask = self.state.variables_of(self, x.shape[0])["mask"]
        y: Tensor = self.base(x, *args)
        return y * self.spread(mask, y)

    @override
    def kl(self) -> Tensor:
        return torch.zeros((), device=self.device)

    @override
    def noise_specs(self, shared: bool) -> tuple[NoiseSpec, ...]:
        return (NoiseSpec("uniform", (self.nodes,)),)

    @override
    def sample(self, component: Assignment | None, noise: Noise | None, width: Width) -> Variables:
        """Return the "mask" (R, outputs) out of indices: 0 drops the channel, 1 keeps it."""
        if noise is None:
            return {"mask": torch.ones(1, self.nodes, device=self.device)}
        keep = 1 - self.method.rate
        return {"mask": pick(noise[0], (self.method.rate, keep)) / keep}

    @override
    def fold(self, variables: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self.family.masked(self.base, self.weight_now, variables["mask"])


class DropoutLayer(StochasticLayer):
    """A dropout layer of the network; a draw drops the same entries (`Dropout2d`: channels) of all rows."""

    def __init__(self, base: Any, method: MCDropout) -> None:
        super().__init__(base, method)
        self.nodes = 1
        self.posterior.register_buffer("here", torch.zeros(()), persistent=False)

    @override
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        seed, axis = self.align(self.state.variables_of(self, x.shape[0])["seed"], x, -1)
        return masked(x.movedim(axis, 0), seed, self.base.p, self._same_over).movedim(0, axis)

    @property
    def _same_over(self) -> str:
        """The entries that share a mask: the "steps" of a sequence, the "pixels" of a channel, or none."""
        return "steps" if self.sequential else "pixels" if self.family.axis == 1 else ""

    @override
    def kl(self) -> Tensor:
        return torch.zeros((), device=self.device)

    @override
    def noise_specs(self, shared: bool) -> tuple[NoiseSpec, ...]:
        return (NoiseSpec("seed", (1,)),)

    @override
    def sample(self, component: Assignment | None, noise: Noise | None, width: Width) -> Variables:
        """Return the "seed" (R, 1), 0 for no mask; the number of masked entries depends on the input."""
        return {"seed": torch.zeros(1, 1, dtype=torch.int64, device=self.device) if noise is None else noise[0]}

    @override
    def fold(self, variables: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"seed": variables["seed"][None]}

    @override
    def freeze(self) -> nn.Module:
        """Return a dropout layer with p=0 whose forward hook, a graph of torch alone, multiplies by one mask.

        The mean of the masks is one: under `Mean` the original returns in eval mode.
        """
        plain = plain_copy(self.base, {})
        copy_hooks(self, plain)
        seed = self.variables()["seed"]
        if isinstance(self.state.mode, Mean):
            return plain.eval()
        plain.p = 0.0  # type: ignore[assignment]
        number = 1 if seed.is_meta else int(seed)
        plain.register_forward_hook(_mask_hook(number, self.base.p, self._same_over), prepend=True)
        return plain.train(self.training)

    @override
    def twin(self, variables: Mapping[str, Tensor]) -> nn.Module:
        plain = _Masked(self.base.p, self._same_over, variables["seed"][None])
        copy_hooks(self, plain)
        return plain


def _mask_hook(seed: int, rate: float, same_over: str) -> fx.GraphModule:
    """Return a forward hook that masks the output of a layer; a graph holds no code of leanbayes."""
    graph = fx.Graph()
    _, _, output = (graph.placeholder(name) for name in ("layer", "inputs", "output"))
    graph.output(masked(fx.Proxy(output), seed, rate, same_over).node)  # type: ignore[arg-type, attr-defined]
    return fx.GraphModule(nn.Module(), graph)


class _Masked(nn.Module):
    """Mask entries of x by a seed that it holds."""

    def __init__(self, rate: float, same_over: str, seed: Tensor) -> None:
        super().__init__()
        self.rate, self.same_over = rate, same_over
        self.register_buffer("seed", seed)

    def forward(self, input: Tensor) -> Tensor:  # as torch's dropouts call it
        return masked(input, self.seed, self.rate, self.same_over)


def masked(x: Tensor, seed: Any, rate: float, same_over: str) -> Tensor:
    """Multiply x by the mask of a seed, the same for all pixels (B, C, ...) or all steps (B, T, C) if so wanted."""
    if same_over == "steps":
        return x * _mask(seed, x[:, 0], rate).unsqueeze(1)
    if same_over == "pixels":
        rows = x.flatten(2)
        return (rows * _mask(seed, rows[:, :, 0], rate).unsqueeze(2)).view_as(x)
    rows = x.flatten(1)
    return (rows * _mask(seed, rows, rate)).view_as(x)


def _mask(seed: Any, entries: Tensor, rate: float) -> Tensor:
    """Return the factors of the entries; a seed of 0 in a tensor masks nothing."""
    kept = (uniforms(seed, entries) >= rate).to(entries.dtype) / (1 - rate)
    return kept if isinstance(seed, int) else torch.where(seed > 0, kept, torch.ones_like(kept))


@dataclass(frozen=True, kw_only=True)
class MCDropout(Method):
    """Dropout that stays on when predicting.

    The `nn.Dropout` layers of a network become stochastic at their own rates, and nothing else changes. Calls of
    `F.dropout` inside `forward` are not found. A network without dropout layers gets channel masks after linear maps.

    Attributes:
        rate: probability that a channel is dropped, for networks without dropout layers.

    Example:
        >>> bnn = lb.convert(net, lb.MCDropout(rate=0.1))
    """

    name: ClassVar[str] = "mc_dropout"
    late: ClassVar[float] = 0.0
    targets: ClassVar[tuple[type[nn.Module], ...]] = (*LINEAR_MAPS, *DROPOUTS)
    things: ClassVar[str] = "dropout layers or linear maps"
    partial: ClassVar[bool] = True
    space: ClassVar[Space] = MappingProxyType({"rate": (0.02, 0.5)})

    rate: float = 0.1

    def __post_init__(self) -> None:
        check_rate(rate=self.rate)

    @override
    def wrap(self, layer: nn.Module) -> StochasticLayer:
        return DropoutLayer(layer, self) if isinstance(layer, DROPOUTS) else MaskedLayer(layer, self)

    @override
    def choose(self, layers: Sequence[tuple[str, nn.Module]]) -> set[str]:
        own = {path for path, layer in layers if isinstance(layer, DROPOUTS) and 0 < _rate(layer) < 1}
        maps = [path for path, layer in layers if isinstance(layer, LINEAR_MAPS)]
        return own or set(maps[:-1] or maps)


def _rate(layer: Any) -> float:
    return float(layer.p)
