"""Random numbers of single images: each image draws from its own stream."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
from torch import Tensor

CPU = torch.device("cpu")
"""Explicit, so that the numbers do not depend on torch's default device."""


class Streams:
    """Random numbers of some images: a function of (seed, corruption, index of the image, number of the call).

    Numbers are drawn on the CPU and moved to the device. They depend neither on other images nor on the severity: a
    higher severity is the same draw, stronger, so that curves over severity are smooth.
    """

    def __init__(self, seed: int, corruption: str, indices: range, device: torch.device) -> None:
        self.indices, self.device = indices, device
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
        self._calls += 1
        rows = []
        for row, index in enumerate(self.indices):
            # torch's CPU generator uses 32 bits of a seed, the size of a checksum.
            self._generator.manual_seed(zlib.crc32(f"{self._key}/{index}/{self._calls}".encode()))
            rows.append(draw_one(row))
        return torch.stack(rows).to(self.device)
