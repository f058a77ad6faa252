"""Random numbers from a seed and an index, by tensor arithmetic alone: the same on any device.

`uniforms` serves variables whose count is known only at the activation (channels under dropout). A draw stores one
seed and computes number c on use, also in compiled graphs and exported networks.

`normals` and `shares` serve one number for each weight. Torch's generators differ between devices. Ten million
numbers drawn on a CPU and sent to a GPU cost more than ten passes of the network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

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

    A generator draws on its own device, a CPU, in float32: the numbers are the same for every device and every default
    dtype. If `counted`, it draws one seed, from which the numbers are computed on `device`.
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
    draw = torch.randn if kind == "normal" else torch.rand
    return draw(shape, generator=generator, dtype=torch.float32, device=place)


class Rows(NamedTuple):
    """Standard numbers to draw, one tensor of this shape for each seed; `counted` as in `standard`."""

    kind: Kind
    shape: tuple[int, ...]
    counted: bool = False


def standard_rows(wanted: Sequence[Rows], seeds: Sequence[int], device: torch.device) -> list[Tensor]:
    """Return the numbers that `standard` draws from a generator of each seed, in fewer calls: one row per seed."""
    drawn = [_empty(one, len(seeds)) for one in wanted]
    rows = [(_filler(one), list(whole.unbind())) for one, whole in zip(wanted, drawn, strict=True)]
    generator = torch.Generator("cpu")
    for position, seed in enumerate(seeds):
        generator.manual_seed(seed)
        for fill, parts in rows:
            fill(parts[position], generator=generator)
    return [
        _of_seeds(one.shape, whole, device, _box_muller if one.kind == "normal" else _halves) if one.counted else
        whole.to(device)
        for one, whole in zip(wanted, drawn, strict=True)
    ]  # fmt: skip


def _empty(wanted: Rows, count: int) -> Tensor:
    whole = wanted.counted or wanted.kind == "seed"
    shape = () if wanted.counted else wanted.shape
    return torch.empty((count, *shape), dtype=torch.int64 if whole else torch.float32, device="cpu")


def _filler(wanted: Rows) -> Callable[..., Tensor]:
    """Return the method of a tensor that draws its numbers; of counted ones, the seed."""
    if wanted.counted:
        return lambda row, generator: row.random_(0, 2**63 - 1, generator=generator)
    if wanted.kind == "seed":
        return lambda row, generator: row.random_(1, PRIME, generator=generator)
    return Tensor.normal_ if wanted.kind == "normal" else Tensor.uniform_


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
    return _counted(shape, generator, device, _halves)


def _halves(bits: Tensor) -> Tensor:
    return torch.stack([bits >> 40, bits << 32 >> 40], 1) / 2**24 + 0.5


def _counted(
    shape: tuple[int, ...], generator: torch.Generator, device: torch.device, law: Callable[[Tensor], Tensor]
) -> Tensor:
    seed = int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device))
    return _of_seed(shape, seed, device, law)


def _of_seeds(shape: tuple[int, ...], seeds: Tensor, device: torch.device, law: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the numbers of several seeds (n,), one row each; few numbers are computed in one operation."""
    pairs = -(-math.prod(shape) // 2)
    if device.type == "cpu" and pairs * len(seeds) > PIECE:
        return torch.stack([_of_seed(shape, seed, device, law) for seed in seeds.tolist()])
    index = torch.arange(pairs, device=device).repeat(len(seeds))
    drawn = law(_bits(seeds.to(device).repeat_interleave(pairs), index)).view(len(seeds), -1)
    return drawn[:, : math.prod(shape)].reshape(len(seeds), *shape)


def _of_seed(shape: tuple[int, ...], seed: int, device: torch.device, law: Callable[[Tensor], Tensor]) -> Tensor:
    """Fill a shape with `law(bits)`: two numbers (pairs, 2) from the bits of each index 0, 1, ... of a seed."""
    pairs = -(-math.prod(shape) // 2)
    drawn = torch.empty(pairs, 2, device=device, dtype=torch.float32)
    piece = PIECE if device.type == "cpu" else max(1, pairs)
    for start in range(0, pairs, piece):
        stop = min(start + piece, pairs)
        drawn[start:stop] = law(_bits(seed, torch.arange(start, stop, device=device)))
    return drawn.flatten()[: math.prod(shape)].view(shape)


def _bits(seed: int | Tensor, index: Tensor) -> Tensor:
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
