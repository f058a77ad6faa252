"""Checks that the metrics share: accepted shapes, rejected values, and the treatment of ties."""

from __future__ import annotations

import torch
from torch import Tensor

# N targets, C classes


def flatten(probabilities: Tensor, y: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """Return class probabilities (N, C) and classes (N,) of the targets that count.

    Args:
        probabilities: (B, C), or dense (B, C, ...), classes on axis 1.
        y: classes (B,), or (B, ...).
        ignore_index: targets with this value are dropped. Metrics drop torch's -100; for another value, flatten first.
    """
    check_tensors(probabilities, y)
    if probabilities.dim() < 2 or probabilities.shape[1] < 2 or not probabilities.is_floating_point():
        raise ValueError(
            f"expected probabilities of at least two classes on axis 1, got {probabilities.dtype} of shape "
            f"{tuple(probabilities.shape)}; of one probability of yes make two: torch.stack((1 - p, p), 1)"
        )
    expected = (probabilities.shape[0], *probabilities.shape[2:])
    if y.shape != expected or y.is_floating_point():
        raise ValueError(
            f"expected class numbers of shape {tuple(expected)} as targets, got {y.dtype} of shape {tuple(y.shape)}"
        )
    y = y.long()  # before the comparison: a byte of 156 equals -100
    kept = y != ignore_index
    classes = y[kept].to(probabilities.device)
    each = probabilities.movedim(1, -1)[kept.to(probabilities.device)]
    _check_classes(each, classes)
    return each, classes


def log_probabilities(probabilities: Tensor) -> Tensor:
    """Return logarithms in float64; a zero, which is a rounded softmax, counts as the smallest number of its dtype."""
    limits = torch.finfo(probabilities.dtype)
    return probabilities.double().clamp(min=limits.tiny * limits.eps).log()


def pick(values: Tensor, y: Tensor) -> Tensor:
    """Return the value of each row's target class: (N, C) and (N,) give (N,)."""
    return values.gather(1, y.unsqueeze(1)).squeeze(1)


def matched(y: Tensor, like: Tensor) -> Tensor:
    """Return real targets in float64 and in the shape of predictions; only a last axis of one may be missing.

    Broadcasting (B,) against (B, 1) would compare every target with every prediction.
    """
    check_tensors(y)
    same = (tuple(like.shape), tuple(like.shape[:-1]) if like.dim() and like.shape[-1] == 1 else None)
    if tuple(y.shape) not in same:
        raise ValueError(f"expected targets of shape {tuple(like.shape)}, got {tuple(y.shape)}")
    return finite(y.to(like.device).view(like.shape), "targets")


def check_tensors(*values: object) -> None:
    """Raise unless all values are tensors."""
    other = next((value for value in values if not isinstance(value, Tensor)), None)
    if other is not None:
        raise TypeError(f"expected tensors, got {type(other).__name__}; torch.as_tensor makes one of an array")


def finite(values: Tensor, what: str) -> Tensor:
    """Return numbers in float64; raise if there are none, or if some are not finite."""
    check_tensors(values)
    if values.numel() == 0:
        raise ValueError(f"expected at least one number as {what}, got shape {tuple(values.shape)}")
    values = values.double()
    bad = int((~values.isfinite()).sum())
    if bad:
        raise ValueError(f"expected finite {what}, got {bad} of {values.numel()} that are NaN or infinite")
    return values


def average_over_ties(keys: Tensor, values: Tensor) -> Tensor:
    """Replace every value by the mean of the values with the same key, so that the order of ties has no effect."""
    _, group, counts = torch.unique(keys, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(counts), dtype=values.dtype, device=values.device).index_add_(0, group, values)
    means: Tensor = (sums / counts)[group]
    return means


def check_whole(number: int, what: str, least: int = 1) -> None:
    """Raise unless a number is an integer of at least `least`."""
    if not isinstance(number, int) or number < least:
        raise ValueError(f"expected {what} to be a whole number of at least {least}, got {number!r}")


def _check_classes(probabilities: Tensor, y: Tensor) -> None:
    """Raise unless rows (N, C) are distributions and the targets are among their classes."""
    if len(y) == 0:
        raise ValueError("expected at least one target that counts, got none")
    lowest, highest = int(y.min()), int(y.max())
    if lowest < 0 or highest >= probabilities.shape[1]:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"expected targets between 0 and {probabilities.shape[1] - 1}, got {wrong}")
    if not probabilities.isfinite().all():
        raise ValueError("expected probabilities, got NaN or infinite numbers; did the network diverge?")
    sums = probabilities.sum(1, dtype=torch.float64)
    worst = sums[(sums - 1).abs().argmax()].item()
    # Probabilities rounded to half precision add up to one within half a percent.
    if abs(worst - 1) > 1e-2 or probabilities.min() < 0:
        raise ValueError(
            f"expected probabilities, at least zero and with sum one over axis 1, got the sum {worst:.6g} and the "
            f"smallest value {probabilities.min().item():.6g}; of logits take the softmax first"
        )
