"""`ambiguous_images`: made-up images whose annotators disagree by a known law: the right answer is computable."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from leanbayes.data.annotated import AnnotatedImages

# N images, S size, M modes

SMALLEST = 16  # pixels of a side: the shape is then at least four wide
BACKGROUND = 0.3
FAINT, BRIGHT = 0.45, 0.8  # grey levels of the shape
NOISE = 0.05  # a third of the smallest contrast


@dataclass(frozen=True, eq=False, kw_only=True)
class AmbiguousImages(AnnotatedImages):
    """Annotated images, and the law of their annotations.

    Attributes:
        modes: the masks that annotators choose among, (N, M, S, S) uint8: the whole shape, its left half, nothing.
        probabilities: of each mode, (N, M) float32; `leanbayes.data.mask_law` says what follows from them.
    """

    modes: Tensor = field(repr=False)
    probabilities: Tensor = field(repr=False)


class Scene(NamedTuple):
    """What images show; each attribute is (N, 1, 1)."""

    round: Tensor
    radius: Tensor
    row: Tensor
    column: Tensor
    level: Tensor


def ambiguous_images(
    *, train: int = 2000, val: int = 500, test: int = 500, size: int = 32, annotators: int = 4, seed: int = 0
) -> AmbiguousImages:
    """Make grey images with one shape each, and annotators who do not agree on what belongs to it.

    An image shows a disc or a square on a darker ground, somewhere, with a radius from an eighth to a quarter of the
    image and a grey level from faint to bright, all uniform, and Gaussian noise. Every annotator, on their own,
    outlines the whole shape, its left half, or nothing, with probabilities that can be read off the image::

        (0.1 + 0.5 t, 0.3, 0.6 - 0.5 t),   t = (mean grey of the shape's pixels - faint) / (bright - faint) in [0, 1]

    Each pixel of a bright shape is marked by most and of a faint one by few, so a network that predicts one mask, or
    pixels on their own, is wrong about most images; the shape itself is plain to see.

    Args:
        train: Number of training images.
        val: Number of validation images.
        test: Number of test images.
        size: Height and width of an image in pixels.
        annotators: Masks of each image.
        seed: Other images and annotators; the same seed gives the same ones.
    """
    splits = {"train": train, "val": val, "test": test}
    if min(splits.values()) < 1 or annotators < 1:
        raise ValueError(f"expected at least one image a split and one annotator, got {splits} and {annotators}")
    if size < SMALLEST:
        raise ValueError(f"expected images of at least {SMALLEST} pixels a side, got {size}. Take a larger size.")
    generator = torch.Generator().manual_seed(seed)
    scene = _draw_scene(sum(splits.values()), size, generator)
    modes = _modes(scene, size)
    images = _draw_images(scene, modes[:, 0], generator)
    probabilities = _law(images, modes[:, 0])
    chosen = torch.multinomial(probabilities, annotators, replacement=True, generator=generator)
    return AmbiguousImages(
        name="ambiguous",
        images=images,
        annotations=modes[torch.arange(len(modes), device=modes.device)[:, None], chosen],
        annotators=torch.full((len(modes),), annotators, device=modes.device),
        classes=("background", "shape"),
        splits=splits,
        modes=modes,
        probabilities=probabilities,
    )


def _draw_scene(count: int, size: int, generator: torch.Generator) -> Scene:
    """Draw shapes that lie wholly inside their image."""
    kind, radius, row, column, level = torch.rand(5, count, 1, 1, generator=generator, device=generator.device)
    radius = size / 8 * (1 + radius)
    room = size - 1 - 2 * radius
    return Scene(kind < 0.5, radius, radius + row * room, radius + column * room, FAINT + level * (BRIGHT - FAINT))


def _modes(scene: Scene, size: int) -> Tensor:
    """Return the masks of the three opinions, (N, 3, S, S) uint8."""
    pixels = torch.arange(size, device=scene.row.device)
    rows, columns = pixels[:, None] - scene.row, pixels - scene.column
    disc = rows.square() + columns.square() <= scene.radius.square()
    square = torch.maximum(rows.abs(), columns.abs()) <= scene.radius
    whole = torch.where(scene.round, disc, square)
    return torch.stack([whole, whole & (columns < 0), torch.zeros_like(whole)], 1).byte()


def _draw_images(scene: Scene, shape: Tensor, generator: torch.Generator) -> Tensor:
    """Paint the shapes and add noise, (N, 1, S, S) uint8."""
    clean = torch.where(shape.bool(), scene.level, BACKGROUND)
    noisy = clean + NOISE * torch.randn(shape.shape, generator=generator, device=generator.device)
    return noisy.clamp(0, 1).mul(255).round().byte()[:, None]


def _law(images: Tensor, shape: Tensor) -> Tensor:
    """Return the probabilities of the modes, (N, 3), from the pixels as they are: what a network could compute."""
    grey = (images[:, 0] / 255 * shape).sum((1, 2)) / shape.sum((1, 2))
    brightness = ((grey - FAINT) / (BRIGHT - FAINT)).clamp(0, 1)
    return torch.stack([0.1 + 0.5 * brightness, torch.full_like(grey, 0.3), 0.6 - 0.5 * brightness], 1)
