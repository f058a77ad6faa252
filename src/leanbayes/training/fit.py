"""One model in training: epochs, steps, and what happens between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn, Tensor

from leanbayes.core.conversion import own_likelihood, stochastic_layers, unwrap
from leanbayes.core.objective import check_mixture, Loss
from leanbayes.core.plain import plain_view
from leanbayes.distributions.likelihoods import Categorical, Likelihood
from leanbayes.methods.ensemble import Ensemble
from leanbayes.runtime._files import local, PathLike
from leanbayes.runtime.batches import Inputs, Output
from leanbayes.training import recipe as schedule
from leanbayes.training.data import Batch, batches_of, Data, groups, Placement, TensorBatches, training_batches
from leanbayes.training.devices import first_answer, launch, not_shared, on_first, share_buffers
from leanbayes.training.diagnostics import check_layout, explain, explained, TAME, TrainingError, watched
from leanbayes.training.meter import Meter, NotFinite
from leanbayes.training.objective import CompiledLoss, left_as_it_was, loss_of, LossOf, Phase
from leanbayes.training.optimizer import clip, optimizer_of, set_rates, to_train_mode, weights_frozen
from leanbayes.training.progress import Display, display, History, peak_memory_mb
from leanbayes.training.recipe import DEFAULT, Recipe
from leanbayes.training.state import Checkpoint, random_state, restore_random_state
from leanbayes.training.validation import validate


@dataclass(frozen=True)
class EpochState:
    """What a callback is told after an epoch.

    Attributes:
        epoch: number of epochs done.
        model: what was trained in it, on the training device: before a late conversion, the plain network.
        row: the epoch's row of the history.
        history: all rows so far.
        fabric: Lightning's Fabric, for what concerns all processes.
    """

    epoch: int
    model: nn.Module
    row: dict[str, Any]
    history: History
    fabric: Any


@dataclass(frozen=True)
class FitArguments:
    """What `fit` was asked for beside the recipe; see there."""

    train: Data
    likelihood: Loss | None
    validation: Data | None
    folder: Path | None
    resume: bool
    callbacks: Sequence[Callable[[EpochState], object]]
    output: Output | None


def run(model: nn.Module, recipe: Recipe, wishes: FitArguments, fabric: Any, shown: Display, done: int) -> History:
    """Train one model on the device of `fabric`, and show progress after `done` epochs of others."""
    likelihood = wishes.likelihood or own_likelihood(model) or Categorical()
    phase = Phase(model, likelihood, recipe.precision)
    resting = weights_frozen(phase) if recipe.freeze else nullcontext()
    with left_as_it_was(phase, fabric.device, channels_last=recipe.channels_last), resting:
        return Training(phase, likelihood, recipe, wishes, fabric).run(shown, done)


class Training:
    """A model, its data and its optimiser on the training device."""

    def __init__(self, phase: Phase, likelihood: Loss, recipe: Recipe, wishes: FitArguments, fabric: Any) -> None:
        """Set everything up, and look whether states can be written."""
        self.recipe, self.wishes, self.fabric, self.likelihood = recipe, wishes, fabric, likelihood
        check_mixture(likelihood, recipe.aggregate)  # now, not in the last epochs
        self._take_data(phase.network)
        self.checkpoint: Checkpoint | None = None
        if wishes.folder is not None:
            self.checkpoint = Checkpoint(wishes.folder, recipe, self.batches.rows)
            on_first(fabric, partial(self.checkpoint.prepare, keep=wishes.resume))
        self.full, self.plain = phase, phase
        if recipe.convert_at_epoch and any(True for _ in stochastic_layers(phase)):
            self.plain = Phase(plain_view(phase.network), likelihood, recipe.precision)
        # What Fabric makes of them: DistributedDataParallel with several processes, else the same.
        self.modules = {one: fabric.strategy.setup_module(one) for one in dict.fromkeys((self.full, self.plain))}
        self.losses: dict[tuple[Phase, bool], LossOf] = {}
        self.optimizer = optimizer_of(phase, recipe)
        self.meter = Meter(fabric, self.optimizer)
        self.first = True

    def run(self, shown: Display, done: int) -> History:
        """Train to the end, from the beginning or from the last state."""
        if self.fabric.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.fabric.device)
        torch.manual_seed(self.recipe.seed)
        history = History()
        if self.checkpoint is not None:
            history = self.checkpoint.load(self.full, self.optimizer)
        shown.begin(done + len(history))
        for epoch in range(len(history), self.recipe.epochs):
            row = self._epoch(epoch, lambda share, values: shown.step(done + len(history) + share, values))
            history.append(row)
            if self.checkpoint is not None:
                on_first(self.fabric, partial(self.checkpoint.save, self.full, self.optimizer, history))
            shown.epoch(done + len(history), row)
            self._call_back(history)
        self.optimizer.zero_grad()
        return history

    def _take_data(self, network: nn.Module) -> None:
        fabric, wishes = self.fabric, self.wishes
        check_layout(network, wishes.train, wishes.validation)
        placement = Placement(fabric.device, fabric.global_rank, fabric.world_size, self.recipe)
        self.batches = training_batches(wishes.train, placement)
        self.validation = None if wishes.validation is None else batches_of(wishes.validation, placement)
        if self.validation is not None and not self.validation.rows:
            raise ValueError("expected rows to validate on, got none; leave validation out")
        if self.validation is not None and not isinstance(self.likelihood, Likelihood):
            raise TypeError("validation needs a likelihood that predicts, such as lb.Categorical(), got a plain loss")

    def _epoch(self, epoch: int, show: Callable[[float, dict[str, Any]], None]) -> dict[str, Any]:
        """Train one epoch and return its row of the history."""
        phase = self._phase(epoch)
        to_train_mode(phase, freeze=self.recipe.freeze)
        self.meter.start()
        random, clock = random_state(self.fabric.device), time.perf_counter()
        try:
            for group in groups(self.batches.epoch(epoch), self.recipe.accumulate):
                progress = epoch + self.meter.steps / self.batches.steps
                if self._step(epoch, progress, group):
                    speed = self.fabric.world_size * self.meter.rows / (time.perf_counter() - clock)
                    show(progress - epoch, self.meter.means() | {"lr": self.lr, "rows_per_second": speed})
            self.meter.look()
        except NotFinite as problem:
            raise TrainingError(self._explanation(epoch, problem, random)) from None
        row = {"epoch": epoch + 1, **self.meter.means(), "beta": self.beta, "lr": self.lr}
        row |= {"seconds": time.perf_counter() - clock, "peak_memory_mb": peak_memory_mb(self.fabric.device)}
        share_buffers(self.fabric, self.full)
        return row | self._validate(phase)

    def _step(self, epoch: int, progress: float, group: list[Batch]) -> bool:
        """Make one step with the batches of a group, as if they were one; return whether a loss was looked at."""
        self.lr = set_rates(self.optimizer, self.recipe, progress)
        self.beta = schedule.beta(self.recipe, progress)
        self.optimizer.zero_grad()
        rows, looked = sum(len(y) for _, y in group), False
        for x, y in group[:-1]:
            with not_shared(self.modules[self._phase(epoch)]):
                looked |= self._add_gradient(epoch, x, y, len(y) / rows)
        x, y = group[-1]
        looked |= self._add_gradient(epoch, x, y, len(y) / rows)
        clip(self.full, self.recipe)
        self.optimizer.step()
        return looked

    def _add_gradient(self, epoch: int, x: Inputs, y: Tensor, share: float) -> bool:
        """Add the gradient of a batch, which is this share of its group; return whether the loss was looked at."""
        self.meter.before()
        with self._first_step(epoch, x, y) if self.first else nullcontext():
            terms = self._loss(epoch)(x, y, self.beta)
        self.first = False
        looked = self.meter.add(terms, len(y))
        loss = terms.loss if share == 1 else terms.loss * share
        loss.backward()  # type: ignore[no-untyped-call]
        return looked

    @contextmanager
    def _first_step(self, epoch: int, x: Inputs, y: Tensor) -> Iterator[None]:
        """Return a context in which wrong data are noticed before anything is learned from them."""
        targets = self.batches.y if isinstance(self.batches, TensorBatches) else y
        network, output = self._phase(epoch).network, self.wishes.output
        # A hook would be compiled into the loss, and its removal compile the loss anew.
        watch = nullcontext() if self.recipe.compile else watched(network, self.likelihood, targets, output)
        with explained(x), watch:
            yield

    def _phase(self, epoch: int) -> Phase:
        return self.plain if epoch < self.recipe.convert_at_epoch else self.full

    def _loss(self, epoch: int) -> LossOf:
        """Return the loss of an epoch: of its network, split or tiled."""
        phase, tile = self._phase(epoch), schedule.tile(self.recipe, epoch)
        if (phase, tile) not in self.losses:
            loss = self._eager_loss(self.modules[phase], tile)
            self.losses[phase, tile] = CompiledLoss(loss, phase, self.fabric.device) if self.recipe.compile else loss
        return self.losses[phase, tile]

    def _eager_loss(self, module: nn.Module, tile: bool) -> LossOf:
        rows, output = self.batches.rows, self.wishes.output
        return loss_of(module, self.likelihood, self.recipe, rows=rows, tile=tile, output=output)

    def _validate(self, phase: Phase) -> dict[str, Any]:
        if self.validation is None:
            return {}
        assert isinstance(self.likelihood, Likelihood)
        with self._own_randomness():
            return validate(phase, self.validation, self.likelihood, self.wishes.output, self.fabric)

    def _call_back(self, history: History) -> None:
        model = self._phase(len(history) - 1).network
        for callback in self.wishes.callbacks:
            with self._own_randomness():
                callback(EpochState(len(history), model, history[-1], history, self.fabric))

    def _own_randomness(self) -> AbstractContextManager[None]:
        """Return a context whose random draws do not change the training."""
        device = self.fabric.device
        return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])

    def _explanation(self, epoch: int, problem: NotFinite, random: dict[str, Tensor]) -> str:
        """Repeat the step that failed, with its batch and its noise, and say what broke."""
        device, phase = self.fabric.device, self._phase(epoch)
        restore_random_state(random, device)
        x, y = next(islice(self.batches.epoch(epoch), problem.step, None))
        restore_random_state(problem.random, device)
        loss = self._eager_loss(phase, schedule.tile(self.recipe, epoch))
        with torch.no_grad():
            cause = explain(phase.network, x, y, lambda: loss(x, y, self.beta))
        cause = first_answer(self.fabric, cause) or f"the same batch is finite when it is run again; {TAME}"
        kept = f" The state of epoch {epoch} is kept." if self.checkpoint is not None and epoch else ""
        return (
            f"the loss is {problem.value} at epoch {epoch + 1}, step {problem.step + 1} of {self.batches.steps}: "
            f"{cause}.{kept}"
        )


# -------------------- loop
# `fit`: train a model in place, an ensemble member by member.


MEMBER_SEEDS = 1000
"""Distance between the seeds of the members of an ensemble."""


def fit(  # noqa: PLR0913
    model: nn.Module,
    train: Data,
    recipe: Recipe = DEFAULT,
    *,
    likelihood: Loss | None = None,
    validation: Data | None = None,
    folder: PathLike | None = None,
    resume: bool = False,
    callbacks: Sequence[Callable[[EpochState], object]] = (),
    progress: bool = True,
    output: Output | None = None,
) -> History:
    """Train a model in place and return what happened in each epoch.

    A converted model is trained on the evidence lower bound, a plain one on its likelihood, an ensemble member by
    member. In the end the model is on the device and in the modes it came with. Torch's generators are seeded by the
    recipe and left as training leaves them. On a CPU the same recipe, model and data give the same weights to the last
    bit, also when training was killed and resumed in between, and whatever callbacks draw at random.

    Args:
        model: converted or plain; itself trained, not a copy.
        train: `(inputs, targets)` as tensors, which are put on the device whole where they fit, a `Dataset`, or a
            `DataLoader` that yields such pairs.
        recipe: how to train.
        likelihood: default the model's own, else `Categorical`; or any loss `(outputs, y) -> loss`.
        validation: held-out data, of which valid_nll and valid_accuracy (valid_rmse) are taken after every epoch, from
            the mean of four draws.
        folder: where the state is kept after every epoch, in `checkpoint/`; None keeps none.
        resume: go on from the state in `folder`, if there is one; otherwise begin anew and remove it.
        callbacks: called with an `EpochState` after every epoch, when its state is on disk.
        progress: show a bar on a terminal, a few lines elsewhere.
        output: picks the tensor out of what the model returns; default itself, `.logits`, or item 0.

    Raises:
        TrainingError: if a loss is not finite, or a state cannot be written.
        TypeError: if something is of another kind than it says above.
        ValueError: if the data, the recipe or the state in `folder` do not fit.

    Example:
        >>> history = lb.fit(bnn, (x, y), Recipe(epochs=30), folder="runs/first", resume=True)
    """
    _check(recipe, folder, resume)
    place = None if folder is None else local(folder)
    fabric = launch(recipe)
    wishes = FitArguments(train, likelihood, validation, place, resume, callbacks, output)
    model = unwrap(model)
    with display(recipe.epochs * _count(model), shown=progress and fabric.is_global_zero) as shown:
        return _fit(model, recipe, wishes, fabric, shown, 0)


def _check(recipe: object, folder: object, resume: bool) -> None:
    if not isinstance(recipe, Recipe):
        raise TypeError(f"expected a recipe such as lb.Recipe(epochs=30), got {recipe!r}")
    if resume and folder is None:
        raise ValueError("resume=True has nothing to resume from; give the folder of the training, or resume=False")


def _fit(model: nn.Module, recipe: Recipe, wishes: FitArguments, fabric: Any, shown: Display, done: int) -> History:
    """Train a model after `done` epochs of others: on its own, or if it is an ensemble each of its members."""
    if not isinstance(model, Ensemble):
        return run(model, recipe, wishes, fabric, shown, done)
    history = History()
    for k, member in enumerate(model.members):
        own = replace(recipe, seed=recipe.seed + MEMBER_SEEDS * k)
        folder = None if wishes.folder is None else wishes.folder / f"member{k}"
        likelihood = wishes.likelihood or own_likelihood(member) or model.likelihood
        wanted = replace(wishes, folder=folder, likelihood=likelihood)
        rows = _fit(member, own, wanted, fabric, shown, done + len(history))
        history.extend(row | {"member": k} for row in rows)
    return history


def _count(model: nn.Module) -> int:
    """Return how many models are trained on their own."""
    return sum(map(_count, model.members)) if isinstance(model, Ensemble) else 1
