"""Select layers by globs on dotted paths, predicates, position, or as a late part; exchange activations after them.

Late parts are all layers from a place on, in the order of registration:

    head          from the last layer with a linear map on
    last_block    from the last block on; a block is a numbered module with two or more such layers whose class occurs
                  again; without blocks, the last layer before the head counts
    last_stage    from the last change of the image size on: a convolution or pooling with a stride, and a convolution
                  there or later; without one, from the last change of width; without one, the last quarter

Stages consist of blocks, or of layers in a network without blocks. The first of them begins no new stage.
"""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any, get_args, Literal

from torch import nn, Tensor

from leanbayes.layers.family import family_of, LINEAR_MAPS

Places = Sequence[tuple[str, nn.Module]]
"""Modules with their paths, in the order of registration."""

LatePart = Literal["head", "last_block", "last_stage"]


@dataclass(frozen=True)
class Selector:
    """The first or last few layers of some types, in the order of registration, or a late part of a network.

    Example:
        >>> last(nn.Conv2d, 3)
        Selector(kinds=(<class 'torch.nn.modules.conv.Conv2d'>,), count=3, from_end=True, part=None)
    """

    kinds: tuple[type[nn.Module], ...]
    count: int = 1
    from_end: bool = False
    part: LatePart | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or self.count < 1:  # paths[-0:] would be all of them
            raise ValueError(f"expected a number of layers of at least 1, got {self.count!r}")

    def pick(self, layers: Places, modules: Places | None = None) -> set[str]:
        """Return the paths of the chosen layers; late parts are found among `modules`, all of the network."""
        if self.part is not None:
            return _late(self.part, layers, modules or layers)
        paths = [path for path, layer in layers if isinstance(layer, self.kinds)]
        return set(paths[-self.count :] if self.from_end else paths[: self.count])


Where = str | Sequence[str] | Callable[[str, nn.Module], bool] | Selector


def first(kind: type[nn.Module], count: int = 1) -> Selector:
    """Select the first `count` layers of a type."""
    return Selector((kind,), count)


def last(kind: type[nn.Module], count: int = 1) -> Selector:
    """Select the last `count` layers of a type."""
    return Selector((kind,), count, from_end=True)


def head() -> Selector:
    """Select the last layer with a linear map, and layers after it. Other layers then run once for all draws."""
    return Selector((nn.Module,), part="head")


def last_block() -> Selector:
    """Select the last block of a network and its head, by the rule of this module."""
    return Selector((nn.Module,), part="last_block")


def last_stage() -> Selector:
    """Select the last stage of a network and its head, by the rule of this module.

    Example:
        >>> bnn = lb.convert(resnet, lb.Rank1(), where=lb.layers.last_stage())
    """
    return Selector((nn.Module,), part="last_stage")


def choose(
    layers: Places,
    where: Where | None,
    aliases: Mapping[str, Sequence[str]] | None = None,
    *,
    argument: str = "where",
    things: str = "layer",
    modules: Places | None = None,
) -> set[str]:
    """Return the paths of the layers that `where` picks; all of them for None. Globs match `aliases` of a path, too.

    With all `modules` of the network, a glob that matches nothing may name a late part, such as "last_stage". Errors
    name the caller's `argument` and the `things` it chooses from.
    """
    paths = [path for path, _ in layers]
    if where is None:
        return set(paths)
    _check(where, argument, things)
    if isinstance(where, Selector):
        return where.pick(layers, modules)
    if isinstance(where, str):
        where = (where,)
    if not isinstance(where, Sequence):
        return {path for path, layer in layers if where(path, layer)}
    names = {path: (path, *(aliases or {}).get(path, ())) for path in paths}
    chosen: set[str] = set()
    for pattern in where:
        matched = {path for path in paths if any(fnmatchcase(name, pattern) for name in names[path])}
        if not matched and modules is not None and pattern in get_args(LatePart):
            matched = _late(pattern, layers, modules)
        if not matched:
            parts = "" if modules is None else f"; the late parts {', '.join(get_args(LatePart))} have names, too"
            there = ", ".join(paths) or "none"
            raise ValueError(f"{argument}={pattern!r} matches no {things}; there are {there}{parts}")
        chosen |= matched
    return chosen


def _check(where: Any, argument: str, things: str) -> None:
    """Raise unless `where` can pick layers; a layer or its type is callable but no predicate."""
    if isinstance(where, Sequence):
        fits = all(isinstance(pattern, str) for pattern in where)
    else:
        fits = isinstance(where, Selector) or (callable(where) and not isinstance(where, (type, nn.Module)))
    if not fits:
        raise TypeError(
            f"expected {argument} to be a glob on the paths of {things}s like 'body.*', a list of globs, a predicate "
            f"such as lambda path, layer: isinstance(layer, nn.Linear), or lb.layers.last(nn.Linear), got {where!r}"
        )


