"""Move hooks and names of tied weights from a module to its replacement."""

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
    """Copy the hooks of one module to another."""
    theirs, own = vars(source), vars(target)
    for name in HOOKS:
        own[name] = copy.copy(theirs[name]) if theirs[name] else type(theirs[name])()
    own["_is_full_backward_hook"] = source._is_full_backward_hook


def every_module(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model in the order of `model.modules()`, which takes three times as long."""
    found: list[nn.Module] = []
    seen: set[int] = set()
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        found.append(module)
        if module._modules:
            waiting.extend(reversed(module._modules.values()))
    return found


def move_hooks(source: nn.Module, target: nn.Module) -> None:
    """Move the hooks of one module to another."""
    for name in HOOKS:
        own = getattr(source, name)
        setattr(target, name, own)
        setattr(source, name, type(own)())
    target._is_full_backward_hook, source._is_full_backward_hook = source._is_full_backward_hook, None


# Hugging Face's transformers store the names of tied weights and tie them again in `tie_weights`, `init_weights` and
# `save_pretrained`. The weight of a wrapped layer is one level deeper: `head.weight` becomes `head.base.weight`.

KEPT = ("_tied_weights_keys", "all_tied_weights_keys")
"""Attributes {name: name of the tied weight}; the first may hold patterns, which stay unchanged."""
BASE = ".base"


def follow_ties(model: nn.Module) -> None:
    """Update the names of tied weights after layers were wrapped or unwrapped."""
    for module in every_module(model):
        for attribute in KEPT:
            # Not getattr of the module: a miss searches all its registries.
            kept = vars(module).get(attribute, getattr(type(module), attribute, None))
            if isinstance(kept, Mapping):
                moved = {_found(module, name): _found(module, other) for name, other in kept.items()}
                if moved != kept:
                    setattr(module, attribute, moved)


def _found(model: nn.Module, name: str) -> str:
    """Return the name of an existing parameter: with `base` or without."""
    path, _, leaf = name.rpartition(".")
    other = path.removesuffix(BASE) if path.endswith(BASE) else path + BASE
    return name if _has(model, path, leaf) or not _has(model, other, leaf) else f"{other}.{leaf}"


def _has(model: nn.Module, path: str, leaf: str) -> bool:
    try:
        return leaf in model.get_submodule(path)._parameters
    except AttributeError:
        return False
