"""Digital corruptions: low contrast, elastic warping, coarse pixels, and JPEG."""

from __future__ import annotations

import io

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.shift.corruptions._random import Streams
from leanbayes.shift.corruptions.geometry import block_matrix, blur, separable
from leanbayes.shift.corruptions.severities import Level, Table

# Contrast that is left.
CONTRAST = Table(cifar=(0.75, 0.5, 0.4, 0.3, 0.15), imagenet=(0.4, 0.3, 0.2, 0.1, 0.05))
# Amplitude and smoothness of the warp, and displacement of three points of an affine map; shares of the image's side.
# In CIFAR-10-C the displacement falls (0.08 to 0.03): severity 5 changes half as much as severity 1. Here it stays.
ELASTIC_TRANSFORM = Table(
    cifar=((0, 0.2, 0.063), (0.05, 0.2, 0.064), (0.08, 0.06, 0.064), (0.1, 0.04, 0.064), (0.1, 0.03, 0.064)),
    imagenet=((0.0625, 0.01, 0), (0.08125, 0.01, 0), (0.10625, 0.01, 0), (0.125, 0.01, 0), (0.15, 0.01, 0)),
)
# Pixels that are left, as a share of the side.
PIXELATE = Table(cifar=(0.95, 0.9, 0.85, 0.75, 0.65), imagenet=(0.6, 0.5, 0.4, 0.3, 0.25))
# JPEG quality.
JPEG_COMPRESSION = Table(cifar=(80, 65, 58, 50, 40), imagenet=(25, 18, 15, 10, 7))


def contrast(images: Tensor, level: Level, streams: Streams) -> Tensor:
    """Pull every channel towards its mean: c (x - mean) + mean."""
    (left,) = CONTRAST.at(level)
    means = images.mean((2, 3), keepdim=True)
    return means.lerp(images, left)


def elastic_transform(images: Tensor, level: Level, streams: Streams) -> Tensor:
    """Displace pixels by a random affine map and by smoothed noise."""
    height, width = images.shape[2:]
    amplitude, smoothness, wander = (min(height, width) * share for share in ELASTIC_TRANSFORM.at(level))
    warp = blur(streams.uniform(2, height, width, low=-1.0, high=1.0), smoothness)
    corners = streams.uniform(2, 3, low=-1.0, high=1.0) @ _corner_weights(height, width).to(images)
    shift_x, shift_y = (amplitude * warp + wander * corners.view(warp.shape)).unbind(1)
    x = torch.arange(width, device=images.device) + shift_x
    y = torch.arange(height, device=images.device)[:, None] + shift_y
    grid = torch.stack([2 * x / (width - 1) - 1, 2 * y / (height - 1) - 1], -1)
    return F.grid_sample(images, grid, padding_mode="reflection", align_corners=True)


def pixelate(images: Tensor, level: Level, streams: Streams) -> Tensor:
    """Replace each pixel by the mean of its block."""
    (left,) = PIXELATE.at(level)
    height, width = images.shape[2:]
    return separable(images, block_matrix(height, int(height * left)), block_matrix(width, int(width * left)))


def jpeg_compression(images: Tensor, level: Level, streams: Streams) -> Tensor:
    """Compress and open again, one image at a time."""
    import numpy as np
    from PIL import Image

    (quality,) = JPEG_COMPRESSION.at(level)
    opened = []
    for image in (255 * images).round().byte().movedim(1, 3).cpu().numpy():
        file = io.BytesIO()
        Image.fromarray(image.squeeze(2) if image.shape[2] == 1 else image).save(file, "JPEG", quality=round(quality))
        opened.append(torch.from_numpy(np.array(Image.open(file))).view(image.shape))
    return torch.stack(opened).movedim(3, 1).to(images) / 255


def _corner_weights(height: int, width: int) -> Tensor:
    """Return the weights (3, H W) of three corners of a central square at each pixel: weighted sums are affine maps."""
    x, y = torch.meshgrid(torch.arange(width) - width / 2, torch.arange(height) - height / 2, indexing="xy")
    side = min(height, width) / 3
    corners = torch.tensor([[side, side, -side], [side, -side, -side], [1.0, 1.0, 1.0]])
    pixels = torch.stack([x.flatten(), y.flatten(), torch.ones(height * width)])
    weights: Tensor = torch.linalg.solve(corners, pixels)
    return weights
