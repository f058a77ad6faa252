"""The loss of a training: the evidence lower bound of a converted model, the likelihood alone of a plain network."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import nn, Tensor

from leanbayes.core.conversion import is_stochastic
from leanbayes.core.objective import elbo, ElboTerms, Loss, targets_per_row
from leanbayes.distributions.likelihoods import Likelihood
from leanbayes.runtime.batches import call, device_of, Inputs, leading_rows, Output, run
from leanbayes.runtime.probe import learn_rows_from
from leanbayes.training.recipe import Recipe


class NetworkWithLikelihood(nn.Module):
    """A network and its likelihood as one module, called like the network, in the precision of the training.

    A likelihood may have parameters; as part of the module, several processes average their gradients too.
    """

    def __init__(self, network: nn.Module, likelihood: Loss, precision: str) -> None:
        super().__init__()
        self.network = network
        self.likelihood = likelihood if isinstance(likelihood, nn.Module) else None
        self.precision = precision

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.autocast():
            return run(self.network, *args, **kwargs)

    def autocast(self) -> Any:
        if self.precision == "32-true":
            return nullcontext()
        return torch.autocast(device_of(self).type, torch.bfloat16)


LossFunction = Callable[[Inputs, Tensor, Any], ElboTerms]
"""The loss of a batch (inputs, targets) under a weight of the KL."""


def loss_function(
    module: nn.Module, likelihood: Loss, recipe: Recipe, *, rows: int, tile: bool, output: Output | None
) -> LossFunction:
    """Return the loss of a network as a function of the batch and the weight of the KL.

    The KL is divided by the number of targets of all `rows` of the training set.
    """
    if recipe.precision != "32-true" and not isinstance(likelihood, Likelihood):
        likelihood = _in_float32(likelihood)
    if recipe.samples == 1 and not is_stochastic(module):
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


def _plain_loss(module: nn.Module, likelihood: Loss, output: Output | None) -> LossFunction:
    """Return `elbo` of a plain network, without its search for stochastic layers at every step."""
    zero = torch.zeros((), device=device_of(module))

    def loss(x: Inputs, y: Tensor, beta: Any) -> ElboTerms:
        outputs = call(module, x, output)
        nll = likelihood(outputs, y).mean()
        return ElboTerms(nll, zero, nll, outputs)

    return loss


class CompiledLoss:
    """A loss compiled for full batches; the last batch of an epoch, of another size, runs eagerly."""

    def __init__(self, loss: Any, network: nn.Module) -> None:
        self.eager: LossFunction = loss
        self.network = network
        # Dynamo counts recompilations by code object and stops after eight: every training has one of its own.
        own = FunctionType(loss.__code__.replace(), loss.__globals__, closure=loss.__closure__)
        self.compiled: LossFunction = torch.compile(own, dynamic=False)
        self.beta = torch.zeros((), device=device_of(network))
        self.rows: int | None = None

    def __call__(self, x: Inputs, y: Tensor, beta: float) -> ElboTerms:
        rows = leading_rows(x)
        if self.rows is None:
            learn_rows_from(self.network, x)  # compiled code cannot find out on which axis layers see the rows
            self.rows = rows
        if rows != self.rows:
            return self.eager(x, y, beta)
        # A tensor, since each new number would recompile; filled, since a copy from the CPU would wait for the GPU.
        return self.compiled(x, y, self.beta.fill_(beta))


def _in_float32(likelihood: Loss) -> Loss:
    """Give a plain loss outputs in float32; likelihoods convert them themselves."""
    return lambda outputs, y: likelihood(outputs.float(), y)
