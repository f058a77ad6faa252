"""`Recipe`: how to train, each field a flag of the command line; and its schedules.

Schedules are pure functions of the progress t, in epochs: `rate(recipe, t)` = warm-up(t) * schedule(t) is a factor of
the learning rate, `beta(recipe, t)` the weight of the KL.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, get_args, get_origin, get_type_hints, Literal

from leanbayes.core.objective import linear_beta
from leanbayes.methods._checks import check_at_least_zero, check_choice, check_positive, check_rate, check_switches

Optimizer = Literal["sgd", "adam"]
Schedule = Literal["cosine", "step", "linear", "straight", "constant"]
PosteriorSchedule = Literal["same", "constant"]
Aggregate = Literal["average", "mixture"]
Deal = Literal["rows", "draws"]
Augment = Literal["none", "flip", "crop", "crop_flip"]
Precision = Literal["32-true", "bf16-mixed"]

HIGHEST_ADAM_RATE = 0.1
"""Adam moves every weight by about its rate at every step: higher rates only destroy."""

OMITTED_AT_DEFAULT: dict[str, Any] = {"accumulate": 1, "freeze": False, "patience": 0, "extra_epochs": 0}
OMITTED_AT_DEFAULT |= {"extra_rate": 0.2, "restart_at_conversion": 0.0, "deal": "rows"}
"""Fields that `Recipe.fields` leaves out at these defaults: stored results are older and keep their job ids."""

LINEAR_START, LINEAR_END, LINEAR_FLOOR = 0.5, 0.9, 0.01
"""The linear schedule of the implicit-nodes paper: from half of the epochs down to 1 % at nine tenths."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train a network. Times are in epochs; the learning rate and the KL's weight change at every step.

    Attributes:
        epochs: passes over the training set.
        patience: stop when valid_nll has not improved for this number of epochs, and keep the best state; 0 trains to
            the last epoch. It needs a constant rate: other schedules are made for their last epoch.
        batch_size: rows of a batch, of all processes together.
        accumulate: batches per optimiser step. Their gradients are averaged by rows, as if they were one batch; the KL
            counts once. Components are balanced, and batch norms take statistics, within each batch.
        optimizer: "sgd" with Nesterov momentum, or "adam".
        lr: learning rate of the weights; for Adam, 1e-3 is usual.
        posterior_lr: learning rate of the posterior; None is `lr`.
        momentum: of SGD.
        weight_decay: of the weights; posteriors do not decay.
        schedule: "cosine" to zero; "step" by `decay` at each of `milestones`; "linear", constant for half of the
            epochs, then down to 1 % at nine tenths of them; "straight", a line to zero; "constant".
        posterior_schedule: "same" as the weights', or "constant" (as in the implicit-nodes paper).
        milestones: epochs of the steps; () is 30, 60 and 80 % of the epochs.
        decay: factor of each step.
        warmup_epochs: over which the rate rises from zero.
        extra_epochs: further epochs after the schedule, at a constant rate. `SWAG` sets them itself.
        extra_rate: the rate of these epochs, relative to `lr`.
        beta: weight of the KL; 1 is the evidence lower bound.
        anneal_epochs: over which the KL's weight rises from zero, counted from the conversion.
        tile: give every row to every component (K times the work) instead of one component per row.
        tile_last_epochs: do so in the last epochs only.
        samples: draws for each row.
        aggregate: "average" the log-likelihoods of a row's draws and components, or take the log of their "mixture",
            which needs several of them: `tile` or `samples`.
        deal: the draws of a row share its component ("rows"), or go to consecutive components ("draws"), as in the
            code of the implicit-nodes paper.
        alternate_epochs: train the weights and the posterior in turn, for this number of epochs each. The other has
            rate zero; the mean of patched copies counts as weights. 0 trains both at once.
        convert_at_epoch: train the plain network of the shared weights until then.
        restart_at_conversion: run the whole schedule, from the end of its warm-up, a second time in the epochs after
            the conversion, at this share of the rates; 0 continues the schedule. Milestones keep their shares.
        freeze: train the posterior alone. Shared weights are fixed; modules with buffers, such as batch norms, stay in
            eval mode. Then `lb.save(only="posterior")` keeps all that was learned.
        clip_norm: largest norm of the gradient.
        augment: augmentation of the images of a batch, on the device.
        precision: "bf16-mixed" runs the network under autocast; losses and KL stay in float32.
        accelerator: "auto", "cpu", "cuda", "mps", or another one that Lightning Fabric knows.
        devices: processes on each machine; `torchrun` overrides it.
        nodes: machines; `torchrun` overrides it.
        seed: of the order of rows, of the augmentation and of torch's generators.
        compile: compile the whole loss, network and KL, with `torch.compile`. On one GPU, full batches are also
            captured as a CUDA graph (`core/step_graph.py`), which spares the GPU the wait for Python.
        channels_last: keep images and convolutions in channels-last memory order.

    Example:
        >>> lb.fit(bnn, (x, y), Recipe(epochs=50, lr=0.05, convert_at_epoch=35))
    """

    epochs: int = 20
    patience: int = 0
    batch_size: int = 128
    accumulate: int = 1
    optimizer: Optimizer = "sgd"
    lr: float = 0.1
    posterior_lr: float | None = None
    momentum: float = 0.9
    weight_decay: float = 5e-4
    schedule: Schedule = "cosine"
    posterior_schedule: PosteriorSchedule = "same"
    milestones: tuple[int, ...] = ()
    decay: float = 0.2
    warmup_epochs: float = 0.0
    extra_epochs: int = 0
    extra_rate: float = 0.2
    beta: float = 1.0
    anneal_epochs: float = 0.0
    tile: bool = False
    tile_last_epochs: int = 0
    samples: int = 1
    aggregate: Aggregate = "average"
    deal: Deal = "rows"
    alternate_epochs: int = 0
    convert_at_epoch: int = 0
    restart_at_conversion: float = 0.0
    freeze: bool = False
    clip_norm: float | None = None
    augment: Augment = "none"
    precision: Precision = "32-true"
    accelerator: str = "auto"
    devices: int = 1
    nodes: int = 1
    seed: int = 0
    compile: bool = False
    channels_last: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.milestones, Iterable) and not isinstance(self.milestones, str):  # JSON has lists only
            object.__setattr__(self, "milestones", tuple(self.milestones))
        self._check_whole(1, "epochs", "batch_size", "accumulate", "samples", "devices", "nodes")
        self._check_whole(
            0, "patience", "tile_last_epochs", "alternate_epochs", "convert_at_epoch", "extra_epochs", "seed"
        )
        check_switches(self)
        self._check_numbers()
        self._check_choices()
        self._check_epochs()

    @property
    def all_epochs(self) -> int:
        """Epochs of the schedule, and those after it."""
        return self.epochs + self.extra_epochs

    @property
    def steps_down(self) -> tuple[int, ...]:
        """Epochs at which the step schedule multiplies the rate by `decay`."""
        return self.milestones or tuple(round(share * self.epochs) for share in (0.3, 0.6, 0.8))

    def fields(self) -> dict[str, Any]:
        """Return the fields by name, ready for JSON."""
        named = asdict(self) | {"milestones": list(self.milestones)}
        return {name: value for name, value in named.items() if OMITTED_AT_DEFAULT.get(name, ...) != value}

    def _check_whole(self, least: int, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not (isinstance(value, int) and not isinstance(value, bool) and value >= least):
                raise ValueError(f"expected {name} to be a whole number of at least {least}, got {value!r}")

    def _check_numbers(self) -> None:
        check_positive(lr=self.lr, extra_rate=self.extra_rate)
        for name in ("posterior_lr", "clip_norm"):
            if getattr(self, name) is not None:
                check_positive(**{name: getattr(self, name)})
        for name in ("weight_decay", "warmup_epochs", "beta", "anneal_epochs", "restart_at_conversion"):
            check_at_least_zero(**{name: getattr(self, name)})
        check_rate(momentum=self.momentum)
        if not (isinstance(self.decay, (int, float)) and 0 < self.decay <= 1):
            raise ValueError(f"expected decay to be above 0 and at most 1, got {self.decay!r}")
        if self.optimizer == "adam" and self.lr >= HIGHEST_ADAM_RATE:
            raise ValueError(f"expected lr to be below {HIGHEST_ADAM_RATE} for adam, got {self.lr!r}; 1e-3 is usual")

    def _check_choices(self) -> None:
        for name, kind in get_type_hints(Recipe).items():
            if get_origin(kind) is Literal:
                check_choice(name, getattr(self, name), get_args(kind))
        if self.aggregate != "average" and not (self.tile or self.tile_last_epochs or self.samples > 1):
            raise ValueError("expected aggregate='mixture' to have draws to mix: set tile, tile_last_epochs or samples")

        if self.deal == "draws" and self.samples == 1:
            raise ValueError("expected deal='draws' to have several draws of a row to deal: set samples")

    def _check_epochs(self) -> None:
        for name in ("convert_at_epoch", "warmup_epochs"):
            if getattr(self, name) >= self.epochs:
                raise ValueError(f"expected {name} to be below the {self.epochs} epochs, got {getattr(self, name)!r}")
        if (last := self.tile_last_epochs) > self.epochs:
            raise ValueError(f"expected tile_last_epochs to be at most the {self.epochs} epochs, got {last!r}")
        if self.freeze and (self.convert_at_epoch or self.alternate_epochs):
            raise ValueError("expected convert_at_epoch and alternate_epochs to be 0 where freeze fixes the weights")
        if self.patience and self.schedule != "constant":
            raise ValueError(f"expected schedule='constant' where patience may stop early, got {self.schedule!r}")
        steps: object = self.milestones
        numbers = isinstance(steps, tuple) and all(isinstance(epoch, (int, float)) for epoch in steps)
        if not numbers or list(self.milestones) != sorted(set(self.milestones)):
            raise ValueError(f"expected milestones to be rising epochs, got {self.milestones!r}")


DEFAULT = Recipe()


def rate(recipe: Recipe, progress: float) -> float:
    """Return the factor of the learning rate of the weights after `progress` epochs."""
    if recipe.extra_epochs and progress >= recipe.epochs:
        return recipe.extra_rate
    if recipe.restart_at_conversion and 0 < recipe.convert_at_epoch <= progress:
        share = (progress - recipe.convert_at_epoch) / (recipe.epochs - recipe.convert_at_epoch)
        again = recipe.warmup_epochs + share * (recipe.epochs - recipe.warmup_epochs)
        return recipe.restart_at_conversion * _shape(recipe, again)
    if progress < recipe.warmup_epochs:
        return progress / recipe.warmup_epochs
    return _shape(recipe, progress)


def _shape(recipe: Recipe, progress: float) -> float:
    """Return the factor of the schedule after the warm-up."""
    share = (progress - recipe.warmup_epochs) / (recipe.epochs - recipe.warmup_epochs)
    match recipe.schedule:
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
        case "straight":
            return max(0.0, 1 - share)
        case "step":
            return float(recipe.decay ** bisect_right(recipe.steps_down, progress))
        case "linear":
            down = (progress / recipe.epochs - LINEAR_START) / (LINEAR_END - LINEAR_START)
            return 1 - (1 - LINEAR_FLOOR) * min(1.0, max(0.0, down))
        case "constant":
            return 1.0


def posterior_rate(recipe: Recipe, progress: float) -> float:
    """Return the factor of the learning rate of the posterior after `progress` epochs."""
    return 1.0 if recipe.posterior_schedule == "constant" else rate(recipe, progress)


def fixed_part(recipe: Recipe, progress: float) -> Literal["weights", "posterior"] | None:
    """Return the part that is not trained now, in turn from the conversion on, first the posterior; None if neither."""
    if not recipe.alternate_epochs or progress < recipe.convert_at_epoch:
        return None
    turn = int((progress - recipe.convert_at_epoch) // recipe.alternate_epochs)
    return "weights" if turn % 2 else "posterior"


def beta(recipe: Recipe, progress: float) -> float:
    """Return the weight of the KL after `progress` epochs: zero before the conversion, then rising linearly."""
    if progress < recipe.convert_at_epoch:
        return 0.0
    return recipe.beta * linear_beta(progress - recipe.convert_at_epoch, recipe.anneal_epochs)


def tile(recipe: Recipe, epoch: int) -> bool:
    """Return whether every component sees every row of this epoch."""
    return recipe.tile or epoch >= recipe.epochs - recipe.tile_last_epochs
