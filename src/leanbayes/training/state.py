"""The state of a training on disk, from which it resumes exactly: one safetensors file, replaced after epochs.

`<folder>/checkpoint/last.safetensors` has the model, the optimiser's tensors and the states of torch's generators.
Its header `leanbayes.training` is JSON: format, epochs done, history, recipe, rows, processes, likelihood, layers,
tied names, `values`, a few means of the data, and `tensors`, the number of tensors of each kind. Nothing is pickled.
The whole file is checked before it is used.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn, Tensor

from leanbayes.core.conversion import stochastic_layers
from leanbayes.core.objective import Loss
from leanbayes.distributions.likelihoods import Likelihood
from leanbayes.runtime import _files
from leanbayes.runtime.batches import device_of
from leanbayes.runtime.display import cell
from leanbayes.runtime.distributed import rank_and_world
from leanbayes.training.data import same_values
from leanbayes.training.diagnostics import TrainingError
from leanbayes.training.progress import History
from leanbayes.training.recipe import Recipe

STATE = Path("checkpoint") / "last.safetensors"  # in the folder of a training
FORMAT = 1
HEADER = "leanbayes.training"
MODEL, OPTIMIZER, RANDOM = "model/", "optimizer/", "random/"
NETWORK = "network."  # attribute of NetworkWithLikelihood
ANYWHERE = {"accelerator"}
"""Fields of a recipe that may change: a training may resume on another device, with its random numbers."""

FIELDS = {
    "format": int,
    "epoch": int,
    "history": list[dict[str, Any]],
    "recipe": dict[str, Any],
    "rows": int,
    "processes": int,
    "likelihood": str,
    "values": list[list[float]],
    "layers": dict[str, str],
    "tied": dict[str, str],
    "tensors": dict[str, int],
}
FORMER = ("collector.squares", "collector.deviations")
"""Tensors that states of earlier versions have where only the average of the weights is used."""
NEWER = ("tensors", "processes", "likelihood", "values")
"""Fields that states of earlier versions do not have; `values` are those of tensors alone."""
ROW = {"epoch": int, "seconds": float, "peak_memory_mb": float}
AGAIN = "to begin again: resume=False, on the command line --fresh"


class Checkpoint:
    """The last whole state of one training."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        recipe: Recipe,
        rows: int,
        likelihood: Loss | None = None,
        values: list[list[float]] | None = None,
    ) -> None:
        self.path = Path(folder) / STATE
        self.recipe = json.loads(json.dumps(recipe.fields()))
        self.rows = rows
        self.epoch = 0  # of the state on disk, once it was loaded or written
        self.processes = rank_and_world()[1]
        self.likelihood = None if likelihood is None else _described(likelihood)
        self.values = values  # of the training set, see `values_of`

    def prepare(self, *, keep: bool) -> None:
        """Check that the folder is writable; remove leftovers and, unless `keep`, the last state."""
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
            _files.remove_leftovers(self.path)
            if not keep:
                self.path.unlink(missing_ok=True)
        except OSError as error:
            raise TrainingError(
                f"checkpoints cannot be written to '{folder}' ({error.strerror or error}); choose a folder that you "
                "may write"
            ) from error

    def save(self, module: nn.Module, optimizer: torch.optim.Optimizer, history: History) -> None:
        """Write the state after an epoch; the last one stays until the new one is whole."""
        tensors, others = _files.untied({MODEL + name: tensor for name, tensor in module.state_dict().items()})
        moments = {  # optimizer/<kind>/<parameter>
            f"{OPTIMIZER}{what}/{name}": value
            for name, parameter in module.named_parameters()
            for what, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }
        tensors |= _files.untied(moments)[0]
        tensors |= {RANDOM + name: state for name, state in random_state(device_of(module)).items()}
        header = {
            "format": FORMAT,
            "epoch": len(history),
            "history": list(history),
            "recipe": self.recipe,
            "rows": self.rows,
            "processes": self.processes,
            "layers": _layers(module),
            "tied": others,
            "tensors": _numbers_of(tensors),
        }
        known = {"likelihood": self.likelihood, "values": self.values}
        header |= {name: value for name, value in known.items() if value is not None}
        try:
            _files.write_tensors(tensors, self.path, {HEADER: json.dumps(header, allow_nan=False)})
        except OSError as error:
            kept = f"that of epoch {self.epoch} is kept" if self.path.is_file() else "there is none before it"
            raise TrainingError(
                f"the checkpoint of epoch {len(history)} could not be written to '{self.path.parent}' "
                f"({error.strerror or error}); {kept}: make room, and resume"
            ) from error
        self.epoch = len(history)

    def load(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, before: Callable[[History], None] = lambda rows: None
    ) -> History:
        """Restore the last state and return its history, empty without one; a file that does not fit raises.

        `before` is called with the history, before the module is compared and filled.
        """
        if not self.path.is_file():
            return History()
        header, tensors = self._read()
        before(History(header["history"]))
        self._compare(header, module)
        tensors = _files.tied(tensors, header["tied"])
        model, kept, random = (with_prefix(tensors, kind) for kind in (MODEL, OPTIMIZER, RANDOM))
        here = module.state_dict()
        model = {name: tensor for name, tensor in model.items() if name in here or name not in FORMER}
        self._compare_shapes(model, here)
        with self._explained():
            _check_optimizer(kept, dict(module.named_parameters()), self.recipe)
            _check_random_state(random)
        module.load_state_dict(model)
        _load_optimizer(module, optimizer, kept)
        restore_random_state(random, device_of(module))
        self.epoch = header["epoch"]
        return History(header["history"])

    def _read(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        with self._explained():
            metadata, tensors = _files.read_tensors(self.path)
            header = _files.parse_json(metadata.get(HEADER, ""), f"the header {HEADER}")
        version = header.get("format") if isinstance(header, dict) else None
        if isinstance(version, int) and version > FORMAT:
            raise ValueError(f"'{self.path}' has format {version}, this leanbayes reads up to {FORMAT}: update it")
        with self._explained():
            _files.check_fields(header, FIELDS, required=tuple(name for name in FIELDS if name not in NEWER))
            _check_history(header, self.recipe["epochs"] + self.recipe.get("extra_epochs", 0))
            if header.get("tensors", there := _numbers_of(tensors)) != there:
                raise ValueError(f"expected the tensors {header['tensors']}, as stated, got {there}")
        return header, tensors

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Add the name of the damaged file and a remedy to an error."""
        try:
            yield
        except ValueError as error:
            raise ValueError(
                f"the checkpoint '{self.path}' is damaged; remove this file, or, {AGAIN} ({error})"
            ) from error

    def _compare(self, header: dict[str, Any], module: nn.Module) -> None:
        """Reject a state of another recipe, training set, likelihood, conversion or number of processes."""
        processes = header.get("processes", self.processes)
        loss = header.get("likelihood", self.likelihood)
        pairs: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
            "recipe": (header["recipe"], self.recipe),
            "training set": ({"rows": header["rows"]}, {"rows": self.rows}),
            "likelihood": ({"the loss": loss}, {"the loss": self.likelihood or loss}),
            "conversion": (header["layers"], _layers(module)),
            "number of processes": ({"processes": processes}, {"processes": self.processes}),
        }
        for kind, (there, here) in pairs.items():
            for name in (name for name in here | there if name not in ANYWHERE):
                old, new = there.get(name, "nothing"), here.get(name, "nothing")
                if old != new:
                    raise ValueError(
                        f"the checkpoint '{self.path}' belongs to another {kind}: {name} was {old} and is {new}; "
                        f"pass the same {kind}; {AGAIN}"
                    )
        values = header.get("values")
        if values is not None and self.values is not None and not same_values(values, self.values):
            raise ValueError(
                f"the checkpoint '{self.path}' belongs to another training set: rows are as many, but have other "
                f"values; pass the same training set; {AGAIN}"
            )

    def _compare_shapes(self, there: dict[str, Tensor], here: dict[str, Tensor]) -> None:
        for name in there | here:
            found = (state.get(name) for state in (there, here))
            old, new = ("missing" if t is None else f"{tuple(t.shape)} of {t.dtype}" for t in found)
            if old != new:
                raise ValueError(
                    f"the checkpoint '{self.path}' belongs to another network: '{name.removeprefix(NETWORK)}' is {old} "
                    f"there and {new} here; pass the same network; {AGAIN}"
                )


def header_of(path: Path) -> dict[str, Any]:
    """Return the header of a stored state, without its tensors; a damaged one raises ValueError."""
    header = _files.parse_json(_files.read_tensors(path, tensors=False)[0].get(HEADER, ""), f"the header of '{path}'")
    _files.check_fields(header, FIELDS, required=tuple(name for name in FIELDS if name not in NEWER))
    return dict(header)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the states of torch's generators: the CPU's, and the GPU's where there is one."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_state(states: dict[str, Tensor], device: torch.device) -> None:
    """Set torch's generators to states that `random_state` returned."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _load_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    parameters = dict(module.named_parameters())
    optimizer.state.clear()
    for key, value in tensors.items():
        what, _, name = key.partition("/")
        parameter = parameters[name]
        # In the memory order of its parameter, as fused kernels expect; counts of steps are scalars.
        like = parameter if value.shape == parameter.shape else value
        own = torch.empty_like(like, dtype=value.dtype, device=parameter.device).copy_(value)
        optimizer.state[parameter][what] = own


def _check_history(header: dict[str, Any], most: int) -> None:
    """Raise unless the history has one row for each finished epoch, in order."""
    epoch, rows = header["epoch"], header["history"]
    if not 1 <= epoch <= most:
        raise ValueError(f"expected epoch to be from 1 to {most}, got {epoch}")
    if len(rows) != epoch or any(row.get("epoch") != number for number, row in enumerate(rows, 1)):
        shown = ", ".join(str(row.get("epoch")) for row in rows[:10]) or "none"
        raise ValueError(f"expected history to have the epochs 1 to {epoch}, once each, got {shown}")
    for number, row in enumerate(rows):
        _files.check_fields(row, ROW, required=tuple(ROW), within=f"history.{number}")


def _check_optimizer(tensors: dict[str, Tensor], parameters: dict[str, nn.Parameter], recipe: dict[str, Any]) -> None:
    """Raise unless every tensor fits its parameter, and a parameter has all kinds of tensors or none."""
    sgd = ("momentum_buffer",) if recipe["momentum"] else ()
    kinds = ("step", "exp_avg", "exp_avg_sq") if recipe["optimizer"] == "adam" else sgd
    names = {key.partition("/")[2] for key in tensors}
    if kinds and not names:
        raise ValueError("the tensors of the optimiser are missing")
    for key in dict.fromkeys((*(f"{kind}/{name}" for name in sorted(names) for kind in kinds), *tensors)):
        value, parameter = tensors.get(key), parameters.get(key.partition("/")[2])
        if value is None or parameter is None:
            raise ValueError(f"the {'tensor' if value is None else 'parameter'} of {OPTIMIZER}{key} is missing")
        fits = value.is_floating_point() and (value.numel() == 1 or value.shape == parameter.shape)
        if not fits:
            raise ValueError(
                f"expected {OPTIMIZER}{key} to be floats of shape {tuple(parameter.shape)}, got {value.dtype} of shape "
                f"{tuple(value.shape)}"
            )


def _check_random_state(states: dict[str, Tensor]) -> None:
    if "cpu" not in states:
        raise ValueError(f"the random state {RANDOM}cpu is missing")
    try:
        torch.Generator().set_state(states["cpu"])
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"expected {RANDOM}cpu to be a state of torch's generator: {error}") from error


def _numbers_of(tensors: dict[str, Tensor]) -> dict[str, int]:
    return {kind.rstrip("/"): sum(name.startswith(kind) for name in tensors) for kind in (MODEL, OPTIMIZER, RANDOM)}


def _layers(module: nn.Module) -> dict[str, str]:
    return {path.removeprefix(NETWORK): repr(layer.method) for path, layer in stochastic_layers(module)}


def _described(likelihood: Loss) -> str:
    """Return the class and the options of a likelihood, floats in four digits, or the name of a plain loss."""
    if not isinstance(likelihood, Likelihood):
        return (likelihood if isinstance(likelihood, FunctionType) else type(likelihood)).__qualname__

    def short(value: Any) -> str:
        return ", ".join(map(short, value)) if isinstance(value, list) else cell(value)

    options = ", ".join(f"{name}={short(value)}" for name, value in likelihood.options.items())
    return f"{type(likelihood).__qualname__}({options})"


def with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
