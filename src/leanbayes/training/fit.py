"""`fit`: train a model in place, an ensemble member by member.

`fit` makes a `Trainer` for each network. `Trainer.run` loops over epochs and batches, `Trainer.step` makes one
optimiser step, and the loss is a function from `objective`.
"""

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

from leanbayes.core.conversion import is_stochastic, own_likelihood, stochastic_layers, unwrap
from leanbayes.core.objective import check_mixture, Loss
from leanbayes.core.plain import plain_view
from leanbayes.core.step_graph import CapturedStep, LossFunction
from leanbayes.distributions.likelihoods import Bernoulli, Categorical, check_answers, Likelihood
from leanbayes.methods._members import Members
from leanbayes.methods.ensemble import members_of
from leanbayes.runtime._files import local, PathLike
from leanbayes.runtime.batches import Inputs, Output
from leanbayes.training import diagnostics, objective
from leanbayes.training import recipe as schedule
from leanbayes.training.data import (
    Batch,
    batches_of,
    Data,
    groups,
    InOrder,
    Placement,
    TensorBatches,
    training_batches,
    values_of,
)
from leanbayes.training.devices import first_answer, launch, moved, not_shared, on_first, prepared, share_buffers
from leanbayes.training.diagnostics import Meter, NotFinite, TrainingError
from leanbayes.training.early_stopping import BestState, next_epoch, split_rows
from leanbayes.training.logs import check_loggers, EpochLog, Logger
from leanbayes.training.objective import NetworkWithLikelihood
from leanbayes.training.progress import Display, display, History, peak_memory_mb
from leanbayes.training.recipe import DEFAULT, Recipe
from leanbayes.training.state import Checkpoint, random_state, restore_random_state

MEMBER_SEEDS = 1000
"""Distance between the seeds of the members of an ensemble."""

SAVING = 0.05
"""Largest share of the time that goes into writing states, but for the first and the last."""


@dataclass(frozen=True)
class EpochState:
    """The argument of a callback, after an epoch.

    Attributes:
        epoch: number of finished epochs.
        model: the model trained in it, on the training device: before a late conversion, the plain network.
        row: the epoch's row of the history.
        history: all rows so far.
        fabric: Lightning's Fabric, for communication between processes; with one process, an object with its `device`,
            `world_size`, `global_rank`, `is_global_zero`, `broadcast`, `all_reduce`, `all_gather` and `barrier`.
        save: writes the state of this epoch now; without a call, only some epochs are on disk.
    """

    epoch: int
    model: nn.Module
    row: dict[str, Any]
    history: History
    fabric: Any
    save: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class FitArguments:
    """Arguments of `fit` in addition to the model and the recipe; see there."""

    train: Data
    likelihood: Loss | None
    validation: Data | None
    folder: Path | None
    resume: bool
    callbacks: Sequence[Callable[[EpochState], object]]
    output: Output | None
    log: EpochLog
    ensemble: Members | None = None
    """The model of several networks that this training alone serves."""


