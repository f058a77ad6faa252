"""Summary of a model: every converted and skipped layer, the cost of the posterior, and messages on the gaps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from torch import nn

from leanbayes.core.student import Student
from leanbayes.layers.composites import lowering
from leanbayes.layers.family import refusal
from leanbayes.methods._base import Method, StochasticLayer
from leanbayes.methods.ensemble import members_of
from leanbayes.runtime.batches import Inputs, Output
from leanbayes.runtime.display import html_table
from leanbayes.runtime.distributed import unwrap
from leanbayes.runtime.passes import components_of
from leanbayes.runtime.rows import ONE_DRAW

EXACT_DIGITS = 15  # larger numbers of networks are written as powers of ten
OWN_PARAMETERS = "parameters of its own"
NOT_CHOSEN = "not chosen"
SHOWN = 3  # parts that a short list names
KINDS = 8  # classes that a message names
ENOUGH = 0.5  # share of the weights within reach of a method below which `convert` warns
REMEDY = "They stay plain: choose others with where=, or register their class (lb.layers.register, docs/layers.md)."


class Row(NamedTuple):
    """One layer of a model.

    Attributes:
        path: dotted path; empty for the root.
        kind: name of its class.
        method: name of its method, None for a plain layer.
        reason: why it has no method; for a converted layer with its own forward, how it was recognised.
        size: number of its weights, without child layers and posterior.
    """

    path: str
    kind: str
    method: str | None
    reason: str
    size: int = 0


class Price(NamedTuple):
    """Multiply-adds for one row: of matrix products, convolutions and attention.

    Attributes:
        draws: different draws of the answer.
        plain: multiply-adds of a pass of the plain network.
        answer: multiply-adds of the answer; layers before the first stochastic one run once.
    """

    draws: int
    plain: int
    answer: int

    @property
    def passes(self) -> float:
        """The answer in plain passes."""
        return self.answer / max(self.plain, 1)

    def __str__(self) -> str:
        draws = "1 draw costs" if self.draws == 1 else f"{self.draws} draws cost"
        passes = f"{self.passes:.3g} plain pass{'' if self.passes == 1 else 'es'}"
        return f"{draws} {passes}: {self.answer:,} multiply-adds a row, {self.plain:,} in a plain pass"


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
        price: of an answer, if `summary` had an example.
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
    price: Price | None = None

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
        return tuple(sorted((row for row in self.rows if row.method is None and row.size), key=lambda row: -row.size))

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
        price = "" if self.price is None else str(self.price)
        return [*filter(None, (self.ensemble, price, f"left out: {largest(self.left_out)}" if missed else ""))]


def summary(
    model: nn.Module, *, example: Inputs | None = None, samples: int = 16, output: Output | None = None
) -> Summary:
    """Summarise a model: its stochastic layers, its other layers with reasons, and the cost.

    Args:
        model: a converted or plain network.
        example: inputs with one row or more. The network runs on them, which gives the price of an answer.
        samples: draws of that answer.
        output: picks the tensor out of what the model returns, as in `predict`.

    Example:
        >>> print(lb.summary(bnn).headline)  # doctest: +NORMALIZE_WHITESPACE
        rank1: 99.9 % of the weights, 21 of 21 layers with a linear map,
        0.73 % extra parameters (85,240 on 11,689,512), 10,155 nodes
    """
    found = _summary(unwrap(model))
    if example is None:
        return found
    from leanbayes.core.predictor import Predictor  # which imports this module

    return replace(found, price=Predictor(model, samples=samples, output=output).price(example))


def _summary(model: nn.Module) -> Summary:
    if members_of(model):
        return _of_ensemble(model)
    if isinstance(model, Student):
        plain, further = summary(model.network), model.extra_parameters
        return replace(plain, parameters=plain.parameters - further, extra_parameters=further)
    layers = [(path, module) for path, module in model.named_modules() if isinstance(module, StochasticLayer)]
    methods = {layer.method for _, layer in layers}
    things = {method.things for method in methods}
    extra = {id(p) for _, layer in layers for p in layer.extra_parameters()}
    mine = {id(p) for _, layer in layers for p in layer.base.parameters()}
    weights = {id(p): p.numel() for p in model.parameters() if id(p) not in extra}
    posterior = {id(p): p.numel() for _, layer in layers for p in layer.posterior.parameters()}
    covered = sum(size for key, size in weights.items() if key in mine)
    parameters = sum(weights.values())
    return Summary(
        rows=tuple(_rows("", model, methods, mine)),
        nodes=sum(layer.nodes for _, layer in layers),
        parameters=parameters,
        extra_parameters=sum(posterior.values()) + sum(layer.stored for _, layer in layers),
        log_networks=math.log(components_of(model)) + sum(layer.log_choices for _, layer in layers),
        covered=covered / parameters if parameters else 0.0,
        eligible=len({path for path, _ in layers} | _eligible(model, methods)),
        things=things.pop() if len(things) == 1 else "layers",
        partial=any(method.partial for method in methods),
    )


def _of_ensemble(ensemble: Any) -> Summary:
    """Count the members as one network and its copies."""
    members = [_summary(member) for member in ensemble.members]
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


def percent(share: float) -> str:
    """Return a share as a percentage, rounded down: 100 means all."""
    return f"{math.floor(1000 * share) / 10:.1f} %"


def largest(rows: Sequence[Row]) -> str:
    """Return the first rows in words, with sizes and reasons, and the number of others."""
    said = [f"'{row.path or '(root)'}' ({row.kind}, {row.size:,} weights: {row.reason})" for row in rows[:SHOWN]]
    more = len(rows) - SHOWN
    return ", ".join(said) + (f" and {more} more" if more > 0 else "")


def gaps(model: nn.Module, method: Method, refused: Mapping[str, str], *, default: bool) -> str:
    """Return a message on the layers that a conversion left out: counts by reason, and a low share of the weights.

    `refused` has the reasons of the chosen layers that could not be converted, by path. Layers that the user leaves out
    (not `default`) need no message.
    """
    said = [f"{counted(refused)}. {REMEDY}"] if refused else []
    found = summary(model) if default and not method.partial else None
    missed = [] if found is None else [row for row in found.left_out if row.reason != NOT_CHOSEN]
    if found is not None and sum(row.size for row in missed) > (1 - ENOUGH) * found.parameters:
        taken = "embeddings" in (f.name for f in fields(method)) and any(row.kind == "Embedding" for row in missed)
        hint = f" {type(method).__name__}(embeddings=True) adds embeddings." if taken else ""
        share = f"{percent(found.covered)} of the weights"
        said.append(f"{type(method).__name__} covers {share}; the largest parts left out are {largest(missed)}.{hint}")
    return " ".join(said)


def counted(refused: Mapping[str, str]) -> str:
    """Return the reasons, each with the number of its layers and two of their paths."""
    by_reason: dict[str, list[str]] = {}
    for path, reason in refused.items():
        by_reason.setdefault(reason, []).append(f"'{path}'")
    return "; ".join(f"{_layers(paths)} cannot be converted: {reason}" for reason, paths in by_reason.items())


def _layers(paths: Sequence[str]) -> str:
    if len(paths) == 1:
        return f"layer {paths[0]}"
    return f"{len(paths)} layers ({', '.join(paths[:2])}{', ...' if len(paths) > 2 else ''})"


def nothing_to_convert(model: nn.Module, method: Method, candidates: Sequence[str], refused: Mapping[str, str]) -> str:
    """Return why a method converts nothing in a model: reasons with counts, or the classes of its modules."""
    name = type(method).__name__
    if refused:
        return f"{name} converts nothing: {counted(refused)}. {REMEDY}"
    if candidates:
        paths = [f"'{path}'" for path in candidates]
        return f"{name} chose nothing, though it can convert {_layers(paths)}; name what to convert with where="
    torch_kinds = [kind.__name__ for kind in method.targets if kind.__module__.startswith("torch.")]
    modules = [module for _, module in parts(model)]
    leaves = [m for m in modules if lowering.opaque(m) or not any(True for _ in m.children())]
    kinds = [type(m) for m in leaves if not isinstance(m, StochasticLayer)]
    homes = ("" if kind.__module__.startswith("torch.nn.") else f"{kind.__module__}." for kind in kinds)
    there = Counter(home + kind.__name__ for home, kind in zip(homes, kinds, strict=True))
    stochastic = sum(isinstance(m, StochasticLayer) for m in modules)
    also = f" and {stochastic} layers that are stochastic already" if stochastic else ""
    seen = ", ".join(f"{count} {kind}" for kind, count in there.most_common(KINDS)) or "nothing"
    return (
        f"{name} found no layer to convert: it handles {', '.join(torch_kinds)} and layers that compute the same "
        f"(docs/layers.md); the model has {seen}{also}"
    )


def _eligible(model: nn.Module, methods: Iterable[Method]) -> set[str]:
    """Return the paths of all layers that the methods choose by default, converted or refused."""
    plain = [(path, m.base if isinstance(m, StochasticLayer) else m) for path, m in parts(model)]
    found: set[str] = set()
    for method in methods:
        with suppress(ValueError):  # a glob of the method named layers inside a composite that is closed again
            found |= method.choose([(path, layer) for path, layer in plain if isinstance(layer, method.targets)])
    return found


def parts(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield modules with their paths, each stochastic layer and each closed composite as one."""
    yield path, module
    if not (isinstance(module, StochasticLayer) or lowering.opaque(module)):
        for name, child in module.named_children():
            yield from parts(child, f"{path}.{name}" if path else name)


