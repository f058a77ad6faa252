"""Many draws in one pass: `torch.func.vmap` over the draws of a group, for inputs so small that calls dominate.

A network is written for one function of a batch. `vmap` runs it for G draws at once, whatever it does with its rows:

    stacked     each plain layer has G folded weights; a linear map becomes a batched product. Every method.
    factored    each stochastic layer has G factors and one weight; G x B rows go through one product. Lean methods.
    tiled       the same as one ordinary batch of G x B rows, without `vmap` (`core/tiled.py`). On a GPU.

Networks that `vmap` cannot run (branches on values, random calls, hooks that look at activations) fold draw by draw.

All draws of a chain of linear layers and activations in one batched product per layer, without `vmap`.

A chain is an `nn.Sequential` of linear layers, activations and dropouts. With the draws on a first axis of their own,
(G, B, n), activations work unchanged, and a linear layer with G weights is `torch.baddbmm`:

    h <- W_g h + b_g        one call for all draws

`vmap` does the same for any network, at several times the overhead; in an MLP of a few thousand weights it dominates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn, Tensor
from torch.func import vmap

from leanbayes.core.conversion import stochastic_layers
from leanbayes.core.frozen import FrozenDraws, Tensors
from leanbayes.core.tiled import tiled_draws, TiledDraws
from leanbayes.layers.family import EMBEDDINGS, family_of, TORCH_MAPS
from leanbayes.layers.hooks import every_module
from leanbayes.runtime.batches import call, Inputs, leading_rows, Output, tensors_in
from leanbayes.runtime.passes import PassState, Variables
from leanbayes.runtime.twins import twin

Way = Literal["folded", "stacked", "factored", "tiled"]

SMALL = {"cpu": 2 * 2**20, "cuda": 8 * 2**20}
"""Bytes of the first layer's outputs, over all draws and rows, up to which draws run together.

