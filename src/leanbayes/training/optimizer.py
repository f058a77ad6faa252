"""The optimiser of a recipe: groups of parameters, learning rates, the limit on the gradient."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from leanbayes.core.conversion import stochastic_layers
from leanbayes.core.objective import parameter_groups
from leanbayes.training.objective import Phase
from leanbayes.training.recipe import posterior_rate, rate, Recipe, resting


def optimizer_of(phase: Phase, recipe: Recipe) -> torch.optim.Optimizer:
    """Return an optimiser of all parameters of a converted model, in the groups of `parameter_groups`.

    One optimiser serves before and after a late conversion: parameters without a gradient do not move. A likelihood
    that is not part of the model forms a group of its own, with the rate of the posterior.
    """
    groups = parameter_groups(
        phase.network, lr=recipe.lr, posterior_lr=recipe.posterior_lr, weight_decay=recipe.weight_decay
    )
    known = {id(parameter) for group in groups for parameter in group["params"]}
    others = [p for p in phase.parameters() if p.requires_grad and id(p) not in known]
    if others:
        own = recipe.lr if recipe.posterior_lr is None else recipe.posterior_lr
        groups.append({"name": "likelihood", "params": others, "lr": own, "weight_decay": 0.0})
    if not groups:
        raise ValueError("expected a model with parameters to train, got none that requires a gradient")
    for group in groups:
        group["initial_lr"] = group["lr"]
    # Fused kernels can be told by a flag on the device to leave the weights alone (see meter.py).
    fused = True if next(phase.parameters()).device.type == "cuda" else None
    if recipe.optimizer == "adam":
        return torch.optim.Adam(groups, lr=recipe.lr, fused=fused)
    nesterov = recipe.momentum > 0
    return torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum, nesterov=nesterov, fused=fused)


def set_rates(optimizer: torch.optim.Optimizer, recipe: Recipe, progress: float) -> float:
    """Set the learning rates after `progress` epochs, and return that of the weights."""
    weights, posterior = rate(recipe, progress), posterior_rate(recipe, progress)
    rest = resting(recipe, progress)
    weights, posterior = 0.0 if rest == "weights" else weights, 0.0 if rest == "posterior" else posterior
    for group in optimizer.param_groups:
        factor = posterior if group["name"] in ("posterior", "likelihood") else weights
        group["lr"] = group["initial_lr"] * factor
    return recipe.lr * weights


def clip(phase: nn.Module, recipe: Recipe) -> None:
    """Scale the gradient down to the recipe's largest norm."""
    if recipe.clip_norm is not None:
        nn.utils.clip_grad_norm_(phase.parameters(), recipe.clip_norm)


# -------------------- freeze
# Training the posterior alone, around a network that stays as it came: weights, statistics and all.
#
# What a network learns without a gradient lies in buffers: the running statistics of norms, the vectors of spectral
# norms. Their modules change them in train mode only, so they are kept in eval mode; dropout stays on.


@contextmanager
def weights_frozen(phase: Phase) -> Iterator[None]:
    """Let posteriors, and the noise of a likelihood, be all that has a gradient while the context is open.

    Raises:
        ValueError: if the model has no posterior to train.
    """
    learned = {id(p) for _, layer in stochastic_layers(phase) for p in layer.extra_parameters() if p.requires_grad}
    if not learned:
        raise ValueError("freeze=True trains the posterior alone, and this model has none; convert it, or freeze=False")
    if phase.likelihood is not None:
        learned |= {id(p) for p in phase.likelihood.parameters()}
    resting = [p for p in phase.parameters() if p.requires_grad and id(p) not in learned]
    for parameter in resting:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in resting:
            parameter.requires_grad_(True)


def to_train_mode(model: nn.Module, *, freeze: bool) -> None:
    """Put a model into train mode; where it is frozen, all of it but the modules that have buffers of their own."""
    model.train()
    if freeze:
        for module in model.modules():
            module.training = not any(True for _ in module.buffers(recurse=False))
