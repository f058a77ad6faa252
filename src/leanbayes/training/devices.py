"""The device and the processes of a training: how they start and communicate.

One process on one device needs no library. Several go through Lightning Fabric, which is imported only then. Where
torchmetrics and transformers are installed it imports them, and this takes longer than the import of torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from leanbayes.runtime.batches import device_of
from leanbayes.runtime.distributed import launched, rank_and_world
from leanbayes.runtime.twins import modes_restored
from leanbayes.training.diagnostics import TrainingError
from leanbayes.training.recipe import Recipe

OWN = ("auto", "cpu", "cuda", "mps")
"""Devices that a single process takes without Fabric, which knows others."""
PACKAGES = ("lightning_fabric", "lightning.fabric")


class OneDevice:
    """The only process of a training, with the attributes of a Fabric that trainings and callbacks use."""

    world_size, global_rank, local_rank, is_global_zero = 1, 0, 0, True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def broadcast(self, value: Any, src: int = 0) -> Any:
        return value

    def all_reduce(self, data: Any, group: Any = None, reduce_op: str = "mean") -> Any:
        return data

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        return data

    def barrier(self, name: str | None = None) -> None:
        pass


def pick_device(accelerator: str) -> torch.device:
    """Return the device for auto, cpu, cuda or mps; raise ValueError if this machine has none."""
    here = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if accelerator == "auto":
        return torch.device(next(name for name, available in here.items() if available))
    if not here.get(accelerator, False):
        there = ", ".join(("auto", *(name for name, available in here.items() if available)))
        raise ValueError(f"expected a device among {there} on this machine, got {accelerator!r}")
    return torch.device(accelerator)


def launch(recipe: Recipe) -> Any:
    """Return the only process, or a Fabric with running processes.

    Under `torchrun` and Slurm the processes exist already; the launcher sets their number. Otherwise, with several
    devices, Fabric starts the script that called `fit` again for each further device.
    """
    launcher = launched()
    devices, nodes = (recipe.devices, recipe.nodes) if launcher is None else (launcher.devices, launcher.nodes)
    alone = launcher is None and devices * nodes == 1 and rank_and_world()[1] == 1
    if alone and recipe.accelerator in OWN:
        device = pick_device(recipe.accelerator)
        return OneDevice(torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device)
    strategy = "ddp" if devices * nodes > 1 else "auto"
    library = first_installed(PACKAGES, "several processes need Lightning Fabric: pip install lightning-fabric")
    fabric = library.Fabric(accelerator=recipe.accelerator, devices=devices, num_nodes=nodes, strategy=strategy)
    _check_joined(fabric, devices * nodes)
    fabric.launch()
    if recipe.batch_size % fabric.world_size:
        raise ValueError(
            f"expected batch_size to be a multiple of the {fabric.world_size} processes, which share every batch, got "
            f"{recipe.batch_size}"
        )
    return fabric


@contextmanager
def moved(model: nn.Module, device: torch.device, *, channels_last: bool) -> Iterator[None]:
    """Move a model to a device inside the context; afterwards back, in the modes it had."""
    home = device_of(model)
    with modes_restored(model):
        model.to(device)
        if channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        try:
            yield
        finally:
            model.to(home)
            if channels_last:
                model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]


def prepared(fabric: Any, module: nn.Module) -> nn.Module:
    """Return a module for training; of several processes, one that averages gradients."""
    return module if isinstance(fabric, OneDevice) else fabric.strategy.setup_module(module)


def share_buffers(fabric: Any, module: nn.Module) -> None:
    """Give every process the buffers of the first: batch norms take statistics of their own rows."""
    if fabric.world_size > 1:
        for buffer in module.buffers():
            distributed.broadcast(buffer, 0)


def not_shared(module: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which gradients are not averaged; the next backward outside averages the sums."""
    return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()


def on_first(fabric: Any, action: Callable[[], None]) -> None:
    """Call `action` in the first process; if it fails, all processes raise its error."""
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
    """Return the first answer, by rank, that is not None."""
    if fabric.world_size == 1:
        return answer
    answers: list[str | None] = [None] * fabric.world_size
    distributed.all_gather_object(answers, answer)
    return next((one for one in answers if one is not None), None)


def _check_joined(fabric: Any, count: int) -> None:
    """Reject processes that joined without Fabric: it would train them separately, or start more."""
    joined = rank_and_world()[1]
    if joined > 1 and (joined != count or not fabric.strategy.cluster_environment.creates_processes_externally):
        raise ValueError(
            f"expected processes that torchrun, Slurm or fit itself started, got {joined} that have joined by "
            "themselves; use torchrun, or set the variables that it sets (RANK, LOCAL_RANK, WORLD_SIZE, "
            "LOCAL_WORLD_SIZE, TORCHELASTIC_RUN_ID)"
        )


def first_installed(packages: Iterable[str], remedy: str) -> Any:
    """Return the first package that is installed, or raise ModuleNotFoundError with a remedy."""
    for package in packages:
        try:
            return importlib.import_module(package)
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError(remedy)
