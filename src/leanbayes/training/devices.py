"""Lightning Fabric, and all we want of it: which device, how many processes, how they start and talk."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from leanbayes.runtime.distributed import launched, rank_and_world
from leanbayes.training.diagnostics import TrainingError
from leanbayes.training.recipe import Recipe

PACKAGES = ("lightning_fabric", "lightning.fabric")


def launch(recipe: Recipe) -> Any:
    """Return a Fabric whose processes run.

    Under `torchrun` and Slurm the processes are there already, and their number is the launcher's. Otherwise, with
    several devices, the script that called `fit` is started again for each further device, as Fabric does it.
    """
    devices, nodes = _counts(recipe)
    fabric = _fabric_class()(
        accelerator=recipe.accelerator,
        devices=devices,
        num_nodes=nodes,
        strategy="ddp" if devices * nodes > 1 else "auto",
    )
    _check_joined(fabric, devices * nodes)
    fabric.launch()
    if recipe.batch_size % fabric.world_size:
        raise ValueError(
            f"expected batch_size to be a multiple of the {fabric.world_size} processes, which share every batch, got "
            f"{recipe.batch_size}"
        )
    return fabric


def share_buffers(fabric: Any, module: nn.Module) -> None:
    """Give every process the buffers of the first: batch norms collect statistics of their own rows."""
    if fabric.world_size > 1:
        for buffer in module.buffers():
            distributed.broadcast(buffer, 0)


def not_shared(module: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which processes keep their gradients to themselves; the next one outside shares them all."""
    return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()


def on_first(fabric: Any, action: Callable[[], None]) -> None:
    """Let the first process do something for all; if it fails, all raise the same error instead of waiting for it."""
    problem: str | None = None
    if fabric.is_global_zero:
        try:
            action()
        except TrainingError as error:
            problem = str(error)
    problem = fabric.broadcast(problem)
    if problem is not None:
        raise TrainingError(problem)


def first_answer(fabric: Any, answer: str | None) -> str | None:
    """Return the answer of the first process that has one."""
    if fabric.world_size == 1:
        return answer
    answers: list[str | None] = [None] * fabric.world_size
    distributed.all_gather_object(answers, answer)
    return next((one for one in answers if one is not None), None)


def _check_joined(fabric: Any, count: int) -> None:
    """Refuse processes that have joined without Fabric: it would train them apart, or start others of its own."""
    joined = rank_and_world()[1]
    if joined > 1 and (joined != count or not fabric.strategy.cluster_environment.creates_processes_externally):
        raise ValueError(
            f"expected processes that torchrun, Slurm or fit itself started, got {joined} that have joined by "
            "themselves; use torchrun, or say in the environment who they are, as it does (RANK, LOCAL_RANK, "
            "WORLD_SIZE, LOCAL_WORLD_SIZE, TORCHELASTIC_RUN_ID)"
        )


def _counts(recipe: Recipe) -> tuple[int, int]:
    """Return devices a machine, and machines."""
    launch = launched()
    return (recipe.devices, recipe.nodes) if launch is None else (launch.devices, launch.nodes)


def _fabric_class() -> Any:
    for package in PACKAGES:
        try:
            return importlib.import_module(package).Fabric
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError("fit needs Lightning Fabric: pip install lightning-fabric")
