"""Ordering units (Cui et al., Variational Nested Dropout): ordered channels; a pass keeps the first few.

    z = 1 - exclusive cumsum(c),   c ~ Gumbel-softmax(log q, tau),   q_j = (1 - mu_{j+1}) prod_{k<=j} mu_k

over groups of channels, mu learned. A unit belongs to a stream of channels (`leanbayes.layers.channels`): all layers
that make or normalise these channels share the unit and its mask.

Units that are `coupled` read the same Gumbel noise: with equal q, all keep the same share of their channels. The
distribution of each unit stays the same. A unit with fewer groups reads the maximum of each block of groups: the
maximum of n standard Gumbel numbers, minus log n, is a standard Gumbel number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Literal, TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn, Tensor

from leanbayes.distributions.ordered import (
    at_or_beyond,
    downhill,
    geometric_tails,
    gumbel,
    keep_of,
    log_tails_of,
    tail_kl,
    uniform_keep_logits,
    uniform_tails,
)
from leanbayes.layers.streams import positions, Stream
from leanbayes.runtime.noise import NoiseSpec
from leanbayes.runtime.passes import PassState

if TYPE_CHECKING:
    from leanbayes.methods.nested.config import NestedDropout

Tail = Literal["learned", "geometric", "categorical"]
Prior = Literal["chain", "uniform"]

HALF = 0.5  # share of the passes that keep all channels under the default prior, so that the full width is trained, too
LIMIT = 5.0  # logits of keep probabilities are clamped to minus and plus this, as in the paper


class OrderingUnit(nn.Module):
    """The order of a stream's channels, and the number of them that a pass keeps.

    Tensors named `free` begin with the last group that is always on: no tail before it is possible. `free_of` maps a
    channel to its entry there. `order` is the method, whose fields are the settings.

    Channels are ordered by their position in a lane, so that all lanes stay equal. The temperature is a buffer, so that
    training can lower it.
    """

    components = 1
    row_noise = False
    ordered = True

    group_of: Tensor
    free_of: Tensor
    block_of: Tensor
    block_size: Tensor
    temperature: Tensor
    prior_log_tails: Tensor
    fixed_log_tails: Tensor
    fixed_keep: Tensor

    def __init__(self, stream: Stream, order: NestedDropout) -> None:
        super().__init__()
        length = stream.size // stream.lanes // stream.block
        self.order, self.groups = order, min(order.groups, length)
        self.always_on = min(self.groups, max(1, math.ceil(order.always_on * self.groups / order.groups)))
        self.state, self.path = PassState(), ""
        index = torch.tensor([position * self.groups // length for position in positions(stream)])
        self.register_buffer("group_of", index, persistent=False)
        self.register_buffer("free_of", (index - self.always_on + 1).clamp_min(0), persistent=False)
        block = torch.arange(order.groups) * self.groups // order.groups
        self.register_buffer("block_of", block[None], persistent=False)
        self.register_buffer("block_size", block.bincount().float(), persistent=False)
        self.register_buffer("temperature", torch.tensor(float(order.temperature)))
        free = self.groups - self.always_on
        keep = HALF ** (1 / max(1, free)) if order.prior_keep is None else order.prior_keep
        prior = uniform_keep_logits(free + 1) if order.prior == "uniform" else torch.full((free,), keep).logit()
        self.register_buffer("prior_log_tails", log_tails_of(prior), persistent=False)
        if order.tail == "learned":
            start = prior if order.init_keep is None else torch.full((free,), order.init_keep).logit()
            self.keep_logits = nn.Parameter(start.clamp(-LIMIT, LIMIT))  # beyond, nothing would be learned
        else:
            fixed = geometric_tails(free + 1, 1 - keep) if order.tail == "geometric" else uniform_tails(free + 1)
            self.register_buffer("fixed_log_tails", fixed.log(), persistent=False)
            self.register_buffer("fixed_keep", at_or_beyond(fixed), persistent=False)

    def attach(self, state: PassState, path: str) -> None:
        """Join the passes of a model, under its own path or under the path that all coupled units share."""
        self.state, self.path = state, f"*.order.{self.order.groups}" if self.order.coupled else f"{path}.order"

    @property
    def learned(self) -> bool:
        """Whether the keep probabilities are learned."""
        return "keep_logits" in self._parameters

    @property
    def device(self) -> torch.device:
        """The device of the unit."""
        return self.group_of.device

    @property
    def used_logits(self) -> Tensor:
        """The learned logits, clamped to their limits, in float32."""
        return _limited(self.keep_logits)

    @property
    def free_log_tails(self) -> Tensor:
        """The logarithms of q_j, from the last group that is always on."""
        return log_tails_of(self.used_logits) if self.learned else self.fixed_log_tails

    @property
    def log_tails(self) -> Tensor:
        """The logarithms of q_j, the probability that j is the last group kept."""
        return F.pad(self.free_log_tails, (self.always_on - 1, 0), value=-math.inf)

    @property
    def keep(self) -> Tensor:
        """P(group j is kept) = sum_{k>=j} q_k, which falls from one: the learned importance of the groups."""
        free = keep_of(self.used_logits) if self.learned else self.fixed_keep
        return F.pad(free, (self.always_on - 1, 0), value=1.0)

    def noise_specs(self, shared: bool) -> tuple[NoiseSpec, ...]:
        """Return one uniform number per group: a pass has one mask for all rows."""
        return (NoiseSpec("uniform", (self.order.groups,), per_row=False),)

    def factors(self, *, again: bool = False) -> Tensor:
        """Return the factors of the channels in the current pass: (R, channels).

        A masked stream is masked `again` after a norm; a fixed width is rescaled only the first time.
        """
        _, noise, width = self.state.inputs_of(self, 1)
        if width is not None:
            return self.at_width(width, again=again)[None]
        if noise is None:
            return torch.ones(1, len(self.group_of), device=self.device)
        perturbed = gumbel(self._pooled(noise[0])[:, self.always_on - 1 :])
        z = downhill(self.free_log_tails, self.temperature, perturbed, self.order.hard)
        return z.index_select(1, self.free_of)

    def _pooled(self, uniform: Tensor) -> Tensor:
        """Return uniform numbers of this unit's groups (R, groups): the maxima of blocks."""
        if self.groups == self.order.groups:
            return uniform
        rows = uniform.new_zeros(len(uniform), self.groups)
        return rows.scatter_reduce(1, self.block_of.expand_as(uniform), uniform, "amax").pow(self.block_size)

    def at_width(self, width: float | int, *, again: bool = False) -> Tensor:
        """Return the factors of a fixed width: zero beyond it, one or the keep probability within."""
        kept = self.kept(width).float()
        return kept * self.keep[self.group_of] if self.order.rescale and not again else kept

    def kept(self, width: float | int) -> Tensor:
        """Return which channels a width keeps."""
        return self.group_of < self.count(width)

    def count(self, width: float | int) -> int:
        """Return the number of groups that a width keeps; an integer width counts groups of the full order."""
        share = width / self.order.groups if isinstance(width, Integral) else width  # NumPy's whole numbers, too
        if not 0 < share <= 1:
            raise ValueError(
                f"expected a width in (0, 1], or a whole number of groups from 1 to {self.order.groups}, got {width}"
            )
        return max(self.always_on, math.floor(share * self.groups + 0.5))

    def kl(self) -> Tensor:
        """Return Phi_1 of eq. (18), the divergence of the tails from the prior chain; zero for fixed tails."""
        return Chains([self], leaders=[self]).kl() if self.learned else torch.zeros((), device=self.device)


