"""Plain layers for the rows of several draws: one kernel for all of them, and factors or norms per row.

A batch has the rows of draw 0, then those of draw 1, and so on; N rows of G draws, N / G of each. These layers run

    z = (W (x * s)) * r + b      one W for all draws, s, r and b per draw,
    z = norm(x) * w + b          w and b per draw,
    z = W x + b                  W and b per draw, as a batched product,

with the launches of the plain layer and at most two more. They are for prediction: nothing has a gradient. Factors stay
in float32 under autocast; the products are rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, Tensor
from typing_extensions import override

from leanbayes.layers.family import Family
from leanbayes.methods._base import plain_copy
from leanbayes.methods._scaled_map import computed_in, CONVOLUTIONS, TRANSPOSED

MOST_READY = 8
"""Shapes for which a layer keeps its variables ready."""

Ready = dict[Any, Tensor]
"""Variables by name and shape of the input, in the shape that multiplies it."""


class DrawsLayer(nn.Module):
    """A layer that serves the rows of G draws.

    Attributes:
        draws: G.
        given: the variables of the draws, one row for each, or one row for all.
        ready: the same in the shapes that were needed.
    """

    draws: int
    given: Mapping[str, Tensor]
    ready: Ready

    def give(self, variables: Mapping[str, Tensor], draws: int, ready: Ready) -> None:
        """Set the variables of the next pass."""
        vars(self).update(draws=draws, given=variables, ready=ready)

    def cast(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Store shared weights in the dtype that a pass computes in, and yield them; most layers have none."""
        yield from ()

    def rows(self, name: str, x: Tensor, axis: int) -> Tensor:
        """Return a variable (G, n) with a row for each row of x, and n on an axis of x."""
        key = (name, x.shape[0], x.dim())
        found = self.ready.get(key)
        if found is None:
            value = self.value(name)
            if len(value) > 1:
                value = value.repeat_interleave(self.each(x), 0)
            shape = [len(value), *[1] * (x.dim() - 1)]
            shape[axis] = value.shape[1]
            found = self.keep(key, value.reshape(shape))
        return found

    def keep(self, key: Any, value: Tensor) -> Tensor:
        """Keep a variable in a shape that was needed, and return it."""
        if len(self.ready) >= MOST_READY:
            self.ready.clear()
        self.ready[key] = value.contiguous()
        return self.ready[key]

    def each(self, x: Tensor) -> int:
        """Return the rows of x that belong to one draw."""
        if x.shape[0] % self.draws:
            raise ValueError(f"expected rows of {self.draws} draws on the first axis, got {tuple(x.shape)}")
        return x.shape[0] // self.draws

    def value(self, name: str) -> Tensor:
        """Return a variable of the draws; a subclass computes others."""
        return self.given[name]


class ScaledRows(DrawsLayer):
    """A linear map between scalings of rows: z = (W (x * s)) * r + b."""

    def __init__(self, base: Any, axis: int, names: Mapping[str, str], *, own_bias: bool) -> None:
        """Take over the map of a plain layer.

        Args:
            base: the layer; its bias is dropped if `own_bias`.
            axis: axis of the channels.
            names: names of the variables that are s, r and b ("input", "output", "bias"), if there are.
            own_bias: whether the draws have biases.
        """
        super().__init__()
        self.plain, self.axis, self.names = plain_copy(base, {}), axis, dict(names)
        if own_bias:
            self.plain._parameters["bias"] = None
        self.has = {side: side in names for side in ("input", "output", "bias")}

    @override
    def cast(self, dtype: torch.dtype) -> Iterator[Tensor]:
        for name, tensor in self.plain._parameters.items():
            if tensor is not None and tensor.dtype == torch.float32 != dtype:
                own = nn.Parameter(tensor.detach().to(dtype), requires_grad=False)
                self.plain._parameters[name] = own
                yield own

    @override
    def value(self, name: str) -> Tensor:
        return self.given[self.names[name]]

    @override
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        if self.has["input"]:
            x = times(x, self.rows("input", x, self.axis), computed_in(x))
        y: Tensor = self.plain.forward(x, *args)
        # The output is new, so it may be overwritten; mixed types are computed in the wider one.
        factor = self.rows("output", y, self.axis) if self.has["output"] else None
        if not self.has["bias"]:
            return y if factor is None else y.mul_(factor)
        bias = self.rows("bias", y, self.axis)
        return y.add_(bias) if factor is None else torch.addcmul(bias, y, factor, out=y)


