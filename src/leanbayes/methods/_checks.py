"""Checks of a method's fields: each raises one sentence with the expected and the given value."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from leanbayes.distributions.positive import SMALLEST_STD


def _check(expected: str, holds: Callable[[float], bool]) -> Callable[..., None]:
    """Return a function that raises unless every named value is a number for which `holds` is true."""

    def check(**values: float) -> None:
        for name, value in values.items():
            if not (isinstance(value, (int, float)) and holds(value)):
                raise ValueError(f"expected {name} to {expected}, got {value!r}")

    return check


check_positive = _check("be a positive number", lambda value: 0 < value < math.inf)
check_at_least_zero = _check("be a number of at least zero", lambda value: 0 <= value < math.inf)
check_share = _check("lie between 0 and 1", lambda value: 0 <= value <= 1)
check_rate = _check("be at least 0 and below 1", lambda value: 0 <= value < 1)


def check_std(**values: float) -> None:
    """Raise unless every value is a standard deviation that can be stored."""
    check_positive(**values)
    for name, value in values.items():
        if value < SMALLEST_STD:
            raise ValueError(f"expected {name} to be at least {SMALLEST_STD}, got {value!r}; for no noise use a point")


def whole_number(name: str, value: Any) -> int:
    """Return a whole number of Python or NumPy as an int; raise for anything else."""
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"expected {name} to be a whole number, got {value!r}") from None


def check_components(components: int) -> None:
    """Raise unless there is at least one component."""
    if not (isinstance(components, int) and not isinstance(components, bool) and components >= 1):
        raise ValueError(f"expected components to be a whole number of at least 1, got {components!r}")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise unless `value` is one of the choices."""
    if value not in choices:
        raise ValueError(f"expected {name} to be one of {', '.join(choices)}, got {value!r}")


def check_switches(settings: Any) -> None:
    """Raise unless every field of a dataclass that is True or False by its type is one of both."""
    for field in fields(settings) if is_dataclass(settings) else ():
        value = getattr(settings, field.name)
        if field.type in ("bool", bool) and not isinstance(value, bool):
            raise ValueError(f"expected {field.name} to be True or False, got {value!r}")


def check_keep(**probabilities: float | None) -> None:
    """Raise unless every probability is strictly between 0 and 1; None means a default."""
    for name, value in probabilities.items():
        if value is not None and not 0 < value < 1:
            raise ValueError(f"expected {name} between 0 and 1, got {value}; 0.95 is usual")
