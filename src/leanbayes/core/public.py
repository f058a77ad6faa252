"""`lb.predict`, `lb.elbo` and `lb.kl` for users: a network that was never converted gets a warning.

The library itself calls the wrapped functions, which do not warn: comparisons and late conversions use plain networks.
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
from leanbayes.core.student import Student
from leanbayes.runtime.passes import PassState

P = ParamSpec("P")
R = TypeVar("R")

warned: set[type] = set()
"""Classes of networks that this process has warned about."""


def _warning(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function with a warning, once per class of networks, for a model without stochastic layer."""

    # `__module__` stays this one, where pickle finds the function.
    @functools.wraps(function, assigned=("__name__", "__qualname__", "__doc__", "__annotations__"))
    def public(*args: P.args, **kwargs: P.kwargs) -> R:
        model: Any = args[0] if args else kwargs.get("model")
        if not torch.compiler.is_compiling() and isinstance(model, nn.Module):
            model = unwrap(model)
            if type(model) not in warned and not _is_converted(model):
                warned.add(type(model))
                message = "this network has no stochastic layer; did you mean lb.convert(net, lb.Rank1())?"
                warnings.warn(message, stacklevel=2)
        return function(*args, **kwargs)

    return public


def _is_converted(model: nn.Module) -> bool:
    return isinstance(model, Student) or any(
        isinstance(vars(module).get("state"), PassState) for module in model.modules()
    )


predict = _warning(prediction.predict)
elbo = _warning(objective.elbo)
kl = _warning(objective.kl)