On a CPU larger activations leave its cache; on a GPU larger batches are no longer bound by launches.
"""

TILED = {"cpu": 0, "cuda": 2**30}
"""The same limit for draws that run as one ordinary batch, which costs a GPU as many launches as one draw."""

MOST_ROWS = 512
"""Rows of all draws up to which they run as one batch: more keep a GPU busy draw by draw."""

LARGEST_STACK = 64 * 2**20
"""Bytes of folded weights that are stacked for one pass."""

SMALL_STACK = 8 * 2**20
"""Bytes of folded weights that are stacked even if they are not kept for the next call."""


class GivenVariables:
    """Takes the place of a `PassState`: the variables of one draw, the same for all rows."""

    key = None
    live = True
    shared = True
    variables: Variables

    def current(self) -> GivenVariables:
        """Return itself: a running pass."""
        return self

    def variables_of(self, layer: Any, rows: int) -> Variables:
        """Return the variables, one row for all rows of the batch."""
        return self.variables

    def holds_variables_of(self, layer: Any) -> bool:
        """Return whether the variables exist before the layer is called."""
        return True


class BatchedDraws:
    """Runs a group of draws in one pass over twins of a model."""

    def __init__(self, draws: FrozenDraws) -> None:
        self.draws = draws
        self.possible = _can_be_batched(draws.network)
        self.chain = chain_of(draws.network)
        self.first = _first_map(draws.network)
        tensors = (tensor for _, plain in draws.pairs for tensor in plain._parameters.values() if tensor is not None)
        self.size = sum(tensor.nbytes for tensor in tensors)
        self.stacked: dict[range, list[Tensors]] = {}
        self.factored: tuple[nn.Module, list[GivenVariables]] | None = None
        self.tiles: TiledDraws | None = None
        self.can_tile = self.possible  # until it fails
        self.compared = False
        self.lean: bool | None = None

    def way(self, x: Inputs) -> Way:
        """Return how to run all draws on a batch, a function of sizes and the device alone.

        Draws run together if their activations are small: on a GPU as one batch, if the layers have a form for it. Of
        the two other ways, a CPU takes stacked weights while they are small, or kept. A GPU, and networks with large
        weights, take factors: all draws read the weights once.
        """
        device = next(tensors_in(x)).device.type
        group = len(self.draws.group(0))
        if not self.possible or group < 2:
            return "folded"
        size, rows = group * _bytes_of_rows(self.first, x), group * (leading_rows(x) or 0)
        if (
            self.can_tile
            and size <= TILED.get(device, 0)
            and rows <= MOST_ROWS
            and self._is_lean(joint=False)
            and self._tiles()
        ):
            return "tiled"
        if size > SMALL.get(device, SMALL["cuda"]):
            return "folded"
        lean, stack = self._is_lean(), group * self.size
        cheap = stack <= SMALL_STACK or stack <= self.draws.budget.limit  # small, or folded once for many calls
        if stack <= LARGEST_STACK and ((device == "cpu" and cheap) or not lean):
            return "stacked"
        return "factored" if lean else "folded"

    def _is_lean(self, *, joint: bool = True) -> bool:
        """Return whether variables are much smaller than weights; their size does not change."""
        if self.lean is None:
            group = self.draws.group(0)
            self.lean = self.draws.is_lean(group, self.draws.variables(group, joint=joint))
        return self.lean

    def run(self, way: Way, group: range, x: Inputs, output: Output | None) -> Tensor:
        """Return the outputs of draws of one group (G, B, ...)."""
        runs = {"stacked": self._run_stacked, "factored": self._run_factored, "tiled": self._run_tiled}
        return runs[way](group, x, output)

    def _tiles(self) -> TiledDraws | None:
        """Return the twin for one batch of all draws; None if some layer has no such form."""
        if self.tiles is None:
            self.tiles = tiled_draws(self.draws)
            self.can_tile = self.tiles is not None
        return self.tiles

    def _run_tiled(self, group: range, x: Inputs, output: Output | None) -> Tensor:
        """Run all draws as one batch; the first pass is compared with that of `vmap`."""
        assert self.tiles is not None
        whole = self.draws.group(group.start)
        variables = _rows_of(self.draws.variables(whole), whole, group)  # those that are folded: none is rounded
        self.compared = self.compared or self.tiles.known() is True
        if not self.compared:
            with torch.autocast(next(tensors_in(x)).device.type, enabled=False):  # `vmap` of norms has no mixed types
                expected = self._over_factors(group, variables, x, output)
            if not self.tiles.agrees(group, variables, x, output, expected):
                self.can_tile, self.tiles = False, None
                return self._run_factored(group, x, output)
            self.compared = True
        return self.tiles.run(group, variables, x, output)

    def _run_stacked(self, group: range, x: Inputs, output: Output | None) -> Tensor:
        """Fold all draws and run the plain twin over them."""
        whole = self.draws.group(group.start)
        weights = _rows_of(self._weights(whole), whole, group)
        layers = [plain for _, plain in self.draws.pairs]
        if self.chain is not None and output is None and isinstance(x, Tensor) and x.dim() == 2:
            return run_chain(self.chain, x, dict(zip(map(id, layers), weights, strict=True)))
        before = [dict(plain._parameters) for plain in layers]

        def run(tensors: list[Tensors]) -> Tensor:
            for plain, own in zip(layers, tensors, strict=True):
                plain._parameters.update(own)  # type: ignore[arg-type]  # a tensor of vmap is no parameter
            return call(self.draws.network, x, output)

        try:
            outputs: Tensor = _over_draws(run, weights, len(group))
            return outputs
        finally:
            for plain, own in zip(layers, before, strict=True):
                plain._parameters.clear()
                plain._parameters.update(own)

    def _weights(self, group: range) -> list[Tensors]:
        """Return the folded tensors of each layer, stacked over the draws; keep them if the budget allows it."""
        if group in self.stacked:
            return self.stacked[group]
        layers = [layer for layer, _ in self.draws.pairs]
        names: list[list[str]] = []

        def fold(variables: list[Variables]) -> list[Tensor]:
            folded = [layer.fold(own) for layer, own in zip(layers, variables, strict=True)]
            names.extend(list(own) for own in folded)
            return [tensor for own in folded for tensor in own.values()]

        flat = iter(_over_draws(fold, self.draws.variables(group, joint=True), len(group)))
        found = [{name: next(flat) for name in own} for own in names]
        if self.draws.budget.take(tensor for own in found for tensor in own.values()):
            self.stacked[group] = found
        return found

    def _run_factored(self, group: range, x: Inputs, output: Output | None) -> Tensor:
        """Run the model with the factors of all draws."""
        whole = self.draws.group(group.start)
        return self._over_factors(group, _rows_of(self.draws.variables(whole, joint=True), whole, group), x, output)

    def _over_factors(self, group: range, variables: list[Variables], x: Inputs, output: Output | None) -> Tensor:
        network, states = self.factored = self.factored or _with_given_variables(self.draws.model)

        def run(variables: list[Variables]) -> Tensor:
            for state, own in zip(states, variables, strict=True):
                state.variables = {name: tensor[None] for name, tensor in own.items()}
            return call(network, x, output)

        try:
            outputs: Tensor = _over_draws(run, variables, len(group))
            return outputs
        finally:
            for state in states:
                state.variables = {}

    def kept(self) -> Iterator[Tensor]:
        """Yield the tensors that are kept for the next call."""
        yield from (tensor for found in self.stacked.values() for own in found for tensor in own.values())
        if self.tiles is not None:
            yield from self.tiles.kept()


def _rows_of(found: list[Variables], whole: range, some: range) -> list[Variables]:
    """Return the rows of some draws of a group."""
    if len(some) == len(whole):
        return found
    rows = slice(some.start - whole.start, some.stop - whole.start)
    return [{name: tensor[rows] if len(tensor) > 1 else tensor for name, tensor in own.items()} for own in found]


def _over_draws(run: Callable[..., Any], variables: list[Any], count: int) -> Any:
    """Map a function over the first axis of tensors in dicts; a tensor with one row serves all draws."""
    names = [list(own) for own in variables]
    flat = [tensor for own in variables for tensor in own.values()]
    batched = [tensor for tensor in flat if len(tensor) > 1 or count == 1]

    def of_one(*tensors: Tensor) -> Any:
        drawn = iter(tensors)
        every = iter([next(drawn) if len(tensor) > 1 or count == 1 else tensor[0] for tensor in flat])
        return run([{name: next(every) for name in own} for own in names])

    return vmap(of_one)(*batched)


def _with_given_variables(model: nn.Module) -> tuple[nn.Module, list[GivenVariables]]:
    """Return a twin of a stochastic model whose layers get their variables from outside, and these places."""
    found = twin(model, {}).eval()
    given = {id(module): GivenVariables() for module in found.modules() if _has_state(module)}
    for module in found.modules():
        if id(module) in given:
            module.state = given[id(module)]  # type: ignore[assignment]
    return found, [given[id(layer)] for _, layer in stochastic_layers(found)]


def _can_be_batched(network: nn.Module) -> bool:
    """Return whether nothing but the network itself sees its activations, and no row depends on others.

    Hooks would see tensors of `vmap`; compiled and scripted modules cannot be mapped.
    """
    every = nn.modules.module
    if every._global_forward_hooks or every._global_forward_pre_hooks:
        return False
    return not any(
        module._forward_hooks
        or module._forward_pre_hooks
        or "_orig_mod" in module._modules
        or isinstance(module, torch.jit.ScriptModule)
        or _has_state(module)
        for module in every_module(network)
    )


def _has_state(module: nn.Module) -> bool:
    return isinstance(vars(module).get("state"), PassState)


def _first_map(network: nn.Module) -> tuple[int, int]:
    """Return the numbers of input and output channels of the first layer; 1 and 1 if none is known."""
    known = (module for module in every_module(network) if isinstance(module, (*TORCH_MAPS, *EMBEDDINGS)))
    first: Any = next(known, None)
    family = None if first is None else family_of(first)
    if family is None:
        return 1, 1
    return 1 if isinstance(first, EMBEDDINGS) else family.inputs(first), family.outputs(first)


def _bytes_of_rows(first: tuple[int, int], x: Inputs) -> int:
    """Return the bytes of the first layer's outputs: an entry of x has `inputs` channels at each position."""
    inputs, outputs = first
    entries = max((tensor.numel() for tensor in tensors_in(x)), default=0)
    return 4 * outputs * (entries // inputs if entries % inputs == 0 else entries)


ELEMENTWISE = frozenset((
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Softsign),
    *(nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Tanhshrink, nn.Identity),
    *(nn.Dropout, nn.AlphaDropout),
))  # fmt: skip
"""Modules that change every entry alone in eval mode."""


