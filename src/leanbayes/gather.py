"""Several processes predict as one: each takes its share of the rows, and all get the whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import distributed, Tensor

from leanbayes.inputs import Inputs, map_rows
from leanbayes.prediction import Prediction
from leanbayes.processes import rank_and_world

ROW_AXES = {"mean": 0, "total": 0, "aleatoric": 0, "epistemic": 0, "samples": 1, "noise": 1}
"""Which axis of each tensor of a prediction counts rows."""


def my_share(x: Inputs, rows: int) -> Inputs:
    """Return every `world`-th row, beginning with this process's rank; all rows where there is one process."""
    rank, world = rank_and_world()
    if world == 1:
        return x
    share: Inputs = map_rows(x, rows, lambda tensor: tensor[rank::world])
    return share


def of_all_processes(mine: Prediction, rows: int) -> Prediction:
    """Put the shares of all processes together, in the order of the rows; each row counts once."""
    world = rank_and_world()[1]
    if world == 1:
        return mine
    tensors = {name: getattr(mine, name) for name in ROW_AXES if getattr(mine, name) is not None}
    shares: list[Any] = [None] * world
    distributed.all_gather_object(shares, tensors)
    order = torch.cat([torch.arange(rank, rows, world) for rank in range(world)]).argsort()
    whole: dict[str, Any] = {
        name: _joined([share[name] for share in shares], order, ROW_AXES[name]) for name in tensors
    }
    return replace(mine, **whole)


def _joined(parts: list[Tensor], order: Tensor, axis: int) -> Tensor:
    return torch.cat(parts, axis).index_select(axis, order)
