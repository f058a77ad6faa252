"""Cache of outputs that do not depend on the draw: of modules that run before the first weight of a draw is used.

Outputs of deterministic modules are kept until a stochastic layer is called or one of its parameters is read. Later
draws on the same rows reuse them. A reused output skips the call, so the call must have no side effect: a module that
changed its arguments in place runs again in every draw, and so does a module whose output was changed in place later.
The versions of tensors show both.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from torch import nn, Tensor

from leanbayes.runtime.batches import versions

BUDGET = 256 * 2**20
"""Bytes of outputs that may be kept at a time."""


class PrefixCache:
    """The kept outputs of the largest modules of a plain twin without a stochastic layer."""

    def __init__(self, twin: nn.Module, stochastic: Iterable[nn.Module]) -> None:
        self.stochastic = {id(module) for module in stochastic}
        self.kept: dict[Hashable, tuple[Tensor, list[int]]] = {}
        self.calls: dict[int, int] = {}
        self.rows: Hashable = None
        self.before = True
        self.inside = False
        self.bytes = 0
        if self.stochastic:
            self._watch(twin)

    def forget(self) -> None:
        """Drop all kept outputs."""
        self.kept, self.bytes = {}, 0

    def start(self, rows: Hashable) -> None:
        """Begin a pass over the named rows."""
        self.calls, self.before, self.inside, self.rows = {}, True, False, rows

    def _watch(self, module: nn.Module) -> None:
        if id(module) in self.stochastic:
            module.register_forward_pre_hook(self._leave)
            module._parameters = _Watched(module._parameters, self._leave)
        elif any(id(inner) in self.stochastic for inner in module.modules()):
            for child in module.children():
                self._watch(child)
        else:
            module.forward = self._replaying(id(module), module.forward)

    def _leave(self, *_: Any) -> None:
        self.before = False

    def _replaying(self, name: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def replayed(*args: Any, **kwargs: Any) -> Any:
            if self.inside or not self.before:  # inside: a parent runs and is kept as a whole
                return forward(*args, **kwargs)
            self.calls[name] = self.calls.get(name, 0) + 1
            key = (self.rows, name, self.calls[name])
            if key in self.kept:
                output, version = self.kept[key]
                if versions(output) == version:
                    return output
            given = versions((args, kwargs))
            self.inside = True
            output = forward(*args, **kwargs)
            self.inside = False
            if self.before and versions((args, kwargs)) == given:
                self._keep(key, output)
            return output

        return replayed

    def _keep(self, key: Hashable, output: Any) -> None:
        if isinstance(output, Tensor) and key not in self.kept and self.bytes + output.nbytes <= BUDGET:
            self.kept[key] = output, versions(output)
            self.bytes += output.nbytes


class _Watched(dict[str, Any]):
    """Parameter dict that notifies on read: some networks use `layer.weight` without calling the layer."""

    def __init__(self, parameters: Mapping[str, Any], read: Callable[[], None]) -> None:
        super().__init__(parameters)
        self.read = read

    def __getitem__(self, name: str) -> Any:
        self.read()
        return super().__getitem__(name)
