"""Which of several processes this is."""

import os

from torch import distributed


def rank_and_world() -> tuple[int, int]:
    """Return this process's rank and the number of processes: (0, 1) where there is one."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def is_first() -> bool:
    """Say whether this process speaks and writes for all; launchers tell by environment before processes are joined."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() == 0
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))) == 0
