"""Random numbers that belong to an image: image i draws from its own stream, whatever comes with it."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
from torch import Tensor

CPU = torch.device("cpu")
"""Named, so that the numbers are the same whatever torch's default device is."""


class Streams:
    """Random numbers for images first, first + 1, ...: a function of (seed, corruption, index, number of the call).

    Neither the other images nor the chunk an image lies in changes its numbers. The severity is left out on purpose: a
    higher severity is the same draw, stronger, so that curves over severity are smooth.
    """

    def __init__(self, seed: int, corruption: str, indices: range, device: torch.device) -> None:
        """Open the streams of the images with these indices; numbers are drawn on the CPU and moved to the device."""
        self.indices = indices
        self.device = device
        self._key = f"{seed}/{corruption}"
        self._calls = 0
        self._generator = torch.Generator(CPU)

    def normal(self, *shape: int) -> Tensor:
        """Return standard normal numbers (n, *shape)."""
        return self._draw(lambda row: torch.randn(shape, generator=self._generator, device=CPU))

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Return uniform numbers (n, *shape) between low and high."""
        return low + (high - low) * self._draw(lambda row: torch.rand(shape, generator=self._generator, device=CPU))

    def poisson(self, rates: Tensor) -> Tensor:
        """Return Poisson counts with the rates (n, ...)."""
        on_cpu = rates.cpu()
        return self._draw(lambda row: torch.poisson(on_cpu[row], generator=self._generator))

    def _draw(self, draw_one: Callable[[int], Tensor]) -> Tensor:
        """Draw row by row, each from a state that its index sets."""
        self._calls += 1
        rows = []
        for row, index in enumerate(self.indices):
            # torch's CPU generator keeps 32 bits of a seed, as many as a checksum has.
            self._generator.manual_seed(zlib.crc32(f"{self._key}/{index}/{self._calls}".encode()))
            rows.append(draw_one(row))
        return torch.stack(rows).to(self.device)
