"""Ensembles that cost no more parameters than one network: how narrow their members have to be."""

from __future__ import annotations

import re
from bisect import bisect_left
from functools import cache

import torch

from leanbayes import models

STEPS = 100
"""Widths are tried in hundredths."""


def equal_parameters(net: str, members: int, *, num_outputs: int, input_shape: tuple[int, ...]) -> str:
    """Return the name of the narrower network of which `members` have as many parameters as one `net`, or nearly so.

    Args:
        net: `lenet`, `lenet-wWIDTH` or `wrn-DEPTH-WIDTH`.
        members: the number of members.
        num_outputs: number of classes.
        input_shape: of one image.

    Example:
        >>> equal_parameters("wrn-28-10", 4, num_outputs=10, input_shape=(3, 32, 32))
        'wrn-28-5'
    """
    stem, width = _split(net)

    def total(step: int) -> int:
        name = f"{stem}{step / STEPS:g}"
        return members * count(name, num_outputs=num_outputs, input_shape=input_shape)

    target = count(net, num_outputs=num_outputs, input_shape=input_shape)
    steps = range(1, round(width * STEPS) + 1)
    above = min(bisect_left(steps, target, key=total), len(steps) - 1)
    best = min(steps[max(0, above - 1)], steps[above], key=lambda step: abs(total(step) - target))
    return f"{stem}{best / STEPS:g}"


@cache
def count(net: str, *, num_outputs: int, input_shape: tuple[int, ...]) -> int:
    """Return the number of parameters of a network, without making any."""
    with torch.device("meta"):
        network = models.build(net, num_outputs=num_outputs, input_shape=input_shape)
    return sum(parameter.numel() for parameter in network.parameters())


def _split(net: str) -> tuple[str, float]:
    """Split the name of a network into what stands before its width, and the width."""
    if net == "lenet":
        return "lenet-w", 1.0
    found = re.fullmatch(r"(wrn-\d+-|lenet-w)([\d.]+)", net)
    if found is None:
        raise ValueError(f"expected a network that comes in any width, lenet or wrn-DEPTH-WIDTH, got {net!r}")
    return found[1], float(found[2])
