"""Which of several processes this is."""

from torch import distributed


def rank_and_world() -> tuple[int, int]:
    """Return this process's rank and the number of processes: (0, 1) where there is one."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
