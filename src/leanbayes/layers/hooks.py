"""Hooks of one module, handed to the module that takes its place."""

from __future__ import annotations

import copy

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
