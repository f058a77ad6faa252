"""Losses as they come, without making a GPU wait for each: collected on the device, looked at now and then.

A loss that is not finite must neither pass unnoticed nor ruin the weights that would explain it. On a CPU every loss is
looked at before the step is taken. On a GPU a flag goes up, upon which fused optimisers leave the weights alone until
somebody looks, at most `LOOK_EVERY` steps later.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from leanbayes.core.objective import ElboTerms
from leanbayes.training.state import random_state

LOOK_EVERY = 50
"""Steps between two looks at a GPU, each of which waits for it."""


class NotFinite(Exception):
    """A loss was not finite.

    Attributes:
        step: of the epoch.
        value: of the loss.
        random: states of torch's generators before that step.
    """

    def __init__(self, step: int, value: float, random: dict[str, Tensor]) -> None:
        """Keep what is needed to repeat the step."""
        super().__init__(f"loss {value} at step {step}")
        self.step, self.value, self.random = step, value, random


class Meter:
    """Means over the rows of an epoch of loss, nll and kl."""

    def __init__(self, fabric: Any, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimiser the flag, where it can read it."""
        self.fabric = fabric
        self.every = LOOK_EVERY if fabric.device.type == "cuda" else 1
        self.flag: Tensor | None = None
        if fabric.device.type == "cuda":
            self.flag, self.one = torch.zeros((), device=fabric.device), torch.ones((), device=fabric.device)
            optimizer.found_inf = self.flag  # type: ignore[attr-defined]
        self.start()

    def start(self) -> None:
        """Begin an epoch."""
        self.steps = self.rows = 0
        self.sums = [0.0, 0.0, 0.0]
        self.pending: list[tuple[Tensor, int, dict[str, Tensor]]] = []

    def before(self) -> None:
        """Remember the noise of the coming step."""
        self.random = random_state(self.fabric.device)

    def add(self, terms: ElboTerms, rows: int) -> bool:
        """Take the terms of a step, as means over all processes; return whether it was time to look."""
        values = torch.stack((terms.loss.detach(), terms.nll.detach(), terms.kl.detach()))
        if self.fabric.world_size > 1:
            values = self.fabric.all_reduce(values, reduce_op="mean")
        if self.flag is not None:
            # What GradScaler does to gradients, in one kernel: the flag goes up if a value is not finite.
            torch._amp_foreach_non_finite_check_and_unscale_([values], self.flag, self.one)
        self.pending.append((values, rows, self.random))
        self.steps += 1
        if self.steps % self.every == 0:
            self.look()
            return True
        return False

    def look(self) -> None:
        """Add up what was collected; raise `NotFinite` at the first loss that is not."""
        if not self.pending:
            return
        first = self.steps - len(self.pending)
        table = torch.stack([values for values, _, _ in self.pending]).tolist()
        for position, (values, (_, rows, random)) in enumerate(zip(table, self.pending, strict=True)):
            if not math.isfinite(values[0]):
                raise NotFinite(first + position, values[0], random)
            self.rows += rows
            self.sums = [total + rows * value for total, value in zip(self.sums, values, strict=True)]
        self.pending = []

    def means(self) -> dict[str, float]:
        """Return the means over the rows seen so far in the epoch."""
        return {name: total / max(1, self.rows) for name, total in zip(("loss", "nll", "kl"), self.sums, strict=True)}