def _rows(path: str, module: nn.Module, methods: set[Method], mine: set[int]) -> list[Row]:
    """List the layers below a module; a leaf, a stochastic layer and a closed composite are one row each.

    A weight that is tied to one of a converted layer counts there alone.
    """
    if isinstance(module, StochasticLayer):
        size = sum(p.numel() for p in module.base.parameters())
        return [Row(path, type(module.base).__name__, module.method.name, _remark(module), size)]
    children = list(module.named_children())
    closed = lowering.opaque(module) or nn.utils.parametrize.is_parametrized(module) or _quantised(module)
    whole = closed or not children
    size = sum(p.numel() for p in module.parameters(recurse=whole) if id(p) not in mine)
    if whole:
        return [Row(path, type(module).__name__, None, _reason(module, methods), size)]
    rows = [row for name, child in children for row in _rows(f"{path}.{name}" if path else name, child, methods, mine)]
    own = any(True for _ in module.parameters(recurse=False))
    return [Row(path, type(module).__name__, None, OWN_PARAMETERS, size), *rows] if own else rows


def _remark(layer: StochasticLayer) -> str:
    """Return how a layer was recognised, and the findings of its first pass: one draw per batch, or not used."""
    remarks = {
        f"recognised {layer.family.way}": bool(layer.family.way),
        "one draw per batch": layer.layout == ONE_DRAW and layer.row_noise,
        "not used in eval mode": layer.used is False,
    }
    return ", ".join(text for text, holds in remarks.items() if holds)


def _reason(module: nn.Module, methods: set[Method]) -> str:
    """Return why a layer has no method."""
    composite = lowering.refusal(module)
    if composite is not None:
        return composite or (NOT_CHOSEN if methods else "not converted")
    if _quantised(module):
        return "quantised"
    if not any(True for _ in module.parameters()):
        return "no parameters"
    reason = refusal(module)
    if reason or any(isinstance(module, method.targets) for method in methods):
        return reason or NOT_CHOSEN
    if not methods:
        return "not converted"
    return f"not a target of {' or '.join(sorted(method.name for method in methods))}"


def _quantised(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.ao.nn.")
