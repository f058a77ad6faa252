"""One plain training for all rows of a seed: methods that convert late, or at the end, begin from its kept states.

A row that converts at epoch c trains the plain network for c epochs, bit for bit as the plain row of its seed does
(docs/design/0011). So the plain row keeps its state, and the others begin there:

| training of the plain row       | kept states                                                |
|---------------------------------|------------------------------------------------------------|
| a schedule with a last epoch    | after the epochs at which other rows convert               |
| one split, with patience        | the best so far: other rows convert there                  |
| a fold, with patience           | every fifth and the last; at the end, those that are used  |
| the final training after folds  | the last: other rows convert there                         |
| any, for Laplace and SWAG       | the last, with the best one: their posteriors come from it |

A kept state is a hard link to a checkpoint, whole or not there. A row without one trains from its beginning, to the
same bits. `discard` removes the states when the last row is done.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from leanbayes.compare.job import Job, plain_of, relocated
from leanbayes.core.conversion import is_stochastic, stochastic_layers
from leanbayes.core.plain import plain_view
from leanbayes.distributions.likelihoods import Likelihood
from leanbayes.evaluation.result import read_json, write_json
from leanbayes.methods._base import Method
from leanbayes.methods.ensemble import members_of
from leanbayes.runtime._files import write_whole
from leanbayes.runtime.batches import device_of
from leanbayes.training import EpochState, History, Recipe
from leanbayes.training.early_stopping import best_epoch, best_file, BestState, next_epoch
from leanbayes.training.objective import make_optimizer, NetworkWithLikelihood
from leanbayes.training.recipe import beta
from leanbayes.training.state import Checkpoint, header_of, STATE

FOLDER, KEY, END = "shared", "key.json", "end"
EVERY = 5
"""Epochs between the kept states of a fold: the common best epoch is not known before all folds have ended."""
OWN = {"convert_at_epoch", "restart_at_conversion", "posterior_lr"}
"""Fields of a recipe in which a row may differ from the plain one until it converts."""
FURTHER = {"extra_epochs", "extra_rate"}
"""Fields of the epochs that SWAG adds after the end."""
Made = tuple[nn.Module, Likelihood]


@dataclass(frozen=True)
class PlainStates:
    """Kept states of the plain training of a seed.

    Attributes:
        folder: where they are.
        key: the settings and the data of that training, as JSON values.
        epochs: the plain row keeps its states after these; empty if no other row needs one. That of the recipe stands
            for the end of the training.
    """

    folder: Path
    key: Mapping[str, Any]
    epochs: tuple[int, ...] = ()

    def keep(self, training: Path, recipe: Recipe, fold: int | None, state: EpochState | None = None) -> None:
        """Keep the state after an epoch, if it is wanted. Without `state`, it is the one on disk.

        The last state of a fold is on disk when its training has ended.
        """
        if not self.epochs:
            return
        history = _stored_history(training) if state is None else state.history
        epoch, wanted = len(history), []
        if epoch and self._wants(history, recipe, fold):
            wanted.append(f"epoch{epoch}")
        if epoch and recipe.epochs in self.epochs and next_epoch(history, recipe) is None:
            wanted.append(END)
        for name in wanted:
            folder = self._of(fold) / name
            if not (folder / STATE).is_file():
                self._keep(training, folder, state, best=name == END)
        if fold is None and recipe.patience and f"epoch{epoch}" in wanted:
            self.prune(fold, epoch)

    def _keep(self, training: Path, folder: Path, state: EpochState | None, *, best: bool) -> None:
        if state is not None:
            state.save()
        self._write_key()
        (folder / STATE).parent.mkdir(parents=True, exist_ok=True)
        file = best_file(training) if best else None
        if file is not None:
            _link(file, folder / file.relative_to(training))
        _link(training / STATE, folder / STATE)

    def _wants(self, history: History, recipe: Recipe, fold: int | None) -> bool:
        epoch = len(history)
        if fold is not None:
            return epoch % EVERY == 0 or next_epoch(history, recipe) is None
        return best_epoch(history, recipe) == epoch if recipe.patience else epoch in self.epochs

    def prune(self, fold: int | None, most: int) -> None:
        """Remove all states but the one that a row which converts after `most` epochs begins from."""
        kept = self._states(fold)
        used = max((epoch for epoch in kept if epoch <= most), default=None)
        for epoch, folder in kept.items():
            if epoch != used:
                shutil.rmtree(folder, ignore_errors=True)

    def begin(
        self, training: Path, recipe: Recipe, make: Callable[[], Made], make_plain: Callable[[], Made], fold: int | None
    ) -> None:
        """Write the first state of a row that converts late or at the end, from the last plain one before it.

        Nothing is written without a state of the same settings, or if the plain network would be trained differently.
        Then the row trains from its beginning.
        """
        if (training / STATE).is_file() or not self._fits():
            return
        (model, likelihood), (plain, other) = make(), make_plain()
        method = method_after(model)
        folder = self._of(fold) / END if method is not None else self._last_before(recipe.convert_at_epoch, fold)
        try:
            header = header_of(folder / STATE) if folder is not None else {}
            recorded = Recipe(**header["recipe"])
        except (KeyError, OSError, TypeError, ValueError):
            return  # there is none, or it is damaged
        assert folder is not None
        if method is not None:
            recipe = method.extended(recipe)
        network = members_of(model)[0] if method is not None and members_of(model) else model
        if members_of(network) or not _begins_alike(recorded, recipe, ended=method is not None):
            return
        bare = plain_view(network) if is_stochastic(network) else network
        whole, view = (NetworkWithLikelihood(net, likelihood, recipe.precision) for net in (network, bare))
        first = NetworkWithLikelihood(plain, other, recipe.precision)
        optimizer, device = make_optimizer(whole, recipe), device_of(network)
        if not _same(view, first) or _rates(view, optimizer) != _rates(first, make_optimizer(first, recorded)):
            return
        best = BestState(training, recipe)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            history = History(header["history"])
            try:
                if method is not None and recipe.patience:
                    BestState(folder, recorded).restore(view, history)
                    best.consider(whole, History(history[: best_epoch(history, recipe)]))
                Checkpoint(folder, recorded, header["rows"]).load(view, optimizer)
            except ValueError:
                return  # damaged
            rows = History(row | {"beta": beta(recipe, row["epoch"] - 1)} for row in history)
            best.save(rows, partial(Checkpoint(training, recipe, header["rows"]).save, whole, optimizer, rows))

    def _last_before(self, most: int, fold: int | None) -> Path | None:
        """Return the folder of the last state after at most `most` epochs."""
        kept = {epoch: folder for epoch, folder in self._states(fold).items() if epoch <= most}
        return kept[max(kept)] if kept else None

    def _of(self, fold: int | None) -> Path:
        return self.folder if fold is None else self.folder / f"fold{fold}"

    def _states(self, fold: int | None) -> dict[int, Path]:
        found = {path.parents[1] for path in self._of(fold).glob(f"epoch*/{STATE}")}
        return {int(folder.name[5:]): folder for folder in found if folder.name[5:].isdigit()}

    def _fits(self) -> bool:
        try:
            return relocated(read_json(self.folder / KEY), self.key) == dict(self.key)
        except (OSError, ValueError):
            return False

    def _write_key(self) -> None:
        if not self._fits():
            shutil.rmtree(self.folder, ignore_errors=True)  # of other settings
            write_json(self.key, self.folder / KEY)


def keeping(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs; each plain one learns after which epochs other rows of its seed convert."""
    epochs: dict[str, set[int]] = {}
    for job in jobs:
        if (plain := plain_of(job)) is not None:
            epochs.setdefault(plain.id, set()).add(job.recipe.convert_at_epoch or job.recipe.epochs)
    return [replace(job, keeps=tuple(sorted(epochs.get(job.id, ())))) for job in jobs]


