"""Lower composites before a conversion, and raise those without noise back to torch's own modules.

`nn.LSTM`, `nn.GRU`, `nn.RNN` and `nn.MultiheadAttention` hide several linear maps in one function. Torch's transformer
layers have rows on the second axis by default, or read their weights in one fused function. Lowered modules are made of
layers that a method can wrap, called with rows on the first axis.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import ref, WeakKeyDictionary

from torch import nn, Tensor

from leanbayes.layers.composites import attention, Composite, recurrent
from leanbayes.layers.composites.attention import Attention
from leanbayes.layers.composites.recurrent import Recurrent
from leanbayes.layers.hooks import copy_hooks, move_hooks

TRANSFORMER_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
UNITS = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder, *TRANSFORMER_LAYERS, Composite)
"""Modules lowered as a whole: an encoder must not send nested tensors into a lowered layer."""

ATTENTIONS = ("self_attn", "multihead_attn")

Done = WeakKeyDictionary[nn.Module, "ref[nn.Module]"]
"""Replacements by module; weak, so that replaced weights are freed at once."""


class RowsFirst(Composite):
    """Transformer layer with `batch_first=False` for callers; `layer` inside has `batch_first=True`."""

    batch_first = False
    self_attn = SimpleNamespace(batch_first=False)
    """The only attribute that torch's stacks read from the attention of their first layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.train(layer.training)
        self._turn(batch_first=True)

    def forward(self, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # Transpose sequences (T, B, E), also the memory of a decoder, and the result; masks stay unchanged.
        if src.dim() == 2:  # without a batch
            return self._called(src, *args, **kwargs)
        if isinstance(self.layer, nn.TransformerDecoderLayer):
            memory, args = (kwargs.pop("memory"), args) if "memory" in kwargs else (args[0], args[1:])
            args = (memory.transpose(0, 1), *args)
        return self._called(src.transpose(0, 1), *args, **kwargs).transpose(0, 1)

    def _called(self, *args: Any, **kwargs: Any) -> Tensor:
        y: Tensor = self.layer(*args, **kwargs)
        return y

    def raised(self) -> nn.Module:
        self._turn(batch_first=False)
        return self.layer

    def _turn(self, *, batch_first: bool) -> None:
        for name in ATTENTIONS:
            if name in self.layer._modules:
                self.layer.get_submodule(name).batch_first = batch_first  # type: ignore[assignment]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        own = f"{prefix}layer."  # keys without it are those of the original layer
        for name in [name for name in state_dict if name.startswith(prefix) and not name.startswith(own)]:
            state_dict[own + name.removeprefix(prefix)] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args)


def refusal(module: nn.Module) -> str | None:
    """Return why a composite cannot be lowered, "" if it can; None for other modules."""
    if isinstance(module, nn.RNNBase):
        return recurrent.refusal(module) or ""
    if isinstance(module, nn.MultiheadAttention):
        return attention.refusal(module) or ""
    if isinstance(module, TRANSFORMER_LAYERS):
        if type(module).forward not in (kind.forward for kind in TRANSFORMER_LAYERS):
            return "it has a forward of its own"
        inner = (module._modules.get(name) for name in ATTENTIONS)
        reasons = (refusal(child) for child in inner if isinstance(child, nn.MultiheadAttention))
        return next(filter(None, reasons), "")
    return None


def opaque(module: nn.Module) -> bool:
    """Return whether a module is a composite that was not lowered: nothing inside can be converted."""
    if isinstance(module, TRANSFORMER_LAYERS):
        return any(isinstance(module._modules.get(name), nn.MultiheadAttention) for name in ATTENTIONS)
    return isinstance(module, (nn.MultiheadAttention, nn.RNNBase))


def lower(model: nn.Module) -> nn.Module:
    """Lower every composite of a model in place; return the root, which may be a new module."""
    return _changed(model, _lowered, WeakKeyDictionary(), lambda module: refusal(module) not in (None, ""))


def raise_back(model: nn.Module, spare: Callable[[nn.Module], bool] = lambda unit: False) -> nn.Module:
    """Restore torch's own modules in place, except in units for which `spare` is true; return the root."""
    return _changed(model, _raised, WeakKeyDictionary(), lambda module: isinstance(module, UNITS) and spare(module))


def aliases(model: nn.Module) -> dict[str, list[str]]:
    """Return further names of layers in a lowered model, by path: that of the composite, and that before lowering."""
    composites = {path: module for path, module in model.named_modules() if isinstance(module, Composite)}
    names: dict[str, list[str]] = {}
    for path, composite in composites.items():
        for inner, _ in composite.named_modules(prefix=path):
            turned = isinstance(composite, RowsFirst) and inner.startswith(f"{path}.layer.")
            names.setdefault(inner, []).append(inner.replace(".layer.", ".", 1) if turned else path)
    return names


def _lowered(module: nn.Module) -> nn.Module:
    if refusal(module) != "":
        return module
    if isinstance(module, TRANSFORMER_LAYERS):
        return module if module.self_attn.batch_first else _in_place_of(module, RowsFirst(module))
    kind: Any = Recurrent if isinstance(module, nn.RNNBase) else Attention
    return _in_place_of(module, kind.lowered(module))


def _raised(module: nn.Module) -> nn.Module:
    if not isinstance(module, Composite):
        return module
    plain = module.raised()
    copy_hooks(module, plain)
    return plain


def _in_place_of(old: nn.Module, new: nn.Module) -> nn.Module:
    move_hooks(old, new)
    return new


def _changed(
    module: nn.Module, change: Callable[[nn.Module], nn.Module], done: Done, spare: Callable[[nn.Module], bool]
) -> nn.Module:
    """Change a tree from its leaves up, each module once; modules for which `spare` is true stay whole."""
    known = done[module]() if module in done else None
    if known is not None:
        return known
    done[module] = ref(module)
    if not spare(module):
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = _changed(child, change, done, spare)
        changed = change(module)
        done[module] = ref(changed)
        return changed
    return module
