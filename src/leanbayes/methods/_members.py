"""Several whole networks as one model, the mixture (1/K) sum_k of its members; the base of explicit ensembles.

Each row of a training batch goes to one member. Draw i is member i mod K; of a stochastic member, it is draw i // K.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn, Tensor
from torch.utils import _pytree

from leanbayes.distributions.likelihoods import Likelihood
from leanbayes.methods._base import Method
from leanbayes.runtime.batches import leading_rows, map_rows
from leanbayes.runtime.noise import NoiseSpec
from leanbayes.runtime.passes import members_in, PassState

T = TypeVar("T")


class Members(nn.Module):
    """K networks of one architecture as one model, each with its own weights, norm statistics and posterior.

    Missing attributes (`config`, `num_features`, ...) are looked up in the first member.

    Attributes:
        members: the networks.
        method: the method that made them.
        likelihood: the likelihood of an ensemble of plain networks; stochastic members keep their own.
    """

    likelihood: Likelihood | None
    path = ""
    row_noise = False
    ordered = False

    def __init__(self, members: Sequence[nn.Module], method: Method) -> None:
        super().__init__()
        if not members:
            raise ValueError("expected at least one member, got none")
        self.members = nn.ModuleList(members)
        self.training = self.members.training = members[0].training
        self.method = method
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

    def new_collector(self) -> nn.Module | None:
        """Return the module that `fit` keeps with the training state, `collect(network)` after each further epoch."""
        return None

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
