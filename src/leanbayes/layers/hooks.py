"""Hooks of one module, handed to the module that takes its place."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch import nn

HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def copy_hooks(source: nn.Module, target: nn.Module) -> None:
    """Register the hooks of one module on another, too."""
    for name in HOOKS:
        setattr(target, name, copy.copy(getattr(source, name)))
    target._is_full_backward_hook = source._is_full_backward_hook


def move_hooks(source: nn.Module, target: nn.Module) -> None:
    """Hand the hooks of one module to another, and leave it with none."""
    for name in HOOKS:
        own = getattr(source, name)
        setattr(target, name, own)
        setattr(source, name, type(own)())
    target._is_full_backward_hook, source._is_full_backward_hook = source._is_full_backward_hook, None


# -------------------- ties
# Names of tied weights, which some models keep: they follow the weights when layers are wrapped or unwrapped.
#
# A model of Hugging Face's transformers knows by name which of its weights are one, and ties them again in
# `tie_weights`, `init_weights` and `save_pretrained`. The weight of a wrapped layer is one level deeper: `head.weight`
# is `head.base.weight` then.


KEPT = ("_tied_weights_keys", "all_tied_weights_keys")
"""Attributes with {name: name of the weight that it is}; the first may hold patterns, which are left as they are."""
BASE = ".base"


def follow_ties(model: nn.Module) -> None:
    """Correct the names of tied weights in a model whose layers were just wrapped, or unwrapped."""
    for module in model.modules():
        for attribute in KEPT:
            kept = getattr(module, attribute, None)
            if isinstance(kept, Mapping):
                moved = {_found(module, name): _found(module, other) for name, other in kept.items()}
                if moved != kept:
                    setattr(module, attribute, moved)


def _found(model: nn.Module, name: str) -> str:
    """Return the name under which a parameter is there: with `base` or without."""
    path, _, leaf = name.rpartition(".")
    other = path.removesuffix(BASE) if path.endswith(BASE) else path + BASE
    return name if _has(model, path, leaf) or not _has(model, other, leaf) else f"{other}.{leaf}"


def _has(model: nn.Module, path: str, leaf: str) -> bool:
    try:
        return leaf in model.get_submodule(path)._parameters
    except AttributeError:
        return False
