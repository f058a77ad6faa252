"""SWAG (Maddox et al., 2019): a Gaussian fitted to the path of SGD at a constant learning rate.

After the plain training, SGD continues at a constant rate, and the weights theta_i are collected after every epoch.
Their mean m, variances s^2 and the last R deviations from the running mean, D, define the posterior

    theta  ~  Normal(m, (diag(s^2) + D D^T / (R - 1)) / 2).

It covers every parameter of the network. The model stores K networks drawn from it, since the batch-norm statistics of
each draw are collected again on training data. So it predicts, saves and costs as an ensemble of K networks.

With `average`, the model is one network with the weights m: SWA (Izmailov et al., 2018), at the price of one pass.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn, Tensor
from typing_extensions import override

from leanbayes.distributions.random import standard
from leanbayes.methods._base import Method, Space, StochasticLayer, Training
from leanbayes.methods._checks import check_components, check_positive, check_switches
from leanbayes.methods._members import Members
from leanbayes.runtime.batches import device_of, Output, pairs_of
from leanbayes.runtime.distributed import rank_and_world, summed
from leanbayes.runtime.noise import generator_of
from leanbayes.runtime.norm import BatchNorm, update_norm

FEWEST = 2
"""Fewest collected weights: one has no variance."""

ROWS_AT_ONCE = 256
"""Rows of a block for the norm statistics, if tensors are given whole."""


class Average(nn.Module):
    """Mean of the weights on the path, all parameters in one row.

    Attributes:
        count: number of collected weights.
        mean: their mean.
    """

    count: Tensor
    mean: Tensor

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        like = _flat(network)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64, device=like.device))
        self.register_buffer("mean", torch.zeros_like(like))

    @torch.no_grad()
    def collect(self, network: nn.Module) -> None:
        """Add the current weights of the network."""
        self.add(_flat(network).to(self.mean.device))

    def add(self, weights: Tensor) -> None:
        """Add weights in one row."""
        self.count += 1
        self.mean += (weights - self.mean) / self.count

    def average(self) -> Tensor:
        """Return the mean of all weights."""
        count = int(self.count)
        if count < FEWEST:
            raise ValueError(
                f"SWAG expected the weights of at least {FEWEST} epochs, got {count}; call model.collect() after each "
                "epoch at the constant rate"
            )
        return self.mean


class Moments(Average):
    """Mean, squared deviations and last deviations of the weights on the path, all parameters in one row.

    Attributes:
        squares: the sum of the squared deviations from the mean, by Welford's update.
        deviations: the last R of theta_i - m_i, m_i the mean of the first i; the oldest is overwritten.
    """

    squares: Tensor
    deviations: Tensor

    def __init__(self, network: nn.Module, rank: int) -> None:
        super().__init__(network)
        self.register_buffer("squares", torch.zeros_like(self.mean))
        self.register_buffer("deviations", self.mean.new_zeros(rank, len(self.mean)))

    @override
    def add(self, weights: Tensor) -> None:
        before = weights - self.mean
        super().add(weights)
        after = weights - self.mean
        self.squares += before * after
        self.deviations[(int(self.count) - 1) % len(self.deviations)] = after

    def draw(self, index: int) -> Tensor:
        """Return draw `index` of all weights, a function of the moments and the index."""
        mean, count = self.average(), int(self.count)
        device, rank = self.mean.device, min(count, len(self.deviations))
        generator = generator_of("swag", index)
        own, low = (standard("normal", (n,), device, generator).to(self.mean) for n in (len(self.mean), rank))
        along = self.deviations[:rank].mT @ low / math.sqrt(2 * max(1, rank - 1))
        return mean + (self.squares / count).clamp(min=0).div(2).sqrt() * own + along


class SWAGNetworks(Members):
    """K networks drawn from the posterior. The first one is trained; the others follow in `after_training`."""

    method: SWAG

    def __init__(self, members: Sequence[nn.Module], method: SWAG) -> None:
        super().__init__(members, method)
        self.kept: list[Average] = []  # in a list, so that no file of the model has them

    @override
    def new_collector(self) -> Average:
        first, method = self.members[0], self.method
        self.kept = [Average(first) if method.average else Moments(first, method.rank)]
        return self.kept[0]

    def collect(self) -> None:
        """Collect the weights of the first member: after each epoch at the constant rate, in a loop of your own."""
        moments = self.kept[0] if self.kept else self.new_collector()
        moments.collect(self.members[0])


@dataclass(frozen=True, kw_only=True)
class SWAG(Method):
    """A Gaussian around the end of a plain training, low rank plus diagonal, from further epochs at a constant rate.

    `fit` trains the network by its recipe, continues for the further epochs, and draws the members. In a loop of your
    own, train `model.members[0]`, call `model.collect()` after each further epoch, and in the end
    `after_training(model, loader)`.

    Attributes:
        components: K, the number of stored draws: the model has K copies of the network.
        rank: R, the number of deviations that are kept while training; an average keeps none.
        extra_epochs: further epochs as a share of the recipe's, rounded up, at least 2.
        rate: constant learning rate of the further epochs, relative to the recipe's peak.
        average: keep the average of the weights in place of draws (SWA): `components` is 1.

    Example:
        >>> model = lb.convert(net, lb.SWAG())
        >>> lb.fit(model, (x, y), lb.Recipe(epochs=40))       # 40 epochs, then 10 at a fifth of the rate
    """

    name: ClassVar[str] = "swag"
    targets: ClassVar[tuple[type[nn.Module], ...]] = ()
    late: ClassVar[float] = 0.0
    post_hoc: ClassVar[bool] = True
    later: ClassVar[Mapping[str, Any]] = MappingProxyType({"average": False})
    space: ClassVar[Space] = MappingProxyType({"rate": (0.05, 0.8)})

    components: int = 16
    rank: int = 20
    extra_epochs: float = 0.25
    rate: float = 0.2
    average: bool = False

    def __post_init__(self) -> None:
        check_components(self.components)
        check_positive(extra_epochs=self.extra_epochs, rate=self.rate)
        check_switches(self)
        if self.average:
            object.__setattr__(self, "components", 1)
        if not (isinstance(self.rank, int) and self.rank >= FEWEST):
            raise ValueError(f"expected rank to be a whole number of at least {FEWEST}, got {self.rank!r}")

    @override
    def wrap(self, layer: nn.Module) -> StochasticLayer:
        raise TypeError("SWAG draws whole networks, not layers; give no `where`")

    @override
    def build(self, make_network: Callable[[int], nn.Module], seed: int) -> SWAGNetworks:
        return self.whole(make_network(seed))

    @override
    def whole(self, model: nn.Module) -> SWAGNetworks:
        if any(isinstance(module, (StochasticLayer, Members)) for module in model.modules()):
            raise ValueError("SWAG expected a plain network, got one that is converted already; convert the plain one")
        return SWAGNetworks([copy.deepcopy(model) for _ in range(self.components)], self)

    @property
    @override
    def training_ratio(self) -> float:
        return 1.0 + self.extra_epochs

    @override
    def extended(self, recipe: Any) -> Any:
        epochs = max(FEWEST, math.ceil(self.extra_epochs * recipe.epochs))
        return replace(recipe, extra_epochs=recipe.extra_epochs or epochs, extra_rate=self.rate)

    @override
    @torch.no_grad()
    def after_training(
        self, model: nn.Module, data: Training, likelihood: object = None, *, output: Output | None = None
    ) -> None:
        if not isinstance(model, SWAGNetworks):
            raise TypeError(f"expected a model of lb.convert(net, lb.SWAG()), got {type(model).__name__}")
        moments, here = model.kept[0] if model.kept else model.new_collector(), device_of(model.members[0])
        trained = list(model.members[0].buffers())  # those of batch norms are collected again
        for index, member in enumerate(model.members):
            home = device_of(member)
            for buffer, last in zip(member.buffers(), trained, strict=True):
                buffer.copy_(last)
            drawn = moments.draw(index) if isinstance(moments, Moments) else moments.average()
            _assign(member.to(here), drawn)
            _collect_norms(member, data)
            member.to(home)
        model.kept.clear()


def _flat(network: nn.Module) -> Tensor:
    """Return all parameters in one row, in float32 or better."""
    parameters = [p.detach() for p in network.parameters()]
    if not parameters:
        raise ValueError("SWAG expected a network with parameters, got none")
    return torch.cat([p.flatten().to(torch.promote_types(p.dtype, torch.float32)) for p in parameters])


def _assign(network: nn.Module, weights: Tensor) -> None:
    parameters = list(network.parameters())
    parts = weights.to(device_of(network)).split([p.numel() for p in parameters])  # type: ignore[no-untyped-call]
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.copy_(part.view_as(parameter))


def _collect_norms(network: nn.Module, data: Training) -> None:
    """Collect the batch-norm statistics of a draw; several processes average theirs."""
    norms = [module for module in network.modules() if isinstance(module, BatchNorm) and module.track_running_stats]
    if not norms:
        return
    update_norm(network, _blocks(data))
    world = rank_and_world()[1]
    for norm in norms:
        for statistic in (norm.running_mean, norm.running_var):
            if world > 1 and statistic is not None:
                summed(statistic).div_(world)


def _blocks(data: Training) -> Iterator[Any]:
    """Yield the inputs of batches; a last one of less than half the size would count as much as the others."""
    first = 0
    for x, y in pairs_of(data, ROWS_AT_ONCE):
        first = first or len(y)
        if 2 * len(y) >= first:
            yield x, y
