"""Draws of one model: variables sampled in groups, folded into the weights of a plain twin, or noise per row.

A twin shares all tensors with the model but those that a draw replaces. Variables and folded weights are functions of
the draw's name and the parameters. They may be kept between calls, until a parameter changes.

Cache of outputs that do not depend on the draw: of modules that run before the first weight of a draw is used.

Outputs of deterministic modules are kept until a stochastic layer is called or one of its parameters is read. Later
draws on the same rows reuse them. A reused output skips the call, so the call must have no side effect: a module that
changed its arguments in place runs again in every draw, and so does a module whose output was changed in place later.
The versions of tensors show both.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn, Tensor

from leanbayes.core.conversion import stochastic_layers
from leanbayes.distributions.assignment import Assignment
from leanbayes.layers.hooks import copy_hooks, every_module
from leanbayes.methods._base import one_draw, plain_copy, StochasticLayer
from leanbayes.runtime.batches import call, Inputs, Output, versions
from leanbayes.runtime.distributed import may_have_shards, refuse_shards
from leanbayes.runtime.noise import Design, designed_noise, Noise
from leanbayes.runtime.passes import check_draws, draws, many_draws, states_of, Variables, Width
from leanbayes.runtime.twins import at_rest, to_eval, twin

DRAWS_AT_ONCE = 16
"""Draws whose random variables are sampled together, in a few large operations."""

MOST_VARIABLES = 2**26
"""Limit of the variables that are sampled together; methods with one per weight take fewer draws at once."""

NEGLIGIBLE = 2**20
"""Bytes of variables of a group that are kept in any case."""

LEAN = 8
"""Variables are kept in any case if weights take this many times their bytes; else they count as weights."""

Tensors = dict[str, Tensor]
"""The tensors of a plain layer that a draw replaces, by name."""


class Name(NamedTuple):
    """The name of a model's draws, without their index."""

    seed: int
    component: int | None = None
    width: Width = None
    design: Design = "independent"


