"""Generated images: are they like real ones, and unlike each other?

Distances are taken between *features*, what a network makes of an image, so a figure means nothing without the name of
that network: `Features` carries it, and `compare_images` hands it on. Figures of different networks, or of different
numbers of images, do not compare.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from leanbayes.metrics._validate import check_whole, finite, flatten
from leanbayes.metrics.features import Features

# N rows, D features, C classes

LARGEST_CHUNK = 2**22
"""Distances that are held at a time, 32 MiB in float64."""


def reconstruction_error(x: Tensor, y: Tensor, per: Literal["pixel", "image"] = "pixel") -> Tensor:
    """Return the mean squared difference of images x (N, ...) and their reconstructions y; less is better.

    `per="pixel"` is the mean over all channels and pixels of all images, `per="image"` the mean over images of their
    sum: larger by the number of channels and pixels. The paper on variational nested dropout does not say which one
    its Table 6 has, nor the scale of its pixels; only ratios compare with it.
    """
    if x.shape != y.shape or x.dim() < 2:
        raise ValueError(
            f"expected images (N, ...) and as many reconstructions of the same shape, got {tuple(x.shape)} and "
            f"{tuple(y.shape)}"
        )
    if per not in ("pixel", "image"):
        raise ValueError(f"expected per to be pixel or image, got {per!r}")
    squares = (finite(x, "images") - finite(y, "reconstructions").to(x.device)).square()
    return squares.mean() if per == "pixel" else squares.flatten(1).sum(1).mean()


def frechet_distance(a: Tensor, b: Tensor) -> Tensor:
    """Return the Fréchet distance of the Gaussians with the moments of two sets of features (Heusel et al., 2017).

    |m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2)), a squared distance despite its name, of features (N, D) and
    (M, D). Covariances have N - 1 in the denominator. The fewer rows, the larger it comes out: compare sets of the
    same size, well above D.

    With C_a = R_a^T R_a and C_b = R_b^T R_b from QR decompositions of the centred rows, the last trace is the sum of
    the singular values of R_a R_b^T: real and accurate whatever the rank, where a matrix root may be neither.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1] or min(len(a), len(b)) < 2:
        raise ValueError(
            f"expected features (N, D) and (M, D) of at least two rows each, for a covariance, got {tuple(a.shape)} "
            f"and {tuple(b.shape)}"
        )
    (mean_a, root_a), (mean_b, root_b) = _moments(a), _moments(b.to(a.device))
    common: Tensor = torch.linalg.svdvals(root_a @ root_b.mT).sum()
    spread = root_a.square().sum() + root_b.square().sum() - 2 * common
    return (mean_a - mean_b).square().sum() + spread.clamp(min=0)


class InceptionScore(NamedTuple):
    """Mean of the scores of several parts of the rows, and their standard deviation."""

    mean: Tensor
    std: Tensor


def inception_score(probabilities: Tensor, splits: int = 10) -> InceptionScore:
    """Return exp(E KL(p(y | x) || p(y))) of class probabilities (N, C), between 1 and C (Salimans et al., 2016).

    High where every image is of a clear class and all classes are as frequent. The rows are cut into `splits` equal
    parts, each scored with the mean of its own rows as p(y). Parts are taken in the order of the rows: shuffle rows
    that are sorted by class. The deviation is that of the parts as they are, with their number in the denominator.
    """
    check_whole(splits, "splits")
    if probabilities.dim() != 2 or len(probabilities) < splits:
        raise ValueError(
            f"expected probabilities (N, C) of at least one row for each of {splits} splits, got "
            f"{tuple(probabilities.shape)}"
        )
    # There are no targets; with any, `flatten` checks that rows are distributions.
    rows, _ = flatten(probabilities, torch.zeros(len(probabilities), dtype=torch.long))
    scores = []
    for part in rows.double().tensor_split(splits):
        divergence = torch.xlogy(part, part) - torch.xlogy(part, part.mean(0))
        scores.append(divergence.sum(1).mean().exp())
    return InceptionScore(torch.stack(scores).mean(), torch.stack(scores).std(correction=0))


class Diversity(NamedTuple):
    """Mean Euclidean distance between two different rows, and from a row to the one nearest to it."""

    pairwise: Tensor
    nearest: Tensor


def sample_diversity(rows: Tensor, *, most: int = 2000, seed: int = 0) -> Diversity:
    """Return how far generated rows (N, ...), features or images, are from each other; zero where all are the same.

    Distances to the nearest shrink with the number of rows: compare sets of the same size.

    Args:
        rows: at least two.
        most: of more rows, so many are drawn without replacement.
        seed: of that draw; the same seed gives the same rows.
    """
    check_whole(most, "most", least=2)
    if rows.dim() < 2 or len(rows) < 2:
        raise ValueError(f"expected at least two rows, (N, ...), got shape {tuple(rows.shape)}")
    if len(rows) > most:
        chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed), device="cpu")[:most]
        rows = rows[chosen.to(rows.device)]
    points = finite(rows.detach(), "rows").flatten(1)
    points = points - points.mean(0)  # distances are differences of squares: a common offset would cost digits
    total, nearest = [], []
    step = max(1, LARGEST_CHUNK // len(points))
    for start in range(0, len(points), step):
        distances = torch.cdist(points[start : start + step], points)
        itself = distances.diagonal(start)
        total.append(distances.sum() - itself.sum())
        itself.fill_(math.inf)
        nearest.append(distances.min(1).values)
    pairs = len(points) * (len(points) - 1)
    return Diversity(torch.stack(total).sum() / pairs, torch.cat(nearest).mean())


class Generation(NamedTuple):
    """How generated images compare with real ones, in the eyes of one network."""

    network: str
    frechet: Tensor
    inception: InceptionScore
    diversity: Diversity


def compare_images(real: Tensor, generated: Tensor, network: Features, splits: int = 10) -> Generation:
    """Return Fréchet distance, inception score and diversity of generated images, and the name of the network.

    Args:
        real: images (N, ...).
        generated: images (M, ...), at best as many.
        network: whose features and probabilities count; diversity is that of the features.
        splits: parts of the inception score.
    """
    seen = network(generated)
    return Generation(
        network=network.name,
        frechet=frechet_distance(network(real).features, seen.features),
        inception=inception_score(seen.probabilities, splits),
        diversity=sample_diversity(seen.features),
    )


def _moments(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean (D,) of rows (N, D) and a root R of their covariance, C = R^T R."""
    rows = finite(features, "features")
    mean = rows.mean(0)
    return mean, torch.linalg.qr(rows - mean, mode="r").R / math.sqrt(len(rows) - 1)
