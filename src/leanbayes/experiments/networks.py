"""Networks by name: one of `leanbayes.models`, or the user's own as `package.module:function`.

Only a name from the command line is ever imported. A name that a file records is text to compare (`agreed`).
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from leanbayes import models

Maker = Callable[[], nn.Module]
OWN = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
"""How the name of a user's own network reads."""


def maker(net: str, *, num_outputs: int, input_shape: tuple[int, ...]) -> Maker:
    """Return a function that makes a new network at every call.

    A function of the user's own gets those of the keywords `num_outputs` and `input_shape` that it accepts; the current
    folder is importable. Such a name must come from the command line, never from a file: it runs code.

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
        try:
            made = function(**keywords)
        except Exception as error:
            raise ValueError(f"{net} failed to make a network: {type(error).__name__}: {error}") from error
        if not isinstance(made, nn.Module):
            raise ValueError(f"expected {net} to return a torch.nn.Module, got {type(made).__name__}")
        return _initialised(made, input_shape)

    return make


def agreed(recorded: str, given: str, place: Path) -> str:
    """Return the network of a run if it may be made: a known one, or an own one that the command line names, too.

    Args:
        recorded: what a file of the run says, which is compared and nothing else.
        given: what the command line says; "" where it says nothing.
        place: the folder of the run.

    Raises:
        ValueError: in one sentence, if an own network was not named, or another one.
    """
    if ":" in recorded and not OWN.fullmatch(recorded):
        raise ValueError(f"'{place}' names a network {recorded!r}, which is neither known nor package.module:function")
    if given and given != recorded:
        raise ValueError(f"expected --net {recorded!r}, which the run was trained on, got {given!r}, for '{place}'")
    if given or ":" not in recorded:
        return recorded
    raise ValueError(
        f"'{place}' was trained on the network {recorded}, which is code outside of leanbayes and is not imported "
        f"because a file names it; add --net {recorded} if you trust {recorded.partition(':')[0]}"
    )


def _find(net: str) -> Callable[..., Any]:
    module_name, _, function_name = net.partition(":")
    if not OWN.fullmatch(net):
        raise ValueError(f"expected a network as package.module:function, got {net!r}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(
            f"cannot import {module_name} for the network {net}: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, function_name, None)
    if function is None:
        raise ValueError(f"{module_name} has no {function_name}; write the network as package.module:function")
    if isinstance(function, nn.Module) or not callable(function):
        kind = type(function).__name__
        raise ValueError(
            f"expected {net} to be a function that makes a network, got a {kind}; write one that returns it"
        )
    return function  # type: ignore[no-any-return]


def _initialised(network: nn.Module, input_shape: tuple[int, ...]) -> nn.Module:
    """Run two rows of zeros through a network with lazy layers, so that they learn their sizes."""
    if any(nn.parameter.is_lazy(parameter) for parameter in network.parameters()):
        with torch.no_grad():
            network.eval()(torch.zeros(2, *input_shape))
        network.train()
    return network
