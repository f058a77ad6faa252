"""`lb.predict`, `lb.elbo` and `lb.kl` as users call them: a network that was never converted gets a warning.

The library itself calls the functions behind them, which are silent: a comparison has its plain row, and training its
plain epochs before a late conversion.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from leanbayes.core import objective
from leanbayes.core import predictor as prediction
from leanbayes.core.conversion import unwrap
from leanbayes.runtime.passes import states_of

P = ParamSpec("P")
R = TypeVar("R")

warned: set[type] = set()
"""Classes of networks of which this process has warned."""


def _warning(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function with a look at its first argument, the model."""

    # The module stays this one, where pickle finds it.
    @functools.wraps(function, assigned=("__name__", "__qualname__", "__doc__", "__annotations__"))
    def public(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_compiling():
            _warn_of_plain(args[0] if args else kwargs.get("model"))
        return function(*args, **kwargs)

    return public


def _warn_of_plain(model: Any) -> None:
    """Warn once for each class of networks if this one has no stochastic layer and is no ensemble."""
    if not isinstance(model, nn.Module):
        return
    model = unwrap(model)
    if type(model) in warned or states_of(model):
        return
    warned.add(type(model))
    message = "this network has no stochastic layer; did you mean lb.convert(net, lb.Rank1())?"
    warnings.warn(message, stacklevel=3)


predict = _warning(prediction.predict)
elbo = _warning(objective.elbo)
kl = _warning(objective.kl)
