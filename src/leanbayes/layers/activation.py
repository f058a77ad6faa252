"""Exchange the activation behind a layer: |x| behind zero-mean layers, softplus where curvature is measured."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import nn, Tensor

from leanbayes.layers.select import choose, Where


class Abs(nn.Module):
    """|x|: what a rectifier behind a zero-mean layer loses half of."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the absolute value of every entry."""
        return x.abs()


ACTIVATIONS: tuple[type[nn.Module], ...] = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.PReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.Softplus,
    nn.Hardswish,
    Abs,
)
"""What counts as an activation."""


def activate(model: nn.Module, where: Where, make: Callable[[], nn.Module]) -> nn.Module:
    """Return a copy of a model with another activation behind the chosen layers.

    The activation that is exchanged is the first one that is registered behind the layer; one that is called as a
    function inside `forward` cannot be seen.

    Args:
        model: a plain or converted network; it stays as it is.
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
        owner, _, name = _behind(path, places).rpartition(".")
        setattr(model.get_submodule(owner), name, make())
    return model


def _behind(path: str, places: list[tuple[str, nn.Module]]) -> str:
    """Return where the first activation behind a layer is registered."""
    start = next(position for position, (name, _) in enumerate(places) if name == path)
    for name, module in places[start + 1 :]:
        if isinstance(module, ACTIVATIONS):
            others = [other for other, same in places if same is module and other != name]
            if others:
                raise ValueError(
                    f"the activation '{name}' behind layer '{path}' also serves as {', '.join(others)}; give the layer "
                    "one of its own"
                )
            return name
    raise ValueError(f"no activation module follows layer '{path}'; one that is called inside forward cannot be seen")
