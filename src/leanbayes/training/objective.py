"""What is trained in an epoch: the converted model, or before a late conversion the plain network inside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import nn, Tensor

from leanbayes.core.conversion import stochastic_layers
from leanbayes.core.objective import elbo, ElboTerms, Loss, targets_per_row
from leanbayes.distributions.likelihoods import Likelihood
from leanbayes.runtime.batches import call, Inputs, leading_rows, Output, run
from leanbayes.runtime.probe import learn_rows_from
from leanbayes.training.recipe import Recipe


class Phase(nn.Module):
    """A network with its likelihood, called like the network and run in the precision of the training.

    The likelihood is here because it may have parameters, which several processes must average, too.
    """

    def __init__(self, network: nn.Module, likelihood: Loss, precision: str) -> None:
        """Take both as they are."""
        super().__init__()
        self.network = network
        self.likelihood = likelihood if isinstance(likelihood, nn.Module) else None
        self.precision = precision

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network."""
        with self.autocast():
            return run(self.network, *args, **kwargs)

    def autocast(self) -> Any:
        """Return the context in which the network runs."""
        if self.precision == "32-true":
            return nullcontext()
        return torch.autocast(next(self.parameters()).device.type, torch.bfloat16)


class LossOf(Protocol):
    """The loss of a batch under a weight of the KL."""

    def __call__(self, x: Inputs, y: Tensor, beta: Any) -> ElboTerms:
        """Return the terms of the loss."""


def loss_of(
    module: nn.Module, likelihood: Loss, recipe: Recipe, *, rows: int, tile: bool, output: Output | None
) -> LossOf:
    """Return the loss of a phase, or of what wraps one, as a function of the batch and the weight of the KL.

    The KL is spread over the targets of all `rows` of the training set.
    """
    if recipe.precision != "32-true" and not isinstance(likelihood, Likelihood):
        likelihood = _in_float32(likelihood)
    if recipe.samples == 1 and not any(True for _ in stochastic_layers(module)):
        return _plain_loss(module, likelihood, output)

    def loss(x: Inputs, y: Tensor, beta: Any) -> ElboTerms:
        return elbo(
            module,
            x,
            y,
            likelihood,
            num_data=rows * targets_per_row(likelihood, y),
            beta=beta,
            samples=recipe.samples,
            tile=tile,
            aggregate=recipe.aggregate,
            output=output,
        )

    return loss


def _plain_loss(module: nn.Module, likelihood: Loss, output: Output | None) -> LossOf:
    """Return what `elbo` says of a plain network, without its looks for stochastic layers at every step."""
    nothing = torch.zeros((), device=next(module.parameters()).device)

    def loss(x: Inputs, y: Tensor, beta: Any) -> ElboTerms:
        outputs = call(module, x, output)
        nll = likelihood(outputs, y).mean()
        return ElboTerms(nll, nothing, nll, outputs)

    return loss


class CompiledLoss:
    """A loss compiled for full batches; the last batch of an epoch, of another size, runs as it is."""

    def __init__(self, loss: Any, network: nn.Module, device: torch.device) -> None:
        """Compile lazily, at the first batch."""
        self.eager: LossOf = loss
        self.network = network
        # Dynamo counts recompilations by code object and gives up after eight: every training has one of its own.
        own = FunctionType(loss.__code__.replace(), loss.__globals__, closure=loss.__closure__)
        self.compiled: LossOf = torch.compile(own, dynamic=False)
        self.beta = torch.zeros((), device=device)
        self.rows: int | None = None

    def __call__(self, x: Inputs, y: Tensor, beta: float) -> ElboTerms:
        """Return the terms of the loss."""
        rows = leading_rows(x)
        if self.rows is None:
            learn_rows_from(self.network, x)  # compiled code cannot find out where layers see the rows
            self.rows = rows
        if rows != self.rows:
            return self.eager(x, y, beta)
        # A tensor, since every new number would compile anew; filled, since a copy from the CPU would wait for the GPU.
        return self.compiled(x, y, self.beta.fill_(beta))


@contextmanager
def left_as_it_was(phase: Phase, device: torch.device, *, channels_last: bool) -> Iterator[None]:
    """Move a phase to a device, and in the end back to where it was, with the modes it had."""
    home = next(phase.parameters()).device
    modes = [(module, module.training) for module in phase.modules()]
    phase.to(device)
    if channels_last:
        phase.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    try:
        yield
    finally:
        phase.to(home)
        if channels_last:
            phase.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        for module, training in modes:
            module.training = training


def _in_float32(likelihood: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Give a plain loss the outputs in float32, as likelihoods take them themselves."""
    return lambda outputs, y: likelihood(outputs.float(), y)
