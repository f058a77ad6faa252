"""Exchange the activation after a layer: |x| after zero-mean layers, softplus to measure curvature."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import nn, Tensor

from leanbayes.layers.select import choose, Where


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
