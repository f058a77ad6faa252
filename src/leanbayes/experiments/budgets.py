"""Recipes by budget: `quick` is minutes, `short` about an hour on two cores, `full` the schedule of the papers."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from leanbayes.training import Recipe

Budget = Literal["quick", "short", "full"]
BUDGETS: tuple[Budget, ...] = ("quick", "short", "full")

FEW = 5000
"""Fewer training images than this get small batches: what counts is the number of steps, also after a conversion."""

KL_EPOCHS = 200
"""Epochs until the KL has its full weight, as in the papers; shorter trainings end before."""


def recipe(budget: Budget, *, kind: str, rows: int, augment: str = "none") -> Recipe:
    """Return the recipe of a budget for data of a kind.

    Args:
        budget: "quick", "short" or "full".
        kind: "image", "table", "series" or "text".
        rows: number of training rows; few rows get small batches and many epochs.
        augment: the augmentation that is usual for the data; such data get the recipe of CIFAR.
    """
    if kind == "table":
        return _table(budget, rows)
    if kind in ("series", "text"):
        return _tokens(budget)
    if augment != "none":
        return _natural_images(budget, augment)
    if rows < FEW:
        epochs = {"quick": 40, "short": 120, "full": 300}[budget]
        return Recipe(epochs=epochs, batch_size=32, lr=0.1, weight_decay=1e-4, warmup_epochs=1, anneal_epochs=KL_EPOCHS)
    epochs = {"quick": 3, "short": 15, "full": 60}[budget]
    warmup = min(1.0, epochs / 10)
    return Recipe(epochs=epochs, batch_size=128, lr=0.05, warmup_epochs=warmup, anneal_epochs=KL_EPOCHS)


def stretched(recipe: Recipe, epochs: int) -> Recipe:
    """Return the recipe over another number of epochs: warm-up and steps keep their shares."""
    share = epochs / recipe.epochs
    return replace(
        recipe,
        epochs=epochs,
        warmup_epochs=recipe.warmup_epochs * share,
        milestones=tuple(round(epoch * share) for epoch in recipe.milestones),
    )


def _natural_images(budget: Budget, augment: str) -> Recipe:
    """The recipe of small natural images: 40 epochs in short, 250 with steps as the rank-1 paper has it in full."""
    if budget == "full":
        return Recipe(
            epochs=250,
            batch_size=128,
            lr=0.1,
            weight_decay=2e-4,
            schedule="step",
            milestones=(100, 200, 225),
            warmup_epochs=1,
            anneal_epochs=KL_EPOCHS,
            augment=augment,  # type: ignore[arg-type]
        )
    epochs = {"quick": 10, "short": 40}[budget]
    return Recipe(
        epochs=epochs,
        batch_size=256,
        lr=0.2,
        weight_decay=5e-4,
        warmup_epochs=3,
        anneal_epochs=KL_EPOCHS,
        augment=augment,  # type: ignore[arg-type]
    )


def _table(budget: Budget, rows: int) -> Recipe:
    """Adam, and as many epochs as make a few thousand steps."""
    steps = {"quick": 1500, "short": 6000, "full": 40_000}[budget]
    batch = 32 if rows < 2000 else 128
    epochs = max(5, round(steps * batch / rows))
    return Recipe(
        epochs=epochs, batch_size=batch, optimizer="adam", lr=1e-2, weight_decay=1e-4, anneal_epochs=KL_EPOCHS
    )


def _tokens(budget: Budget) -> Recipe:
    """Adam for networks that look tokens up; a few thousand rows are learned by heart after a dozen epochs."""
    epochs = {"quick": 4, "short": 6, "full": 8}[budget]
    return Recipe(epochs=epochs, batch_size=128, optimizer="adam", lr=2e-3, clip_norm=1.0, anneal_epochs=KL_EPOCHS)
