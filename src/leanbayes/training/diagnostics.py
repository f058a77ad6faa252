"""Faults of a training: wrong data at the first step, and losses that are not finite.

A loss that is not finite must neither pass unnoticed nor ruin the weights that would explain it. On a CPU each loss is
read before the step is taken. On a GPU reading would make it wait: losses are collected there and read every
`LOOK_EVERY` steps; until then a flag on the device makes fused optimisers leave the weights alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn, Tensor
from torch.utils.data import DataLoader

from leanbayes.core.conversion import stochastic_layers
from leanbayes.core.objective import check_loss, ElboTerms, Loss
from leanbayes.distributions.likelihoods import Categorical, check_classes
from leanbayes.runtime.batches import Inputs, Output, row_axis, tensors_in

CLEAN = "look for missing values and divisions by zero where the data are prepared"
TAME = "try a lower lr, clip_norm=1.0, a warm-up, or precision='32-true'"

LOOK_EVERY = 50
"""Steps between two looks at the losses on a GPU; each look waits for it."""

KINDS = {
    torch.uint8: ("Byte", "unsigned char", "uint8"),
    torch.float64: ("Double", "double", "float64"),
    torch.int64: ("Long and", "long int"),
    torch.int32: ("Int ", "got: int ", "type (int)"),
    torch.int16: ("Short", "short"),
    torch.bool: ("Bool", "bool"),
    torch.float16: ("Half",),
    torch.bfloat16: ("BFloat16",),
}
"""Types of inputs that few networks take, and their names in torch's errors."""

ROWS_AT_ONCE = 4096
"""Rows whose targets are compared at once, as int64: small types cannot hold every number of classes."""


class TrainingError(RuntimeError):
    """Training cannot continue; the message has the reason and a remedy."""


class NotFinite(Exception):
    """A loss was not finite, at `step` of the epoch; `random` holds the states of torch's generators before it."""

    def __init__(self, step: int, value: float, random: dict[str, Tensor]) -> None:
        super().__init__(f"loss {value} at step {step}")
        self.step, self.value, self.random = step, value, random


class Meter:
    """Means over the rows of an epoch of loss, nll and kl."""

    def __init__(self, fabric: Any, optimizer: torch.optim.Optimizer) -> None:
        self.fabric = fabric
        self.every = LOOK_EVERY if fabric.device.type == "cuda" else 1
        self.flag: Tensor | None = None
        if fabric.device.type == "cuda":
            self.flag, self.one = torch.zeros((), device=fabric.device), torch.ones((), device=fabric.device)
            optimizer.found_inf = self.flag  # type: ignore[attr-defined]
        self.start()

    def start(self) -> None:
        """Begin an epoch."""
        self.steps = self.rows = 0
        self.sums = [0.0, 0.0, 0.0]
        self.pending: list[tuple[Tensor, int, dict[str, Tensor]]] = []

    def add(self, terms: ElboTerms, rows: int, random: dict[str, Tensor]) -> bool:
        """Add the terms of a batch, averaged over all processes; return whether the losses were read.

        `random` holds the states of torch's generators before the pass.
        """
        values = torch.stack((terms.loss.detach(), terms.nll.detach(), terms.kl.detach()))
        if self.fabric.world_size > 1:
            values = self.fabric.all_reduce(values, reduce_op="mean")
        if self.flag is not None:
            # The kernel of GradScaler: it raises the flag if a value is not finite.
            torch._amp_foreach_non_finite_check_and_unscale_([values], self.flag, self.one)
        self.pending.append((values, rows, random))
        self.steps += 1
        if self.steps % self.every == 0:
            self.look()
            return True
        return False

    def look(self) -> None:
        """Read the collected losses and add them up; raise `NotFinite` at the first that is not finite."""
        if not self.pending:
            return
        first = self.steps - len(self.pending)
        table = torch.stack([values for values, _, _ in self.pending]).tolist()
        for position, (values, (_, rows, random)) in enumerate(zip(table, self.pending, strict=True)):
            if not math.isfinite(values[0]):
                raise NotFinite(first + position, values[0], random)
            self.rows += rows
            self.sums = [total + rows * value for total, value in zip(self.sums, values, strict=True)]
        self.pending = []

    def means(self) -> dict[str, float]:
        """Return the means over the rows read so far in the epoch."""
        return {name: total / max(1, self.rows) for name, total in zip(("loss", "nll", "kl"), self.sums, strict=True)}


