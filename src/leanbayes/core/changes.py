"""Notice changes of a model's tensors between two calls.

Torch counts changes in place, but not those of fused optimisers (`Adam(fused=True)`; `lb.fit` uses them on a GPU, and
Adam on a CPU). So a step of any optimiser of a parameter is a change, too.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Iterable
from itertools import chain
from typing import Any
from weakref import WeakSet

import torch
from torch import nn, Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

VERSION = operator.attrgetter("_version")

_alive: WeakSet[Changes] = WeakSet()
_lock = threading.Lock()


class Changes:
    """The tensors of modules, as they were when this object was made.

    Attributes:
        holders: the dicts of parameters and buffers.
        tensors: their tensors; kept, so that no other tensor gets an identity of theirs.
        kind: the type of device whose autocast counts.
        stepped: whether an optimiser has changed one of the tensors.
    """

    def __init__(self, modules: Iterable[nn.Module], kind: str) -> None:
        self.holders = [d for m in modules for d in (m._parameters, m._buffers) if d]
        self.kind, self.stepped = kind, False
        self.tensors = [tensor for holder in self.holders for tensor in holder.values() if tensor is not None]
        self.addressed = [tensor for tensor in self.tensors if type(tensor) in (Tensor, nn.Parameter)]
        self.counted = [tensor for tensor in self.tensors if not tensor.is_inference()]
        self.seen = self._fingerprint()
        _watch_optimizers()
        with _lock:
            _alive.add(self)

    def found(self) -> bool:
        """Return whether a tensor was replaced or changed in place, or the precision of autocast has changed."""
        return self.stepped or self._fingerprint() != self.seen

    def _fingerprint(self) -> list[Any]:
        """Return a value that changes with every tensor that is replaced or changed in place.

        Folded weights also depend on the precision of autocast.
        """
        precision = torch.get_autocast_dtype(self.kind) if torch.is_autocast_enabled(self.kind) else None
        identities = map(id, chain.from_iterable(holder.values() for holder in self.holders))
        return [precision, *identities, *map(Tensor.data_ptr, self.addressed), *map(VERSION, self.counted)]


@functools.cache
def _watch_optimizers() -> None:
    """See the steps of all optimisers from now on."""
    register_optimizer_step_post_hook(_notice)


def _notice(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling() or not _alive:  # compiled steps count their changes
        return
    changed = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    with _lock:
        alive = list(_alive)
    for changes in alive:
        changes.stepped = changes.stepped or any(id(tensor) in changed for tensor in changes.tensors)
