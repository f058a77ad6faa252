"""The optimiser of a recipe: groups of parameters, learning rates, clipping, and weights that are frozen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from leanbayes.core.conversion import stochastic_layers
from leanbayes.core.objective import parameter_groups
from leanbayes.runtime.batches import device_of
from leanbayes.training.objective import NetworkWithLikelihood
from leanbayes.training.recipe import fixed_part, posterior_rate, rate, Recipe


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
    # A flag on the device can make fused kernels skip a step (see diagnostics.Meter).
    fused = True if device_of(model).type == "cuda" else None
    if recipe.optimizer == "adam":
        return torch.optim.Adam(groups, lr=recipe.lr, fused=fused)
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


def clip(model: nn.Module, recipe: Recipe) -> None:
    """Scale the gradient down to the recipe's largest norm."""
    if recipe.clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)


@contextmanager
def weights_frozen(model: NetworkWithLikelihood) -> Iterator[None]:
    """Take the gradient from all parameters but the posterior's and the likelihood's, inside the context.

    Raises:
        ValueError: if the model has no posterior to train.
    """
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
