"""`ambiguous_images`: synthetic images with a known distribution of the annotators' masks.

The masks of image n are its modes (N, M, H, W), zeros and ones; an annotator outlines mode m with probability p_m
(N, M). The distance of two masks is d(a, b) = 1 - |a and b| / |a or b|, zero for two empty ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from leanbayes.data.annotated.images import AnnotatedImages

# N images, M modes, H height, W width, S samples

SMALLEST = 16  # pixels of a side: shapes are then at least four pixels wide
BACKGROUND = 0.3
FAINT, BRIGHT = 0.45, 0.8  # grey levels of the shape
NOISE = 0.05  # a third of the smallest contrast


@dataclass(frozen=True, eq=False, kw_only=True)
class AmbiguousImages(AnnotatedImages):
    """Annotated images, and the distribution of their annotations.

    Attributes:
        modes: the masks that annotators choose from, (N, M, H, W) uint8: the whole shape, its left half, nothing.
        probabilities: of each mode, (N, M) float32.
    """

    modes: Tensor = field(repr=False)
    probabilities: Tensor = field(repr=False)


def ambiguous_images(
    *, train: int = 2000, val: int = 500, test: int = 500, size: int = 32, annotators: int = 4, seed: int = 0
) -> AmbiguousImages:
    """Make grey images with one shape each, and annotators who disagree about its outline.

    An image has a disc or a square on a darker background, with Gaussian noise. Its place, its radius (an eighth to a
    quarter of the image) and its grey level (faint to bright) are uniform. Each annotator independently outlines the
    whole shape, its left half, or nothing, with the probabilities::

        (0.1 + 0.5 t, 0.3, 0.6 - 0.5 t),   t = (mean grey of the shape's pixels - faint) / (bright - faint) in [0, 1]

    A network that predicts one mask, or independent pixels, is wrong about most images. `train`, `val` and `test` are
    numbers of images, `size` is their height and width, and `annotators` the number of masks of each.
    """
    splits = {"train": train, "val": val, "test": test}
    if min(splits.values()) < 1 or annotators < 1:
        raise ValueError(f"expected at least one image a split and one annotator, got {splits} and {annotators}")
    if size < SMALLEST:
        raise ValueError(f"expected images of at least {SMALLEST} pixels a side, got {size}. Take a larger size.")
    generator = torch.Generator().manual_seed(seed)
    modes, images = _draw(sum(splits.values()), size, generator)
    probabilities = _mode_probabilities(images, modes[:, 0])
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


def _draw(count: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw shapes wholly inside their images; return modes (N, 3, H, W) and noisy images (N, 1, H, W), uint8."""
    kind, radius, row, column, level = torch.rand(5, count, 1, 1, generator=generator, device=generator.device)
    radius = size / 8 * (1 + radius)
    room = size - 1 - 2 * radius
    pixels = torch.arange(size, device=generator.device)
    rows, columns = pixels[:, None] - (radius + row * room), pixels - (radius + column * room)
    disc = rows.square() + columns.square() <= radius.square()
    square = torch.maximum(rows.abs(), columns.abs()) <= radius
    whole = torch.where(kind < 0.5, disc, square)
    modes = torch.stack([whole, whole & (columns < 0), torch.zeros_like(whole)], 1).byte()
    clean = torch.where(whole, FAINT + level * (BRIGHT - FAINT), BACKGROUND)
    noisy = clean + NOISE * torch.randn(whole.shape, generator=generator, device=generator.device)
    return modes, noisy.clamp(0, 1).mul(255).round().byte()[:, None]


def _mode_probabilities(images: Tensor, shape: Tensor) -> Tensor:
    """Return the probabilities of the modes, (N, 3), from the noisy pixels, as a network could compute them."""
    grey = (images[:, 0] / 255 * shape).sum((1, 2)) / shape.sum((1, 2))
    brightness = ((grey - FAINT) / (BRIGHT - FAINT)).clamp(0, 1)
    return torch.stack([0.1 + 0.5 * brightness, torch.full_like(grey, 0.3), 0.6 - 0.5 * brightness], 1)


def true_pixel_probabilities(modes: Tensor, probabilities: Tensor) -> Tensor:
    """Return the probability that each pixel is marked, ``sum_m p_m mode_m``: (N, H, W)."""
    _check_modes(modes, probabilities)
    return torch.einsum("nm,nmhw->nhw", probabilities, modes.to(probabilities.dtype))


def mode_frequencies(samples: Tensor, modes: Tensor) -> Tensor:
    """Return the share of samples (S, N, H, W) that are nearest to each mode, (N, M); compare it with probabilities.

    The nearest mode has the largest intersection over union, averaged over marked and unmarked pixels. With marked
    pixels only, a sample with one stray pixel could not be near an empty mode.
    """
    if samples.dim() != 4 or modes.dim() != 4 or samples.shape[1:] != (len(modes), *modes.shape[2:]):
        raise ValueError(
            f"expected samples (S, N, H, W) of modes (N, M, H, W), got shapes {tuple(samples.shape)} and "
            f"{tuple(modes.shape)}. Bring both to the same images and size."
        )
    _check_masks(samples, "samples")
    marked = overlap(samples.transpose(0, 1), modes)
    unmarked = overlap(1 - samples.transpose(0, 1).float(), 1 - modes.float())
    nearest = (marked + unmarked).argmax(2)
    return torch.nn.functional.one_hot(nearest, modes.shape[1]).float().mean(1)


def optimal_energy_distance(
    modes: Tensor, probabilities: Tensor, *, annotators: int, samples: int | None = None
) -> Tensor:
    """Return the expected squared generalised energy distance of a perfect network to a few annotators, (N,).

    With D the distances of the modes, p their probabilities, q the shares of the annotators and s those of the
    samples, the distance is ``2 s'Dq - s'Ds - q'Dq``. Because ``E q'Dq = (1 - 1 / annotators) p'Dp``, samples from p
    have the expectation ``p'Dp (1 / annotators + 1 / samples)``. It is the minimum, because `d` is of negative type.
    samples=None is the limit of many samples.
    """
    _check_modes(modes, probabilities)
    if annotators < 1 or (samples is not None and samples < 1):
        raise ValueError(f"expected at least one annotator and one sample, got {annotators} and {samples}")
    distances = (1 - overlap(modes, modes)).to(probabilities.dtype)
    expected = torch.einsum("nm,nmk,nk->n", probabilities, distances, probabilities)
    return expected * (1 / annotators + (1 / samples if samples is not None else 0.0))


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """Return the intersection over union of each mask in (N, S, H, W) with each in (N, M, H, W): (N, S, M)."""
    a, b = a.flatten(2).float(), b.flatten(2).float()
    common = torch.einsum("nsp,nmp->nsm", a, b)
    union = a.sum(2)[:, :, None] + b.sum(2)[:, None] - common
    return torch.where(union > 0, common / union.clamp_min(1.0), 1.0)


def _check_modes(modes: Tensor, probabilities: Tensor) -> None:
    if modes.dim() != 4 or probabilities.shape != modes.shape[:2]:
        raise ValueError(
            f"expected modes (N, M, H, W) with probabilities (N, M), got shapes {tuple(modes.shape)} and "
            f"{tuple(probabilities.shape)}. Give each mode of each image one probability."
        )
    _check_masks(modes, "modes")


def _check_masks(masks: Tensor, what: str) -> None:
    between = (masks != 0) & (masks != 1)
    if between.any():
        raise ValueError(
            f"expected {what} of zeros and ones, got the value {masks[between][0]:g}. Sample masks, or cut "
            "probabilities at one half."
        )
