"""Which component serves whom: rows of a batch, whole layers, channels or single elements.

Two questions, one answer each. *Which rows?* `blocks` deals components to the rows of a batch; a row keeps its
component through the whole network (rank-1, implicit nodes, explicit ensembles). *Who shares an index?* `pick` turns
uniform noise into component indices, one for each number: noise with one number a layer gives the layer one index
(ensemble model patching), one a channel gives MC dropout, one an element gives DropConnect and crossed patching.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Assignment(NamedTuple):
    """Components of rows: row r uses component `component[r // each]`.

    Even blocks have few entries and a large `each`: gathering parameters for them is an expansion, whose gradient is
    a sum, instead of a scatter.
    """

    component: Tensor
    each: int = 1

    def rows(self) -> Tensor:
        """Return the component of every row."""
        return self.component.repeat_interleave(self.each)

    def modulo(self, components: int) -> Assignment:
        """Return the same for a layer with fewer components."""
        return Assignment(self.component % components, self.each)

    def repeat(self, times: int) -> Assignment:
        """Return the same for a batch that is repeated as a whole."""
        return Assignment(self.component.repeat(times), self.each)

    def by_block(self, values: Tensor) -> Tensor:
        """Gather what belongs to components (K, n) for blocks of rows, to be broadcast over each of them (-1, 1, n)."""
        return values[self.component][:, None]

    def take(self, values: Tensor) -> Tensor:
        """Gather what belongs to components (K, n) for the rows (R, n)."""
        return self.by_block(values).expand(-1, self.each, -1).flatten(0, 1)


def blocks(
    rows: int,
    components: int,
    *,
    rank: int = 0,
    world: int = 1,
    device: torch.device | None = None,
    turn: int | None = None,
) -> Assignment:
    """Assign `rows` rows to components in contiguous blocks whose sizes differ by at most one.

    The blocks are turned by `turn`, by default a random offset from torch's global generator: where components do not
    divide the batch, or outnumber it, none is favoured in the long run, and where batches always come in the same
    order, every component sees every row.

    With several processes the batch is the global one, dealt out in turn as `DistributedSampler` does: row i of
    process `rank` is global row `i * world + rank`. Every process then sees every component.

    Example:
        >>> blocks(8, 4).rows().tolist()
        [2, 2, 3, 3, 0, 0, 1, 1]
    """
    if rows % components == 0:
        index, each = torch.arange(components, device=device), rows // components
    else:
        index, each = (torch.arange(rows, device=device) * world + rank) * components // (rows * world), 1
    if components > 1:
        offset = torch.randint(components, (), device=device) if turn is None else turn % components
        index = (index + offset) % components
    return Assignment(index, each)


def pick(uniform: Tensor, probabilities: Sequence[float] | Tensor) -> Tensor:
    """Return component indices (as `uniform`): index k where the uniform number falls into k's share of [0, 1).

    Example:
        >>> pick(torch.tensor([0.05, 0.5]), (0.1, 0.9))     # dropout at rate 0.1: component 0 is nothing, 1 is the unit
        tensor([0, 1])
    """
    if isinstance(probabilities, Tensor):
        return pick_between(uniform, cuts(probabilities.to(uniform)))
    # Comparisons with numbers: a tensor of them would be copied to the device at every call.
    return sum((uniform >= cut).long() for cut in list(itertools.accumulate(probabilities))[:-1])  # type: ignore[return-value]


def cuts(probabilities: Tensor) -> Tensor:
    """Return where [0, 1) is cut into the shares of K components: (K - 1,)."""
    return probabilities.cumsum(0)[:-1]


def pick_between(uniform: Tensor, cuts: Tensor) -> Tensor:
    """Return what `pick` returns, for shares that were cut before."""
    return torch.bucketize(uniform, cuts, right=True)