def explain(network: nn.Module, x: Inputs, y: Tensor, loss: Callable[[], ElboTerms], likelihood: Loss) -> str | None:
    """Return a clause on the first fault of a batch, with a remedy; None if there is no fault this time.

    The weights and the noise must be those that gave the loss; `loss` computes it again.
    """
    for name, value in (("inputs", x), ("targets", y)):
        if not all(map(_finite, tensors_in(value))):
            return f"the {name} of the batch are not finite; {CLEAN}"
    if isinstance(likelihood, Categorical) and bool((y.long() == likelihood.ignore_index).all()):
        return "all targets of the batch are ignored, so they have no mean; leave such rows out, or take larger batches"
    broken = broken_layer(network)
    if broken is not None:
        return f"the parameters of {broken} are not finite, its update broke; {TAME}"
    return _watch(network, loss)


def broken_layer(network: nn.Module, *, updated: bool = False) -> str | None:
    """Return the layer whose update broke first: parameters are not finite; of those `updated`, or of all."""
    named = ((name, p) for name, p in network.named_parameters() if p.grad is not None or not updated)
    broken = [name for name, parameter in named if not _finite(parameter)]
    # Gradients flow from the end of a network: of several broken layers, its last one broke first.
    return _layer(broken[-1].rpartition(".")[0]) if broken else None


def _watch(network: nn.Module, loss: Callable[[], ElboTerms]) -> str | None:
    found: list[str] = []

    def report(path: str, module: nn.Module, args: Any, output: Any) -> None:
        if not all(map(_finite, tensors_in(output))):
            found.append(path)

    with ExitStack() as stack:
        for path, module in network.named_modules():
            stack.callback(module.register_forward_hook(partial(report, path)).remove)
        terms = loss()
    if found:
        return f"the output of {_layer(found[0])} is the first that is not finite; {TAME}"
    for path, layer in stochastic_layers(network):
        if not _finite(layer.kl()):
            return f"the KL of {_layer(path)} is not finite; lower posterior_lr or raise the prior's scale"
    if not _finite(terms.nll):
        return f"all outputs are finite, their likelihood is not; check the targets, or {TAME}"
    return None


def _layer(path: str) -> str:
    path = path.removesuffix(".base")
    return f"layer '{path}'" if path else "the network"


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all()) if tensor.is_floating_point() else True


def check_kinds(model: object, likelihood: object, callbacks: object) -> None:
    """Reject arguments of `fit` that would fail after the first epoch, or with an obscure error."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a model, a torch.nn.Module, got {model!r}")
    if likelihood is not None:
        check_loss(likelihood)
    if not (isinstance(callbacks, Sequence) and all(map(callable, callbacks))):
        raise TypeError(f"expected callbacks to be a list of functions of an EpochState, got {callbacks!r}")


def check_layout(network: nn.Module, *data: object) -> None:
    """Reject a network with rows on the second axis, unless the data are batches of a DataLoader."""
    if row_axis(network) and not all(isinstance(each, DataLoader | None) for each in data):
        raise ValueError(
            "expected a network that takes rows on the first axis, got one with batch_first=False; put it into a "
            "module that transposes them, or give a DataLoader of batches in its layout"
        )


@contextmanager
def types_explained(x: Inputs) -> Iterator[None]:
    """Add to torch's error how to convert inputs of a type that the network cannot take."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(x, Tensor) or x.dtype not in KINDS:
            raise
        if not any(name in str(error) for name in KINDS[x.dtype]):
            raise
        remedy = "x.float(), for pixels x.float() / 255" if x.dtype == torch.uint8 else "x.float()"
        raise TypeError(
            f"expected inputs of a type that the network takes, got {x.dtype} ({error}); convert them: {remedy}"
        ) from error


@contextmanager
def classes_checked(network: nn.Module, likelihood: Loss, y: Tensor, output: Output | None) -> Iterator[None]:
    """Compare class targets with the network's outputs before the loss does: a GPU does not recover from its error."""
    if not isinstance(likelihood, Categorical) or y.is_floating_point() or not y.numel():
        yield
        return

    def compare(module: nn.Module, args: Any, result: Any) -> None:
        picked = getattr(result, "logits", result) if output is None else output(result)
        if isinstance(picked, Tensor) and picked.dim() > 1 and picked.shape[likelihood.axis] > 1:
            for some in torch.split(y, ROWS_AT_ONCE):
                check_classes(some.long(), picked.shape[likelihood.axis], likelihood.ignore_index)

    hook = network.register_forward_hook(compare)
    try:
        yield
    finally:
        hook.remove()
