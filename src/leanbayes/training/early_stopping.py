"""Early stopping: the epoch with the lowest validation NLL, its state, and the split of rows to validate on.

A training with `Recipe(patience=p)` stops when `valid_nll` has not improved for p epochs, and keeps the best state. A
model that is converted late chooses only among the epochs after its conversion. The decision is a function of the
history, so that a resumed training stops at the same epoch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn, Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from leanbayes.data.holdout import held_out
from leanbayes.runtime import _files
from leanbayes.runtime.batches import map_rows
from leanbayes.training.data import common_rows, Data, is_pair
from leanbayes.training.diagnostics import TrainingError
from leanbayes.training.progress import History
from leanbayes.training.recipe import Recipe
from leanbayes.training.state import MODEL

HEADER = "leanbayes.best"
FOLDER, FILES = "checkpoint", "best*.safetensors"  # in the folder of a training


def split_rows(train: Data, share: float, seed: int) -> tuple[Data, Data]:
    """Return training and validation data: a share of the rows, by class or target quantile, is held out.

    The targets of a Dataset are not read; its rows are held out at random.

    Raises:
        TypeError: if the data are a DataLoader or a stream, whose rows cannot be divided.
    """
    if isinstance(train, (DataLoader, IterableDataset)):
        kind = type(train).__name__
        raise TypeError(f"validation={share} divides tensors or a Dataset, got {kind}; give validation data")
    if isinstance(train, Dataset):
        held = held_out(torch.zeros(len(train), device="cpu"), share, seed)  # type: ignore[arg-type]
        kept, out = (rows.nonzero().flatten().tolist() for rows in (~held, held))
        return Subset(train, kept), Subset(train, out)
    if not is_pair(train):
        return train, train  # the check of the training data explains it
    x, y = train
    common_rows(x, y)
    held = held_out(y.cpu(), share, seed).to(y.device)

    def part(chosen: Tensor) -> Data:
        return map_rows(x, len(y), lambda tensor: tensor[chosen.to(tensor.device)]), y[chosen]

    return part(~held), part(held)


def best_epoch(history: History, recipe: Recipe) -> int | None:
    """Return the epoch, from 1, with the lowest valid_nll after the conversion; None if there is none yet.

    Further epochs after the schedule do not count.
    """
    rows = [row for row in history[recipe.convert_at_epoch :] if not row.get("extra")]
    scores = [(row.get("valid_nll"), row["epoch"]) for row in rows]
    known = [(math.inf if nll is None else nll, epoch) for nll, epoch in scores]
    return min(known)[1] if known else None


def is_over(history: History, recipe: Recipe) -> bool:
    """Return whether the training has not improved for `recipe.patience` epochs."""
    best = best_epoch(history, recipe) if recipe.patience else None
    return best is not None and len(history) - best >= recipe.patience


def next_epoch(history: History, recipe: Recipe) -> int | None:
    """Return the time of the schedule at which the next epoch begins, from `recipe.epochs` on for further epochs.

    None is the end. A training that stops early has as many fewer further epochs, but at least two.
    """
    further = sum(bool(row.get("extra")) for row in history)
    done = len(history) - further
    if not further and done < recipe.epochs and not is_over(history, recipe):
        return done
    wanted = max(min(2, recipe.extra_epochs), math.ceil(recipe.extra_epochs * done / recipe.epochs))
    return recipe.epochs + further if further < wanted else None


def best_file(folder: Path) -> Path | None:
    """Return the file with the best state of a finished training; None without early stopping."""
    return next((folder / FOLDER).glob(FILES), None)


class BestState:
    """The model of the best epoch: in memory, and in `<folder>/checkpoint/best<epoch>.safetensors` when it is saved.

    The name has the epoch, so that a kill between two files leaves a state and the best state that it refers to.
    """

    def __init__(self, folder: Path | None, recipe: Recipe) -> None:
        self.folder = None if folder is None else folder / FOLDER
        self.recipe = recipe
        self.state: dict[str, Tensor] = {}
        self.unsaved = False

    def forget(self, but: Path | None = None) -> None:
        """Remove the states in the folder, but one."""
        for path in () if self.folder is None else self.folder.glob(FILES):
            if path != but:
                path.unlink(missing_ok=True)

    def consider(self, model: nn.Module, history: History) -> None:
        """Keep the state in memory if the last epoch is the best."""
        if self.recipe.patience and best_epoch(history, self.recipe) == len(history):
            self.state = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
            self.unsaved = True

    def save(self, history: History, save_last: Callable[[], object]) -> None:
        """Write the best state if it is new, then the last state, then remove older best states."""
        path = self._path(best_epoch(history, self.recipe) if self.recipe.patience else None)
        if path is not None and self.unsaved:
            self._write(path)
        save_last()
        if path is not None:
            self.forget(but=path)

    def _path(self, epoch: int | None) -> Path | None:
        return None if epoch is None or self.folder is None else self.folder / f"best{epoch}.safetensors"

    def _write(self, path: Path) -> None:
        tensors, others = _files.untied({MODEL + name: tensor for name, tensor in self.state.items()})
        try:
            _files.write_tensors(tensors, path, {HEADER: json.dumps({"tied": others})})
        except OSError as error:
            raise TrainingError(
                f"the best state could not be written to '{path.parent}' ({error.strerror or error}); make room, and "
                "resume"
            ) from error
        self.unsaved = False

    def restore(self, model: nn.Module, history: History) -> None:
        """Load the state of the best epoch into the model."""
        epoch = best_epoch(history, self.recipe) if self.recipe.patience else None
        if epoch is not None:
            model.load_state_dict(self.state or self._read(epoch))

    def _read(self, epoch: int) -> dict[str, Tensor]:
        path = self._path(epoch)
        assert path is not None, "a state in memory is lost only with its process"
        if not path.is_file():
            raise ValueError(
                f"expected the best state, of epoch {epoch}, in '{path}', got no file; begin again: resume=False, on "
                "the command line --fresh"
            )
        metadata, tensors = _files.read_tensors(path)
        header: Any = _files.parse_json(metadata.get(HEADER, ""), f"the header {HEADER} of '{path}'")
        _files.check_fields(header, {"tied": dict[str, str]}, required=("tied",))
        return {name.removeprefix(MODEL): tensor for name, tensor in _files.tied(tensors, header["tied"]).items()}