def fit(  # noqa: PLR0913
    model: nn.Module,
    train: Data,
    recipe: Recipe = DEFAULT,
    *,
    likelihood: Loss | None = None,
    validation: Data | float | None = None,
    folder: PathLike | None = None,
    resume: bool = False,
    callbacks: Sequence[Callable[[EpochState], object]] = (),
    loggers: Sequence[Logger] = (),
    progress: bool = True,
    output: Output | None = None,
) -> History:
    """Train a model in place and return the history of its epochs.

    A converted model is trained on the evidence lower bound, a plain one on its likelihood, an ensemble member by
    member. Methods that do not train their posterior (`LastLayerLaplace`, `SWAG`) train the plain network and compute
    it afterwards (`Method.after_training`). In the end the model has the device and the modes it came with. The recipe
    seeds torch's generators, and training advances them. On a CPU the same recipe, model and data give the same weights
    to the last bit. Kills, resumption and random draws in callbacks do not change them.

    Args:
        model: converted or plain; itself trained, not a copy.
        train: `(inputs, targets)` as tensors, which are moved to the device whole if they fit, a `Dataset`, or a
            `DataLoader` that yields such pairs.
        recipe: how to train.
        likelihood: default the model's own, else `Categorical`; or any loss `(outputs, y) -> loss`.
        validation: held-out data, or the share of the training rows to hold out, by class or target quantile. After
            every epoch, valid_nll and valid_accuracy (or valid_rmse) are computed from the mean of four draws. With
            `Recipe(patience=...)` they decide when to stop.
        folder: where the state is stored in `checkpoint/`, after an epoch and so often that writing takes at most a
            twentieth of the time, and at the end; every epoch is a line of `history.jsonl`. None stores none.
        resume: continue from the state in `folder`, if there is one; tensors must have the values they had, other data
            the number of rows. Otherwise start again and remove it.
        callbacks: called with an `EpochState` after every epoch. If one raises, the state of the epoch is stored.
        loggers: objects with `log_metrics(dict, step)`, called with the row of every epoch: loggers of Fabric or
            Lightning, or your own. A resumed training logs each epoch once.
        progress: show a bar on a terminal, a few lines elsewhere.
        output: picks the tensor from the model's result; default itself, `.logits`, or item 0.

    Raises:
        TrainingError: if a loss is not finite, or a state cannot be written.
        TypeError: if an argument is of another type than listed above.
        ValueError: if the data, the recipe or the state in `folder` do not fit.

    Example:
        >>> history = lb.fit(bnn, (x, y), Recipe(epochs=30), folder="runs/first", resume=True)
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"expected a recipe such as lb.Recipe(epochs=30), got {recipe!r}")
    if resume and folder is None:
        raise ValueError("resume=True has nothing to resume from; give the folder of the training, or resume=False")
    if recipe.patience and validation is None:
        raise ValueError("patience needs rows to validate on: pass validation=0.1, or held-out data")
    check_loggers(loggers)
    diagnostics.check_kinds(model, likelihood, callbacks)
    if isinstance(validation, float):
        train, validation = split_rows(train, validation, recipe.seed)
    place = None if folder is None else local(folder)
    fabric = launch(recipe)
    log = EpochLog(place, loggers, resume=resume) if fabric.is_global_zero else EpochLog(None, (), resume=False)
    arguments = FitArguments(train, likelihood, validation, place, resume, callbacks, output, log)
    history = History()
    with display(epochs_of(unwrap(model), recipe), shown=progress and fabric.is_global_zero) as shown:
        for network, own_recipe, own_arguments, columns in _networks(unwrap(model), recipe, arguments):
            with _trainer(network, own_recipe, own_arguments, fabric) as trainer:
                rows = trainer.run(shown, len(history), columns)
            history.extend(row | columns for row in rows)
    log.cut(len(history))
    return history


def _networks(
    model: nn.Module, recipe: Recipe, arguments: FitArguments
) -> Iterator[tuple[nn.Module, Recipe, FitArguments, dict[str, int]]]:
    """Yield each network to train with its recipe, arguments and columns of the history; of an ensemble, members.

    Each member learns noise of its own, from the initial one on; after the last, the common likelihood has them all.
    """
    members = members_of(model)
    if not members:
        yield model, recipe, arguments, {}
        return
    ensemble: Any = model
    if ensemble.method.post_hoc:
        likelihood = arguments.likelihood or ensemble.likelihood
        own_arguments = replace(arguments, likelihood=likelihood, ensemble=ensemble)
        yield members[0], ensemble.method.extended(recipe), own_arguments, {}
        return
    shared = arguments.likelihood or ensemble.likelihood
    own = shared.split(len(members)) if isinstance(shared, Likelihood) else ()
    parts: Sequence[Any] = own or [shared] * len(members)
    for k, member in enumerate(members):
        own_recipe = replace(recipe, seed=recipe.seed + MEMBER_SEEDS * k)
        folder = None if arguments.folder is None else arguments.folder / f"member{k}"
        likelihood = parts[k] if arguments.likelihood else own_likelihood(member) or parts[k]
        own_arguments = replace(arguments, folder=folder, likelihood=likelihood)
        for network, its_recipe, its_arguments, _ in _networks(member, own_recipe, own_arguments):
            yield network, its_recipe, its_arguments, {"member": k}
    if isinstance(shared, Likelihood):
        shared.join(own)


def epochs_of(model: nn.Module, recipe: Recipe) -> int:
    """Return the epochs of all networks that `fit` trains; early stopping may end one before."""
    members = members_of(model)
    if not members:
        return recipe.all_epochs
    ensemble: Any = model
    if ensemble.method.post_hoc:
        return int(ensemble.method.extended(recipe).all_epochs)
    return sum(epochs_of(member, recipe) for member in members)


@contextmanager
def _trainer(network: nn.Module, recipe: Recipe, arguments: FitArguments, fabric: Any) -> Iterator[Trainer]:
    """Make a trainer with the network on the training device, and frozen if asked; undo both afterwards."""
    likelihood = arguments.likelihood or own_likelihood(network) or Categorical()
    model = NetworkWithLikelihood(network, likelihood, recipe.precision)
    frozen = objective.weights_frozen(model) if recipe.freeze else nullcontext()
    with moved(model, fabric.device, channels_last=recipe.channels_last), frozen:
        yield Trainer(model, likelihood, recipe, arguments, fabric)


class Trainer:
    """One network in training, with its data and its optimiser.

    Attributes:
        model: the network with its likelihood.
        plain: the network trained before a late conversion, of the same weights; without one, `model`.
        convert_at: the first epoch that trains `model`; methods that fit their posterior afterwards have none.
        current: the one of both that is trained in this epoch.
        loss: of this epoch.
    """

    def __init__(
        self, model: NetworkWithLikelihood, likelihood: Loss, recipe: Recipe, arguments: FitArguments, fabric: Any
    ) -> None:
        self.recipe, self.arguments, self.fabric, self.likelihood = recipe, arguments, fabric, likelihood
        check_mixture(likelihood, recipe.aggregate)  # now, not in the last epochs
        self._place_data(model.network)
        self.methods = list(dict.fromkeys(layer.method for _, layer in stochastic_layers(model)))
        for method in self.methods:
            method.before_training(model.network, InOrder(self.batches), likelihood, output=arguments.output)
        post_hoc = bool(self.methods) and all(method.post_hoc for method in self.methods)
        self.convert_at = recipe.all_epochs if post_hoc else recipe.convert_at_epoch
        self.checkpoint: Checkpoint | None = None
        if arguments.folder is not None:
            batches = self.batches
            values = values_of(batches.x, batches.y) if isinstance(batches, TensorBatches) else None
            self.checkpoint = Checkpoint(arguments.folder, recipe, batches.rows, likelihood, values)
            on_first(fabric, partial(self.checkpoint.prepare, keep=arguments.resume))
        self.best = BestState(arguments.folder, recipe)
        if not arguments.resume and fabric.is_global_zero:
            self.best.forget()
        self.model = self.plain = model
        if self.convert_at and is_stochastic(model):
            self.plain = NetworkWithLikelihood(plain_view(model.network), likelihood, recipe.precision)
        # With several processes Fabric wraps them in DistributedDataParallel.
        self.modules = {one: prepared(fabric, one) for one in dict.fromkeys((self.model, self.plain))}
        self.collector: Any = None
        self.losses: dict[tuple[nn.Module, bool], LossFunction] = {}
        self.captured: CapturedStep | None = None
        self.optimizer = objective.make_optimizer(model, recipe)
        self.meter = Meter(fabric, self.optimizer)
        self.first = True
        self.next_save = 0.0

    def run(self, shown: Display, done: int, columns: dict[str, int]) -> History:
        """Train to the last epoch, from the beginning or from the stored state.

        `done` epochs of other networks come before; `columns` are added to the rows that are logged.
        """
        history, log = self._start(), self.arguments.log
        log.catch_up(done, [row | columns for row in history])
        shown.begin(done + len(history))
        while (begin := next_epoch(history, self.recipe)) is not None:
            epoch = len(history)
            if begin == self.recipe.epochs:
                self.best.restore(self.model, history)
            self._start_epoch(epoch)
            with self._failure_explained(epoch):
                for group in groups(self.batches.epoch(epoch), self.recipe.accumulate):
                    share = self.meter.steps / self.batches.steps
                    if self.step(group, begin + share):
                        speed = self.fabric.world_size * self.meter.rows / (time.perf_counter() - self.clock)
                        values = self.meter.means() | {"lr": self.lr, "rows_per_second": speed}
                        shown.step(done + epoch + share, values)
                self.meter.look()
            self._check_update(epoch)
            history.append(self._end_epoch(epoch, further=begin >= self.recipe.epochs))
            self._collect(history)
            self.best.consider(self.model, history)
            shown.epoch(done + len(history), history[-1])
            with self._own_randomness():
                on_first(self.fabric, partial(log.add, done + len(history) - 1, history[-1] | columns))
            self._call_back(history)
            last = next_epoch(history, self.recipe) is None
            on_first(self.fabric, partial(self._save, history, now=last))
        self.optimizer.zero_grad()
        self._complete(history)
        return history

    def _save(self, history: History, *, now: bool) -> None:
        """Write the state after an epoch: now, or if writing has taken a small share of the time so far."""
        start, checkpoint = time.perf_counter(), self.checkpoint
        if checkpoint is None or checkpoint.epoch == len(history) or not (now or start >= self.next_save):
            return
        self.best.save(history, partial(checkpoint.save, self.model, self.optimizer, history))
        end = time.perf_counter()
        self.next_save = end + (end - start) / SAVING

    def _call_back(self, history: History) -> None:
        """Call the callbacks after an epoch, before its state is written. If one raises, the state is written, too."""
        first = self.fabric.is_global_zero
        save: Callable[[], None] = partial(self._save, history, now=True) if first else lambda: None
        state = EpochState(len(history), self.current.network, history[-1], history, self.fabric, save)
        try:
            for callback in self.arguments.callbacks:
                with self._own_randomness():
                    callback(state)
        except BaseException:
            save()
            raise

    def step(self, group: list[Batch], progress: float) -> bool:
        """Make one optimiser step with a group of batches, as if they were one; return whether losses were read."""
        self.lr = objective.set_rates(self.optimizer, self.recipe, progress)
        self.beta = schedule.beta(self.recipe, progress)
        self.optimizer.zero_grad()
        rows, read = sum(len(y) for _, y in group), False
        for number, (x, y) in enumerate(group, 1):
            with nullcontext() if number == len(group) else not_shared(self.modules[self.current]):
                random = random_state(self.fabric.device)
                with self._first_batch(x, y) if self.first else nullcontext():
                    captured = None if self.captured is None else self.captured(x, y, self.beta)
                    terms = self.loss(x, y, self.beta) if captured is None else captured
                self.first = False
                read |= self.meter.add(terms, len(y), random)
                if captured is None:
                    loss = terms.loss if len(y) == rows else terms.loss * (len(y) / rows)
                    loss.backward()  # type: ignore[no-untyped-call]
        if self.recipe.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_norm)
        self.optimizer.step()
        return read

    def _place_data(self, network: nn.Module) -> None:
        fabric, arguments = self.fabric, self.arguments
        diagnostics.check_layout(network, arguments.train, arguments.validation)
        placement = Placement(fabric.device, fabric.global_rank, fabric.world_size, self.recipe)
        self.batches = training_batches(arguments.train, placement)
        self.validation = None if arguments.validation is None else batches_of(arguments.validation, placement)
        if self.validation is not None and not self.validation.rows:
            raise ValueError("expected rows to validate on, got none; leave validation out")
        if self.validation is not None and not isinstance(self.likelihood, Likelihood):
            raise TypeError("validation needs a likelihood that predicts, such as lb.Categorical(), got a plain loss")

    def _start(self) -> History:
        """Seed torch's generators, or restore the stored state; return the history so far."""
        if self.fabric.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.fabric.device)
        torch.manual_seed(self.recipe.seed)
        if self.checkpoint is None:
            return History()
        return self.checkpoint.load(self.model, self.optimizer, self._keep_collector)

    def _keep_collector(self, history: History) -> None:
        """Keep what an ensemble collects with the state, if the last epoch was a further one."""
        ensemble = self.arguments.ensemble
        further = bool(history) and history[-1].get("extra", False)
        found = ensemble.new_collector() if further and self.collector is None and ensemble is not None else None
        if found is not None:
            self.collector = self.model.collector = found.to(self.fabric.device)

    def _collect(self, history: History) -> None:
        self._keep_collector(history)
        if self.collector is not None:
            self.collector.collect(self.model.network)

    def _start_epoch(self, epoch: int) -> None:
        """Choose the network and the loss of an epoch."""
        self.current = self.plain if epoch < self.convert_at else self.model
        self.tile = schedule.tile(self.recipe, epoch)
        key = self.current, self.tile
        if key not in self.losses:
            loss = self._eager_loss(self.modules[self.current])
            self.losses[key] = objective.CompiledLoss(loss, self.current) if self.recipe.compile else loss
        if self.captured is None or self.captured.loss is not self.losses[key]:
            self.captured = None  # its memory first
            self.captured = self._capture_of(self.losses[key])
        self.loss = self.losses[key]
        objective.to_train_mode(self.current, freeze=self.recipe.freeze)
        if self.captured is not None:
            self.captured.look()
        self.meter.start()
        self.clock = time.perf_counter()

    def _capture_of(self, loss: LossFunction) -> CapturedStep | None:
        """Return the recorder of compiled steps on one GPU."""
        recipe, here = self.recipe, self.fabric
        alone = here.device.type == "cuda" and here.world_size == 1 and recipe.accumulate == 1
        return CapturedStep(loss, self.current) if recipe.compile and alone else None

    def _eager_loss(self, module: nn.Module) -> LossFunction:
        options: dict[str, Any] = {"rows": self.batches.rows, "tile": self.tile, "output": self.arguments.output}
        return objective.loss_function(module, self.likelihood, self.recipe, **options)

    @contextmanager
    def _first_batch(self, x: Inputs, y: Tensor) -> Iterator[None]:
        """Check the data in the first pass, before the first step."""
        targets = self.batches.y if isinstance(self.batches, TensorBatches) else y
        network, output = self.current.network, self.arguments.output
        if isinstance(self.likelihood, Bernoulli):
            check_answers(targets)
        checked: AbstractContextManager[None] = nullcontext()
        if not self.recipe.compile:  # a hook would be compiled into the loss, and its removal would recompile it
            checked = diagnostics.classes_checked(network, self.likelihood, targets, output)
        with diagnostics.types_explained(x), checked:
            yield

    def _end_epoch(self, epoch: int, *, further: bool) -> dict[str, Any]:
        """Return the epoch's row of the history, with scores on the validation data."""
        row = {"epoch": epoch + 1, **self.meter.means(), "beta": self.beta, "lr": self.lr}
        row |= {"extra": True} if further else {}
        row |= {"seconds": time.perf_counter() - self.clock, "peak_memory_mb": peak_memory_mb(self.fabric.device)}
        share_buffers(self.fabric, self.model)
        if self.validation is None:
            return row
        assert isinstance(self.likelihood, Likelihood)
        with self._own_randomness():
            where = self.validation, self.likelihood, self.arguments.output, self.fabric
            return row | objective.validate(self.current, *where)

    def _complete(self, history: History) -> None:
        """Return to the best state, and let the methods compute the part of the posterior that is not trained.

        The time counts in the last epoch. Further epochs have begun at the best state, and are kept.
        """
        if not history[-1].get("extra"):
            self.best.restore(self.model, history)
        clock, ensemble = time.perf_counter(), self.arguments.ensemble
        owners = [(method, self.model.network) for method in self.methods]
        owners += [] if ensemble is None else [(ensemble.method, ensemble)]
        with self._own_randomness():
            for method, model in owners:
                method.after_training(model, InOrder(self.batches), self.likelihood, output=self.arguments.output)
        if any(method.post_hoc for method, _ in owners):
            history[-1] |= {"seconds": history[-1]["seconds"] + time.perf_counter() - clock}

    def _own_randomness(self) -> AbstractContextManager[None]:
        """Return a context whose random draws do not change the training."""
        device = self.fabric.device
        return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])

    @contextmanager
    def _failure_explained(self, epoch: int) -> Iterator[None]:
        """Explain a loss that is not finite: repeat the step with its batch and noise, raise `TrainingError`."""
        device = self.fabric.device
        random = random_state(device)
        try:
            yield
        except NotFinite as problem:
            restore_random_state(random, device)
            x, y = next(islice(self.batches.epoch(epoch), problem.step, None))
            restore_random_state(problem.random, device)
            loss = self._eager_loss(self.current)
            with torch.no_grad():
                cause = diagnostics.explain(self.current.network, x, y, lambda: loss(x, y, self.beta), self.likelihood)
            again = f"the same batch is finite when it is run again; {diagnostics.TAME}"
            raise TrainingError(
                f"the loss is {problem.value} at epoch {epoch + 1}, step {problem.step + 1} of {self.batches.steps}: "
                f"{first_answer(self.fabric, cause) or again}.{self._kept()}"
            ) from None

    def _check_update(self, epoch: int) -> None:
        """Raise if an update broke parameters in the last step of an epoch, whose loss no step reads."""
        layer = diagnostics.broken_layer(self.current.network, updated=True)
        if layer is not None:
            raise TrainingError(
                f"the parameters of {layer} are not finite after epoch {epoch + 1}, its update broke; "
                f"{diagnostics.TAME}.{self._kept()}"
            )

    def _kept(self) -> str:
        """Return a sentence on the state that is left on disk, empty without one."""
        stored = 0 if self.checkpoint is None else self.checkpoint.epoch
        return f" The state of epoch {stored} is kept." if stored else ""
