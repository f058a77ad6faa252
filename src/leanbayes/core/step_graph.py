"""A training step as a CUDA graph: the GPU repeats the kernels of forward and backward without waiting for Python.

`CapturedStep` captures the loss of a batch and its gradients once, and replays them for every batch of the same shape:

    x, y, beta -> fixed tensors;  replay;  p.grad, nll, kl <- fixed tensors

Noise stays fresh: torch moves the generator on at every replay. The optimiser and its learning rates stay outside.
Python runs at the capture alone. So a step is captured only if Python does nothing in it that may change (see
`refusal`), and captured again if modules or parameters have changed between epochs.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Hashable, Iterable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn, Tensor

from leanbayes.core.answer_graphs import capturing, NotCapturableError, signature, without_cast_cache
from leanbayes.core.objective import ElboTerms
from leanbayes.runtime.batches import Inputs, map_leaves, tensors_in

WARM_UP = 3
"""Passes before a capture: they compile, and choose the kernels of convolutions."""

SIMPLE = (bool, int, float, str, type(None))

LossFunction = Callable[[Inputs, Tensor, Any], ElboTerms]
"""The loss of a batch (inputs, targets) under a weight of the KL."""

_cuda: Any = torch.cuda  # its streams and graphs have no types

logger = logging.getLogger("leanbayes")


class CapturedStep:
    """Loss and gradients of full batches by a CUDA graph; batches of another shape return None.

    Args:
        loss: the loss of a batch; the weight of the KL is a tensor.
        network: the module whose gradients are computed.
    """

    def __init__(self, loss: LossFunction, network: nn.Module) -> None:
        self.loss, self.network = loss, network
        self.failed = False
        self.forget()

    def forget(self) -> None:
        """Drop the capture and its memory."""
        self.graph: Any = None
        self.inputs: list[Tensor] = []
        self.signature: Hashable = None
        self.gradients: list[tuple[nn.Parameter, Tensor]] = []
        self.values: Tensor | None = None
        self.outputs: Tensor | None = None
        self.state: Hashable = None

    def look(self) -> None:
        """Drop the capture if a module or parameter has changed: call it when an epoch begins."""
        if self.graph is not None and self.state != _state(self.network):
            self.forget()

    def __call__(self, x: Inputs, y: Tensor, beta: float) -> ElboTerms | None:
        """Set the gradients of a batch and return its terms; None if this batch needs an ordinary step."""
        if self.failed or (self.graph is not None and not self._fits(x, y)):
            return None
        if self.graph is None and not self._captured_for(x, y):
            return None
        assert self.graph is not None
        assert self.values is not None
        assert self.outputs is not None
        torch._foreach_copy_(self.inputs, list(tensors_in((x, y))))
        self.beta.fill_(beta)
        self.graph.replay()
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        nll, kl, loss = self.values.clone().unbind()
        return ElboTerms(nll, kl, loss, self.outputs)

    def _fits(self, x: Inputs, y: Tensor) -> bool:
        try:
            return signature((x, y)) == self.signature
        except NotCapturableError:
            return False

    def _captured_for(self, x: Inputs, y: Tensor) -> bool:
        """Record the step for batches like this one; return whether that was possible."""
        reason = refusal(self.network)
        if reason is None:
            kept = [buffer.clone() for buffer in self.network.buffers()]
            try:
                with torch.random.fork_rng(devices=[y.device]):
                    self.signature = signature((x, y))
                    self._capture(x, y)
            except (NotCapturableError, Exception) as error:  # whatever a network does that cannot be captured
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                self.forget()
            with torch.no_grad():
                for buffer, before in zip(self.network.buffers(), kept, strict=True):
                    buffer.copy_(before)
        self.state, self.failed = _state(self.network), reason is not None
        if reason is not None:
            _clear(self.network.parameters())
            logger.warning("training steps are not captured as a CUDA graph: %s", reason)
        return reason is None

    def _capture(self, x: Inputs, y: Tensor) -> None:
        """Run the step on fixed inputs a few times, then capture it."""
        fixed = map_leaves((x, y), _clone)
        self.inputs = list(tensors_in(fixed))
        self.beta = torch.zeros((), device=y.device)
        side, here = _cuda.Stream(y.device), _cuda.current_stream(y.device)
        side.wait_stream(here)
        try:
            # The cast weights of an autocast around the training would never be cast again.
            own_casts = without_cast_cache() if torch.is_autocast_enabled(y.device.type) else nullcontext()
            with _cuda.stream(side), own_casts:
                for _ in range(WARM_UP):
                    _clear(self.network.parameters())
                    self._run(*fixed)
                _clear(self.network.parameters())
                graph, before = _cuda.CUDAGraph(), python_state(self.network)
                with capturing(graph, y.device):
                    self.values, self.outputs = self._run(*fixed)
        finally:
            here.wait_stream(side)
        if python_state(self.network) != before:
            raise NotCapturableError(
                "Python draws random numbers in a pass, or counts passes; a graph would repeat one"
            )
        self.gradients = [(p, p.grad) for p in self.network.parameters() if p.grad is not None]
        self.graph = graph

    def _run(self, x: Inputs, y: Tensor) -> tuple[Tensor, Tensor]:
        terms = self.loss(x, y, self.beta)
        terms.loss.backward()  # type: ignore[no-untyped-call]
        return torch.stack([terms.nll, terms.kl, terms.loss]).detach(), terms.outputs.detach()


def refusal(network: nn.Module) -> str | None:
    """Return why a step of a network cannot be captured, or None: hooks of the user would run only once."""
    for path, module in network.named_modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        for hook in (hook for some in hooks for hook in some.values()):
            owner = type(getattr(hook, "__self__", hook)).__module__
            if not owner.startswith("leanbayes."):
                return f"module '{path}' has a hook, which would run at the capture alone"
    for path, parameter in network.named_parameters():
        after: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if parameter._backward_hooks or after:
            return f"parameter '{path}' has a hook, which would run at the capture alone"
    return None


def python_state(network: nn.Module) -> Hashable:
    """Return the state that a captured step cannot change: attributes of modules, generators of the CPU."""
    name, words, *place = np.random.get_state()  # noqa: NPY002
    numpy = name, np.asarray(words).tobytes(), *place
    return _state(network), torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy


def _state(network: nn.Module) -> Hashable:
    """Return a value that differs if a capture would: modules, their modes and plain attributes, and parameters."""
    modules = [
        (id(module), *((name, value) for name, value in vars(module).items() if isinstance(value, SIMPLE)))
        for module in network.modules()
    ]
    tensors = [(id(p), p.data_ptr(), p.requires_grad) for p in (*network.parameters(), *network.buffers())]
    return tuple(modules), tuple(tensors)


def _clear(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _clone(leaf: Any) -> Any:
    return leaf.clone(memory_format=torch.preserve_format) if isinstance(leaf, Tensor) else leaf