def chain_of(network: nn.Module) -> list[nn.Module] | None:
    """Return the modules of a chain in order; None for any other network."""
    found = list(_parts(network))
    known = all(type(module) is nn.Linear or type(module) in ELEMENTWISE for module in found)
    return found if known else None


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    if type(module).forward is not nn.Sequential.forward:
        yield module
        return
    for child in module.children():
        yield from _parts(child)


def run_chain(modules: list[nn.Module], x: Tensor, drawn: dict[int, dict[str, Tensor]]) -> Tensor:
    """Return the outputs of G draws (G, B, n) for rows (B, m); `drawn` has stacked tensors by identity of a layer."""
    for module in modules:
        own = drawn.get(id(module))
        x = module(x) if own is None else _linear(module, x, own)
    return x


def _linear(module: Any, x: Tensor, own: dict[str, Tensor]) -> Tensor:
    weight, bias = own["weight"], own.get("bias", module.bias)
    draws, outputs, _ = weight.shape
    if x.dim() == 2:  # the same rows for all draws: one product with all weights
        stacked = None if bias is None else bias.expand(draws, outputs).flatten()
        return F.linear(x, weight.flatten(0, 1), stacked).view(len(x), draws, outputs).transpose(0, 1)
    return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(-2), x, weight.mT)