POOLS = (nn.modules.pooling._MaxPoolNd, nn.modules.pooling._AvgPoolNd)
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
LAST_SHARE = 4
"""The last stage is one of n equal parts, if no size changes."""


def _late(part: Any, layers: Places, modules: Places) -> set[str]:
    """Return the paths of the layers in a late part of a network."""
    order = {path: position for position, (path, _) in enumerate(modules)}
    maps = [path for path, module in modules if isinstance(module, LINEAR_MAPS)]
    if not maps:
        return set()
    start, units = maps[-1], _units(maps, modules)
    if part == "last_block" and units:
        start = next(reversed(units))
    elif part == "last_stage" and units:
        start = _stage_start(maps, units, modules)
    return {path for path, _ in layers if order.get(path, -1) >= order[start]}


def _units(maps: Sequence[str], modules: Places) -> dict[str, list[str]]:
    """Return the linear maps of each block by its path; without blocks, each map before the head alone."""
    inside = Counter(above for path in maps for above in _above(path))
    numbered = {
        path: type(module)
        for path, module in modules
        if inside[path] > 1 and type(module) not in CONTAINERS and re.search(r"\d", path.rpartition(".")[2])
    }
    counts = Counter(numbered.values())
    blocks: dict[str, list[str]] = {}
    for path in maps:
        block = next((above for above in _above(path) if counts[numbered.get(above, nn.Module)] > 1), None)
        if block is not None:
            blocks.setdefault(block, []).append(path)
    return blocks or {path: [path] for path in maps[:-1]}


def _above(path: str) -> Iterator[str]:
    """Yield the paths of the modules around a module, the nearest first."""
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def _stage_start(maps: Sequence[str], units: dict[str, list[str]], modules: Places) -> str:
    """Return the path of the first module of the last stage."""
    own = dict(modules)
    order = {path: position for position, (path, _) in enumerate(modules)}
    convolutions = [order[path] for path in maps if isinstance(own[path], nn.modules.conv._ConvNd)]
    names, inside = list(units), list(units.values())
    reach = range(order[inside[0][-1]] + 1, max(convolutions, default=-1) + 1)  # the first unit begins no stage
    strided = [path for path, module in modules if order[path] in reach and _has_stride(module)]
    if strided:
        return next((above for above in _above(strided[-1]) if above in units), strided[-1])
    widths = [_width(own[unit[-1]]) for unit in inside]
    changes = [later for later, (old, new) in enumerate(pairwise(widths), 1) if old != new]
    return names[changes[-1] if changes else -math.ceil(len(names) / LAST_SHARE)]


def _has_stride(module: Any) -> bool:
    if not isinstance(module, (*POOLS, nn.modules.conv._ConvNd)):
        return False
    stride: Any = module.stride
    return bool(max(stride) > 1 if isinstance(stride, tuple) else stride > 1)


def _width(layer: nn.Module) -> int:
    family = family_of(layer)
    return 0 if family is None else family.outputs(layer)


class Abs(nn.Module):
    """|x|; a rectifier after a zero-mean layer would lose half of it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


ACTIVATIONS: tuple[type[nn.Module], ...] = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.GELU, nn.SiLU),
    *(nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardswish, Abs),
)
"""Classes that count as activations."""


def activate(model: nn.Module, where: Where, make: Callable[[], nn.Module]) -> nn.Module:
    """Return a copy of a model with another activation after the chosen layers.

    It replaces the first activation module registered after each layer. A function called in `forward` is not found.

    Args:
        model: a plain or converted network; it stays unchanged.
        where: layers, as `convert` takes them.
        make: makes the new activation, such as `lb.layers.Abs` or `torch.nn.Softplus`.

    Raises:
        ValueError: if no layer is chosen, no activation follows one, or it serves other layers, too.

    Example:
        >>> net = lb.layers.activate(net, lb.layers.first(nn.Linear), nn.Softplus)
    """
    model = copy.deepcopy(model)
    places = list(model.named_modules(remove_duplicate=False))
    layers = [(path, module) for path, module in places if path and not isinstance(module, ACTIVATIONS)]
    chosen = choose(layers, where)
    if not chosen:
        raise ValueError(f"expected where to pick a layer of this network, got {where!r}, which picks none")
    for path in chosen:
        owner, _, name = _next_activation(path, places).rpartition(".")
        setattr(model.get_submodule(owner), name, make())
    return model


def _next_activation(path: str, places: list[tuple[str, nn.Module]]) -> str:
    """Return the path of the first activation after a layer."""
    start = next(position for position, (name, _) in enumerate(places) if name == path)
    for name, module in places[start + 1 :]:
        if isinstance(module, ACTIVATIONS):
            others = [other for other, same in places if same is module and other != name]
            if others:
                raise ValueError(
                    f"the activation '{name}' after layer '{path}' also serves as {', '.join(others)}; give the layer "
                    "one of its own"
                )
            return name
    raise ValueError(f"no activation module follows layer '{path}'; one that is called inside forward cannot be seen")
