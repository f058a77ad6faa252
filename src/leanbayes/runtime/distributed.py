"""Rank and number of processes, wrappers around models, and parameters sharded over processes (FSDP2)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import distributed, nn, Tensor

from leanbayes.layers.hooks import every_module

INTERACTIVE = ("bash", "interactive")
"""Names of interactive Slurm jobs, which start processes themselves (as in Lightning Fabric)."""

HOMES = ("torch.distributed.tensor", "torch.distributed._tensor")
"""Modules that define DTensor; torch 2.4 has the second."""


class Launch(NamedTuple):
    """Processes that a launcher started: its name, the number on each machine, and the number of machines."""

    launcher: str
    devices: int
    nodes: int

    @property
    def processes(self) -> int:
        """The total number of processes."""
        return self.devices * self.nodes


def launched() -> Launch | None:
    """Return how torchrun or Slurm started this process; None if leanbayes may start processes itself."""
    if distributed.is_available() and distributed.is_torchelastic_launched():
        world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
        return Launch("torchrun", local, world // local)
    tasks = _slurm_tasks()
    if tasks == 1 or os.environ.get("SLURM_JOB_NAME") in INTERACTIVE:
        return None
    local = int(os.environ.get("SLURM_NTASKS_PER_NODE", "0"))
    if not local or tasks % local:
        raise ValueError(
            f"expected Slurm to say how many of its {tasks} tasks run on each machine, got SLURM_NTASKS_PER_NODE="
            f"{local or 'nothing'}; use srun --ntasks-per-node, or --ntasks 1 with leanbayes --devices"
        )
    return Launch("slurm", local, tasks // local)


def _slurm_tasks() -> int:
    return int(os.environ.get("SLURM_NTASKS", "1")) if "SLURM_PROCID" in os.environ else 1


def rank_and_world() -> tuple[int, int]:
    """Return this process's rank and the number of processes; (0, 1) for a single process."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def summed(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor over all processes; of a single process, the tensor itself."""
    if rank_and_world()[1] > 1:
        distributed.all_reduce(tensor)
    return tensor


def is_first() -> bool:
    """Return whether this process prints and writes for all; before they join, the environment has the rank."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() == 0
    slurm = os.environ["SLURM_PROCID"] if _slurm_tasks() > 1 else "0"
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", slurm))) == 0


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside `DistributedDataParallel` and `torch.compile` wrappers."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return unwrap(model.module)
    inner = getattr(model, "_orig_mod", None)
    return unwrap(inner) if isinstance(inner, nn.Module) else model


@contextmanager
def gathered(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Replace the shards of `fully_shard` by whole tensors; gradients flow back into the shards.

    Every process opens the context between a pass and its backward. `kl` is then the same number in all processes, and
    each shard gets its part of the gradient once. Modules without shards stay unchanged.

    Example:
        >>> with gathered(layer.posterior for _, layer in lb.stochastic_layers(bnn)):
        ...     divergence = lb.kl(bnn)
    """
    tops = modules if may_have_shards() else ()
    holders: list[dict[str, Any]] = [module._parameters for top in tops for module in every_module(top)]
    shards = [(holder, name, p) for holder in holders for name, p in holder.items() if is_shard(p)]
    whole: dict[int, Any] = {}
    for _, _, shard in shards:  # a tied parameter is gathered once
        whole[id(shard)] = whole[id(shard)] if id(shard) in whole else shard.full_tensor()
    try:
        for holder, name, shard in shards:
            holder[name] = whole[id(shard)]
        yield
    finally:
        for holder, name, shard in shards:
            holder[name] = shard


def refuse_shards(parameters: Iterable[Tensor], path: str) -> None:
    """Raise if this process holds only shards of a layer; the message shows how to gather a model."""
    if any(map(is_shard, parameters)):
        raise ValueError(
            f"expected whole parameters, got shards of layer '{path}' (fully_shard); gather them into a conversion "
            "that is not sharded: whole.load_state_dict(get_model_state_dict(bnn, options=StateDictOptions("
            "full_state_dict=True))), both of torch.distributed.checkpoint.state_dict"
        )


def has_shards(model: nn.Module) -> bool:
    """Return whether FSDP shards a model or a part of it: its parameters are whole only while that part runs."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    names = ("FSDPModule", "FullyShardedDataParallel")
    classes = {kind for module in model.modules() for kind in type(module).__mro__}
    return any(kind.__name__ in names for kind in classes)


def may_have_shards() -> bool:
    """Return whether DTensors can exist in this process: their module is imported."""
    return any(home in sys.modules for home in HOMES)


def is_shard(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor, without the slow import: before it there are none."""
    if type(tensor) is nn.Parameter or type(tensor) is Tensor:
        return False  # asked for every parameter in every step
    homes = map(sys.modules.get, HOMES)
    return any(isinstance(tensor, getattr(home, "DTensor", ())) for home in homes)
