"""Compute once what does not depend on the draw: the modules that run before the first stochastic layer.

The outputs of deterministic modules are kept until a stochastic layer is called; later draws on the same rows get
them back instead of computing them again. A tensor that the network changed in place after it was kept is noticed
by its version and computed anew.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

from torch import nn, Tensor

BUDGET = 256 * 2**20
"""Bytes of outputs that may be kept at a time."""


class Prefix:
    """The kept outputs, and the modules of a plain twin that give them back."""

    def __init__(self, twin: nn.Module, stochastic: Iterable[nn.Module]) -> None:
        """Watch the largest modules of `twin` that contain no stochastic layer."""
        self.stochastic = {id(module) for module in stochastic}
        self.kept: dict[Hashable, tuple[Tensor, int]] = {}
        self.calls: dict[int, int] = {}
        self.rows: Hashable = None
        self.before = True
        self.bytes = 0
        if self.stochastic:
            self._watch(twin)

    def forget(self) -> None:
        """Begin other data."""
        self.kept, self.bytes = {}, 0

    def start(self, rows: Hashable) -> None:
        """Begin a pass over the named rows."""
        self.calls, self.before, self.rows = {}, True, rows

    def _watch(self, module: nn.Module) -> None:
        if id(module) in self.stochastic:
            module.register_forward_pre_hook(self._leave)
        elif any(id(inner) in self.stochastic for inner in module.modules()):
            for child in module.children():
                self._watch(child)
        else:
            module.forward = self._replaying(id(module), module.forward)

    def _leave(self, module: nn.Module, args: Any) -> None:
        self.before = False

    def _replaying(self, name: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def replayed(*args: Any, **kwargs: Any) -> Any:
            if not self.before:
                return forward(*args, **kwargs)
            self.calls[name] = self.calls.get(name, 0) + 1
            key = (self.rows, name, self.calls[name])
            if key in self.kept:
                output, version = self.kept[key]
                if output._version == version:
                    return output
            output = forward(*args, **kwargs)
            self._keep(key, output)
            return output

        return replayed

    def _keep(self, key: Hashable, output: Any) -> None:
        if isinstance(output, Tensor) and key not in self.kept and self.bytes + output.nbytes <= BUDGET:
            self.kept[key] = output, output._version
            self.bytes += output.nbytes
