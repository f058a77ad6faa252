"""Make plain networks of a stochastic one: `draw`, `mean`, `strip`, and views that share its tensors."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any, cast

import torch
from torch import nn
from torch.nn.utils import parametrize

from leanbayes.core.conversion import Network, stochastic_layers, unwrap
from leanbayes.layers.composites.lowering import raise_back
from leanbayes.layers.hooks import copy_hooks
from leanbayes.methods._checks import check_at_least_zero, whole_number
from leanbayes.methods.ensemble import member_of, members_of
from leanbayes.runtime.noise import Design
from leanbayes.runtime.passes import draws, Width
from leanbayes.runtime.twins import at_rest, copied, tensors_of, twin


def draw(
    model: Network,
    *,
    seed: int = 0,
    index: int = 0,
    component: int | None = None,
    width: Width = None,
    design: Design = "independent",
) -> Network:
    """Return one posterior draw as an ordinary network of the original class, without leanbayes inside.

    It equals sample `index` of `predict(model, x, seed=seed, design=design)` and shares no tensor with `model`.

    Example:
        >>> plain = lb.draw(bnn, seed=0)
    """
    inner: Any = unwrap(model)
    seed, index = whole_number("seed", seed), whole_number("index", index)
    check_at_least_zero(index=index)
    members = members_of(inner)
    if members:
        member, own = member_of(members, index, component)
        return cast(Network, draw(member, seed=seed, index=own, width=width, design=design))
    return cast(Network, _frozen_copy(inner, seed=seed, index=index, component=component, width=width, design=design))


def mean(model: Network, *, component: int | None = None) -> Network:
    """Return the network of posterior means, averaged over components or of one component.

    Distributions without a mean (Cauchy, half-Cauchy) give their median. After random-sign initialisation the average
    of the components means little: name one. The members of an explicit ensemble have no mean.
    """
    inner: Any = unwrap(model)
    members = members_of(inner)
    if members:
        if component is None:
            raise ValueError("the members of an ensemble have no mean network; name one with component=k")
        return cast(Network, mean(member_of(members, 0, component)[0]))
    return cast(Network, _frozen_copy(inner, mean=True, component=component))


def _frozen_copy(model: nn.Module, **draw: Any) -> nn.Module:
    model = twin(at_rest(model), share_plain=True)
    with draws(model, **draw):
        return _on_its_own(raise_back(frozen(model)), model)


def strip(model: nn.Module) -> nn.Module:
    """Return the plain network of the shared weights, as trained since the conversion, without factors."""
    return _on_its_own(raise_back(plain_view(model)), model)


def plain_view(model: nn.Module) -> nn.Module:
    """Return the plain network of the shared layers: other modules, the same parameters and buffers.

    It has no factors, no noise and no KL. Training it trains the shared weights of `model`.
    """
    bases: dict[int, nn.Module] = {}
    for _, layer in stochastic_layers(model):
        base = bases[id(layer)] = _shallow(layer.base)
        copy_hooks(layer, base)
    return twin(unwrap(model), bases)


def _shallow(module: nn.Module) -> nn.Module:
    """Return a module with the same parts, as `copy.copy` does, which torch refuses for a parametrised module."""
    if not parametrize.is_parametrized(module):
        return copy.copy(module)
    found = nn.Module.__new__(type(module))
    vars(found).update(vars(module))
    return found


def frozen(model: nn.Module) -> nn.Module:
    """Return a plain twin of the model under the current draw; it shares the tensors that no draw touches."""
    layers: dict[int, nn.Module] = {}
    with torch.no_grad():
        for _, layer in stochastic_layers(model):
            layers[id(layer)] = layer.freeze()
            layer.state.noise.pop(layer.path, None)  # it may be as large as the weights
    return twin(unwrap(model), layers)


def _on_its_own(plain: nn.Module, model: nn.Module) -> nn.Module:
    """Copy the tensors that a plain twin shares with its model; others are the twin's own and stay."""
    theirs = {0, *map(_address, tensors_of(model))}
    found = {id(tensor): tensor for tensor in tensors_of(plain)}
    users = Counter(map(_address, found.values()))
    made = {key: one for key, one in found.items() if _address(one) not in theirs and users[_address(one)] == 1}
    return copied(plain, {key: one for key, one in made.items() if one.untyped_storage().nbytes() == one.nbytes})


def _address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory; 0 if it has none or hides it."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided
    return tensor.untyped_storage().data_ptr() if plain else 0
