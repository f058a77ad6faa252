"""Linear maps of pixels: blur, zoom and blocks as matrices for rows and columns, and motion along a line."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


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
    weights = torch.exp(-0.5 * (reach / max(sigma, 1e-6)) ** 2)
    sources = (torch.arange(size)[:, None] + reach).clamp(0, size - 1)
    return torch.zeros(size, size).scatter_add_(1, sources, (weights / weights.sum()).expand(size, -1))


def zoom_matrix(size: int, factor: float) -> Tensor:
    """Return the (size, size) matrix that magnifies the middle linearly, by a factor of at least one.

    As in the benchmarks, whole pixels are cut out and stretched: a factor close to one may change nothing.
    """
    cut = math.ceil(size / factor)
    stretched = round(cut * factor)
    inside = torch.arange(size) + (stretched - size) // 2
    position = inside * (cut - 1) / max(stretched - 1, 1)
    below = position.floor().clamp(max=cut - 2).long()
    share = (position - below)[:, None]
    first = (size - cut) // 2 + below[:, None]
    return torch.zeros(size, size).scatter_(1, first, 1 - share).scatter_(1, first + 1, share)


def block_matrix(size: int, blocks: int) -> Tensor:
    """Return the (size, size) matrix that replaces each pixel by the mean of the block that holds its centre."""
    block = ((torch.arange(size) + 0.5) * blocks / size).floor()
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
    weights = torch.exp(-0.5 * (steps / sigma) ** 2)
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
