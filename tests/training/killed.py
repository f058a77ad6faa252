"""A training to be killed, in the processes of `test_kill`.

It crosses a late conversion, annealing, augmentation and a switch to tiles. Each step is slowed down, so that a signal
sent at a random moment finds it at work.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from leanbayes.training.fit import fit
from leanbayes.training.state import Checkpoint

from .problems import images, rank1, short

RECIPE = short(epochs=24, convert_at_epoch=6, tile_last_epochs=6, augment="crop_flip", anneal_epochs=12, batch_size=32)


def train(folder: Path, started: Any, pause_at: int | None, slow: float) -> None:
    """Resume training; set `started` after an epoch, or when state `pause_at` is written and not yet renamed."""
    torch.set_num_threads(1)
    if pause_at is not None:
        _pause_before_rename(started, pause_at)
    model = rank1()
    model[3].register_forward_hook(lambda module, args, result: time.sleep(slow))

    def report(state: Any) -> None:
        state.save()
        if pause_at is None:
            started.set()

    fit(model, images(), RECIPE, folder=folder, resume=True, callbacks=[report], progress=False)


def _pause_before_rename(started: Any, pause_at: int) -> None:
    flush, save, states = os.fsync, Checkpoint.save, []

    def pause(handle: int) -> None:
        flush(handle)
        if len(states) == pause_at:
            started.set()
            time.sleep(60)

    def counted(*given: Any) -> None:
        states.append(given)
        save(*given)

    os.fsync, Checkpoint.save = pause, counted
