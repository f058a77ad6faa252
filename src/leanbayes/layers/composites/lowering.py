"""Lower composites before a conversion, and raise those without noise back to torch's own modules.

`nn.LSTM`, `nn.GRU`, `nn.RNN` and `nn.MultiheadAttention` hide several linear maps in one function. Torch's transformer
layers have rows on the second axis by default, or read their weights in one fused function. Lowered modules are made of
layers that a method can wrap, called with rows on the first axis.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn
from weakref import ref, WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn, Tensor

from leanbayes.layers import family
from leanbayes.layers.composites import Composite, linear_of, recurrent
from leanbayes.layers.composites.recurrent import Recurrent
from leanbayes.layers.hooks import copy_hooks, move_hooks

TRANSFORMER_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
UNITS = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder, *TRANSFORMER_LAYERS, Composite)
"""Modules lowered as a whole: an encoder must not send nested tensors into a lowered layer."""

ATTENTIONS = ("self_attn", "multihead_attn")

Done = WeakKeyDictionary[nn.Module, "ref[nn.Module]"]
"""Replacements by module; weak, so that replaced weights are freed at once."""


def refusal(module: nn.Module) -> str | None:
    """Return why a composite cannot be lowered, "" if it can; None for other modules."""
    if isinstance(module, nn.RNNBase):
        return recurrent.refusal(module) or ""
    if isinstance(module, nn.MultiheadAttention):
        return _attention_refusal(module) or ""
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
    kind: Any = Recurrent if isinstance(module, nn.RNNBase) else Attention
    if isinstance(module, TRANSFORMER_LAYERS):
        if module.self_attn.batch_first:
            return module
        kind = RowsFirst
    new: nn.Module = kind(module)
    move_hooks(module, new)
    return new


def _raised(module: nn.Module) -> nn.Module:
    if not isinstance(module, Composite):
        return module
    plain = module.raised()
    copy_hooks(module, plain)
    return plain


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
        layer: Callable[..., Tensor] = self.layer
        if src.dim() == 2:  # without a batch
            return layer(src, *args, **kwargs)
        if isinstance(self.layer, nn.TransformerDecoderLayer):
            memory, args = (kwargs.pop("memory"), args) if "memory" in kwargs else (args[0], args[1:])
            args = (memory.transpose(0, 1), *args)
        return layer(src.transpose(0, 1), *args, **kwargs).transpose(0, 1)

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


# Attention

PROJECTIONS = ("query", "key", "value")  # the layers before the heads, in the order in which torch packs their weights


class NoTensor:
    """Placeholder for packed weights that rejects every torch function.

    Torch's encoder layers have a fast path: it reads all weights, or packs padded rows into nested tensors, instead of
    calling the modules. Torch skips it if a weight has its own `__torch_function__`, as this one.
    """

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise TypeError(
            "expected the module to be called, got its packed weight: this attention was lowered into layers; call "
            "it, or read the weights of its query, key and value"
        )


class Attention(Composite):
    """Lowered `nn.MultiheadAttention`.

    y = out_proj(head_1, ..., head_H), head_h = softmax(q_h k_h^T / sqrt(E / H) + mask) v_h with q = query(x_q),
    k = key(x_k), v = value(x_v) of E channels, E / H per head. The Linears see rows on their first axis, in either
    layout, so a sequence has one draw.

    `in_proj_weight` is no tensor: with `in_proj_bias` and `_qkv_same_embed_dim` it turns the fast path of torch's
    transformers off, in every mode.
    """

    in_proj_weight = NoTensor()
    in_proj_bias = None
    _qkv_same_embed_dim = False

    query: nn.Module
    key: nn.Module
    value: nn.Module
    out_proj: nn.Module
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None

    def __init__(self, module: nn.MultiheadAttention) -> None:
        super().__init__()
        self.embed_dim, self.kdim, self.vdim = module.embed_dim, module.kdim, module.vdim
        self.num_heads, self.head_dim = module.num_heads, module.head_dim
        self.dropout, self.add_zero_attn, self.batch_first = module.dropout, module.add_zero_attn, module.batch_first
        separate: Any = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        weights = _thirds(module.in_proj_weight) if module._qkv_same_embed_dim else map(_copied, separate)
        for name, weight, bias in zip(PROJECTIONS, weights, _thirds(module.in_proj_bias), strict=True):
            self.add_module(name, linear_of(weight, bias))
        self.out_proj = copy.deepcopy(module.out_proj)
        self.bias_k, self.bias_v = _copied(module.bias_k), _copied(module.bias_v)
        self.train(module.training)

    def raised(self) -> nn.MultiheadAttention:
        """Return torch's own module with the current weights; it shares no tensor with this one.

        Torch has all biases or none: if one layer has a bias, the others get zeros.
        """
        layers: list[Any] = [self.query, self.key, self.value]
        output: Any = copy.deepcopy(self.out_proj)
        biased = any(layer.bias is not None for layer in (*layers, output))
        module = nn.MultiheadAttention(
            self.embed_dim,
            self.num_heads,
            dropout=self.dropout,
            bias=biased,
            add_zero_attn=self.add_zero_attn,
            kdim=self.kdim,
            vdim=self.vdim,
            batch_first=self.batch_first,
            device="meta",  # nothing is initialised: torch's generator stays unchanged
        )
        if module._qkv_same_embed_dim:
            module.in_proj_weight = _parameter(*(layer.weight for layer in layers))
        else:
            for layer, name in zip(layers, ("q_proj_weight", "k_proj_weight", "v_proj_weight"), strict=True):
                setattr(module, name, _parameter(layer.weight))
        if biased:
            module.in_proj_bias = _parameter(*(_bias_or_zeros(layer) for layer in layers))
            output.bias = _parameter(_bias_or_zeros(output))
        module.out_proj = output
        module.bias_k, module.bias_v = _copied(self.bias_k), _copied(self.bias_v)
        return module.train(self.training)

    def forward(  # noqa: PLR0913, the signature is torch's
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return outputs and attention weights (None unless `need_weights`) as `nn.MultiheadAttention` does."""
        if is_causal and attn_mask is None:
            raise ValueError("expected a causal attn_mask, which is_causal promises, got None; pass it, too")
        batched = query.dim() == 3
        inputs = self._rows_first(query, key, value)
        # Masks are merged into one, unless the kernel can make the causal mask itself.
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = self._mask(inputs, key_padding_mask, None if causal else attn_mask)
        k, v, mask = self._extended(self.key(inputs[1]), self.value(inputs[2]), mask)
        q, k, v = (self._heads(x) for x in (self.query(inputs[0]), k, v))
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            mixed, weights = _mix(q, k, v, mask, dropout)
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights[0]
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)
        output = self.out_proj(mixed.transpose(1, 2).flatten(2))
        if not batched:
            return output[0], weights
        return output if self.batch_first else output.transpose(0, 1), weights

    def _rows_first(self, *inputs: Tensor) -> list[Tensor]:
        """Return query, key and value as (rows, positions, channels)."""
        _expect_inputs(*inputs)
        if inputs[0].dim() == 2:
            return [x[None] for x in inputs]
        rows = [x if self.batch_first else x.transpose(0, 1) for x in inputs]
        if rows[0].shape[0] != rows[1].shape[0] or rows[1].shape[:2] != rows[2].shape[:2]:
            raise ValueError(f"expected equally many rows, and as many values as keys, got {_shapes(inputs)}")
        return rows

    def _mask(self, inputs: list[Tensor], padding: Tensor | None, pairs: Tensor | None) -> Tensor | None:
        """Return the mask to add to scores (rows, heads, queries, keys), or None."""
        rows, queries, dtype = inputs[0].shape[0], inputs[0].shape[1], inputs[0].dtype
        keys = inputs[1].shape[1]
        if padding is not None:
            padding = padding[None] if padding.dim() == 1 else padding
            _expect_mask(padding, "key_padding_mask", (rows, keys))
            padding = _additive(padding, dtype)[:, None, None]
        if pairs is not None:
            _expect_mask(pairs, "attn_mask", (queries, keys), (rows * self.num_heads, queries, keys))
            pairs = _additive(pairs, dtype)
            pairs = pairs[None, None] if pairs.dim() == 2 else pairs.view(rows, self.num_heads, queries, keys)
        if padding is None or pairs is None:
            return pairs if padding is None else padding
        return pairs + padding

    def _extended(self, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Append the extra keys and values of every sequence: the learned pair, then zeros."""
        pairs: list[tuple[Tensor, Tensor]] = []
        if self.bias_k is not None and self.bias_v is not None:
            pairs.append((self.bias_k, self.bias_v))
        if self.add_zero_attn:
            pairs.append((k.new_zeros(1, 1, k.shape[-1]), v.new_zeros(1, 1, v.shape[-1])))
        for key, value in pairs:
            k = torch.cat([k, key.expand(k.shape[0], -1, -1)], 1)
            v = torch.cat([v, value.expand(v.shape[0], -1, -1)], 1)
        if mask is not None and pairs:
            mask = F.pad(mask, (0, len(pairs)))
        return k, v, mask

    def _heads(self, x: Tensor) -> Tensor:
        """Split channels: (rows, positions, channels) -> (rows, heads, positions, channels of a head)."""
        return x.reshape(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Keys of torch's module: split packed weights, rename separate ones.
        for name in ("weight", "bias"):
            packed = state_dict.pop(f"{prefix}in_proj_{name}", None)
            for layer, part in zip(PROJECTIONS, () if packed is None else packed.tensor_split(3), strict=False):
                state_dict[f"{prefix}{layer}.{name}"] = part.clone()  # layers share no memory, also when assigned
        for layer in PROJECTIONS:
            separate = f"{prefix}{layer[0]}_proj_weight"
            if separate in state_dict:
                state_dict[f"{prefix}{layer}.weight"] = state_dict.pop(separate)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _attention_refusal(module: nn.MultiheadAttention) -> str | None:
    """Return why attention cannot be lowered; None if it can."""
    if nn.utils.parametrize.is_parametrized(module):
        return "its packed weights are parametrised"
    kind = type(module)
    if kind.forward is not nn.MultiheadAttention.forward:
        return f"{kind.__name__} is a MultiheadAttention with a forward of its own"
    if kind is not nn.MultiheadAttention:
        return f"{kind.__name__} is a MultiheadAttention of a class of its own, which could not be given back"
    names = ("in_proj_weight",) if module._qkv_same_embed_dim else ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    if any(module._parameters.get(name) is None for name in names):
        return "a hook computes its packed weights"
    if not isinstance(module.out_proj, nn.Linear):
        return f"its out_proj is no Linear but a {type(module.out_proj).__name__}"
    reason = family.refusal(module.out_proj)
    return None if reason is None else f"of its out_proj: {reason}"


def _mix(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> tuple[Tensor, Tensor]:
    """Return the mixed values of each head and the attention weights."""
    scores = (q * math.sqrt(1 / q.shape[-1])) @ k.mT
    if mask is not None:
        scores = scores + mask.to(scores.dtype)  # autocast does not cast sums, and a mask has the inputs' type
    weights = F.dropout(scores.softmax(-1), dropout)
    return weights @ v, weights


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)


def _expect_inputs(*inputs: Tensor) -> None:
    if any(x.is_nested for x in inputs):
        raise ValueError("expected query, key and value as padded tensors, got a nested one; use a key_padding_mask")
    if len({x.dim() for x in inputs}) > 1 or inputs[0].dim() not in (2, 3):
        raise ValueError(f"expected query, key and value of two axes or of three (a batch), got {_shapes(inputs)}")


def _shapes(tensors: Sequence[Tensor]) -> str:
    return ", ".join(str(tuple(x.shape)) for x in tensors)


def _expect_mask(mask: Tensor, name: str, *shapes: tuple[int, ...]) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"expected {name} of bool or floating type, got {mask.dtype}; use mask.bool()")
    if mask.shape not in shapes:
        raise ValueError(f"expected {name} of shape {' or '.join(map(str, shapes))}, got {tuple(mask.shape)}")


def _thirds(packed: Tensor | None) -> list[Any]:
    if packed is None:
        return [None] * 3
    return [nn.Parameter(part.clone(), packed.requires_grad) for part in packed.detach().tensor_split(3)]


def _copied(parameter: Tensor | None) -> Any:
    return None if parameter is None else _parameter(parameter)


def _parameter(*parts: Tensor) -> nn.Parameter:
    """Concatenate tensors to one new parameter; it is trained if one of them is."""
    joined = torch.cat([part.detach() for part in parts])
    return nn.Parameter(joined, requires_grad=any(part.requires_grad for part in parts))


def _bias_or_zeros(layer: Any) -> Tensor:
    bias: Tensor | None = layer.bias
    if bias is not None:
        return bias
    return torch.zeros_like(layer.weight[:, 0], requires_grad=layer.weight.requires_grad)
