"""Known laws over masks: what a perfect network would predict of images whose annotators choose among few masks.

The masks of image n are its modes; an annotator outlines mode m with probability p_m. The distance of two masks is
d(a, b) = 1 - |a and b| / |a or b|, zero for two empty ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

# S samples, N images, M modes, H height, W width


def true_pixel_probabilities(modes: Tensor, probabilities: Tensor) -> Tensor:
    """Return how likely each pixel is to be marked, ``sum_m p_m mode_m``: (N, H, W).

    Args:
        modes: Masks of zeros and ones, (N, M, H, W).
        probabilities: Of each mode, (N, M).
    """
    _check_law(modes, probabilities)
    return torch.einsum("nm,nmhw->nhw", probabilities, modes.to(probabilities.dtype))


def mode_frequencies(samples: Tensor, modes: Tensor) -> Tensor:
    """Return the share of samples that are nearest to each mode, (N, M); to compare with the probabilities.

    Nearest is the mode with the largest intersection over union, averaged over marked and unmarked pixels: by the
    marked ones alone, no sample with a single stray pixel could be near an empty mode.

    Args:
        samples: Masks of zeros and ones, (S, N, H, W).
        modes: Masks of zeros and ones, (N, M, H, W).
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


def mode_distances(modes: Tensor) -> Tensor:
    """Return the distance between each pair of modes, (N, M, M)."""
    return 1 - overlap(modes, modes)


def optimal_energy_distance(
    modes: Tensor, probabilities: Tensor, *, annotators: int, samples: int | None = None
) -> Tensor:
    """Return the expected squared generalised energy distance of a perfect network to a few annotators, (N,).

    With D the distances of the modes, p their probabilities, q the shares of the annotators and s those of the
    samples, the distance is ``2 s'Dq - s'Ds - q'Dq``. As ``E q'Dq = (1 - 1 / annotators) p'Dp``, samples from the law
    itself have the expectation ``p'Dp (1 / annotators + 1 / samples)``. No other law has less: `d` is of negative type.

    Args:
        modes: Masks of zeros and ones, (N, M, H, W).
        probabilities: Of each mode, (N, M).
        annotators: How many masks of each image a network is compared with.
        samples: How many masks the network draws; None is the limit of many.
    """
    _check_law(modes, probabilities)
    if annotators < 1 or (samples is not None and samples < 1):
        raise ValueError(f"expected at least one annotator and one sample, got {annotators} and {samples}")
    spread = torch.einsum("nm,nmk,nk->n", probabilities, mode_distances(modes).to(probabilities.dtype), probabilities)
    return spread * (1 / annotators + (1 / samples if samples is not None else 0.0))


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """Return the intersection over union of each mask in (N, S, H, W) with each in (N, M, H, W): (N, S, M)."""
    a, b = a.flatten(2).float(), b.flatten(2).float()
    common = torch.einsum("nsp,nmp->nsm", a, b)
    union = a.sum(2)[:, :, None] + b.sum(2)[:, None] - common
    return torch.where(union > 0, common / union.clamp_min(1.0), 1.0)


def _check_law(modes: Tensor, probabilities: Tensor) -> None:
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
