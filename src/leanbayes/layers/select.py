"""Select layers by globs on dotted paths, predicates, or position; exchange the activations after them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn, Tensor


@dataclass(frozen=True)
class Selector:
    """The first or last few layers of some types, in the order of registration.

    Example:
        >>> last(nn.Conv2d, 3)
        Selector(kinds=(<class 'torch.nn.modules.conv.Conv2d'>,), count=3, from_end=True)
    """

    kinds: tuple[type[nn.Module], ...]
    count: int = 1
    from_end: bool = False

    def pick(self, layers: Sequence[tuple[str, nn.Module]]) -> set[str]:
        """Return the paths of the chosen layers."""
        paths = [path for path, layer in layers if isinstance(layer, self.kinds)]
        return set(paths[-self.count :] if self.from_end else paths[: self.count])


Where = str | Sequence[str] | Callable[[str, nn.Module], bool] | Selector


def first(kind: type[nn.Module], count: int = 1) -> Selector:
    """Select the first `count` layers of a type."""
    return Selector((kind,), count)


def last(kind: type[nn.Module], count: int = 1) -> Selector:
    """Select the last `count` layers of a type."""
    return Selector((kind,), count, from_end=True)


def choose(
    layers: Sequence[tuple[str, nn.Module]],
    where: Where | None,
    aliases: Mapping[str, Sequence[str]] | None = None,
    *,
    argument: str = "where",
    things: str = "layer",
) -> set[str]:
    """Return the paths of the layers that `where` picks; all of them for None. Globs match `aliases` of a path, too.

    Errors name the caller's `argument` and the `things` it chooses from.
    """
    paths = [path for path, _ in layers]
    if where is None:
        return set(paths)
    _check(where, argument, things)
    if isinstance(where, Selector):
        return where.pick(layers)
    if isinstance(where, str):
        where = (where,)
    if not isinstance(where, Sequence):
        return {path for path, layer in layers if where(path, layer)}
    names = {path: (path, *(aliases or {}).get(path, ())) for path in paths}
    chosen: set[str] = set()
    for pattern in where:
        matched = {path for path in paths if any(fnmatchcase(name, pattern) for name in names[path])}
        if not matched:
            raise ValueError(f"{argument}={pattern!r} matches no {things}; there are {', '.join(paths) or 'none'}")
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
        ValueError: if no activation follows a layer, or it serves other layers, too.

    Example:
        >>> net = lb.layers.activate(net, lb.layers.first(nn.Linear), nn.Softplus)
    """
    model = copy.deepcopy(model)
    places = list(model.named_modules(remove_duplicate=False))
    layers = [(path, module) for path, module in places if path and not isinstance(module, ACTIVATIONS)]
    chosen = choose(layers, where)
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
