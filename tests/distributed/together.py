"""Processes of a test that work together over gloo, on one machine."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import distributed

SLOW = ("pytest", "torch.distributed.fsdp", "lightning_fabric", "leanbayes.training")
one_worker = pytest.mark.xdist_group("processes")
"""Tests that start processes run in one worker: a server imports everything once, a module's fixture trains once."""
Work = Callable[[int, int], dict[str, Any]]


def together(world: int, work: Work, folder: Path) -> list[dict[str, Any]]:
    """Call `work(rank, world)` in processes that have joined, and return the result of each."""
    # Forked from a server that has imported the slow packages.
    multiprocessing.set_forkserver_preload(list(SLOW))
    mp.start_processes(_one, (world, work, str(folder)), nprocs=world, start_method="forkserver")
    return [torch.load(folder / f"{rank}of{world}.pt", weights_only=True) for rank in range(world)]


def _one(rank: int, world: int, work: Work, folder: str) -> None:
    torch.set_num_threads(1)
    # The variables of torchrun, for Fabric: else it would start the script again for the other processes.
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {name: str(number) for name, number in numbers.items()} | {"TORCHELASTIC_RUN_ID": "test"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # asked for, not used: they have joined already
    meeting = f"file://{folder}/meeting{world}"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    torch.save(work(rank, world), Path(folder) / f"{rank}of{world}.pt")
    distributed.destroy_process_group()
