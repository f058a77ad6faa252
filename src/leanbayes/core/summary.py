"""Summary of a converted model: every converted and skipped layer, and the cost of the posterior."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from leanbayes.core.conversion import stochastic_layers, unwrap
from leanbayes.core.coverage import coverage, largest, left_out, percent
from leanbayes.core.coverage import Row as Row
from leanbayes.methods.ensemble import members_of
from leanbayes.runtime.display import html_table
from leanbayes.runtime.passes import components_of

EXACT_DIGITS = 15
"""Larger numbers of networks are written as powers of ten."""


@dataclass(frozen=True)
class Summary:
    """The layers of a model and the cost of its posterior; print it.

    Attributes:
        rows: every layer, converted or not.
        nodes: number of random variables of one draw.
        parameters: parameters of the network without its posterior.
        extra_parameters: parameters of the posterior, and numbers that it stores untrained.
        log_networks: log of the number of different draws; infinite for continuous noise.
        covered: share of the network's weights in stochastic layers, each weight counted once.
        eligible: layers that the methods convert by default; stochastic ones always count.
        things: a noun for these layers.
        partial: whether the methods convert a small part of the network by design.
    """

    rows: tuple[Row, ...]
    nodes: int
    parameters: int
    extra_parameters: int
    log_networks: float
    covered: float = 0.0
    eligible: int = 0
    things: str = "layers"
    partial: bool = False

    @property
    def converted(self) -> int:
        """Number of stochastic layers."""
        return sum(row.method is not None for row in self.rows)

    @property
    def total(self) -> int:
        """Number of layers."""
        return len(self.rows)

    @property
    def extra_percent(self) -> float:
        """Parameters of the posterior in percent of the network's."""
        return 100 * self.extra_parameters / max(self.parameters, 1)

    @property
    def headline(self) -> str:
        """The line to quote."""
        names = sorted({row.method for row in self.rows if row.method})
        share = f"{percent(self.covered)} of the weights, " if names and not self.partial else ""
        reach = f"{self.converted} of {self.eligible if names else self.total} {self.things}"
        return (
            f"{' + '.join(names) or 'plain'}: {share}{reach}, "
            f"{self.extra_percent:.2f} % extra parameters ({self.extra_parameters:,} on {self.parameters:,}), "
            f"{self.nodes:,} nodes"
        )

    @property
    def ensemble(self) -> str:
        """The size of the ensemble of all draws in words; empty if infinite."""
        if not 0 < self.log_networks < math.inf:
            return ""
        digits = self.log_networks / math.log(10)
        number = f"{round(math.exp(self.log_networks)):,}" if digits < EXACT_DIGITS else f"10^{digits:,.0f}"
        return f"an ensemble of {number} networks"

    def __repr__(self) -> str:
        return str(self)

    @property
    def left_out(self) -> tuple[Row, ...]:
        """The parts with weights but without a method, the largest first."""
        return tuple(left_out(self.rows))

    def __str__(self) -> str:
        cells = self._cells()
        wide = [max((len(cell[i]) for cell in cells), default=0) for i in range(3)]
        lines = [f"{p:<{wide[0]}}  {k:<{wide[1]}}  {n:>{wide[2]}}  {what}".rstrip() for p, k, n, what in cells]
        return "\n".join([self.headline, *self._remarks(), *lines])

    def _repr_html_(self) -> str:
        heads = ("layer", "class", "weights", "method")
        return html_table(self.headline, heads, self._cells(), "; ".join(self._remarks()))

    def _cells(self) -> list[tuple[str, str, str, str]]:
        return [(row.path or "(root)", row.kind, f"{row.size:,}" if row.size else "", _said(row)) for row in self.rows]

    def _remarks(self) -> list[str]:
        """Return the size of the ensemble and the largest parts left out, if there are any."""
        missed = self.converted and self.left_out and not self.partial
        return [*filter(None, (self.ensemble, f"left out: {largest(self.left_out)}" if missed else ""))]


def summary(model: nn.Module) -> Summary:
    """Summarise a model: its stochastic layers, its other layers with reasons, and the cost.

    Example:
        >>> print(lb.summary(bnn).headline)  # doctest: +NORMALIZE_WHITESPACE
        rank1: 99.9 % of the weights, 21 of 21 layers with a linear map,
        0.73 % extra parameters (85,240 on 11,689,512), 10,155 nodes
    """
    model = unwrap(model)
    if members_of(model):
        return _of_ensemble(model)
    layers = list(stochastic_layers(model))
    extra = _numbers(p for _, layer in layers for p in layer.posterior.parameters())
    both = _numbers(p for _, layer in layers for p in layer.extra_parameters())
    found = coverage(model)
    methods = {layer.method for _, layer in layers}
    things = {method.things for method in methods}
    return Summary(
        rows=found.rows,
        nodes=sum(layer.nodes for _, layer in layers),
        parameters=sum(p.numel() for p in model.parameters()) - both,
        extra_parameters=extra + sum(layer.stored for _, layer in layers),
        log_networks=math.log(components_of(model)) + sum(layer.log_choices for _, layer in layers),
        covered=found.share,
        eligible=found.eligible,
        things=things.pop() if len(things) == 1 else "layers",
        partial=any(method.partial for method in methods),
    )


def _of_ensemble(ensemble: Any) -> Summary:
    """Count the members as one network and its copies."""
    members = [summary(member) for member in ensemble.members]
    rows = [
        Row(f"members.{k}", type(member).__name__, ensemble.method.name, "", said.parameters)
        for k, (member, said) in enumerate(zip(ensemble.members, members, strict=True))
    ]
    copies = sum(member.parameters + member.extra_parameters for member in members[1:])
    return Summary(
        rows=tuple(rows),
        nodes=sum(member.nodes for member in members),
        parameters=members[0].parameters,
        extra_parameters=members[0].extra_parameters + copies,
        log_networks=math.log(len(members)) + members[0].log_networks,
        covered=1.0,
        eligible=len(members),
        things="members",
    )


def _said(row: Row) -> str:
    if row.method is None:
        return f"- {row.reason}"
    return f"{row.method} ({row.reason})" if row.reason else row.method


def _numbers(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in {id(p): p for p in parameters}.values())