def waits(job: Job, jobs: Sequence[Job]) -> bool:
    """Return whether a job begins from the state of another one of the list."""
    plain = plain_of(job)
    return plain is not None and any(other.id == plain.id for other in jobs)


def discard(jobs: Sequence[Job], out: Path, is_done: Callable[[Job], bool]) -> None:
    """Remove the kept states of each plain job if all rows that begin from them are done."""
    for job in jobs:
        if job.keeps and all(is_done(other) for other in jobs if waits(other, [job])):
            shutil.rmtree(job.folder(out) / FOLDER, ignore_errors=True)


def method_after(model: nn.Module) -> Method | None:
    """Return the method whose posterior comes from the trained plain network, else None."""
    owners: list[Any] = [model] if members_of(model) else [layer for _, layer in stochastic_layers(model)]
    methods = dict.fromkeys(owner.method for owner in owners)
    return next(iter(methods)) if methods and all(method.post_hoc for method in methods) else None


def _stored_history(training: Path) -> History:
    """Return the history of the state on disk, empty without one; `fit` names a damaged one."""
    try:
        return History(header_of(training / STATE)["history"])
    except ValueError:
        return History()


def _same(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two networks have the same tensors under the same names, bit for bit."""
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def _rates(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[float, float]]:
    """Return learning rate and decay of each parameter of a module.

    They may differ: the learned noise of a converted network has the learning rate of its posterior.
    """
    of = {id(p): (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    return {name: of[id(parameter)] for name, parameter in module.named_parameters() if id(parameter) in of}


def _begins_alike(plain: Recipe, recipe: Recipe, *, ended: bool) -> bool:
    """Return whether both recipes train the plain network alike until the conversion, or to the end.

    Without a last epoch, at a constant rate, the number of epochs has no effect before it, and tiled last epochs have
    none if they begin after it. A posterior with a schedule of its own is left out: the learned noise of targets
    follows it.
    """
    if recipe.posterior_schedule != "same" or plain.restart_at_conversion or (ended and recipe.restart_at_conversion):
        return False
    constant = recipe.schedule == "constant" and not recipe.tile_last_epochs
    free = OWN | (FURTHER if ended else {"epochs", "patience"} if constant else set())
    if not ended and max(plain.tile_last_epochs, recipe.tile_last_epochs) <= recipe.epochs - recipe.convert_at_epoch:
        free |= {"tile_last_epochs"}
    there, here = plain.fields(), recipe.fields()
    return all(there.get(name) == here.get(name) for name in (there.keys() | here.keys()) - free)


def _link(state: Path, path: Path) -> None:
    """Link a file, which is replaced and never changed; copy it on a disk without links."""
    try:
        os.link(state, path)
    except FileExistsError:
        return
    except OSError:
        write_whole(path, lambda temporary: shutil.copyfile(state, temporary))
