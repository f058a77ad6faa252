"""Blur corruptions: defocus, frosted glass, motion and zoom."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.shift.corruptions._random import Streams
from leanbayes.shift.corruptions.geometry import blur, motion, separable, take, zoom_matrix
from leanbayes.shift.corruptions.severities import Level, Table

# Radius of the disk, sigma of its soft edge; pixels.
DEFOCUS_BLUR = Table(
    cifar=((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
    imagenet=((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
)
# Sigma of the blur before and after, reach of a jump, rounds of jumps. The benchmarks' own rows are not in the order of
# their strength; these are close to them and in order.
GLASS_BLUR = Table(
    cifar=((0.4, 1, 1), (0.33, 1, 1), (0.3, 1, 1), (0.4, 1, 2), (0.25, 1, 2)),
    imagenet=((0.9, 1, 1.6), (1.3, 2, 1), (1.1, 3, 2), (1.5, 4, 2), (1.1, 3, 3)),
)
# Radius and sigma of the smear; pixels. CIFAR-10-C has sigma 2 at severities 3 and 4, without a visible difference.
MOTION_BLUR = Table(
    cifar=((6, 1), (6, 1.5), (6, 2), (8, 2.2), (9, 2.5)),
    imagenet=((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
)
# Largest factor, step between factors.
ZOOM_BLUR = Table(
    cifar=((1.06, 0.01), (1.11, 0.01), (1.15, 0.01), (1.2, 0.01), (1.25, 0.01)),
    imagenet=((1.11, 0.01), (1.15, 0.01), (1.2, 0.02), (1.24, 0.02), (1.3, 0.03)),
)


def defocus_blur(images: Tensor, level: Level, streams: Streams) -> Tensor:
    """Average over a disk with a soft edge."""
    radius, edge = DEFOCUS_BLUR.at(level)
    kernel = _disk(radius, edge).to(images)
    pad = kernel.shape[0] // 2
    channels = F.pad(images, (pad, pad, pad, pad), mode="reflect").flatten(0, 1)[:, None]
    return F.conv2d(channels, kernel[None, None]).view(images.shape)


def glass_blur(images: Tensor, level: Level, streams: Streams) -> Tensor:
    """Blur, replace each pixel by a near one, and blur again."""
    sigma, reach, rounds = GLASS_BLUR.at(level)
    images = blur(images, sigma)
    for before in range(math.ceil(rounds)):
        images = take(images, _jumps(streams.uniform(3, *images.shape[2:]), reach, rounds - before))
    return blur(images, sigma)


def motion_blur(images: Tensor, level: Level, streams: Streams) -> Tensor:
    """Smear along a line at most 45 degrees from the horizontal."""
    radius, sigma = MOTION_BLUR.at(level)
    return motion(images, streams.uniform(low=-math.pi / 4, high=math.pi / 4), round(radius), sigma)


def zoom_blur(images: Tensor, level: Level, streams: Streams) -> Tensor:
    """Average the image and its magnifications."""
    largest, step = ZOOM_BLUR.at(level)
    factors = [1 + step * k for k in range(round((largest - 1) / step) + 1)]
    height, width = images.shape[2:]
    total = images.clone()
    for factor in factors:
        total += separable(images, zoom_matrix(height, factor), zoom_matrix(width, factor))
    return total / (len(factors) + 1)


def _disk(radius: float, edge: float) -> Tensor:
    """Return a kernel of sum one: a disk with blurred edges."""
    reach = math.ceil(radius) + 2
    line = torch.arange(-reach, reach + 1).float()
    disk = (line[:, None] ** 2 + line**2 <= radius**2).float()
    taps = torch.arange(-1.0, 2.0) if radius <= 8 else torch.arange(-2.0, 3.0)
    soft = torch.exp(-0.5 * (taps / edge) ** 2)
    kernel = F.conv2d(disk[None, None], torch.outer(soft, soft)[None, None], padding=len(taps) // 2)[0, 0]
    return kernel / kernel.sum()


def _jumps(chance: Tensor, reach: float, share: float) -> Tensor:
    """Return the source of each pixel (n, H W), when pixels jump in turn, from the last to the first.

    A pixel takes the current value of its partner, -reach to reach rows and columns away. A partner later in the image
    has jumped already. All chains of jumps are followed at once, doubling their length each time.

    Args:
        chance: uniform numbers (n, 3, H, W): vertical and horizontal offset of the partner, and whether a pixel jumps.
        reach: largest offset, and margin of unchanged pixels. Offsets are rounded down: reach 1 goes up, left or
            nowhere.
        share: share of the pixels that jump; all of them from 1 on.
    """
    height, width = chance.shape[2:]
    margin = math.ceil(reach)
    down, right = ((2 * chance[:, :2] - 1) * reach).floor().long().unbind(1)
    here = torch.arange(height * width, device=chance.device).view(height, width)
    jumping = chance[:, 2] < share
    jumping[:, : margin + 1] = jumping[:, height - margin + 1 :] = False
    jumping[:, :, : margin + 1] = jumping[:, :, width - margin + 1 :] = False
    source = (here + down * width + right).where(jumping, here).flatten(1)
    jumping = jumping.flatten(1)
    going = jumping & jumping.gather(1, source) & (source > here.flatten())
    while going.any():
        source, going = source.gather(1, source).where(going, source), going.gather(1, source) & going
    return source