class Budget:
    """Bytes that may be kept between calls."""

    def __init__(self, limit: float) -> None:
        self.limit, self.used = limit, 0

    def take(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether the tensors may be kept, and count them if so."""
        size = sum(tensor.nbytes for tensor in tensors)
        if self.used + size > self.limit:
            return False
        self.used += size
        return True


class Sampler:
    """Samples the variables of named draws, in one operation for all layers of a kind.

    The variables of a layer are a function of its parameters, component and noise: nothing in the model changes.
    Layers that share ordering units find their noise in the pass state, so a twin with its own state samples them.
    """

    def __init__(self, model: nn.Module, name: Name) -> None:
        model = at_rest(model)
        states = states_of(model)
        holders = [layer for _, layers in states for layer in layers]
        check_draws(name.component, name.width, holders)
        self.layers: list[StochasticLayer] = [layer for layer in holders if isinstance(layer, StochasticLayer)]
        self.alone = len(states) == 1 and len(holders) == len(self.layers)
        if self.alone:
            for layer in self.layers if may_have_shards() else ():
                every = (tensor for module in every_module(layer) for tensor in module._parameters.values())
                refuse_shards((tensor for tensor in every if tensor is not None), layer.path)
        else:
            model = twin(model, share_plain=True)
            self.layers = [layer for _, layer in stochastic_layers(model)]
        self.model, self.name = model, name

    def variables(self, group: Sequence[int], *, joint: bool) -> list[Variables]:
        """Return the variables of each layer, one row per draw.

        `joint` samples all layers of a kind in one operation; its last bits may differ, as those of `vmap` do.
        """
        seed, component, width, design = self.name
        if not self.alone:
            with many_draws(self.model, seed, group, component=component, width=width, design=design):
                return [layer.variables() for layer in self.layers]
        chosen = torch.tensor(group if component is None else [component] * len(group), device=self.layers[0].device)
        names = [(seed, index, 0) for index in group]
        found: dict[int, Variables] = {}
        for layers in _alike(self.layers) if joint else [[layer] for layer in self.layers]:
            noise = [_noise(layer, names, design) for layer in layers]
            own = Assignment(chosen % layers[0].components)
            sampled = (
                layers[0].sample_of(layers, own, noise, width) if joint else [layers[0].sample(own, noise[0], width)]
            )
            found |= zip(map(id, layers), sampled, strict=True)
        return [found[id(layer)] for layer in self.layers]


_recent: OrderedDict[Any, Noise] = OrderedDict()
"""Noise of named draws, which is the same in every call: of the layers that were sampled last."""

MOST_RECENT, SMALLEST_KEPT = 64, 2**16
"""Layers whose noise is kept, and the numbers that each of them may have: 16 MiB in all."""


def _noise(layer: Any, names: list[tuple[int, int, int]], design: Design) -> Noise:
    """Return the noise of named draws; the generators of small layers cost more than their passes."""
    specs = layer.noise_specs(shared=True)
    if len(names) * sum(math.prod(spec.shape) for spec in specs) > SMALLEST_KEPT:
        return designed_noise(layer, names, design)
    key = (layer.path, specs, layer.device, tuple(names), design, torch.get_default_dtype())
    found = _recent.get(key)
    if found is None:
        found = designed_noise(layer, names, design)
        if all(type(tensor) is Tensor for tensor in found):  # no fake tensors of a tracer
            _recent[key] = found
        while len(_recent) > MOST_RECENT:
            _recent.popitem(last=False)
    return found


def _alike(layers: list[Any]) -> list[list[Any]]:
    """Return the layers in groups that `sample_of` can sample together."""
    groups: dict[Any, list[Any]] = {}
    for position, layer in enumerate(layers):
        kind = (type(layer), layer.method, layer.base.weight.dtype) if layer.sampled_together else position
        groups.setdefault(kind, []).append(layer)
    return list(groups.values())


class FrozenDraws:
    """One plain twin of a model whose weights are replaced draw by draw.

    Attributes:
        model: the stochastic model, or a twin of it.
        network: the plain twin.
        pairs: each stochastic layer with its plain one.
        at_once: draws that are sampled together.
        latest: the group that was sampled last, and its variables.
        groups: kept variables of groups of draws.
        folded: kept tensors of the plain layers, by draw.
    """

    def __init__(self, model: nn.Module, name: Name, count: int, budget: Budget) -> None:
        """Build the plain twin of a model for its draws 0 to `count` - 1."""
        self.sampler = Sampler(model, name)
        self.model, self.count, self.budget = self.sampler.model, count, budget
        layers = self.sampler.layers
        self.at_once = max(1, min(DRAWS_AT_ONCE, MOST_VARIABLES // max(1, sum(layer.nodes for layer in layers))))
        self.latest: tuple[Any, list[Variables]] = None, []
        self.groups: dict[Any, list[Variables]] = {}
        self.folded: dict[int, list[Tensors]] = {}
        plain = self._shells()
        self.network = to_eval(twin(self.model, dict(zip(map(id, layers), plain, strict=True))))
        self.pairs = list(zip(layers, plain, strict=True))
        self.prefix: PrefixCache | None = None

    def _shells(self) -> list[nn.Module]:
        """Return plain layers whose tensors will be replaced; layers that do not keep their class need a draw."""
        shells: list[nn.Module] = []
        for position, layer in enumerate(self.sampler.layers):
            if layer.family.plain is None and type(layer).twin is StochasticLayer.twin:
                shells.append(plain_copy(layer.base, {}))
                copy_hooks(layer, shells[-1])
            else:
                own = self.variables(self.group(0))[position]
                shells.append(layer.twin(one_draw(own, 0)))
        return shells

    def group(self, index: int) -> range:
        """Return the draws that are sampled together with draw `index`."""
        start = index - index % self.at_once
        stop = start + self.at_once
        return range(start, stop if index >= self.count else min(stop, self.count))

    def variables(self, group: range, *, joint: bool = False) -> list[Variables]:
        """Return the variables of each layer, one row per draw of the group."""
        key = group, joint
        if key in self.groups or key == self.latest[0]:
            return self.groups.get(key, self.latest[1])
        found = self.sampler.variables(group, joint=joint)
        self.latest = key, found
        if self.is_lean(group, found) or self.budget.take(_tensors(found)):
            self.groups[key] = found
        return found

    def tensors(self, index: int) -> list[Tensors]:
        """Return the tensors of each plain layer under draw `index`."""
        if index in self.folded:
            return self.folded[index]
        group = self.group(index)
        row = group.index(index)
        variables = zip(self.pairs, self.variables(group), strict=True)
        found = [layer.fold(one_draw(own, row)) for (layer, _), own in variables]
        if self.is_lean(group, self.variables(group)) and self.budget.take(_tensors(found)):
            self.folded[index] = found
        return found

    def select(self, index: int) -> None:
        """Fold draw `index` into the weights of the twin."""
        for (_, plain), tensors in zip(self.pairs, self.tensors(index), strict=True):
            for name, tensor in tensors.items():
                # A new parameter, not new data in the old one: autocast caches weights by identity.
                plain._parameters[name] = nn.Parameter(tensor, requires_grad=False)

    def run(self, x: Inputs, rows: tuple[int, int], output: Output | None) -> Tensor:
        """Run the selected draw on the rows from `rows[0]` to `rows[1]`."""
        if self.prefix is None:
            self.prefix = PrefixCache(self.network, [plain for _, plain in self.pairs])
        self.prefix.start(rows)
        return call(self.network, x, output)

    def forget_outputs(self) -> None:
        """Drop the kept outputs of the modules before the first stochastic layer."""
        if self.prefix is not None:
            self.prefix.forget()

    def rest(self) -> None:
        """Drop everything that the next call must not see, or that is larger than the budget."""
        self.forget_outputs()
        self.latest = None, []

    def caches(self) -> Iterator[Tensor]:
        """Yield the variables and folded weights that are kept for the next call."""
        for found in (*self.groups.values(), *self.folded.values()):
            yield from _tensors(found)

    def is_lean(self, group: range, variables: list[Variables]) -> bool:
        """Return whether variables are much smaller than the weights, so that they are kept in any case."""
        size = sum(tensor.nbytes for tensor in _tensors(variables))
        return size <= NEGLIGIBLE or LEAN * size <= len(group) * sum(p.nbytes for p in self.model.parameters())


class RowDraws:
    """The stochastic model itself in eval mode, with seeded noise per row."""

    def __init__(self, model: nn.Module, name: Name) -> None:
        self.network, self.name, self.index = twin(model).eval(), name, 0
        self.prefix: PrefixCache | None = None

    def select(self, index: int) -> None:
        """Store the index of the draw."""
        self.index = index

    def run(self, x: Inputs, rows: tuple[int, int], output: Output | None) -> Tensor:
        """Run the model with different noise for every row and chunk."""
        seed, component, width, _ = self.name
        wanted: dict[str, Any] = {"index": self.index, "component": component, "width": width}
        if self.prefix is None:
            self.prefix = PrefixCache(self.network, [layer for _, layer in stochastic_layers(self.network)])
        self.prefix.start(rows)
        with draws(self.network, seed=hash((seed, rows[0])), shared=False, **wanted):
            return call(self.network, x, output)

    def forget_outputs(self) -> None:
        """Drop the kept outputs of the modules before the first stochastic layer."""
        if self.prefix is not None:
            self.prefix.forget()

    rest = forget_outputs

    def caches(self) -> Iterator[Tensor]:
        """Yield nothing: all tensors are the model's own."""
        yield from ()


def _tensors(found: Iterable[Mapping[str, Tensor]]) -> Iterator[Tensor]:
    return (tensor for named in found for tensor in named.values())


BUDGET = 256 * 2**20
"""Bytes of outputs that may be kept at a time."""


class PrefixCache:
    """The kept outputs of the largest modules of a twin without a stochastic layer."""

    def __init__(self, twin: nn.Module, stochastic: Iterable[nn.Module]) -> None:
        self.stochastic = {id(module) for module in stochastic}
        self.kept: dict[Hashable, tuple[Tensor, list[int]]] = {}
        self.calls: dict[int, int] = {}
        self.rows: Hashable = None
        self.before = True
        self.inside = False
        self.bytes = 0
        if self.stochastic:
            self._watch(twin)

    def forget(self) -> None:
        """Drop all kept outputs."""
        self.kept, self.bytes = {}, 0

    def start(self, rows: Hashable) -> None:
        """Begin a pass over the named rows."""
        self.calls, self.before, self.inside, self.rows = {}, True, False, rows

    def _watch(self, module: nn.Module) -> None:
        if id(module) in self.stochastic:
            module.register_forward_pre_hook(self._leave)
            module._parameters = _Watched(module._parameters, self._leave)
            if isinstance(module, StochasticLayer):  # a read of its weight is one of a draw
                module.drawn = self._leaving(module.drawn)  # type: ignore[method-assign]
        elif any(id(inner) in self.stochastic for inner in module.modules()):
            for child in module.children():
                self._watch(child)
        else:
            module.forward = self._replaying(id(module), module.forward)

    def _leave(self, *_: Any) -> None:
        self.before = False

    def _leaving(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def left(*args: Any) -> Any:
            self._leave()
            return function(*args)

        return left

    def _replaying(self, name: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def replayed(*args: Any, **kwargs: Any) -> Any:
            if self.inside or not self.before:  # inside: a parent runs and is kept as a whole
                return forward(*args, **kwargs)
            self.calls[name] = self.calls.get(name, 0) + 1
            key = (self.rows, name, self.calls[name])
            if key in self.kept:
                output, version = self.kept[key]
                if versions(output) == version:
                    return output
            given = versions((args, kwargs))
            self.inside = True
            output = forward(*args, **kwargs)
            self.inside = False
            if self.before and versions((args, kwargs)) == given:
                self._keep(key, output)
            return output

        return replayed

    def _keep(self, key: Hashable, output: Any) -> None:
        if isinstance(output, Tensor) and key not in self.kept and self.bytes + output.nbytes <= BUDGET:
            self.kept[key] = output, versions(output)
            self.bytes += output.nbytes


class _Watched(dict[str, Any]):
    """Parameter dict that notifies on read: some networks use `layer.weight` without calling the layer."""

    def __init__(self, parameters: Mapping[str, Any], read: Callable[[], None]) -> None:
        super().__init__(parameters)
        self.read = read

    def __getitem__(self, name: str) -> Any:
        self.read()
        return super().__getitem__(name)
