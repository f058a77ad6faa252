"""Why a loss is not finite: the batch that did it runs once more, and every layer is watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, ExitStack
from typing import Any

import torch
from torch import nn, Tensor
from torch.utils.data import DataLoader

from leanbayes.core.conversion import stochastic_layers
from leanbayes.core.objective import ElboTerms, Loss
from leanbayes.distributions.likelihoods import Categorical, check_classes
from leanbayes.runtime.batches import Inputs, Output, row_axis, tensors_in

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


# -------------------- first
# The first step: what torch would say of wrong data, in a sentence that says what to do.


KINDS = {
    torch.uint8: (("Byte", "unsigned char", "uint8"), "x.float(), for pixels x.float() / 255"),
    torch.float64: (("Double", "double", "float64"), "x.float()"),
}
"""Types of inputs that few networks take: how torch calls them when it complains, and how to convert them."""

ROWS_AT_ONCE = 4096
"""Rows whose targets are compared together, as int64: small types cannot hold every number of classes."""


def check_layout(network: nn.Module, *data: object) -> None:
    """Refuse to cut rows off the first axis for a network that has them on the second; a DataLoader cuts its own."""
    if row_axis(network) and not all(isinstance(each, DataLoader | None) for each in data):
        raise ValueError(
            "expected a network that takes rows on the first axis, got one with batch_first=False; put it into a "
            "module that transposes them, or give a DataLoader of batches in its layout"
        )


@contextmanager
def explained(x: Inputs) -> Iterator[None]:
    """Say how to convert inputs, if their type is what the network cannot take."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(x, Tensor) or x.dtype not in KINDS:
            raise
        names, remedy = KINDS[x.dtype]
        if not any(name in str(error) for name in names):
            raise
        raise TypeError(
            f"expected inputs of a type that the network takes, got {x.dtype} ({error}); convert them: {remedy}"
        ) from error


@contextmanager
def watched(network: nn.Module, likelihood: Loss, y: Tensor, output: Output | None) -> Iterator[None]:
    """Compare class targets with the outputs of the network before the loss does, of which a GPU would not recover."""
    if not isinstance(likelihood, Categorical) or y.is_floating_point() or not y.numel():
        yield
        return

    def compare(module: nn.Module, args: Any, result: Any) -> None:
        picked = getattr(result, "logits", result) if output is None else output(result)
        if isinstance(picked, Tensor) and picked.dim() > 1:
            for some in torch.split(y, ROWS_AT_ONCE):
                check_classes(some.long(), picked.shape[likelihood.axis], likelihood.ignore_index)

    hook = network.register_forward_hook(compare)
    try:
        yield
    finally:
        hook.remove()
