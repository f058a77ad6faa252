"""Noise corruptions: Gaussian, shot and impulse noise, and the two kinds of the implicit paper."""

from __future__ import annotations

from torch import Tensor

from leanbayes.shift.corruptions._random import Streams
from leanbayes.shift.corruptions.severities import Level, Table

# Standard deviation; photons at full brightness; share of elements that are hit.
GAUSSIAN_NOISE = Table(cifar=(0.04, 0.06, 0.08, 0.09, 0.10), imagenet=(0.08, 0.12, 0.18, 0.26, 0.38))
SHOT_NOISE = Table(cifar=(500, 250, 100, 75, 50), imagenet=(60, 25, 12, 5, 3))
IMPULSE_NOISE = Table(cifar=(0.01, 0.02, 0.03, 0.05, 0.07), imagenet=(0.03, 0.06, 0.09, 0.17, 0.27))

# The implicit paper increases both until only noise is left, here in five equal steps.
MIX_SHARE = (0.2, 0.4, 0.6, 0.8, 1.0)
SALT_AND_PEPPER = (0.2, 0.4, 0.6, 0.8, 1.0)


def gaussian_noise(images: Tensor, level: Level, streams: Streams) -> Tensor:
    """Add Gaussian noise: x + sigma e,  e ~ N(0, I)."""
    (sigma,) = GAUSSIAN_NOISE.at(level)
    return images + sigma * streams.normal(*images.shape[1:])


def shot_noise(images: Tensor, level: Level, streams: Streams) -> Tensor:
    """Count photons: Poisson(c x) / c."""
    (photons,) = SHOT_NOISE.at(level)
    return streams.poisson(photons * images) / photons


def impulse_noise(images: Tensor, level: Level, streams: Streams) -> Tensor:
    """Set a share of all elements to black or white, with even odds."""
    (share,) = IMPULSE_NOISE.at(level)
    return _set_to_black_or_white(images, share, streams)


def gaussian_mix(images: Tensor, level: Level, streams: Streams) -> Tensor:
    """Mix with Gaussian noise, eq. 28 of the implicit paper: (1 - g) x + g e,  e ~ N(0, I)."""
    share = MIX_SHARE[level.severity - 1]
    return (1 - share) * images + share * streams.normal(*images.shape[1:])


def salt_and_pepper(images: Tensor, level: Level, streams: Streams) -> Tensor:
    """Set each element to 0 or 1 with probability p, section 3.5 of the implicit paper."""
    return _set_to_black_or_white(images, SALT_AND_PEPPER[level.severity - 1], streams)


def _set_to_black_or_white(images: Tensor, share: float, streams: Streams) -> Tensor:
    hit = streams.uniform(*images.shape[1:]) < share
    return images.where(~hit, streams.uniform(*images.shape[1:]).round())
