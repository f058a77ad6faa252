"""Why a loss is not finite: the batch that did it runs once more, and every layer is watched."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn, Tensor

from leanbayes.convert import stochastic_layers
from leanbayes.inputs import Inputs, tensors_in
from leanbayes.objective import ElboTerms

CLEAN = "look for missing values and divisions by zero where the data are prepared"
TAME = "try a lower lr, clip_norm=1.0, a warm-up, or precision='32-true'"


class TrainingError(RuntimeError):
    """Training cannot go on; the message says why, and what to try."""


def explain(network: nn.Module, x: Inputs, y: Tensor, loss: Callable[[], ElboTerms]) -> str | None:
    """Return a clause that says what first went wrong in a batch, and what to try; None if nothing does this time.

    Args:
        network: the model, with the weights and under the noise that gave the loss.
        x: the inputs of the batch.
        y: its targets.
        loss: computes the terms of the loss of this batch; nothing else is run.
    """
    for name, value in (("inputs", x), ("targets", y)):
        if not all(map(_finite, tensors_in(value))):
            return f"the {name} of the batch are not finite; {CLEAN}"
    broken = [name for name, parameter in network.named_parameters() if not _finite(parameter)]
    if broken:
        # Gradients come from the end of a network: of several broken layers, its last one broke first.
        return f"the parameters of {_layer(broken[-1].rpartition('.')[0])} are not finite, its update broke; {TAME}"
    return _watch(network, loss)


def _watch(network: nn.Module, loss: Callable[[], ElboTerms]) -> str | None:
    found: list[str] = []
    with ExitStack() as stack:
        for path, module in network.named_modules():
            stack.callback(module.register_forward_hook(_reporter(path, found)).remove)
        terms = loss()
    if found:
        return f"the output of {_layer(found[0])} is the first that is not finite; {TAME}"
    for path, layer in stochastic_layers(network):
        if not _finite(layer.kl()):
            return f"the KL of {_layer(path)} is not finite; lower posterior_lr or raise the prior's scale"
    return (
        None if _finite(terms.nll) else f"all outputs are finite, their likelihood is not; check the targets, or {TAME}"
    )


def _reporter(path: str, found: list[str]) -> Callable[[nn.Module, Any, Any], None]:
    def report(module: nn.Module, args: Any, output: Any) -> None:
        if not all(map(_finite, tensors_in(output))):
            found.append(path)

    return report


def _layer(path: str) -> str:
    path = path.removesuffix(".base")
    return f"layer '{path}'" if path else "the network"


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all()) if tensor.is_floating_point() else True
