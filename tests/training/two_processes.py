"""The work of the processes of `test_processes`; as a program: `python -m tests.training.two_processes FOLDER DEVICES`.

As a program, Fabric starts it again for the second process; under torchrun both exist from the beginning.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import leanbayes as lb
from leanbayes.training import Recipe, TrainingError
from leanbayes.training.fit import fit

from .problems import images, rank1, same, short


def recipe(devices: int) -> Recipe:
    """Return a recipe that crosses a late conversion and a switch to tiles; 90 rows make an incomplete batch."""
    return short(epochs=4, convert_at_epoch=1, tile_last_epochs=1, anneal_epochs=2, devices=devices)


def train(folder: Path, devices: int) -> dict[str, Any]:
    """Train, validate, and resume from the last state; return the results of this process."""
    bnn, again = rank1(norm=False), rank1(norm=False)
    data = {"validation": images(33), "folder": folder, "progress": False}
    history = fit(bnn, images(90), recipe(devices), likelihood=lb.Categorical(), **data)
    fit(again, images(90), recipe(devices), resume=True, **data)
    return {
        "state": dict(bnn.state_dict()),
        "history": list(history),
        "resumed": same(bnn, again),
        "error": failure(devices),
    }


def failure(devices: int) -> str:
    """Train on data with one row, in one of the processes, that is not finite; return the error."""
    x, y = images(32)
    x[5] = float("nan")
    try:
        fit(rank1(norm=False), (x, y), short(devices=devices, batch_size=32), progress=False)
    except TrainingError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = train(Path(sys.argv[1]), int(sys.argv[2]))
    torch.save(found, Path(sys.argv[1]) / f"{distributed.get_rank()}of2.pt")
