"""Overlap of masks, and agreement of sampled masks with several annotations of an image.

Masks are boolean, or class labels together with `classes=C`; pixels labelled -100 do not count.
*Two empty masks are equal*: their overlap is one and their distance zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from leanbayes.metrics._validate import check_whole, flatten, pick
from leanbayes.metrics.calibration import equal_bins

# S samples, A annotations, M = S + A masks, B images, P pixels, C classes

IGNORED = -100
"""Label of pixels that do not count, as in torch's losses."""

LARGEST_CHUNK = 2**22
"""Pixels, or pairs of masks, in memory at a time: 32 MiB in float64."""


def iou(a: Tensor, b: Tensor, *, classes: int | None = None, pixels: int = 2) -> Tensor:
    """Return the intersection over union (Jaccard index), |a & b| / |a | b|; one for two empty masks.

    Args:
        a: masks (..., H, W), boolean, or labels if there are classes.
        b: masks of the same pixels; leading axes are broadcast.
        classes: C, for labels; the result then has a last axis of C classes. Pixels labelled -100 in either mask do
            not count.
        pixels: number of pixel axes at the end, 3 for volumes.
    """
    shared, sizes = _overlap(a, b, classes, pixels)
    return _share(shared, sizes - shared)


def dice(a: Tensor, b: Tensor, *, classes: int | None = None, pixels: int = 2) -> Tensor:
    """Return the Dice coefficient, 2 |a & b| / (|a| + |b|); one for two empty masks. Arguments as of `iou`."""
    shared, sizes = _overlap(a, b, classes, pixels)
    return _share(2 * shared, sizes)


def energy_distance(
    samples: Tensor,
    annotations: Tensor,
    *,
    annotators: Tensor | None = None,
    classes: int | None = None,
    background: bool = False,
    unbiased: bool = False,
) -> Tensor:
    """Return the squared generalised energy distance of each image: (B,), less is better (Kohl et al., 2018).

    GED^2 = 2 E d(s, y) - E d(s, s') - E d(y, y') with d = 1 - IoU, for samples s, s' and annotations y, y' of one
    image. It is zero if both are the same collection of masks.

    The means are over all pairs, a mask with itself included, as in the paper: between 0 and 2 for boolean masks, and
    too large if there are few. With classes, the IoU of two masks is averaged over the classes in either of them; it
    is one if there are none.

    Args:
        samples: masks (S, B, ...) from S draws; all axes after the second are pixels.
        annotations: masks (A, B, ...). A pixel that one annotation labels -100 does not count in any mask of the image.
        annotators: for images with different numbers of annotations: the number (B,) of valid ones, which come first,
            or a boolean (A, B). Other annotations are not read.
        classes: C, if masks are labels; None if they are boolean.
        background: count class 0 like the others.
        unbiased: average over pairs of different masks instead. The expectation is then that of infinitely many masks;
            single values may be below zero. Needs two samples and two annotations of each image.
    """
    s, itself, distances = len(samples), int(unbiased), []
    for similar, exist in _similarities(samples, annotations, annotators, classes, background):
        apart, kept, count = 1 - similar, exist.double(), exist.sum(1)
        if unbiased and min(s, int(count.min())) < 2:
            raise ValueError(
                f"expected at least two samples and two annotations of every image for unbiased=True, got {s} and "
                f"{int(count.min())}; unbiased=False needs one of each"
            )
        across = (apart[:, :s, s:].mean(1) * kept).sum(1) / count
        # A mask has no distance to itself: only the number of pairs depends on `unbiased`.
        among_samples = apart[:, :s, :s].sum((1, 2)) / (s * (s - itself))
        among_annotations = torch.einsum("bi,bij,bj->b", kept, apart[:, s:, s:], kept) / (count * (count - itself))
        distances.append(2 * across - among_samples - among_annotations)
    return torch.cat(distances)


