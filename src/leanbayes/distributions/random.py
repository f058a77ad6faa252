"""Random numbers from a seed and an index, by tensor arithmetic alone: the same on any device.

`uniforms` serves variables whose count is known only at the activation (channels under dropout). A draw stores one
seed and computes number c on use, also in compiled graphs and exported networks.

`normals` and `shares` serve one number for each weight. Torch's generators differ between devices. Ten million
numbers drawn on a CPU and sent to a GPU cost more than ten passes of the network.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

PRIME = 2**31 - 1  # a Mersenne prime: squares of remainders fit into 64 bits

ROUNDS = 4


Kind = Literal["normal", "uniform", "seed"]
"""Standard numbers: normal, uniform in [0, 1), or integer seeds from 1 to PRIME - 1."""


def standard(
    kind: Kind,
    shape: tuple[int, ...],
    device: torch.device,
    generator: torch.Generator | None = None,
    *,
    counted: bool = False,
) -> Tensor:
    """Draw standard numbers from torch's global generator on `device`, or from `generator` alone.

    A generator draws on its own device, a CPU, so the numbers are the same for every device. If `counted`, it draws
    one seed, from which the numbers are computed on `device`.
    """
    if generator is None:  # compiled code must not name a generator, not even as None
        if kind == "seed":
            return torch.randint(1, PRIME, shape, device=device)
        return torch.randn(shape, device=device) if kind == "normal" else torch.rand(shape, device=device)
    if counted:
        return (normals if kind == "normal" else shares)(shape, generator, device)
    place = generator.device
    if kind == "seed":
        return torch.randint(1, PRIME, shape, generator=generator, device=place)
    return (torch.randn if kind == "normal" else torch.rand)(shape, generator=generator, device=place)


def uniforms(seeds: Tensor, like: Tensor) -> Tensor:
    """Return uniform numbers in [0, 1), one for each seed (rows, 1) and each column of `like` (any, columns).

    A few rounds of h <- (h^2 + a c + s) mod (2^31 - 1): squaring mixes, index c and seed s separate rows.
    """
    index = torch.ones_like(like[:1], dtype=torch.int64).cumsum(1)  # not arange: a traced network has no sizes yet
    state = (seeds * 48271 + index * 69621) % PRIME
    for turn in range(ROUNDS):
        state = (state * state + index * 40692 + seeds + turn) % PRIME
    return state.to(torch.float64) / PRIME


PIECE = 2**16  # pairs of numbers per step on a CPU: they fit in its cache

GOLDEN, FIRST, SECOND = (n - 2**64 for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""The constants of SplitMix64 (Steele, Lea, Flood, 2014), as signed numbers."""


def normals(shape: tuple[int, ...], generator: torch.Generator, device: torch.device) -> Tensor:
    """Return standard normal numbers: two for each 64 bits, by Box and Muller; none beyond 6.7."""
    return _counted(shape, generator, device, _box_muller)


def shares(shape: tuple[int, ...], generator: torch.Generator, device: torch.device) -> Tensor:
    """Return uniform numbers in [0, 1), two for each 64 bits."""
    return _counted(shape, generator, device, lambda bits: torch.stack([bits >> 40, bits << 32 >> 40], 1) / 2**24 + 0.5)


def _counted(
    shape: tuple[int, ...], generator: torch.Generator, device: torch.device, law: Callable[[Tensor], Tensor]
) -> Tensor:
    """Fill a shape with `law(bits)`: two numbers (pairs, 2) from the bits of each index 0, 1, ... of a seed."""
    seed = int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device))
    pairs = -(-math.prod(shape) // 2)
    drawn = torch.empty(pairs, 2, device=device, dtype=torch.float32)
    piece = PIECE if device.type == "cpu" else max(1, pairs)
    for start in range(0, pairs, piece):
        stop = min(start + piece, pairs)
        drawn[start:stop] = law(_bits(seed, torch.arange(start, stop, device=device)))
    return drawn.flatten()[: math.prod(shape)].view(shape)


def _bits(seed: int, index: Tensor) -> Tensor:
    """Return 64 random bits for each index, by SplitMix64; signed integers wrap around as unsigned ones do."""
    state = index.mul_(GOLDEN).add_(seed)
    for shift, factor in ((30, FIRST), (27, SECOND)):
        state.bitwise_xor_(_shifted(state, shift)).mul_(factor)
    return state.bitwise_xor_(_shifted(state, 31))


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Shift to the right and fill with zeros; torch's `>>` fills with the sign."""
    return (bits >> by).bitwise_and_(2 ** (64 - by) - 1)


def _box_muller(bits: Tensor) -> Tensor:
    """Return r (cos a, sin a), r^2 = -2 log u: u from the upper 31 bits, never zero, the angle a from the lower 32."""
    u = (_shifted(bits, 33).float() + 0.5) / 2**31
    angle = (bits << 32 >> 32).float() * (math.pi / 2**31)
    return u.log_().mul_(-2).sqrt_()[:, None] * torch.stack([angle.cos(), angle.sin()], 1)
