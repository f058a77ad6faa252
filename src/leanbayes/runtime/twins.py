"""Structural copies of models: the same tensors in other modules."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import nn, Tensor
from torch.nn.utils.parametrize import ParametrizationList

from leanbayes.layers.hooks import every_module, follow_ties, HOOKS
from leanbayes.runtime.distributed import refuse_shards
from leanbayes.runtime.passes import PassState, states_of


def twin(model: nn.Module, replace: Mapping[int, nn.Module] | None = None, *, share_plain: bool = False) -> nn.Module:
    """Return a copy of the modules of a model, with the same tensors and a `PassState` of its own.

    Args:
        model: the model; it stays unchanged.
        replace: new modules by identity of the old ones; the copy then has no pass hooks.
        share_plain: share modules without a stochastic layer inside instead of copying them.

    Draws use twins, so that other threads can use the model at the same time.
    """
    memo = _Memo(model, without_hooks=replace is not None)
    if share_plain:
        for _, layers in states_of(model):
            for layer in layers:
                refuse_shards(layer.parameters(), layer.path)
        _share_plain(model, memo)
    memo.update(replace or {})
    found = _structure(model, memo)
    if replace is None:
        return found
    for module in (*every_module(found), *replace.values()):
        _remove_pass_hooks(module)
    follow_ties(found)
    return found


def at_rest(model: nn.Module) -> nn.Module:
    """Return the model, or a twin of it if draws would change it: spectral norms iterate at every read in training."""
    if not any(module.training for module in _parametrizations(model)):
        return model
    found = twin(model)
    for module in _parametrizations(found):
        to_eval(module)
    return found


def _parametrizations(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the parametrisations of stochastic layers."""
    inside = (module for _, layers in states_of(model) for layer in layers for module in every_module(layer))
    return (module for module in inside if isinstance(module, ParametrizationList))


def copied(model: nn.Module, kept: Mapping[int, Any] | None = None) -> nn.Module:
    """Copy a model and its tensors; tensors in `kept` (by identity) are shared."""
    try:
        return copy.deepcopy(model, dict(kept or {}))
    except RuntimeError as error:
        raise ValueError(
            f"the model cannot be copied ({str(error).splitlines()[0]}); give up hook-based weight_norm for "
            "torch.nn.utils.parametrizations.weight_norm, or convert in place with copy=False"
        ) from error


def tensors_of(model: nn.Module) -> Iterator[Any]:
    """Yield every tensor of a model: parameters, buffers, and plain attributes of modules."""
    for module in every_module(model):
        for holder in (module._parameters, module._buffers, module.__dict__):
            yield from (value for value in holder.values() if isinstance(value, Tensor))


def to_eval(model: nn.Module) -> nn.Module:
    """Switch a model to eval mode, as `model.eval()` does, and return it."""
    modules = every_module(model)
    if any(type(m).train is not nn.Module.train or type(m).eval is not nn.Module.eval for m in modules):
        return model.eval()
    for module in modules:
        vars(module)["training"] = False  # a plain attribute: `nn.Module.__setattr__` costs more than all the rest
    return model


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


ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes, type, FunctionType, BuiltinFunctionType))
"""Types that `copy.deepcopy` does not copy."""

EMPTY = frozenset((dict, OrderedDict, set, list))
"""Containers whose empty copies need no visit: most registries of hooks."""


class _Memo(dict[int, Any]):
    """Copies by identity of the original, as `copy.deepcopy` keeps them; tensors are their own copies.

    Attributes:
        without_hooks: whether the copies have no pass hooks.
    """

    def __init__(self, model: nn.Module, *, without_hooks: bool) -> None:
        super().__init__()
        self.model, self.without_hooks, self.has_tensors = model, without_hooks, False

    def copy_of(self, value: Any) -> Any:
        """Return a deep copy of an attribute; all tensors of the model that it refers to are shared."""
        if not self.has_tensors:
            self.update((id(tensor), tensor) for tensor in tensors_of(self.model))
            self.has_tensors = True
        return copy.deepcopy(value, self)


def _structure(module: nn.Module, memo: _Memo) -> nn.Module:
    """Copy a module as `copy.deepcopy(module, memo)` does, in a tenth of the time.

    Registries and attributes of simple types are copied here. Any other attribute, and a class with its own way of
    copying or pickling, is left to `copy.deepcopy` with the same memo.
    """
    found = memo.get(id(module))
    if found is not None:
        return found  # type: ignore[no-any-return]
    kind: Any = type(module)
    if not _copies_by_default(kind):
        return memo.copy_of(module)  # type: ignore[no-any-return]
    made: nn.Module = kind.__new__(kind)
    memo[id(module)], own = made, made.__dict__
    for name, value in module.__dict__.items():
        if type(value) in ATOMS:
            own[name] = value
        elif type(value) in EMPTY and not value:
            own[name] = type(value)()
        elif name != "_compiled_call_impl":  # `nn.Module.__getstate__` leaves it out, too
            own[name] = _attribute(name, value, memo)
    return made


def _attribute(name: str, value: Any, memo: _Memo) -> Any:
    """Copy the registry of modules or tensors, or another attribute that is not simple."""
    if name == "_modules":
        return type(value)((key, None if child is None else _structure(child, memo)) for key, child in value.items())
    if name in ("_parameters", "_buffers"):
        return type(value)(value)
    if name in HOOKS and memo.without_hooks:
        value = type(value)((key, hook) for key, hook in value.items() if not _is_pass_hook(hook))
        if all(type(hook) in ATOMS for hook in value.values()):
            return value
    simple = isinstance(value, Tensor) or (type(value) is tuple and all(type(item) in ATOMS for item in value))
    return value if simple else memo.copy_of(value)


@functools.lru_cache(maxsize=1024)
def _copies_by_default(kind: Any) -> bool:
    """Return whether a class of modules is copied by its `__dict__` alone."""
    custom = any("__deepcopy__" in vars(base) or vars(base).get("__slots__") for base in kind.__mro__)
    names = ("__reduce_ex__", "__reduce__", "__getstate__")
    # Torch's own modules define `__setstate__` to read old pickles.
    restores = kind.__setstate__ is nn.Module.__setstate__ or kind.__setstate__.__module__.startswith("torch.nn.")
    return not custom and restores and all(getattr(kind, name) is getattr(nn.Module, name) for name in names)


def _share_plain(module: nn.Module, shared: dict[int, Any]) -> bool:
    """Collect modules without a `PassState` inside, and the tensors of others; return whether this one has none."""
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
            if _is_pass_hook(hook):
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def _is_pass_hook(hook: Any) -> bool:
    return any(isinstance(getattr(hook, name, None), PassState) for name in ("__self__", "state"))
