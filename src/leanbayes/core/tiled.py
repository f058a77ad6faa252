"""Many draws as one ordinary batch: G x B rows through a twin whose layers have factors per row, without `vmap`.

The twin has the launches of the plain network and at most two more per layer, so on a GPU sixteen draws of one image
cost little more than one plain pass. Rows must not depend on each other, and no branch may depend on values. `vmap`
knows neither limit, so the first pass of a model is compared with it:

    outputs       those of `vmap` without autocast, within rounding;
    exchange      the draws of the first half do not change if those of the second half do.

If either fails, `vmap` runs the draws. The result is remembered for the modules of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn, Tensor

from leanbayes.core.frozen import FrozenDraws
from leanbayes.layers.hooks import every_module
from leanbayes.runtime.batches import call, device_of, Inputs, leading_rows, map_rows, Output
from leanbayes.runtime.passes import Variables
from leanbayes.runtime.twins import to_eval, twin

ROUNDING = {torch.float64: 1e-6, torch.float32: 0.02}
"""Largest difference from `vmap` relative to the largest output; TF32 rounds to ten bits, other types to fewer."""

EXCHANGED = 1e-5
"""Largest relative change of draws when others change; the same kernels run, so it is zero or a dependence."""

_known: WeakKeyDictionary[nn.Module, tuple[tuple[int, ...], bool]] = WeakKeyDictionary()
"""Models that were compared with `vmap`: the identities of their modules, and the result."""


class TiledDraws:
    """A twin of a model that runs the rows of several draws as one batch.

    Attributes:
        draws: the draws of the model.
        layers: the layers of the twin that hold variables of draws, in the order of `draws.pairs`.
        ready: variables of groups of draws, in the shapes that the layers need.
        cast: the weights that are kept in the dtype of autocast.
    """

    def __init__(self, draws: FrozenDraws, layers: list[Any]) -> None:
        self.draws, self.layers = draws, layers
        replaced = {id(layer): new for (layer, _), new in zip(draws.pairs, layers, strict=True)}
        self.network = to_eval(twin(draws.model, replaced))
        self.ready: dict[range, list[dict[Any, Tensor]]] = {}
        self.cast: list[Tensor] | None = None

    def run(self, group: range, variables: list[Variables], x: Inputs, output: Output | None) -> Tensor:
        """Return the outputs of the draws of a group (G, B, ...)."""
        if self.cast is None:
            self.cast = self._cast()
        ready = self.ready.setdefault(group, [{} for _ in self.layers])
        return self._run(len(group), variables, ready, x, output)

    def known(self) -> bool | None:
        """Return whether this twin agrees with `vmap`; None if the modules of the model were not compared yet."""
        structure, found = _known.get(self.draws.model, ((), False))
        return found if structure == self._structure() else None

    def agrees(
        self, group: range, variables: list[Variables], x: Inputs, output: Output | None, expected: Tensor
    ) -> bool:
        """Return whether this twin gives the outputs of `vmap`, and no draw depends on the others; remember it."""
        try:
            with torch.autocast(expected.device.type, enabled=False):
                found = self._compare(group, variables, x, output, expected)
        except Exception:  # of any kind: the network runs under `vmap`
            found = False
        _known[self.draws.model] = self._structure(), found
        return found

    def _structure(self) -> tuple[int, ...]:
        return tuple(map(id, every_module(self.draws.model)))

    def kept(self) -> Iterator[Tensor]:
        """Yield the tensors that are kept for the next call."""
        yield from self.cast or ()
        for ready in self.ready.values():
            for own in ready:
                yield from own.values()

    def _run(
        self, count: int, variables: list[Variables], ready: list[dict[Any, Tensor]], x: Inputs, output: Output | None
    ) -> Tensor:
        rows = leading_rows(x) or 0
        for layer, own, shaped in zip(self.layers, variables, ready, strict=True):
            layer.give(own, count, shaped)
        # cat, not repeat: it keeps channels_last.
        outputs = call(self.network, map_rows(x, rows, lambda tensor: torch.cat([tensor] * count)), output)
        if not outputs.dim() or outputs.shape[0] != count * rows:
            raise ValueError(f"expected outputs of {count} x {rows} rows, got the shape {tuple(outputs.shape)}")
        return outputs.view(count, rows, *outputs.shape[1:])

    def _compare(
        self, group: range, variables: list[Variables], x: Inputs, output: Output | None, expected: Tensor
    ) -> bool:
        ours = self._run(len(group), variables, [{} for _ in self.layers], x, output)
        if ours.shape != expected.shape:
            return False
        half = len(group) // 2
        changed = [{name: _exchanged(tensor, half) for name, tensor in own.items()} for own in variables]
        theirs = self._run(len(group), changed, [{} for _ in self.layers], x, output)
        rounding = ROUNDING.get(ours.dtype, 0.1)
        size = expected.double().abs().amax()
        near = (ours.double() - expected.double()).abs().amax() <= rounding * size
        alone = (ours[:half].double() - theirs[:half].double()).abs().amax() <= EXCHANGED * size
        return bool(near & alone)

    def _cast(self) -> list[Tensor]:
        """Keep the shared weights in the dtype of autocast, if the budget allows it: a pass need not cast them."""
        kind, budget = device_of(self.draws.model).type, self.draws.budget
        if not torch.is_autocast_enabled(kind):
            return []
        dtype = torch.get_autocast_dtype(kind)
        size = dtype.itemsize * sum(layer.base.weight.numel() for layer, _ in self.draws.pairs)
        if budget.used + size > budget.limit:
            return []
        cast = [tensor for layer in self.layers for tensor in layer.cast(dtype)]
        budget.take(cast)
        return cast


def tiled_draws(draws: FrozenDraws) -> TiledDraws | None:
    """Return the twin; None if a layer has no form for rows of several draws."""
    layers = [layer.together() for layer, _ in draws.pairs]
    return TiledDraws(draws, layers) if layers and all(layer is not None for layer in layers) else None


def _exchanged(tensor: Tensor, half: int) -> Tensor:
    """Return variables of draws, those of the first half in place of the second half, too."""
    if len(tensor) == 1:
        return tensor
    return torch.cat((tensor[:half], tensor[:half], tensor[2 * half :].roll(1, -1)))
