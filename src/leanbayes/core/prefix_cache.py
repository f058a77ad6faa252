"""Compute once what does not depend on the draw: the modules that run before a weight of a draw is used.

The outputs of deterministic modules are kept until a stochastic layer is called or one of its parameters is read;
later draws on the same rows get them back instead of computing them again. To give an output back is to leave out
the call, so what a call did besides must be nothing: a module that changed its arguments in place runs again in
every draw, and so does one whose output was changed in place later. Both are noticed by the versions of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from torch import nn, Tensor

from leanbayes.runtime.batches import versions

BUDGET = 256 * 2**20
"""Bytes of outputs that may be kept at a time."""


class PrefixCache:
    """The kept outputs, and the modules of a plain twin that give them back."""

    def __init__(self, twin: nn.Module, stochastic: Iterable[nn.Module]) -> None:
        """Watch the largest modules of `twin` that contain no stochastic layer."""
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
        """Begin other data."""
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
            if self.inside or not self.before:  # inside: a module with two parents, of which one is replayed as a whole
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
    """The parameters of a layer, which say when one of them is read: not every network calls the layer for it."""

    def __init__(self, parameters: Mapping[str, Any], read: Callable[[], None]) -> None:
        super().__init__(parameters)
        self.read = read

    def __getitem__(self, name: str) -> Any:
        self.read()
        return super().__getitem__(name)
