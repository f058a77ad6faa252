"""Constants of the severities: CIFAR-10-C's for 32 pixels, ImageNet-C's for 224, interpolated in between.

With `size` the shorter side of the images:
    blend = log(size / 32) / log(224 / 32), clipped to [0, 1],     constant = (1 - blend) cifar + blend imagenet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

Scale = Literal["cifar", "imagenet"]
SEVERITIES = (1, 2, 3, 4, 5)

_CIFAR_SIZE, _IMAGENET_SIZE = 32, 224


class Level(NamedTuple):
    """One of five severities, and the position of the images between CIFAR (0) and ImageNet (1)."""

    severity: int
    blend: float


@dataclass(frozen=True)
class Table:
    """The constants of one corruption: for each benchmark five entries, numbers or tuples."""

    cifar: tuple[float, ...] | tuple[tuple[float, ...], ...]
    imagenet: tuple[float, ...] | tuple[tuple[float, ...], ...]

    def at(self, level: Level) -> list[float]:
        """Return the constants of a level."""
        rows = torch.tensor([self.cifar, self.imagenet], dtype=torch.float64).reshape(2, len(SEVERITIES), -1)
        cifar, imagenet = rows[:, level.severity - 1]
        return [float(value) for value in cifar.lerp(imagenet, level.blend)]


def blend_of(size: int, scale: Scale | None) -> float:
    """Return 0 for CIFAR's constants, 1 for ImageNet's; with None, by the logarithm of the size."""
    if scale not in ("cifar", "imagenet", None):
        raise ValueError(
            f"expected scale 'cifar' or 'imagenet' (or None, to go by image size), got {scale!r}. Pass one of them."
        )
    if scale is not None:
        return float(scale == "imagenet")
    way = math.log(size / _CIFAR_SIZE) / math.log(_IMAGENET_SIZE / _CIFAR_SIZE)
    return min(max(way, 0.0), 1.0)
