"""What an estimator for tables chooses by itself: the network, the method, and how long to train."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from leanbayes import models
from leanbayes.experiments.config import method_of
from leanbayes.inputs import call
from leanbayes.layers.modes import in_eval_mode
from leanbayes.methods.base import Method
from leanbayes.methods.rank1 import Rank1
from leanbayes.training import Recipe

Net = nn.Module | Callable[..., nn.Module] | str | None
"""A network to copy, a function of the keywords `num_outputs` and `input_shape`, a name of `lb.models`, or None."""

HIDDEN = 100
"""Units of the one hidden layer of the default network."""

FEWEST_STEPS = 200
"""Steps of the shortest training: half a second on one core."""

FEWEST_EPOCHS = 20
"""Passes over large tables, which have more steps than that in each."""

BATCH_SIZES = (32, 512)
"""Smallest and largest batch."""

STEPS_AN_EPOCH = 64
"""Batches of an epoch, where they are neither the smallest nor the largest."""


def default_recipe(rows: int) -> Recipe:
    """Return a recipe for a table of so many rows: a fixed number of steps for small ones, of epochs for large ones."""
    smallest, largest = BATCH_SIZES
    batch_size = min(largest, max(smallest, rows // STEPS_AN_EPOCH))
    epochs = max(FEWEST_EPOCHS, round(FEWEST_STEPS * batch_size / max(rows, batch_size)))
    return Recipe(epochs=epochs, batch_size=batch_size, optimizer="adam", lr=1e-2, weight_decay=3e-3)


def chosen_method(method: Method | str | None) -> Method | None:
    """Return the method that is meant: itself, by its name, the default; None for the plain network, "plain"."""
    if method is None:
        return Rank1(components=4)
    if isinstance(method, str):
        return method_of(method)
    if not isinstance(method, Method):
        raise TypeError(f"expected method to be one such as lb.Rank1(components=4), or its name, got {method!r}")
    return method


def network(net: Net, *, num_outputs: int, features: int) -> nn.Module:
    """Return a new network with `num_outputs` for each row of `features` numbers.

    Raises:
        TypeError: if `net` is none of the kinds that make a network.
        ValueError: if the network cannot take such rows, or its outputs have another shape.
    """
    made = _made(net, num_outputs=num_outputs, input_shape=(features,))
    _check_outputs(made, num_outputs, features)
    return made


def _made(net: Any, *, num_outputs: int, input_shape: tuple[int, ...]) -> nn.Module:
    if net is None:
        return models.MLP(input_shape, num_outputs, hidden=(HIDDEN,))
    if isinstance(net, str):
        return models.build(net, num_outputs=num_outputs, input_shape=input_shape)
    if isinstance(net, nn.Module):
        return copy.deepcopy(net)
    made = net(num_outputs=num_outputs, input_shape=input_shape) if callable(net) else net
    if not isinstance(made, nn.Module):
        raise TypeError(
            "expected net to be a torch.nn.Module, a function of num_outputs and input_shape that returns one, or a "
            f"name of lb.models, got {net!r}"
        )
    return made


def _check_outputs(made: nn.Module, num_outputs: int, features: int) -> None:
    """Run two rows of zeros through the network, which also gives lazy layers their sizes."""
    try:
        with torch.no_grad(), in_eval_mode(made):
            outputs = call(made, torch.zeros(2, features))
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"expected net to take float32 rows of {features} features, which failed: {error}") from error
    if outputs.shape != (2, num_outputs):
        raise ValueError(
            f"expected net to return {num_outputs} outputs a row, shape (2, {num_outputs}) for two rows, got shape "
            f"{tuple(outputs.shape)}; give its last layer {num_outputs} outputs"
        )
