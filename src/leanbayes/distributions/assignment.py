"""Which component serves whom: rows of a batch in contiguous, balanced blocks."""

from __future__ import annotations

import torch
from torch import Tensor


def blocks(rows: int, components: int, *, rank: int = 0, world: int = 1, device: torch.device | None = None) -> Tensor:
    """Assign `rows` rows to components in contiguous blocks whose sizes differ by at most one.

    Where the components do not divide the batch, or outnumber it, the assignment is turned by a random offset
    from torch's global generator, so that in the long run no component is favoured.

    With several processes the batch is the global one, dealt out in turn as `DistributedSampler` does: row i of
    process `rank` is global row `i * world + rank`. Every process then sees every component.

    Example:
        >>> blocks(8, 4).tolist()
        [0, 0, 1, 1, 2, 2, 3, 3]
    """
    total = rows * world
    index = (torch.arange(rows, device=device) * world + rank) * components // total
    if total % components:
        index = (index + torch.randint(components, (), device=device)) % components
    return index
