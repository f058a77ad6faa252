"""Earlier passes of a model, found again when activation checkpointing recomputes a part of one during backward.

A recomputation must see the components and the noise of its own pass, also after later passes. Autograd numbers its
nodes in the order of creation, for each thread on its own. A pass remembers the numbers at its beginning and its end.
The node that is running when a layer is recomputed was created during that pass, so its number names the pass.

Reentrant checkpointing runs a backward inside a backward. The nodes of the inner one were created during a
recomputation, after all passes. Such nodes belong to the pass that was last recomputed in the same thread.

A pass is kept alive by the graph of its output. Where no graph is alive, the pass is forgotten.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast, Generic, TypeVar

import torch
from torch import Tensor

State = TypeVar("State")

MOST_KEYS = 2**16  # keys of passes that are remembered, to recognise a repeated one


@dataclass(eq=False)
class Pass(Generic[State]):
    """One pass: its state, and the numbers of the autograd nodes that were created during it."""

    state: State
    thread: int
    first: int
    last: int | None = None
    task: int = -1  # the backward during which the pass began, -1 for none; it runs no node of this pass


@dataclass
class _Recomputed(Generic[State]):
    """The last recomputation in a thread: its outermost backward, a number before its nodes, and its pass."""

    task: int
    after: int
    of: weakref.ref[Pass[State]]


@dataclass(eq=False)
class History(Generic[State]):
    """The passes of one model whose graphs may be alive; the last one of a forward is kept in any case."""

    passes: list[weakref.ref[Pass[State]]] = field(default_factory=list)  # each is kept alive by its graph
    keys: dict[int, None] = field(default_factory=dict)  # random keys of earlier passes
    latest: Pass[State] | None = None
    recomputed: dict[int, _Recomputed[State]] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)

    def begin(self, state: State) -> None:
        """Remember a pass that begins now."""
        thread, number = threading.get_ident(), next_number()
        self.seen[thread] = number
        self.latest = Pass(state, thread, number, task=torch._C._current_graph_task_id())
        self.passes = [one for one in self.passes if one() is not None]
        self.passes.append(weakref.ref(self.latest))

    def end(self, outputs: Iterable[Tensor]) -> None:
        """Close the latest pass; the graphs of its outputs keep it alive."""
        latest = self.latest
        if latest is None or latest.last is not None:
            return
        latest.last = self.seen[latest.thread] = next_number()
        for output in outputs:
            if output.grad_fn is not None and not torch._C._functorch.is_functorch_wrapped_tensor(output):
                cast(Any, output).register_hook(partial(_keep_alive, latest))
        if latest.task != -1:
            self.latest = None  # its own graph alone keeps it

    def find(self) -> State | None:
        """Return the state of the pass that is being recomputed; None if no pass is."""
        node = torch._C._current_autograd_node()
        if node is None:
            return None
        number, thread = node._sequence_nr(), threading.get_ident()
        alive = [one for one in (ref() for ref in self.passes) if one is not None]
        task = torch._C._current_graph_task_id()
        during = (one for one in alive if one.first <= number and (one.last is None or number <= one.last))
        found = {one for one in during if one.task == -1 or one.task != task}
        nested = self._nested(number, thread)
        if nested is not None and not any(one.thread == thread for one in found):
            found.add(nested)
        if len(found) > 1:
            raise RuntimeError(
                "activation checkpointing recomputes a layer, and two passes may have called it: nested reentrant "
                "regions hide which; use checkpoint(..., use_reentrant=False), or run backward after each forward"
            )
        if not found:
            return None
        one = found.pop()
        self._touch(one, thread)
        return one.state

    def _nested(self, number: int, thread: int) -> Pass[State] | None:
        """Return the pass of a recomputation around this backward, if the node was created during it."""
        last = self.recomputed.get(thread)
        if last is None or last.task == torch._C._current_graph_task_id() or number < last.after:
            return None
        return last.of()

    def _touch(self, one: Pass[State], thread: int) -> None:
        """Note that a pass is being recomputed in this thread; a recomputation inside another keeps the outer note."""
        last = self.recomputed.get(thread)
        if last is None or last.of() is not one:
            after = self.seen.get(thread, 0)
            self.recomputed[thread] = _Recomputed(torch._C._current_graph_task_id(), after, weakref.ref(one))
        self.seen[thread] = next_number()

    def new_key(self) -> int:
        """Draw a key from torch's generator.

        A pass that begins during backward repeats an earlier one: checkpointing restored the generator.
        """
        key = int(torch.randint(2**63 - 1, (), device="cpu"))
        if in_backward() and key not in self.keys:
            raise RuntimeError(
                "a stochastic network is called during backward with noise that no earlier pass had: expected "
                "checkpoint(..., preserve_rng_state=True) around it, or `with lb.draws(model)` around forward and "
                "backward, which fixes the noise"
            )
        self.keys[key] = None
        if len(self.keys) > MOST_KEYS:
            del self.keys[next(iter(self.keys))]
        return key

    def __deepcopy__(self, memo: Any) -> History[State]:
        """Return an empty history: the graphs of a model do not belong to its copy."""
        return History()

    def __reduce__(self) -> tuple[Any, ...]:
        return History, ()


def _keep_alive(kept: Pass[Any], gradient: Tensor) -> None:
    """Hook of an output's graph: it holds a pass and changes no gradient."""


def next_number() -> int:
    """Return the number that autograd gives to the next node of this thread."""
    return int(cast(Any, torch.autograd)._get_sequence_nr())


def in_backward() -> bool:
    """Return whether autograd is running a backward in this thread."""
    if torch.compiler.is_compiling():
        return False
    return bool(torch._C._current_graph_task_id() != -1)