def matched_iou(
    samples: Tensor,
    annotations: Tensor,
    *,
    annotators: Tensor | None = None,
    classes: int | None = None,
    background: bool = False,
) -> Tensor:
    """Return the Hungarian-matched IoU of each image: (B,), more is better (Kohl et al., 2019).

    Samples and annotations are repeated up to the least common multiple of their numbers. Each sample is assigned to
    one annotation so that the mean overlap, the result, is largest. Arguments as of `energy_distance`.
    """
    from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

    s, scores = len(samples), []
    for similar, exist in _similarities(samples, annotations, annotators, classes, background):
        for overlap, kept in zip(similar[:, :s, s:].cpu().numpy(), exist.cpu().numpy(), strict=True):
            table = overlap[:, kept]
            rows = math.lcm(*table.shape)
            table = table.repeat(rows // table.shape[0], 0).repeat(rows // table.shape[1], 1)
            scores.append(table[linear_sum_assignment(table, maximize=True)].mean())
    return torch.tensor(scores, dtype=torch.float64, device=samples.device)


class PixelCalibration(NamedTuple):
    """Calibration error of pixels, and mean difference between their probabilities and the annotators' votes."""

    ece: Tensor
    vote_error: Tensor


def pixel_calibration(
    probabilities: Tensor, annotations: Tensor, *, annotators: Tensor | None = None, bins: int = 15
) -> PixelCalibration:
    """Compare the probabilities of pixels with the votes of several annotators.

    `ece` is the expected calibration error with each annotator's label of each pixel as one target. `vote_error` is
    the mean of |p_c - share of votes for c| over classes and pixels with a vote.

    Args:
        probabilities: (B, C, ...), such as `p.mean` of a prediction.
        annotations: labels (A, B, ...), or boolean masks for two classes; -100 is no vote.
        annotators: which annotations exist, as for `energy_distance`.
        bins: number of equally wide bins of the confidence, as for `ece`.
    """
    pixels = (*probabilities.shape[:1], *probabilities.shape[2:])
    if annotations.shape[1:] != pixels or len(pixels) < 2 or not annotations.numel() or annotations.is_floating_point():
        raise ValueError(
            f"expected probabilities (B, C, ...) and annotations (A, B, ...) that are labels of the same pixels, got "
            f"{tuple(probabilities.shape)} and {annotations.dtype} of shape {tuple(annotations.shape)}"
        )
    votes = torch.zeros_like(probabilities, dtype=torch.float32)
    for annotation, exist in zip(annotations, _existing(annotations, annotators), strict=True):
        y = annotation.long().masked_fill(~_over_pixels(exist, annotation), IGNORED).to(votes.device)
        y, given = _read(y, votes.shape[1])
        votes.scatter_add_(1, y.clamp(min=0).unsqueeze(1), given.unsqueeze(1).to(votes.dtype))
    # Pixels weighted by their votes stand for the rows of all annotators, without copies.
    voted = votes.sum(1) > 0
    rows, _ = flatten(probabilities, torch.where(voted, 0, IGNORED))
    counts = votes.movedim(1, -1)[voted].double()
    voters, (confidence, predicted) = counts.sum(1), rows.double().max(1)
    right, sure = (equal_bins(confidence, each, bins).hits for each in (pick(counts, predicted), voters * confidence))
    return PixelCalibration(
        ece=(right - sure).abs().sum() / voters.sum(),
        vote_error=(rows - counts / voters.unsqueeze(1)).abs().mean(),
    )


def _overlap(a: Tensor, b: Tensor, classes: int | None, pixels: int) -> tuple[Tensor, Tensor]:
    """Return |a & b| and |a| + |b| as (...), or of each class as (..., C)."""
    check_whole(pixels, "pixels")
    if min(a.dim(), b.dim()) < pixels or a.shape[-pixels:] != b.shape[-pixels:] or 0 in a.shape[-pixels:]:
        raise ValueError(
            f"expected masks of the same pixels on the last {pixels} axes, got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    labels, axes = _labels(a, b, classes, background=True), tuple(range(-pixels, 0))
    (a, counts_a), (b, counts_b) = _read(a, classes), _read(b, classes)
    shared, sizes = [], []
    for label in labels:
        first, second = (a == label) & counts_b, (b == label) & counts_a
        shared.append((first & second).sum(axes))
        sizes.append(first.sum(axes) + second.sum(axes))
    if classes is None:
        return shared[0].double(), sizes[0].double()
    return torch.stack(shared, -1).double(), torch.stack(sizes, -1).double()


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """Return part / whole, and one for 0 / 0: two empty masks are equal."""
    return (part / whole).where(whole > 0, 1.0)


def _similarities(
    samples: Tensor, annotations: Tensor, annotators: Tensor | None, classes: int | None, background: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the IoU of all pairs of masks (b, M, M) and the valid annotations (b, A), for a few images at a time."""
    if samples.dim() < 3 or samples.shape[1:] != annotations.shape[1:] or not samples.numel() * len(annotations):
        raise ValueError(
            f"expected samples (S, B, ...) and annotations (A, B, ...) of the same images and pixels, got "
            f"{tuple(samples.shape)} and {tuple(annotations.shape)}"
        )
    labels = _labels(samples, annotations, classes, background)
    annotations = annotations.to(samples.device)
    existing = _existing(annotations, annotators)
    members = len(samples) + len(annotations)
    step = max(1, LARGEST_CHUNK // (members * max(members, samples[0, 0].numel())))
    for start in range(0, samples.shape[1], step):
        sampled, annotated, exist = (each[:, start : start + step] for each in (samples, annotations, existing))
        annotated = annotated.masked_fill(~_over_pixels(exist, annotated), 0)
        masks, counts = _read(torch.cat((sampled, annotated)).flatten(2).transpose(0, 1), classes)
        yield _pairwise_iou(masks, counts.all(1, keepdim=True), labels), exist.T


def _pairwise_iou(masks: Tensor, counts: Tensor, labels: range) -> Tensor:
    """Return the IoU of all pairs of masks (b, M, P), averaged over the labels in either of the two."""
    overlaps = occur = torch.zeros((), dtype=torch.float64, device=masks.device)
    for label in labels:
        shared = _shared((masks == label) & counts)
        sizes = shared.diagonal(dim1=1, dim2=2)
        union = sizes.unsqueeze(1) + sizes.unsqueeze(2) - shared
        overlaps = overlaps + _share(shared, union) * (union > 0)
        occur = occur + (union > 0)
    return _share(overlaps, occur)


def _shared(masks: Tensor) -> Tensor:
    """Return the number of pixels that pairs of masks (b, M, P) share: (b, M, M)."""
    step = max(1, LARGEST_CHUNK // masks.shape[1])
    shared = torch.zeros((), dtype=torch.float64, device=masks.device)
    for start in range(0, masks.shape[2], step):
        part = masks[..., start : start + step].double()  # float64 counts exactly, even under autocast
        shared = shared + part @ part.mT
    return shared


def _labels(a: Tensor, b: Tensor, classes: int | None, background: bool) -> range:
    """Return the labels whose pixels are compared: only True (1) if masks are boolean."""
    if a.is_floating_point() or b.is_floating_point() or (classes is None and (a.dtype, b.dtype) != (torch.bool,) * 2):
        raise ValueError(
            f"expected boolean masks, or class labels and classes=C, got {a.dtype} and {b.dtype} with "
            f"classes={classes}; of probabilities make labels first: p.argmax(1), or p > 0.5"
        )
    if classes is None:
        return range(1, 2)
    check_whole(classes, "classes", least=2)
    return range(0 if background else 1, classes)


def _read(masks: Tensor, classes: int | None) -> tuple[Tensor, Tensor]:
    """Return masks, labels as int64, and the pixels that count: all except those labelled -100."""
    if classes is None:
        return masks, torch.ones_like(masks)
    masks = masks.long()
    counts = masks != IGNORED
    wrong = masks[counts & ((masks < 0) | (masks >= classes))]
    if len(wrong):
        raise ValueError(
            f"expected labels between 0 and {classes - 1}, or {IGNORED} for pixels that do not count, got "
            f"{wrong[0].item()}"
        )
    return masks, counts


def _existing(annotations: Tensor, annotators: Tensor | None) -> Tensor:
    """Return a boolean (A, B), true for valid annotations."""
    most, images = annotations.shape[:2]
    exist = torch.ones(most, images, dtype=torch.bool, device=annotations.device)
    if annotators is None:
        return exist
    counts = annotators.shape == (images,) and not annotators.is_floating_point() and annotators.dtype != torch.bool
    if not counts and (annotators.dtype != torch.bool or annotators.shape != exist.shape):
        raise ValueError(
            f"expected annotators as whole numbers ({images},) or as a boolean ({most}, {images}), got "
            f"{annotators.dtype} of shape {tuple(annotators.shape)}"
        )
    numbers = annotators if counts else annotators.sum(0)
    if numbers.min() < 1 or numbers.max() > most:
        raise ValueError(
            f"expected between 1 and {most} annotations of every image, got {int(numbers.min())} to "
            f"{int(numbers.max())}; leave out images without annotations"
        )
    given = torch.arange(most, device=annotators.device).unsqueeze(1) < numbers if counts else annotators
    return given.to(annotations.device)


def _over_pixels(flags: Tensor, masks: Tensor) -> Tensor:
    return flags.view(*flags.shape, *(1,) * (masks.dim() - flags.dim()))
