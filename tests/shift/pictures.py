"""Pictures that look natural enough: a 1/f landscape, a bright disk, a dark bar; and how much one was changed."""

from __future__ import annotations

import torch
from torch import Tensor


def pictures(count: int, size: int, channels: int = 3, seed: int = 0) -> Tensor:
    """Return uint8 pictures (count, channels, size, size)."""
    generator = torch.Generator().manual_seed(seed)
    frequency = torch.hypot(torch.fft.fftfreq(size)[:, None], torch.fft.rfftfreq(size)).clamp(min=1 / size)
    white = torch.fft.rfft2(torch.randn(count, channels, size, size, generator=generator))
    land = torch.fft.irfft2(white / frequency, s=(size, size))
    land = 0.45 + 0.16 * land / land.std((1, 2, 3), keepdim=True)
    y, x = torch.meshgrid(torch.linspace(0, 1, size), torch.linspace(0, 1, size), indexing="ij")
    centre = 0.25 + 0.5 * torch.rand(count, 2, 1, 1, generator=generator)
    colour = torch.rand(count, channels, 1, 1, generator=generator)
    disk = ((y - centre[:, 0]) ** 2 + (x - centre[:, 1]) ** 2 < 0.04)[:, None]
    bar = ((x - centre[:, 0]).abs() < 0.05)[:, None]
    land = torch.where(disk, 0.5 + 0.4 * colour, land)
    return (255 * torch.where(bar & ~disk, 0.15, land).clamp(0, 1)).round().byte()


def change(before: Tensor, after: Tensor) -> float:
    """Return the mean squared change of uint8 images, pixels between 0 and 1."""
    return ((after.double() - before.double()) / 255).square().mean().item()
