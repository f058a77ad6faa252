"""Take composites apart before a conversion, and put torch's own modules back where one is left without noise.

`nn.LSTM`, `nn.GRU`, `nn.RNN` and `nn.MultiheadAttention` keep several linear maps in one function; torch's transformer
layers call theirs with rows on the second axis by default, or read their weights in one fused function. Lowered, all
of them are made of layers that a method can wrap, called with rows on the first axis.
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
"""What is taken apart as a whole: an encoder must not send nested tensors into a layer that was."""

ATTENTIONS = ("self_attn", "multihead_attn")

Done = WeakKeyDictionary[nn.Module, "ref[nn.Module]"]
"""What became of modules; it keeps none alive, or the weights of all that were replaced would be held till the end."""


class RowsFirst(Composite):
    """A transformer layer with `batch_first=False` that sees its rows on the first axis.

    Attributes:
        layer: the layer itself, with `batch_first=True`.
        batch_first: False, as callers see it.
    """

    batch_first = False
    self_attn = SimpleNamespace(batch_first=False)
    """All that torch's stacks of layers ask of the attention of their first one."""

    def __init__(self, layer: nn.Module) -> None:
        """Turn the attentions of a layer, which are taken apart already."""
        super().__init__()
        self.layer = layer
        self.train(layer.training)
        self._turn(batch_first=True)

    def forward(self, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Turn sequences (T, B, E), the memory of a decoder too, and turn the result back; masks stay as they are."""
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
        """Return the layer with `batch_first=False` again."""
        self._turn(batch_first=False)
        return self.layer

    def _turn(self, *, batch_first: bool) -> None:
        for name in ATTENTIONS:
            if name in self.layer._modules:
                self.layer.get_submodule(name).batch_first = batch_first  # type: ignore[assignment]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Accept the keys of the layer itself."""
        own = f"{prefix}layer."
        for name in [name for name in state_dict if name.startswith(prefix) and not name.startswith(own)]:
            state_dict[own + name.removeprefix(prefix)] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args)


def refusal(module: nn.Module) -> str | None:
    """Say why a composite is not taken apart, "" where it can be; None for what is no composite."""
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
    """Say whether nothing inside a module can be converted: a composite that stayed as it was."""
    if isinstance(module, TRANSFORMER_LAYERS):
        return any(isinstance(module._modules.get(name), nn.MultiheadAttention) for name in ATTENTIONS)
    return isinstance(module, (nn.MultiheadAttention, nn.RNNBase))


def lower(model: nn.Module) -> nn.Module:
    """Take every composite of a model apart, in place; return the root, which may be one itself."""
    return _changed(model, _lowered, WeakKeyDictionary(), lambda module: refusal(module) not in (None, ""))


def raise_back(model: nn.Module, spare: Callable[[nn.Module], bool] = lambda unit: False) -> nn.Module:
    """Put torch's own modules back, in place, except in units that `spare` names; return the root."""
    return _changed(model, _raised, WeakKeyDictionary(), lambda module: isinstance(module, UNITS) and spare(module))


def aliases(model: nn.Module) -> dict[str, list[str]]:
    """Return other names by which a layer may be chosen: that of the composite it is in, and its path before lowering.

    Of a model that was taken apart, by the paths of the layers inside its composites.
    """
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
    """Change a tree from its leaves up, each module once; what `spare` names stays, with all that is in it."""
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