class Chains:
    """The chains of several units with one order; `leaders` are the units whose own divergence counts.

    Chains of equal length are computed in one operation.
    """

    def __init__(self, units: Sequence[OrderingUnit], *, leaders: Sequence[OrderingUnit]) -> None:
        self.units, self.leaders = units, set(leaders)
        batches: dict[int, list[OrderingUnit]] = {}
        for unit in dict.fromkeys([*leaders, *units]):
            batches.setdefault(unit.groups - unit.always_on, []).append(unit)
        self.batches = list(batches.values())
        self.learned = any(unit.learned for unit in units)
        logits = [torch.stack([unit.keep_logits for unit in batch]) for batch in self.batches if self.learned]
        self.logits = [_limited(each) for each in logits]

    def kl(self) -> Tensor:
        """Return the sum of the divergences of the leaders, whose tails are learned."""
        total: list[Tensor] = []
        for batch, logits in zip(self.batches, self.logits, strict=True):
            count = sum(unit in self.leaders for unit in batch)  # they come first
            total.append(tail_kl(log_tails_of(logits[:count]), batch[0].prior_log_tails).sum())
        return torch.stack(total).sum()

    def keep_of_channels(self) -> Tensor:
        """Return the keep probabilities of the channels, one unit after the other."""
        starts: dict[OrderingUnit, int] = {}
        end = 0
        for batch in self.batches:
            length = batch[0].groups - batch[0].always_on + 1
            starts |= {unit: end + row * length for row, unit in enumerate(batch)}
            end += len(batch) * length
        places = torch.cat([unit.free_of + starts[unit] for unit in self.units])
        return self._keep().index_select(0, places)

    def _keep(self) -> Tensor:
        if self.learned:
            return torch.cat([keep_of(logits).flatten() for logits in self.logits])
        return torch.cat([unit.fixed_keep for batch in self.batches for unit in batch])


def _limited(logits: Tensor) -> Tensor:
    """Return logits clamped to their limits, in float32, with no gradient beyond.

    The gradient of `hardtanh` is one operation, of `clamp` five. It is zero at the limit itself, where students begin:
    hence a limit that is two roundings larger.
    """
    limit = LIMIT * (1 + 2e-7)
    return F.hardtanh(logits.float(), -limit, limit)
