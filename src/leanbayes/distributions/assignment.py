"""Assign mixture components to rows of a batch, whole layers, channels or single elements.

`blocks` assigns components to rows. A row keeps its component in the whole network (rank-1, implicit, ensembles).
`pick` turns uniform noise into component indices. The shape of the noise decides which elements share an index:
one number a layer (ensemble model patching), a channel (MC dropout) or an element (DropConnect, crossed patching).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Assignment(NamedTuple):
    """Components of rows: row r uses component `component[r // each]`.

    Even blocks have few entries and a large `each`. Gathering their parameters is an expansion: its gradient is a sum,
    not a scatter.
    """

    component: Tensor
    each: int = 1

    def rows(self) -> Tensor:
        """Return the component of every row."""
        return self.component.repeat_interleave(self.each)

    def modulo(self, components: int) -> Assignment:
        """Return the assignment for a layer with fewer components."""
        return Assignment(self.component % components, self.each)

    def repeat(self, times: int, *, components: int | None = None) -> Assignment:
        """Return the assignment for a batch that is repeated as a whole.

        A row keeps its component. Given the number of components, its repeats go to consecutive ones instead.
        """
        if components is None:
            return Assignment(self.component.repeat(times), self.each)
        turns = torch.arange(times, device=self.component.device)[:, None]
        return Assignment(((self.component + turns) % components).flatten(), self.each)

    def split(self, parts: int) -> list[Assignment]:
        """Return the assignments of equal parts of the batch, one after the other."""
        return [Assignment(part, self.each) for part in self.component.chunk(parts)]

    def by_block(self, values: Tensor) -> Tensor:
        """Gather values of components (K, n) for blocks of rows: (blocks, 1, n)."""
        return values[self.component].unsqueeze(1)

    def take(self, values: Tensor) -> Tensor:
        """Gather values of components (K, n) for rows (R, n)."""
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

    `turn` rotates the component numbers; the default is a random offset from torch's global generator. Rotation favours
    no component, and every component sees every row even if batches come in a fixed order.

    With several processes, row i of process `rank` is global row `i * world + rank`, as in `DistributedSampler`.

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
        >>> pick(torch.tensor([0.05, 0.5]), (0.1, 0.9))     # dropout at rate 0.1: 0 drops the unit, 1 keeps it
        tensor([0, 1])
    """
    if isinstance(probabilities, Tensor):
        return pick_between(uniform, cuts(probabilities.to(uniform)))
    # Compare with Python numbers: a tensor would be copied to the device at every call.
    return sum((uniform >= cut).long() for cut in list(itertools.accumulate(probabilities))[:-1])  # type: ignore[return-value]


def cuts(probabilities: Tensor) -> Tensor:
    """Return the boundaries (K - 1,) between the shares of K components in [0, 1)."""
    return probabilities.cumsum(0)[:-1]


def pick_between(uniform: Tensor, cuts: Tensor) -> Tensor:
    """Return the result of `pick` for boundaries from `cuts`."""
    return torch.bucketize(uniform, cuts, right=True)
