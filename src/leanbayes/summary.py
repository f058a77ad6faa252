"""What `convert` did: every converted and every skipped layer, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from leanbayes.convert import stochastic_layers, unwrap
from leanbayes.layers import lowering
from leanbayes.layers.family import refusal
from leanbayes.methods.base import Method, StochasticLayer
from leanbayes.methods.ensemble import Ensemble
from leanbayes.sampling import components_of

EXACT_DIGITS = 15
"""Larger numbers of networks are written as powers of ten."""


class Row(NamedTuple):
    """One layer: its path and type, the method it carries or the reason why it carries none."""

    path: str
    kind: str
    method: str | None
    reason: str


@dataclass(frozen=True)
class Summary:
    """The layers of a model and the cost of its posterior; `print` it.

    Attributes:
        rows: every layer, converted or not.
        nodes: variables of one draw; for implicit nodes the input nodes of the network.
        parameters: parameters of the network without its posterior.
        extra_parameters: parameters of the posterior.
        log_networks: log of the number of different networks that draws can give; infinite for continuous noise.
    """

    rows: tuple[Row, ...]
    nodes: int
    parameters: int
    extra_parameters: int
    log_networks: float

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
        names = sorted({row.method for row in self.rows if row.method}) or ["plain"]
        return (
            f"{' + '.join(names)}: {self.converted} of {self.total} layers, "
            f"{self.extra_percent:.2f} % extra parameters ({self.extra_parameters:,} on {self.parameters:,}), "
            f"{self.nodes:,} nodes"
        )

    @property
    def ensemble(self) -> str:
        """How large an ensemble the draws form, in words; empty where there is no end to them."""
        if not 0 < self.log_networks < math.inf:
            return ""
        digits = self.log_networks / math.log(10)
        number = f"{round(math.exp(self.log_networks)):,}" if digits < EXACT_DIGITS else f"10^{digits:,.0f}"
        return f"an ensemble of {number} networks"

    def __repr__(self) -> str:
        """Return the table, too: it is what a prompt should show."""
        return str(self)

    def __str__(self) -> str:
        """Return a table with one line a layer and the headline below."""
        cells = [(row.path or "(root)", row.kind, row.method or f"- {row.reason}") for row in self.rows]
        wide = [max((len(cell[i]) for cell in cells), default=0) for i in range(2)]
        lines = [f"{path:<{wide[0]}}  {kind:<{wide[1]}}  {what}".rstrip() for path, kind, what in cells]
        return "\n".join([*lines, self.headline, *([self.ensemble] if self.ensemble else [])])


def summary(model: nn.Module) -> Summary:
    """Summarise a model: which layers are stochastic, which are not and why, and what it costs.

    Example:
        >>> print(lb.summary(bnn).headline)
        rank1: 21 of 66 layers, 0.73 % extra parameters (85,240 on 11,689,512), 10,155 nodes
    """
    model = unwrap(model)
    if isinstance(model, Ensemble):
        return _of_ensemble(model)
    layers = list(stochastic_layers(model))
    extra = _numbers(p for _, layer in layers for p in layer.posterior.parameters())
    both = _numbers(p for _, layer in layers for p in layer.extra_parameters())
    return Summary(
        rows=tuple(_rows("", model, {layer.method for _, layer in layers})),
        nodes=sum(layer.nodes for _, layer in layers),
        parameters=sum(p.numel() for p in model.parameters()) - both,
        extra_parameters=extra,
        log_networks=math.log(components_of(model)) + sum(layer.log_choices for _, layer in layers),
    )


def _of_ensemble(ensemble: Ensemble) -> Summary:
    """Count the members as one network and its copies."""
    members = [summary(member) for member in ensemble.members]
    rows = [Row(f"members.{k}", type(m).__name__, ensemble.method.name, "") for k, m in enumerate(ensemble.members)]
    copies = sum(member.parameters + member.extra_parameters for member in members[1:])
    return Summary(
        rows=tuple(rows),
        nodes=sum(member.nodes for member in members),
        parameters=members[0].parameters,
        extra_parameters=members[0].extra_parameters + copies,
        log_networks=math.log(len(members)) + members[0].log_networks,
    )


def _rows(path: str, module: nn.Module, methods: set[Method]) -> list[Row]:
    """List the layers below a module: a leaf, a stochastic layer or a composite that is not opened is one row."""
    if isinstance(module, StochasticLayer):
        return [Row(path, type(module.base).__name__, module.method.name, "")]
    children = list(module.named_children())
    closed = lowering.opaque(module) or nn.utils.parametrize.is_parametrized(module) or _quantised(module)
    if closed or not children:
        return [Row(path, type(module).__name__, None, _reason(module, methods))]
    rows = [row for name, child in children for row in _rows(f"{path}.{name}" if path else name, child, methods)]
    own = sum(p.numel() for p in module.parameters(recurse=False))
    return rows if not own else [Row(path, type(module).__name__, None, "parameters of its own"), *rows]


def _reason(module: nn.Module, methods: set[Method]) -> str:
    """Say why a layer carries no method."""
    composite = lowering.refusal(module)
    if composite is not None:
        return composite or ("not chosen" if methods else "not converted")
    if _quantised(module):
        return "quantised"
    if not any(True for _ in module.parameters()):
        return "no parameters"
    reason = refusal(module)
    if reason or any(isinstance(module, method.targets) for method in methods):
        return reason or "not chosen"
    return f"not a target of {' or '.join(sorted(method.name for method in methods))}" if methods else "not converted"


def _quantised(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.ao.nn.")


def _numbers(parameters: Iterable[nn.Parameter]) -> int:
    """Count the numbers of parameters, of which layers may share some."""
    return sum(p.numel() for p in {id(p): p for p in parameters}.values())
