"""Sweep over corruptions and severities: the same images as network inputs, clean and corrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from leanbayes.shift.corruptions import all_names, as_dtype, as_unit, corrupt, enlarge, names, SMALLEST
from leanbayes.shift.corruptions.severities import Scale, SEVERITIES


@dataclass(frozen=True, eq=False)
class Shift:
    """Corruptions, severities and images of a sweep.

    Iterating yields (corruption, severity, inputs of the network), first ("clean", 0, ...), one at a time.

    Attributes:
        images: raw images (N, C, H, W), uint8, or float between 0 and 1.
        y: classes (N,).
        inputs: turns raw images into inputs of the network; usually `dataset.inputs`.
        corruptions: names, from `all_names()`.
        severities: from 1 to 5.
        seed: of the corruptions.
        scale: of the constants, as in `corrupt`.
    """

    images: Tensor
    y: Tensor
    inputs: Callable[[Tensor], Tensor]
    corruptions: tuple[str, ...] = names()
    severities: tuple[int, ...] = SEVERITIES
    seed: int = 0
    scale: Scale | None = None

    def __post_init__(self) -> None:
        if len(self.images) != len(self.y):
            raise ValueError(f"expected one class per image, got {len(self.images)} images and {len(self.y)} classes.")
        unknown = [name for name in self.corruptions if name not in all_names()]
        if unknown:
            raise ValueError(f"expected corruptions among {', '.join(all_names())}; got {unknown}. Choose from these.")
        if not set(self.severities) <= set(SEVERITIES):
            raise ValueError(f"expected severities from 1 to 5, got {self.severities}. Clean images always come first.")

    def __len__(self) -> int:
        """Return the number of passes over the images."""
        return 1 + len(self.corruptions) * len(self.severities)

    def __iter__(self) -> Iterator[tuple[str, int, Tensor]]:
        yield "clean", 0, self.inputs(self.images)
        for name in self.corruptions:
            for severity in self.severities:
                yield name, severity, self.inputs(self.corrupted(name, severity))

    def corrupted(self, name: str, severity: int) -> Tensor:
        """Return the raw images under one corruption, in their own size.

        Images below 28 pixels are enlarged and corrupted. Only the change is averaged back: resizing itself would blur.
        """
        if min(self.images.shape[2:]) >= SMALLEST:
            return corrupt(self.images, name, severity, seed=self.seed, scale=self.scale)
        small = as_unit(self.images)
        large = enlarge(small)
        change = corrupt(large, name, severity, seed=self.seed, scale=self.scale) - large
        return as_dtype(small + F.interpolate(change, size=small.shape[2:], mode="area"), self.images.dtype)
