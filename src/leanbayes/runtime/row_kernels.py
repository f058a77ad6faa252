"""Triton kernels for `row_sums`: imported on a GPU alone, since Triton is not everywhere.

Letters: N rows, P positions, C channels. A program sums a part of the positions of one row and a block of channels, so
that a small batch fills the GPU, too. The parts are added afterwards, in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

PROGRAMS = 2048
"""Programs of a launch, at least: enough for all multiprocessors of a large GPU."""

TILE = 4096
"""Numbers of each input that a program loads at a time."""


@triton.jit  # type: ignore[untyped-decorator]
def _row_sums(  # noqa: PLR0913
    a: tl.tensor, b: tl.tensor, out: tl.tensor,
    positions: tl.tensor, channels: tl.tensor, rows: tl.tensor, part: tl.tensor,
    a_row: tl.tensor, a_position: tl.tensor, a_channel: tl.tensor,
    b_row: tl.tensor, b_position: tl.tensor, b_channel: tl.tensor,
    BOTH: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
) -> None:  # fmt: skip
    blocks = tl.cdiv(channels, BLOCK_C)
    row, piece = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(1)
    c = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    first = piece * part
    last = tl.minimum(first + part, positions)
    products = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    sums = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    for start in range(first, last, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        inside = (p < last)[:, None] & (c < channels)[None, :]
        at_a = row * a_row + p[:, None] * a_position + c[None, :] * a_channel
        at_b = row * b_row + p[:, None] * b_position + c[None, :] * b_channel
        x = tl.load(a + at_a, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(b + at_b, mask=inside, other=0.0).to(tl.float32)
        products += x * y
        if BOTH:
            sums += x
    place = out + (piece * rows + row) * channels + c
    tl.store(place, tl.sum(products, 0), mask=c < channels)
    if BOTH:
        tl.store(place + tl.num_programs(1) * rows * channels, tl.sum(sums, 0), mask=c < channels)


def launch(a: Tensor, b: Tensor, *, both: bool) -> Tensor:
    """Return sum_p a b, and sum_p a if `both`, of tensors (N, P, C): float32, (1 or 2, N, C)."""
    rows, positions, channels = a.shape
    block_c, block_p = blocks(a)
    pieces = min(triton.cdiv(positions, block_p), triton.cdiv(PROGRAMS, rows * triton.cdiv(channels, block_c)))
    part = triton.cdiv(triton.cdiv(positions, pieces), block_p) * block_p
    pieces = triton.cdiv(positions, part)
    out = torch.empty((1 + both, pieces, rows, channels), device=a.device, dtype=torch.float32)
    grid: Any = (rows * triton.cdiv(channels, block_c), pieces)  # the first axis alone may be long
    sizes = positions, channels, rows, part
    with torch.cuda.device_of(a):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        _row_sums[grid](a, b, out, *sizes, *a.stride(), *b.stride(), both, block_p, block_c)
    return out.squeeze(1) if pieces == 1 else out.sum(1)


def blocks(a: Tensor) -> tuple[int, int]:
    """Return the channels and positions of a tile: long runs of neighbours in memory, and few numbers masked."""
    positions, channels = a.shape[1:]
    if a.stride(1) == 1 and a.stride(2) != 1:  # positions are neighbours
        block_p = min(1024, triton.next_power_of_2(positions))
        return min(TILE // block_p, triton.next_power_of_2(channels)), block_p
    divisor = channels & -channels  # the largest power of two in it
    block_c = min(128, divisor if divisor >= 16 else triton.next_power_of_2(channels))
    return block_c, max(1, min(TILE // block_c, triton.next_power_of_2(positions)))
