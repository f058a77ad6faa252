"""Structural copies of models: the same tensors in other modules."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn, Tensor

from leanbayes.layers.hooks import follow_ties
from leanbayes.runtime.distributed import refuse_shards
from leanbayes.runtime.passes import PassState, states_of


def twin(model: nn.Module, replace: Mapping[int, nn.Module] | None = None, *, share_plain: bool = False) -> nn.Module:
    """Return a copy of the modules of a model, with the same tensors and a `PassState` of its own.

    Args:
        model: the model; it stays unchanged.
        replace: the modules that take the place of others, by identity; the copy then has no pass hooks.
        share_plain: share modules without a stochastic layer inside instead of copying them.

    So draws are made while other threads use the model, and make draws of their own.
    """
    shared: dict[int, Any] = {}
    if share_plain:
        for _, layers in states_of(model):
            for layer in layers:
                refuse_shards(layer.parameters(), layer.path)
        _share_plain(model, shared)
    else:
        shared = {id(tensor): tensor for tensor in tensors_of(model)}
    if replace is None:
        return copy.deepcopy(model, shared)
    found: nn.Module = copy.deepcopy(model, shared | dict(replace))
    for module in (*found.modules(), *replace.values()):
        _remove_pass_hooks(module)
    follow_ties(found)
    return found


def copied(model: nn.Module, kept: Mapping[int, Any] | None = None) -> nn.Module:
    """Copy a model with all of its tensors but those that are kept, by identity."""
    try:
        return copy.deepcopy(model, dict(kept or {}))
    except RuntimeError as error:
        raise ValueError(
            f"the model cannot be copied ({str(error).splitlines()[0]}); give up hook-based weight_norm for "
            "torch.nn.utils.parametrizations.weight_norm, or convert in place with copy=False"
        ) from error


def tensors_of(model: nn.Module) -> Iterator[Any]:
    """Yield every tensor of a model: parameters, buffers, and plain attributes of modules."""
    for module in model.modules():
        for holder in (module._parameters, module._buffers, module.__dict__):
            yield from (value for value in holder.values() if isinstance(value, Tensor))


@contextmanager
def modes_restored(model: nn.Module) -> Iterator[None]:
    """Restore the mode (train or eval) of each module when the context ends."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch to eval mode inside the context; restore each module's mode afterwards."""
    with modes_restored(model):
        model.eval()
        yield


def _share_plain(module: nn.Module, shared: dict[int, Any]) -> bool:
    """Note modules without a `PassState` anywhere, and the tensors of others; return whether this one is such."""
    plain = [_share_plain(child, shared) for child in module.children()]
    if all(plain) and not isinstance(vars(module).get("state"), PassState):
        shared[id(module)] = module
        return True
    tensors = (*module._parameters.values(), *module._buffers.values(), *module.__dict__.values())
    shared.update((id(tensor), tensor) for tensor in tensors if isinstance(tensor, Tensor))
    return False


def _remove_pass_hooks(module: nn.Module) -> None:
    """Remove the hooks of a `PassState`, and those that hold one."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            if any(isinstance(getattr(hook, name, None), PassState) for name in ("__self__", "state")):
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
