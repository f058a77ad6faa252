"""Explicit ensembles (Lakshminarayanan et al., 2017): K whole networks, the reference for lean methods.

An `Ensemble` is the mixture (1/K) sum_k of its members. Each row of a training batch goes to one member. Draw i is
member i mod K; of a stochastic member, it is draw i // K.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import nn, Tensor
from torch.utils import _pytree
from typing_extensions import override

from leanbayes.distributions.likelihoods import Likelihood
from leanbayes.methods._base import Method, StochasticLayer
from leanbayes.methods._checks import check_choice, check_components
from leanbayes.runtime.batches import leading_rows, map_rows
from leanbayes.runtime.noise import NoiseSpec
from leanbayes.runtime.passes import members_in, PassState

Init = Literal["fresh", "copy"]
T = TypeVar("T")


class Ensemble(nn.Module):
    """K networks of one architecture as one model, each with its own weights, norm statistics and posterior.

    Missing attributes (`config`, `num_features`, ...) are looked up in the first member.

    Attributes:
        members: the networks.
        likelihood: the likelihood of an ensemble of plain networks; stochastic members keep their own.

    Example:
        >>> ensemble = lb.Ensemble([make_network() for _ in range(4)])
        >>> lb.fit(ensemble, train)                      # each member on its own
    """

    likelihood: Likelihood | None
    path = ""
    row_noise = False
    ordered = False

    def __init__(self, members: Sequence[nn.Module], method: DeepEnsemble | None = None) -> None:
        super().__init__()
        if not members:
            raise ValueError("expected at least one member, got none")
        self.members = nn.ModuleList(members)
        self.training = self.members.training = members[0].training
        self.method = method or DeepEnsemble(components=len(members))
        self.components = len(members)
        self.state = PassState(components=self.components)
        self.state.attach(self)
        self.likelihood = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run every row through its member; inside `draws`, run all rows through one member."""
        rows = leading_rows((args, kwargs)) or 1
        component, _, _ = self.state.inputs_of(self, rows)
        if component is None:
            raise ValueError("the members of an ensemble have no mean network; name one with component=k")
        if component.component.numel() == 1:
            return self.members[int(component.component)](*args, **kwargs)
        return self._split(component.rows(), rows, args, kwargs)

    def noise_specs(self, shared: bool) -> tuple[NoiseSpec, ...]:
        """Return no specs: only the member of a row is random."""
        return ()

    @property
    def device(self) -> torch.device:
        """The device of the first member."""
        return next(self.members.parameters()).device

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            members = self._modules.get("members")
            if not isinstance(members, nn.ModuleList) or name.startswith("_"):
                raise
            return getattr(members[0], name)

    def _split(self, member_of_row: Tensor, rows: int, args: Any, kwargs: Any) -> Any:
        """Run each member on its rows, and return the outputs in the order of the rows."""
        outputs, order = [], []
        for k, member in enumerate(self.members):
            mine = (member_of_row == k).nonzero().flatten()
            if len(mine):
                own_args, own_kwargs = map_rows((args, kwargs), rows, partial(torch.index_select, dim=0, index=mine))
                outputs.append(member(*own_args, **own_kwargs))
                order.append(mine)
        return _pytree.tree_map(partial(_joined, torch.cat(order).argsort()), *outputs)


def members_of(model: nn.Module) -> list[nn.Module]:
    """Return the members of an explicit ensemble; none for any other model."""
    return list(members_in(model) or ())


def member_of(members: Sequence[T], index: int, component: int | None = None) -> tuple[T, int]:
    """Return the member of draw `index`, and the number of the draw within the member."""
    count = len(members)
    if component is not None and not 0 <= component < count:
        raise ValueError(f"expected a component from 0 to {count - 1}, got {component}")
    return members[index % count if component is None else component], index // count


def _joined(order: Tensor, *parts: Any) -> Any:
    """Join the outputs of members in the order of the rows: tensors, and records that torch's trees do not know.

    Other objects (a cache of keys, a name) belong to one member and become None.
    """
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts)[order]
    if isinstance(first, type) or not (is_dataclass(first) or getattr(first, "logits", None) is not None):
        return None
    record = copy.copy(first)
    for name in [field.name for field in fields(first)] if is_dataclass(first) else vars(first):
        inner = _pytree.tree_map(partial(_joined, order), *(getattr(part, name) for part in parts))
        object.__setattr__(record, name, inner)  # also where it is frozen
    return record


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
