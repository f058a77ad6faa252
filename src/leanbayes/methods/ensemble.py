"""Explicit ensembles (Lakshminarayanan et al., 2017): K whole networks, the reference for lean methods.

An `Ensemble` is the mixture (1/K) sum_k of its members (`_members.py`).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from typing_extensions import override

from leanbayes.methods._base import Method, StochasticLayer
from leanbayes.methods._checks import check_choice, check_components
from leanbayes.methods._members import member_of as member_of
from leanbayes.methods._members import Members
from leanbayes.methods._members import members_of as members_of

Init = Literal["fresh", "copy"]


class Ensemble(Members):
    """K networks of one architecture as one model, each with its own weights, norm statistics and posterior.

    Missing attributes (`config`, `num_features`, ...) are looked up in the first member.

    Attributes:
        members: the networks.
        likelihood: the likelihood of an ensemble of plain networks; stochastic members keep their own.

    Example:
        >>> ensemble = lb.Ensemble([make_network() for _ in range(4)])
        >>> lb.fit(ensemble, train)                      # each member on its own
    """

    def __init__(self, members: Sequence[nn.Module], method: DeepEnsemble | None = None) -> None:
        super().__init__(members, method or DeepEnsemble(components=max(1, len(members))))


@dataclass(frozen=True, kw_only=True)
class DeepEnsemble(Method):
    """Whole copies of the network, each trained separately: K times the cost of everything.

    Attributes:
        components: K, the number of members.
        init: "fresh" initialises every member but the first again, with `reset_parameters` of its modules; "copy"
            starts all members as the given network. For networks that initialise themselves in another way, build the
            members yourself: `lb.Ensemble([make_network() for _ in range(4)])`.

    Example:
        >>> ensemble = lb.convert(net, lb.DeepEnsemble(components=4))
    """

    name: ClassVar[str] = "deep_ensemble"
    targets: ClassVar[tuple[type[nn.Module], ...]] = ()
    late: ClassVar[float] = 0.0

    components: int = 4
    init: Init = "fresh"

    def __post_init__(self) -> None:
        check_components(self.components)
        check_choice("init", self.init, ("fresh", "copy"))

    @override
    def wrap(self, layer: nn.Module) -> StochasticLayer:
        raise TypeError("an explicit ensemble copies whole networks, not layers; give no `where`")

    @override
    def build(self, make_network: Callable[[int], nn.Module], seed: int) -> Ensemble:
        return Ensemble([make_network(seed + 1000 * k) for k in range(self.components)], self)

    @override
    def whole(self, model: nn.Module) -> Ensemble:
        members = [copy.deepcopy(model) for _ in range(self.components)]
        if self.init == "fresh":
            for member in members[1:]:
                reset(member)
            _warn_of_equal(members)
        return Ensemble(members, self)


def reset(network: nn.Module) -> None:
    """Initialise a network again, with the `reset_parameters` of its modules."""
    for module in network.modules():
        again = _reset_of(module)
        if callable(again):
            again()


def _reset_of(module: nn.Module) -> Any:
    """Return the function that initialises a module; torch's attention calls it `_reset_parameters`."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _warn_of_equal(members: Sequence[nn.Module]) -> None:
    """Warn if a parameter without `reset_parameters` is the same in two members."""
    if len(members) < 2:
        return
    second = dict(members[1].named_parameters())
    for name in _out_of_reach(members[0]):
        first = members[0].get_parameter(name)
        # A constant parameter (zeros, ones) would be the same in a new network, too.
        if torch.equal(first, second[name]) and (first != first.flatten()[:1]).any():
            warnings.warn(
                f"the parameter '{name}' is the same in all members, since its module has no reset_parameters; build "
                "the members yourself: lb.Ensemble([make_network() for _ in range(4)])",
                stacklevel=4,
            )
            return


def _out_of_reach(network: nn.Module) -> Iterator[str]:
    """Yield the names of parameters whose module has no `reset_parameters`, without those of stochastic layers."""
    noisy = [path for path, module in network.named_modules() if isinstance(module, StochasticLayer)]
    for name, _ in network.named_parameters():
        path = name.rpartition(".")[0]
        inside = any(path == one or path.startswith(f"{one}.") or not one for one in noisy)
        if not inside and not callable(_reset_of(network.get_submodule(path))):
            yield name
