"""Networks by name: one of `leanbayes.models`, or the user's own as `package.module:function`."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from leanbayes import models

Maker = Callable[[], nn.Module]


def maker(net: str, *, num_outputs: int, input_shape: tuple[int, ...]) -> Maker:
    """Return a function that makes the network anew at every call.

    A function of the user's own gets those of the keywords `num_outputs` and `input_shape` that it accepts; the current
    folder is importable.

    Raises:
        ValueError: in one sentence, if there is no such network or it cannot be made.
    """
    known: dict[str, Any] = {"num_outputs": num_outputs, "input_shape": input_shape}
    if ":" not in net:
        return lambda: models.build(net, **known)
    function = _find(net)
    accepted = inspect.signature(function).parameters
    everything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    keywords = {name: value for name, value in known.items() if everything or name in accepted}

    def make() -> nn.Module:
        made = function(**keywords)
        if not isinstance(made, nn.Module):
            raise ValueError(f"expected {net} to return a torch.nn.Module, got {type(made).__name__}")
        return made

    return make


def _find(net: str) -> Callable[..., Any]:
    module_name, _, function_name = net.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot find the network {net!r}: {error}; write package.module:function") from error
    if not callable(function):
        raise ValueError(f"expected {net} to be a function that makes a network, got {type(function).__name__}")
    return function  # type: ignore[no-any-return]
