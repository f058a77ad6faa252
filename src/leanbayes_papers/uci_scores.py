"""How ensemble model patching judges a regression: RMSE and log predictive density in the units of the target.

The paper (appendix B.3) averages the outputs f_s of S draws and adds the noise 1 / tau to their variance:

    mean = 1/S sum_s f_s,    variance = 1/S sum_s f_s^2 - mean^2 + 1 / tau.

Its log predictive density is taken to be that of the Gaussian with these moments (`lpd`). The density of the mixture,
log 1/S sum_s Normal(y | f_s, 1 / tau), which is the first formula of the same appendix, is recorded beside it
(`lpd_mixture`); the two agree where the draws differ little compared with the noise. Without any spread both are at
most -1/2 log(2 pi / tau), which is -2.07 for tau = 0.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from leanbayes_papers.batched_regression import BatchedRegression

NUMBERS = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Activations of one layer that are computed at a time: what a cache holds, and what keeps a GPU busy."""


class Unit(NamedTuple):
    """What turns standardised targets of each split back into their own units: mean and standard deviation (T,)."""

    mean: Tensor
    std: Tensor


@torch.no_grad()
def functions(
    net: BatchedRegression, x: Tensor, *, draws: int, members: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """Yield draws of the outputs at test inputs, a few at a time: (S, T, n), standardised.

    Args:
        net: networks in evaluation mode; `members` of them, one after the other, belong to a split and are draws, too.
        x: standardised inputs (T * members, d, n).
        draws: how many of each network.
        members: networks of a split.
        generator: decides the draws; on the device of the networks.
    """
    nets, features, rows = x.shape
    widest = max(features, net.hidden_weight.shape[2])
    few = max(1, NUMBERS[x.device.type] // (nets * widest * rows))
    for start in range(0, draws, few):
        noise = net.noise(min(few, draws - start), 1, generator)
        outputs: Tensor = net(x.unsqueeze(0), noise)
        yield outputs.view(-1, nets // members, members, rows).transpose(1, 2).flatten(0, 1)


def score(outputs: Iterable[Tensor], y: Tensor, unit: Unit, *, precision: float) -> dict[str, list[float]]:
    """Return `rmse`, `lpd` and `lpd_mixture` of every split.

    Args:
        outputs: draws (S, T, n) in any number of pieces, standardised.
        y: targets (T, n) in their own units.
        unit: of the targets.
        precision: tau, in the units of the target.
    """
    y, centre, scale = y.double(), unit.mean.double().unsqueeze(-1), unit.std.double().unsqueeze(-1)
    count, total, squares = 0, torch.zeros_like(y), torch.zeros_like(y)
    density = torch.full_like(y, -math.inf)
    for piece in outputs:
        f = piece.double() * scale + centre - y  # distances from the targets: small numbers, whose squares are exact
        count += len(f)
        total += f.sum(0)
        squares += f.square().sum(0)
        density = torch.logaddexp(density, (-0.5 * precision * f.square()).logsumexp(0))
    mean = total / count
    variance = (squares / count - mean.square()).clamp_min(0) + 1 / precision
    floor = 0.5 * math.log(precision / (2 * math.pi))
    return {
        "rmse": mean.square().mean(1).sqrt().tolist(),
        "lpd": (-0.5 * (mean.square() / variance + (2 * math.pi * variance).log())).mean(1).tolist(),
        "lpd_mixture": (density - math.log(count) + floor).mean(1).tolist(),
    }
