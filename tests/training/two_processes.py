"""What the processes of `test_processes` run: `python -m tests.training.two_processes FOLDER DEVICES`.

Fabric starts this script again for the second process; under torchrun both are there from the beginning.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import distributed

import leanbayes as lb
from leanbayes.training import Recipe, TrainingError
from leanbayes.training.fit import fit

from .problems import images, rank1, short

DEVICES = 2


def recipe(devices: int) -> Recipe:
    """Return a recipe that crosses a late conversion and a switch to tiles; 90 rows make an incomplete batch."""
    return short(epochs=4, convert_at_epoch=1, tile_last_epochs=1, anneal_epochs=2, devices=devices)


def train(folder: Path, devices: int) -> None:
    """Train, stop, resume and predict; keep what this process has in the end."""
    torch.set_num_threads(1)
    bnn = rank1(norm=False)
    likelihood = lb.Categorical()
    history = fit(bnn, images(90), recipe(devices), likelihood=likelihood, validation=images(33), folder=folder)
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    state = {name: tensor.tolist() for name, tensor in bnn.state_dict().items()}
    again = rank1(norm=False)
    fit(again, images(90), recipe(devices), validation=images(33), folder=folder, resume=True)
    resumed = all(torch.equal(a, b) for a, b in zip(bnn.parameters(), again.parameters(), strict=True))
    (folder / f"{rank}of{devices}.json").write_text(
        json.dumps({"state": state, "history": history, "resumed": resumed, "error": failure(devices)})
    )


def failure(devices: int) -> str:
    """Train on data of which one row, in one of the processes, is not finite; return what is said."""
    x, y = images(32)
    x[5] = float("nan")
    try:
        fit(rank1(norm=False), (x, y), short(devices=devices, batch_size=32), progress=False)
    except TrainingError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]))
