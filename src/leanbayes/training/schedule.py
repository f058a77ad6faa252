"""What changes during training, as pure functions of the progress: epochs done, counted in fractions.

Learning rate: `rate(recipe, t) = warm-up(t) * schedule(t)`, a factor of the recipe's rates. KL: `beta(recipe, t)`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal

from leanbayes.objective import linear_beta
from leanbayes.training.recipe import Recipe

LINEAR_START, LINEAR_END, LINEAR_REST = 0.5, 0.9, 0.01
"""The linear schedule of the implicit-nodes paper: from half of the epochs down to 1 % at nine tenths."""


def rate(recipe: Recipe, progress: float) -> float:
    """Return the factor of the learning rate of the weights after `progress` epochs."""
    if progress < recipe.warmup_epochs:
        return progress / recipe.warmup_epochs
    share = (progress - recipe.warmup_epochs) / (recipe.epochs - recipe.warmup_epochs)
    if recipe.schedule == "cosine":
        return cosine(share)
    if recipe.schedule == "straight":
        return max(0.0, 1 - share)
    if recipe.schedule == "step":
        return steps(progress, recipe.steps_down, recipe.decay)
    return linear(progress / recipe.epochs) if recipe.schedule == "linear" else 1.0


def posterior_rate(recipe: Recipe, progress: float) -> float:
    """Return the factor of the learning rate of the posterior after `progress` epochs."""
    return 1.0 if recipe.posterior_schedule == "constant" else rate(recipe, progress)


def resting(recipe: Recipe, progress: float) -> Literal["weights", "posterior"] | None:
    """Say which parameters are held fixed: in turn, first the posterior, from the conversion on; None where neither."""
    if not recipe.alternate_epochs or progress < recipe.convert_at_epoch:
        return None
    turn = int((progress - recipe.convert_at_epoch) // recipe.alternate_epochs)
    return "weights" if turn % 2 else "posterior"


def beta(recipe: Recipe, progress: float) -> float:
    """Return the weight of the KL after `progress` epochs: none before the conversion, then rising linearly."""
    if progress < recipe.convert_at_epoch:
        return 0.0
    return recipe.beta * linear_beta(progress - recipe.convert_at_epoch, recipe.anneal_epochs)


def tile(recipe: Recipe, epoch: int) -> bool:
    """Say whether every component sees every row of this epoch."""
    return recipe.tile or epoch >= recipe.epochs - recipe.tile_last_epochs


def cosine(share: float) -> float:
    """Return (1 + cos(pi t)) / 2: one at the start, zero at the end."""
    return 0.5 * (1 + math.cos(math.pi * min(1.0, share)))


def steps(progress: float, milestones: Sequence[int], decay: float) -> float:
    """Return decay^m after m milestones."""
    return float(decay ** bisect_right(milestones, progress))


def linear(share: float) -> float:
    """Return one for half of the time, then a straight line to 1 % at nine tenths, then 1 %."""
    down = (share - LINEAR_START) / (LINEAR_END - LINEAR_START)
    return 1 - (1 - LINEAR_REST) * min(1.0, max(0.0, down))
