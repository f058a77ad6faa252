"""Parts of the corruptions: random numbers of single images, linear maps of pixels, clouds and ferns of ice."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# n images, C channels, H height, W width

CPU = torch.device("cpu")
"""Explicit, so that the numbers do not depend on torch's default device."""
F32 = torch.float32
"""Explicit, so that the numbers do not depend on torch's default dtype."""

_FERNS, _BARBS = 20, 8
# The strokes of a fern: start on the stem, angle to it, length (shares of the stem). The stem comes first, then barbs
# at 60 degrees on either side.
_STROKES = (
    (0.0, 0.0, 1.0),
    *((k / _BARBS, side * math.pi / 3, 0.45 * (1 - k / _BARBS)) for k in range(_BARBS) for side in (1, -1)),
)


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
        return self._draw(lambda row: torch.randn(shape, generator=self._generator, dtype=F32, device=CPU))

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Return uniform numbers (n, *shape) between low and high."""
        return low + (high - low) * self._draw(
            lambda row: torch.rand(shape, generator=self._generator, dtype=F32, device=CPU)
        )

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


def separable(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return rows @ image @ columns^T for every channel of images (n, C, H, W)."""
    rows, columns = rows.to(images), columns.to(images)
    return F.linear(F.linear(images, columns).mT, rows).mT.contiguous()


def blur(images: Tensor, sigma: float) -> Tensor:
    """Blur by a Gaussian with sigma in pixels; the border repeats the last pixel."""
    height, width = images.shape[-2:]
    return separable(images, gaussian_matrix(height, sigma), gaussian_matrix(width, sigma))


def gaussian_matrix(size: int, sigma: float) -> Tensor:
    """Return the (size, size) matrix of a Gaussian filter, cut at four sigma."""
    reach = torch.arange(-round(4 * sigma), round(4 * sigma) + 1)
    weights = torch.exp(-0.5 * (reach.float() / max(sigma, 1e-6)) ** 2)
    sources = (torch.arange(size)[:, None] + reach).clamp(0, size - 1)
    return torch.zeros(size, size, dtype=F32).scatter_add_(1, sources, (weights / weights.sum()).expand(size, -1))


def zoom_matrix(size: int, factor: float) -> Tensor:
    """Return the (size, size) matrix that magnifies the middle linearly, by a factor of at least one.

    As in the benchmarks, whole pixels are cut out and stretched: a factor close to one may change nothing.
    """
    cut = math.ceil(size / factor)
    stretched = round(cut * factor)
    inside = torch.arange(size) + (stretched - size) // 2
    position = (inside * (cut - 1)).float() / max(stretched - 1, 1)
    below = position.floor().clamp(max=cut - 2).long()
    share = (position - below)[:, None]
    first = (size - cut) // 2 + below[:, None]
    return torch.zeros(size, size, dtype=F32).scatter_(1, first, 1 - share).scatter_(1, first + 1, share)


def block_matrix(size: int, blocks: int) -> Tensor:
    """Return the (size, size) matrix that replaces each pixel by the mean of the block that holds its centre."""
    block = ((torch.arange(size, dtype=F32) + 0.5) * blocks / size).floor()
    same = (block[:, None] == block).float()
    return same / same.sum(1, keepdim=True)


def take(images: Tensor, sources: Tensor) -> Tensor:
    """Return images (n, C, H, W) whose pixel p is pixel sources[:, p] of the old ones; sources (n, H W)."""
    pixels = images.flatten(2)
    return pixels.gather(2, sources[:, None].expand(pixels.shape)).view(images.shape)


def motion(images: Tensor, angles: Tensor, radius: int, sigma: float) -> Tensor:
    """Smear image i along angles[i], in radians: 2 radius + 1 steps of a pixel, weighted by half a Gaussian."""
    height, width = images.shape[-2:]
    steps = torch.arange(2 * radius + 1)
    weights = torch.exp(-0.5 * (steps.float() / sigma) ** 2)
    weights = weights[weights > 1e-3 * weights.sum()]
    y = torch.arange(height, device=images.device)
    x = torch.arange(width, device=images.device)
    smeared = torch.zeros_like(images)
    for step, weight in enumerate((weights / weights.sum()).tolist()):
        down, right = (step * angles.sin()).round().long(), (step * angles.cos()).round().long()
        rows = (y + down[:, None]).clamp(0, height - 1)
        columns = (x + right[:, None]).clamp(0, width - 1)
        smeared.add_(take(images, (rows[:, :, None] * width + columns[:, None]).flatten(1)), alpha=weight)
    return smeared


def clouds(streams: Streams, size: int, decay: float) -> Tensor:
    """Return clouds (n, side, side) between 0 and 1 by the diamond-square fractal; side is a power of two >= size.

    Each round halves the grid: a new point is the mean of its four neighbours (the grid wraps around) plus noise, whose
    amplitude falls by decay^2. All noise is drawn first, so that it is the same for every decay.
    """
    side = 2 ** math.ceil(math.log2(size))
    noise = streams.uniform(side, side, low=-1.0, high=1.0)
    height = torch.zeros_like(noise)
    step, amplitude = side, 1.0
    while step >= 2:
        old, new = slice(0, None, step), slice(step // 2, None, step)
        corners = height[:, old, old]
        pairs = corners + corners.roll(-1, 2)
        centres = (pairs + pairs.roll(-1, 1)) / 4 + amplitude * noise[:, new, new]
        height[:, new, new] = centres
        height[:, old, new] = (pairs + centres + centres.roll(1, 1)) / 4 + amplitude * noise[:, old, new]
        sides = corners + corners.roll(-1, 1) + centres + centres.roll(1, 2)
        height[:, new, old] = sides / 4 + amplitude * noise[:, new, old]
        step, amplitude = step // 2, amplitude / decay**2
    height -= height.amin((1, 2), keepdim=True)
    return height / height.amax((1, 2), keepdim=True)


def ferns(streams: Streams, height: int, width: int) -> Tensor:
    """Return ferns of ice (n, height, width) on black: stems with barbs that shorten to the tip.

    Positions are complex numbers x + i y; the image is the unit square. Axes: image, fern, stroke, point of a stroke.
    Points fade towards the end of a stroke.
    """
    across, down = streams.uniform(2, _FERNS, 1, 1, low=-0.1, high=1.1).unbind(1)
    root = torch.complex(across, down)
    stem = streams.uniform(_FERNS, 1, 1, high=2 * math.pi)
    length = streams.uniform(_FERNS, 1, 1, low=0.3, high=0.7)
    light = streams.uniform(_FERNS, 1, 1, low=0.4, high=1.0)

    foot, turn, reach = torch.tensor(_STROKES, dtype=F32, device=root.device).T[..., None]
    way = torch.linspace(0, 1, max(height, width) // 2, dtype=F32, device=root.device)
    place = root + length * (foot * _unit(stem) + reach * way * _unit(stem + turn))

    x, y = place.real, place.imag
    inside = (y >= 0) & (y < 1) & (x >= 0) & (x < 1)
    pixel = ((y * height).long() * width + (x * width).long()).where(inside, 0)
    shine = (light * (1 - 0.6 * way)).expand(place.shape).where(inside, 0)
    drawn = torch.zeros(len(root), height * width, dtype=F32, device=root.device)
    drawn.scatter_reduce_(1, pixel.flatten(1), shine.flatten(1), "amax")
    return blur(drawn.view(-1, 1, height, width), min(height, width) / 160)[:, 0]


def _unit(angle: Tensor) -> Tensor:
    return torch.polar(torch.ones_like(angle), angle)
