"""Which numbers of a result cannot be true: the report names them instead of failing on them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

LARGEST = 1e100  # larger numbers overflow when they are squared
DEEPEST = 30  # levels of lists and mappings
SHOWN = 40  # characters of a field or a value in a message
ABOVE = {  # what these numbers must be larger than
    "cost.train_step_ratio": 0,
    "cost.predict_ratio": 0,
    "cost.passes": 0,
    "cost.extra_percent": -100,
    "recipe.epochs": 0,
    "recipe.samples": 0,
    "method.fields.components": 0,
}


def complaint(record: Mapping[str, Any]) -> str | None:
    """Name the first field that cannot be true, and say what was expected of it; None where there is none."""
    for field, value, depth in _fields(record):
        if depth > DEEPEST:
            return f"expected at most {DEEPEST} levels, got more in `{_short(field)}`"
        if not _is_number(value):
            continue
        if abs(value) > LARGEST:
            return f"expected `{_short(field)}` to be at most {LARGEST:g}, got {_short(str(value))}"
        if value <= ABOVE.get(field, -math.inf):
            return f"expected `{field}` to be above {ABOVE[field]}, got {value}"
    return None


def _fields(record: Mapping[str, Any]) -> Iterator[tuple[str, Any, int]]:
    """Yield every value with its path and its depth; without recursion, for a file may be nested deeply."""
    waiting: list[tuple[str, Any, int]] = [("", record, 0)]
    while waiting:
        path, value, depth = waiting.pop()
        yield path, value, depth
        items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
        waiting += [(f"{path}.{key}" if path else str(key), inner, depth + 1) for key, inner in items]


def _is_number(value: Any) -> bool:
    """Whether a value counts as a number; what is not finite counts as missing."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole or (isinstance(value, float) and math.isfinite(value))


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
