"""Early stopping: the epoch with the lowest validation NLL, its state, and the split of rows to validate on.

A training with `Recipe(patience=p)` stops when `valid_nll` has not improved for p epochs, and keeps the best state. A
model that is converted late chooses only among the epochs after its conversion. The decision is a function of the
history, so that a resumed training stops at the same epoch.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn, Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from leanbayes.data.holdout import held_out
from leanbayes.runtime import _files
from leanbayes.runtime.batches import leading_rows, map_rows
from leanbayes.training.data import Data
from leanbayes.training.diagnostics import TrainingError
from leanbayes.training.progress import History
from leanbayes.training.recipe import Recipe
from leanbayes.training.state import MODEL

HEADER = "leanbayes.best"
BEST = Path("checkpoint") / "best.safetensors"  # in the folder of a training


def split_rows(train: Data, share: float, seed: int) -> tuple[Data, Data]:
    """Return training and validation data: a share of the rows, by class or target quantile, is held out.

    The targets of a Dataset are not read; its rows are held out at random.

    Raises:
        TypeError: if the data are a DataLoader, whose rows cannot be divided.
    """
    if isinstance(train, DataLoader):
        raise TypeError(f"validation={share} divides tensors or a Dataset, got a DataLoader; give validation data")
    if isinstance(train, Dataset):
        held = held_out(torch.zeros(len(train)), share, seed)  # type: ignore[arg-type]
        kept, out = (rows.nonzero().flatten().tolist() for rows in (~held, held))
        return Subset(train, kept), Subset(train, out)
    x, y = train
    rows = leading_rows(x)
    if rows != len(y):
        return train, train  # the check of the training data explains it
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


class BestState:
    """The model of the best epoch: in memory, and in `<folder>/checkpoint/best.safetensors` for resumed trainings."""

    def __init__(self, folder: Path | None, recipe: Recipe) -> None:
        self.path = None if folder is None else folder / BEST
        self.recipe = recipe
        self.state: dict[str, Tensor] = {}

    def forget(self) -> None:
        """Remove the state of an earlier training."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def consider(self, model: nn.Module, history: History, *, writes: bool) -> None:
        """Keep the state if the last epoch is the best; the first process writes it."""
        if not self.recipe.patience or best_epoch(history, self.recipe) != len(history):
            return
        self.state = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
        if self.path is None or not writes:
            return
        tensors, others = _files.untied({MODEL + name: tensor for name, tensor in self.state.items()})
        header = json.dumps({"epoch": len(history), "tied": others})
        try:
            _files.write_tensors(tensors, self.path, {HEADER: header})
        except OSError as error:
            raise TrainingError(
                f"the best state could not be written to '{self.path.parent}' ({error.strerror or error}); make room, "
                "and resume"
            ) from error

    def restore(self, model: nn.Module, history: History) -> None:
        """Load the state of the best epoch into the model."""
        if not self.recipe.patience or best_epoch(history, self.recipe) is None:
            return
        model.load_state_dict(self.state or self._read(best_epoch(history, self.recipe)))

    def _read(self, epoch: int | None) -> dict[str, Tensor]:
        assert self.path is not None, "a state in memory is lost only with its process"
        metadata, tensors = _files.read_tensors(self.path)
        header: Any = _files.parse_json(metadata.get(HEADER, ""), f"the header {HEADER} of '{self.path}'")
        _files.check_fields(header, {"epoch": int, "tied": dict[str, str]}, required=("epoch", "tied"))
        if header["epoch"] != epoch:
            raise ValueError(
                f"'{self.path}' has the state of epoch {header['epoch']}, and epoch {epoch} was the best; begin again: "
                "resume=False, on the command line --fresh"
            )
        return {name.removeprefix(MODEL): tensor for name, tensor in _files.tied(tensors, header["tied"]).items()}