class NormRows(DrawsLayer):
    """A norm with a weight and a bias for each draw."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.norm: Any = plain_copy(base, {})
        self.folds = isinstance(base, nn.modules.batchnorm._BatchNorm)

    @override
    def value(self, name: str) -> Tensor:
        """Return scale or shift; a batch norm in eval mode is one product and one sum."""
        weight = self.given["weight"]
        if not self.folds:
            return weight.flatten(1) if name == "weight" else self.given["bias"].flatten(1)
        scale = weight * torch.rsqrt(self.norm.running_var + self.norm.eps)
        return scale if name == "weight" else self.given["bias"] - scale * self.norm.running_mean

    @override
    def forward(self, x: Tensor) -> Tensor:
        if self.folds:
            self.norm._check_input_dim(x)
            return torch.addcmul(self.rows("bias", x, 1), x, self.rows("weight", x, 1), out=torch.empty_like(x))
        if isinstance(self.norm, nn.LayerNorm):
            y = F.layer_norm(x, self.norm.normalized_shape, None, None, self.norm.eps)
            return torch.addcmul(self.rows("bias", y, -1), y, self.rows("weight", y, -1), out=y)
        y = F.group_norm(x, self.norm.num_groups, None, None, self.norm.eps)
        return torch.addcmul(self.rows("bias", y, 1), y, self.rows("weight", y, 1), out=y)


class LinearDraws(DrawsLayer):
    """A linear layer with weights and biases for each draw."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        dtype, each = computed_in(x), self.each(x)
        weight = self._in(dtype, "weight").mT
        rows = x.reshape(self.draws, -1, x.shape[-1]).to(dtype)
        if "bias" in self.given:
            y = torch.baddbmm(self._in(dtype, "bias").unsqueeze(1), rows, weight)
        else:
            y = torch.bmm(rows, weight)
        return y.view(self.draws * each, *x.shape[1:-1], y.shape[-1])

    def _in(self, dtype: torch.dtype, name: str) -> Tensor:
        found = self.ready.get((name, dtype))
        if found is None:
            value = self.given[name].to(dtype)
            found = self.keep((name, dtype), value.expand(self.draws, *value.shape[1:]))
        return found


def scaled_rows(family: Family, base: Any, names: Mapping[str, str], *, own_bias: bool) -> DrawsLayer | None:
    """Return a layer that runs z = (W (x * s)) * r + b; None if the map is not that of a torch class."""
    kinds = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)
    if family.form or family.weight is not None or family.kind not in kinds:
        return None
    kind: Any = family.kind
    if type(base).forward is not kind.forward:
        return None
    return ScaledRows(base, family.axis, names, own_bias=own_bias)


def patched_rows(base: Any, names: list[str]) -> DrawsLayer | None:
    """Return a layer with weights of draws: a norm with weight and bias, or a linear layer; None for another."""
    if isinstance(base, nn.modules.batchnorm._BatchNorm):
        torch_class = type(base) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        return NormRows(base) if torch_class and base.running_mean is not None and len(names) == 2 else None
    if type(base) in (nn.LayerNorm, nn.GroupNorm):
        flat = type(base) is nn.GroupNorm or len(base.normalized_shape) == 1
        return NormRows(base) if flat and len(names) == 2 else None
    return LinearDraws() if type(base) is nn.Linear else None


def times(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x * factor in a dtype, in one operation and rounded once."""
    if x.dtype == dtype == factor.dtype:
        return x * factor
    return torch.mul(x, factor, out=torch.empty_like(x, dtype=dtype))
