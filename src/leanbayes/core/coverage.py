"""Count the weights that a method covers, and list the parts that it leaves out with their reasons."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import NamedTuple

from torch import nn

from leanbayes.layers.composites import lowering
from leanbayes.layers.family import refusal
from leanbayes.methods._base import Method, StochasticLayer
from leanbayes.runtime.rows import ONE_DRAW

OWN_PARAMETERS = "parameters of its own"
NOT_CHOSEN = "not chosen"
SHOWN = 3
"""Parts that a short list names."""
KINDS = 8
"""Classes that a message names."""
ENOUGH = 0.5
"""Share of the weights within reach of a method below which `convert` warns."""
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


@dataclass(frozen=True)
class Coverage:
    """The part of a model that its methods reach.

    Attributes:
        rows: every layer, converted or not.
        weights: weights of the network, each once.
        covered_weights: those in converted layers.
        eligible: layers that the methods convert by default; converted ones always count.
    """

    rows: tuple[Row, ...]
    weights: int
    covered_weights: int
    eligible: int

    @property
    def share(self) -> float:
        """Share of the weights that are in converted layers."""
        return self.covered_weights / self.weights if self.weights else 0.0


def percent(share: float) -> str:
    """Return a share as a percentage, rounded down: 100 means all."""
    return f"{math.floor(1000 * share) / 10:.1f} %"


def left_out(rows: Iterable[Row]) -> list[Row]:
    """Return the parts with weights but without a method, the largest first."""
    return sorted((row for row in rows if row.method is None and row.size), key=lambda row: -row.size)


def coverage(model: nn.Module) -> Coverage:
    """Count the weights and layers that the methods of a model reach."""
    layers = [(path, module) for path, module in model.named_modules() if isinstance(module, StochasticLayer)]
    methods = {layer.method for _, layer in layers}
    extra = {id(p) for _, layer in layers for p in layer.extra_parameters()}
    mine = {id(p) for _, layer in layers for p in layer.base.parameters()}
    weights = {id(p): p.numel() for p in model.parameters() if id(p) not in extra}
    return Coverage(
        rows=tuple(_rows("", model, methods, mine)),
        weights=sum(weights.values()),
        covered_weights=sum(size for key, size in weights.items() if key in mine),
        eligible=len({path for path, _ in layers} | _eligible(model, methods)),
    )


def largest(parts: Sequence[Row], count: int = SHOWN) -> str:
    """Return the first parts of a list in words, with sizes and reasons, and the number of others."""
    said = [f"'{row.path or '(root)'}' ({row.kind}, {row.size:,} weights: {row.reason})" for row in parts[:count]]
    more = len(parts) - count
    return ", ".join(said) + (f" and {more} more" if more > 0 else "")


def gaps(model: nn.Module, method: Method, refused: Mapping[str, str], *, default: bool) -> str:
    """Return a message on the layers that a conversion left out: counts by reason, and a low share of the weights.

    Args:
        model: the converted model.
        method: its method.
        refused: reasons of the chosen layers that could not be converted, by path.
        default: whether the method chose the layers; layers that the user leaves out need no message.
    """
    said = [f"{counted(refused)}. {REMEDY}"] if refused else []
    found = coverage(model) if default and not method.partial else None
    parts = [] if found is None else [row for row in left_out(found.rows) if row.reason != NOT_CHOSEN]
    if found is not None and sum(row.size for row in parts) > (1 - ENOUGH) * found.weights:
        taken = "embeddings" in (f.name for f in fields(method)) and any(row.kind == "Embedding" for row in parts)
        hint = f" {type(method).__name__}(embeddings=True) adds embeddings." if taken else ""
        share = f"{percent(found.share)} of the weights"
        said.append(f"{type(method).__name__} covers {share}; the largest parts left out are {largest(parts)}.{hint}")
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
    modules = [module for _, module in _walk("", model)]
    leaves = [m for m in modules if lowering.opaque(m) or not any(True for _ in m.children())]
    there = Counter(full_name(type(m)) for m in leaves if not isinstance(m, StochasticLayer))
    stochastic = sum(isinstance(m, StochasticLayer) for m in modules)
    also = f" and {stochastic} layers that are stochastic already" if stochastic else ""
    seen = ", ".join(f"{count} {kind}" for kind, count in there.most_common(KINDS)) or "nothing"
    return (
        f"{name} found no layer to convert: it handles {', '.join(torch_kinds)} and layers that compute the same "
        f"(docs/layers.md); the model has {seen}{also}"
    )


def full_name(kind: type) -> str:
    """Return the name of a class, with its module unless it is one of torch."""
    return kind.__name__ if kind.__module__.startswith("torch.nn.") else f"{kind.__module__}.{kind.__name__}"


def _eligible(model: nn.Module, methods: Iterable[Method]) -> set[str]:
    """Return the paths of all layers that the methods choose by default, converted or refused."""
    plain = [(path, m.base if isinstance(m, StochasticLayer) else m) for path, m in _walk("", model)]
    found: set[str] = set()
    for method in methods:
        with suppress(ValueError):  # a glob of the method named layers inside a composite that is closed again
            found |= method.choose([(path, layer) for path, layer in plain if isinstance(layer, method.targets)])
    return found


def _walk(path: str, module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """Yield modules with their paths, each stochastic layer and each closed composite as one."""
    yield path, module
    if not (isinstance(module, StochasticLayer) or lowering.opaque(module)):
        for name, child in module.named_children():
            yield from _walk(f"{path}.{name}" if path else name, child)


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
