"""Uniform numbers from a seed and an index, by tensor arithmetic alone.

For variables whose number is known only when an activation arrives (the channels under a dropout layer): a draw keeps
one seed, and number c is computed where it is needed, in compiled graphs, exported networks and on any device alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

PRIME = 2**31 - 1
"""A Mersenne prime: squares of remainders fit into 64 bits."""

ROUNDS = 4


def draw_seeds(rows: int, generator: torch.Generator | None, device: torch.device | None = None) -> Tensor:
    """Draw `rows` seeds (rows, 1)."""
    if generator is None:  # compiled code must not name a generator, not even as None
        return torch.randint(1, PRIME, (rows, 1), device=device)
    return torch.randint(1, PRIME, (rows, 1), generator=generator)


def uniforms(seeds: Tensor, like: Tensor) -> Tensor:
    """Return uniform numbers in [0, 1), one for each seed (rows, 1) and each column of `like` (any, columns).

    A few rounds of h <- (h^2 + a c + s) mod (2^31 - 1): squaring mixes, the index and the seed keep rows apart.
    """
    index = torch.ones_like(like[:1], dtype=torch.int64).cumsum(1)  # not arange: a traced network has no sizes yet
    state = (seeds * 48271 + index * 69621) % PRIME
    for turn in range(ROUNDS):
        state = (state * state + index * 40692 + seeds + turn) % PRIME
    return state.to(torch.float64) / PRIME
