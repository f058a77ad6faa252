"""The fifteen common corruptions (Hendrycks & Dietterich, 2019) and the two of the implicit paper.

All severities of a corruption use the same random numbers. The constants are at the top of `noise`, `blur`, `weather`
and `digital`: those of CIFAR-10-C for 32 pixels and of ImageNet-C for 224. A few differ slightly, where a benchmark
changes images less at a higher severity.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.shift.corruptions import blur, digital, noise, weather
from leanbayes.shift.corruptions._random import Streams
from leanbayes.shift.corruptions.severities import blend_of, Level, Scale, SEVERITIES

SMALLEST = 28
Corruption = Callable[[Tensor, Level, Streams], Tensor]

_COMMON: tuple[Corruption, ...] = (
    noise.gaussian_noise,
    noise.shot_noise,
    noise.impulse_noise,
    blur.defocus_blur,
    blur.glass_blur,
    blur.motion_blur,
    blur.zoom_blur,
    weather.snow,
    weather.frost,
    weather.fog,
    weather.brightness,
    digital.contrast,
    digital.elastic_transform,
    digital.pixelate,
    digital.jpeg_compression,
)
_IMPLICIT_PAPER: tuple[Corruption, ...] = (noise.gaussian_mix, noise.salt_and_pepper)
_BY_NAME = {corruption.__name__: corruption for corruption in _COMMON + _IMPLICIT_PAPER}

_CHUNK = 2**20  # numbers of a chunk of images: memory does not grow with the number of images


def names() -> tuple[str, ...]:
    """Return the names of the fifteen common corruptions, in the order of the benchmark."""
    return all_names()[: len(_COMMON)]


def all_names() -> tuple[str, ...]:
    """Return the fifteen names, then those of the implicit paper, "gaussian_mix" and "salt_and_pepper"."""
    return tuple(_BY_NAME)


def corrupt(images: Tensor, name: str, severity: int, *, seed: int = 0, scale: Scale | None = None) -> Tensor:
    """Return corrupted images, of the same shape, dtype and device.

    Args:
        images: (N, C, H, W), one or three channels, at least 28 pixels; uint8, or float between 0 and 1.
        name: one of `all_names()`.
        severity: 1 to 5.
        seed: the result of image i depends on (seed, name, severity, i) and itself, not on other images.
        scale: constants of "cifar" (CIFAR-10-C) or "imagenet" (ImageNet-C). None: the former for 32 pixels, the latter
            for 224, interpolated in the logarithm of the shorter side.
    """
    _check(images, name, severity)
    level = Level(int(severity), blend_of(min(images.shape[2:]), scale))
    size = max(1, _CHUNK // images[0].numel()) if len(images) else 1
    corrupted = torch.empty_like(images)
    for start in range(0, len(images), size):
        chunk = images[start : start + size]
        streams = Streams(seed, name, range(start, start + len(chunk)), images.device)
        corrupted[start : start + size] = as_dtype(_BY_NAME[name](as_unit(chunk), level, streams), images.dtype)
    return corrupted


def enlarge(images: Tensor, size: int = 32) -> Tensor:
    """Return images whose shorter side is at least `size` pixels (bilinear), of the same dtype."""
    _check_shape(images)
    factor = max(1.0, size / min(images.shape[2:]))
    height, width = (round(side * factor) for side in images.shape[2:])
    return as_dtype(F.interpolate(as_unit(images), size=(height, width), mode="bilinear"), images.dtype)


def as_unit(images: Tensor) -> Tensor:
    """Return float32 between 0 and 1."""
    return images.float() / 255 if images.dtype == torch.uint8 else images.float()


def as_dtype(images: Tensor, dtype: torch.dtype) -> Tensor:
    """Return clipped images in a dtype; uint8 takes the nearest of 256 levels."""
    clipped = images.clamp(0, 1)
    return (255 * clipped).round().to(dtype) if dtype == torch.uint8 else clipped.to(dtype)


def _check(images: Tensor, name: str, severity: int) -> None:
    if name not in _BY_NAME:
        raise ValueError(f"expected one of the corruptions {', '.join(_BY_NAME)}; got {name!r}. Choose one of them.")
    if severity not in SEVERITIES:
        raise ValueError(
            f"expected a severity from 1 (mild) to 5 (strong), got {severity!r}. Clean images need no corruption."
        )
    _check_shape(images)
    _check_values(images)
    if min(images.shape[2:]) < SMALLEST:
        height, width = images.shape[2:]
        raise ValueError(
            f"expected images of at least {SMALLEST} x {SMALLEST} pixels, got {height} x {width}. "
            "Enlarge them first: leanbayes.shift.enlarge(images)."
        )


def _check_shape(images: Tensor) -> None:
    if images.dim() != 4 or images.shape[1] not in (1, 3):
        raise ValueError(
            f"expected images (N, C, H, W) of one or three channels, got shape {tuple(images.shape)}. "
            "Put the channels in the second place, and give grey images one."
        )


def _check_values(images: Tensor) -> None:
    if images.dtype == torch.uint8 or images.numel() == 0:
        return
    if not images.is_floating_point():
        raise ValueError(f"expected uint8 or float images, got {images.dtype}. Convert them to uint8.")
    low, high = images.min().item(), images.max().item()
    if not (low >= 0 and high <= 1):
        raise ValueError(
            f"expected float images between 0 and 1, got {low:g} to {high:g}. "
            "Corrupt raw images, before they are normalised."
        )
