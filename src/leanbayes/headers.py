"""Check the JSON that a file says of itself: the type of every field, before any of them is used."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, Literal, Union

_LONGEST = 60  # characters of a value in a message
_LARGEST = 2**63  # whole numbers beyond overflow as floats or as sizes


def check_fields(values: Any, kinds: Mapping[str, Any], *, required: tuple[str, ...] = (), within: str = "") -> None:
    """Raise unless `values` is an object whose fields have the types of `kinds`; others may be there, too.

    Args:
        values: what JSON holds.
        kinds: type hints by name; tuples are lists in JSON.
        required: names of fields that must be there.
        within: what the names in the message begin with, such as "chain.0".

    Raises:
        ValueError: naming the first field that is wrong, what was expected and what came.
    """
    if not isinstance(values, dict):
        raise ValueError(f"expected {within or 'the header'} to be an object, got {_short(values)}")
    for name in required:
        if name not in values:
            raise ValueError(f"the field {_joined(within, name)} is missing")
    for name, kind in kinds.items():
        if name in values and not conforms(values[name], kind):
            raise ValueError(f"expected {_joined(within, name)} to be {_described(kind)}, got {_short(values[name])}")


def conforms(value: Any, kind: Any) -> bool:
    """Tell whether a value from JSON has the type of a hint: a union, Literal, list, tuple, dict, or a class."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(conforms(value, one) for one in inner)
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in inner)
    if origin is tuple and inner[-1] is not Ellipsis:
        fits = isinstance(value, (list, tuple)) and len(value) == len(inner)
        return fits and all(conforms(one, own) for one, own in zip(value, inner, strict=True))
    if origin in (list, tuple):
        return isinstance(value, (list, tuple)) and all(conforms(one, inner[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(conforms(one, inner[1]) for one in value.values())
    return kind is Any or _is_one(value, NoneType if kind is None else kind)


def _is_one(value: Any, kind: type) -> bool:
    """Tell whether a value is of a class; True and False are no numbers, and whole numbers are floats, too."""
    if kind not in (int, float):
        return isinstance(value, kind)
    if isinstance(value, bool) or not isinstance(value, (int, kind)):
        return False
    return isinstance(value, float) or abs(value) < _LARGEST


def _joined(within: str, name: str) -> str:
    return f"{within}.{name}" if within else name


def _described(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind).replace("typing.", "")


def _short(value: Any) -> str:
    if isinstance(value, (list, dict)) and len(value) > _LONGEST:  # which may also be nested without end
        return f"{type(value).__name__} of length {len(value)}"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
