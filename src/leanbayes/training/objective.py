"""The objective of a training: the loss of a batch, the optimiser of a recipe, and scores on held-out data.

The loss of a converted model is the evidence lower bound, that of a plain network the likelihood alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import nn, Tensor

from leanbayes.core.conversion import is_stochastic, stochastic_layers
from leanbayes.core.objective import elbo, ElboTerms, Loss, parameter_groups, targets_per_row
from leanbayes.core.prediction import Prediction
from leanbayes.core.predictor import predict
from leanbayes.core.step_graph import LossFunction
from leanbayes.distributions.likelihoods import Likelihood, match_shape
from leanbayes.runtime._files import finite
from leanbayes.runtime.batches import call, device_of, Inputs, leading_rows, Output, run
from leanbayes.runtime.probe import learn_rows_from
from leanbayes.training.data import Batches
from leanbayes.training.recipe import fixed_part, posterior_rate, rate, Recipe

VALIDATION_DRAWS = 4
"""Draws of a prediction: enough to follow a training, a quarter of the default of `predict`."""


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context with the precision of a recipe."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16-mixed" else nullcontext()


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
        with autocast(self.precision, device_of(self)):
            return run(self.network, *args, **kwargs)


def loss_function(
    module: nn.Module, likelihood: Loss, recipe: Recipe, *, rows: int, tile: bool, output: Output | None
) -> LossFunction:
    """Return the loss of a network as a function of the batch and the weight of the KL.

    The KL is divided by the number of targets of all `rows` of the training set.
    """
    if recipe.precision != "32-true" and not isinstance(likelihood, Likelihood):
        given = likelihood  # a plain loss gets outputs in float32; likelihoods convert them themselves
        likelihood = lambda outputs, y: given(outputs.float(), y)  # noqa: E731
    if recipe.samples == 1 and not is_stochastic(module):
        return _plain_loss(module, likelihood, output)
    options: dict[str, Any] = {name: getattr(recipe, name) for name in ("samples", "aggregate", "deal")}
    options |= {"tile": tile, "output": output}

    def loss(x: Inputs, y: Tensor, beta: Any) -> ElboTerms:
        num_data = rows * targets_per_row(likelihood, y)
        return elbo(module, x, y, likelihood, num_data=num_data, beta=beta, **options)

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

    def __call__(self, x: Inputs, y: Tensor, beta: float | Tensor) -> ElboTerms:
        rows = leading_rows(x)
        if self.rows is None:
            learn_rows_from(self.network, x)  # compiled code cannot find out on which axis layers see the rows
            self.rows = rows
        if rows != self.rows:
            return self.eager(x, y, beta)
        # A tensor, since each new number would recompile; filled, since a copy from the CPU would wait for the GPU.
        return self.compiled(x, y, beta if isinstance(beta, Tensor) else self.beta.fill_(beta))


def make_optimizer(model: NetworkWithLikelihood, recipe: Recipe) -> torch.optim.Optimizer:
    """Return an optimiser of all parameters, in the groups of `parameter_groups`.

    One optimiser serves before and after a late conversion: parameters without a gradient do not move. A likelihood
    outside the network has a group of its own, with the rate of the posterior.
    """
    groups = parameter_groups(
        model.network, lr=recipe.lr, posterior_lr=recipe.posterior_lr, weight_decay=recipe.weight_decay
    )
    known = {id(parameter) for group in groups for parameter in group["params"]}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
    if others:
        own = recipe.lr if recipe.posterior_lr is None else recipe.posterior_lr
        groups.append({"name": "likelihood", "params": others, "lr": own, "weight_decay": 0.0})
    if not groups:
        raise ValueError("expected a model with parameters to train, got none that requires a gradient")
    for group in groups:
        group["initial_lr"] = group["lr"]
    kind = device_of(model).type
    if recipe.optimizer == "adam":  # on a CPU, the fused kernel is cheaper for small networks
        return torch.optim.Adam(groups, lr=recipe.lr, fused=True if kind in ("cuda", "cpu") else None)
    # A flag on the device can make fused kernels skip a step (see diagnostics.Meter).
    fused = True if kind == "cuda" else None
    nesterov = recipe.momentum > 0
    return torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum, nesterov=nesterov, fused=fused)


def set_rates(optimizer: torch.optim.Optimizer, recipe: Recipe, progress: float) -> float:
    """Set the learning rates after `progress` epochs; return the rate of the weights."""
    fixed = fixed_part(recipe, progress)
    weights = 0.0 if fixed == "weights" else rate(recipe, progress)
    posterior = 0.0 if fixed == "posterior" else posterior_rate(recipe, progress)
    for group in optimizer.param_groups:
        factor = posterior if group["name"] in ("posterior", "likelihood") else weights
        group["lr"] = group["initial_lr"] * factor
    return recipe.lr * weights


@contextmanager
def weights_frozen(model: NetworkWithLikelihood) -> Iterator[None]:
    """Freeze all parameters but the posterior's and the likelihood's, inside the context; raise if there is none."""
    learned = {id(p) for _, layer in stochastic_layers(model) for p in layer.extra_parameters() if p.requires_grad}
    if not learned:
        raise ValueError("freeze=True trains the posterior alone, and this model has none; convert it, or freeze=False")
    if model.likelihood is not None:
        learned |= {id(p) for p in model.likelihood.parameters()}
    frozen = [p for p in model.parameters() if p.requires_grad and id(p) not in learned]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


def to_train_mode(model: nn.Module, *, freeze: bool) -> None:
    """Put a model into train mode; where it is frozen, all but the modules that own buffers.

    A network learns without a gradient in buffers: statistics of norms, vectors of spectral norms. Modules change
    them in train mode only. Dropout has none and stays on.
    """
    model.train()
    if freeze:
        for module in model.modules():
            module.training = not any(True for _ in module.buffers(recurse=False))


def validate(
    model: NetworkWithLikelihood, batches: Batches, likelihood: Likelihood, output: Output | None, fabric: Any
) -> dict[str, float | None]:
    """Return valid_nll, and valid_accuracy or valid_rmse.

    Every process predicts its own rows; the sums over all processes count each row once.
    """
    regression = likelihood.measure == "variance"
    sums = torch.zeros(3, dtype=torch.float64, device=fabric.device)  # -log p, squared errors or hits, targets
    for x, y in batches.in_order():
        with autocast(model.precision, fabric.device):
            prediction = predict(model.network, x, likelihood, samples=VALIDATION_DRAWS, output=output)
        sums += torch.stack(_sums(prediction, y, regression)).to(sums)
    nll, second, count = fabric.all_reduce(sums, reduce_op="sum").tolist()
    if regression:
        return {"valid_nll": finite(nll / count), "valid_rmse": finite((second / count) ** 0.5)}
    return {"valid_nll": finite(nll / count), "valid_accuracy": second / count}


def _sums(prediction: Prediction, y: Tensor, regression: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of -log p, the sum of squared errors (or of hits), and the number of targets."""
    nll = -prediction.log_prob(y).sum()
    mean = prediction.mean
    if regression:
        errors = (match_shape(y, mean, "validation") - mean).square().flatten(1).mean(1)
        return nll, errors.sum(), torch.tensor(float(len(errors)), device=errors.device)
    if mean.dim() == y.dim() + 1 and mean.shape[1] > 1:  # probabilities of classes
        counted = y.long().ne(getattr(prediction.likelihood, "ignore_index", -1))
        hits = mean.argmax(1).eq(y) & counted
    else:  # probabilities of yes
        hits = mean.gt(0.5).eq(match_shape(y, mean, "validation").gt(0.5))
        counted = torch.ones_like(hits)
    return nll, hits.sum(), counted.sum()
