"""Methods that make layers stochastic: one file per method, found by scanning this folder."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Iterable

from leanbayes.methods._base import Method


def all_methods() -> dict[str, type[Method]]:
    """Return every method of the package by name, in the order of the names."""
    found: dict[str, type[Method]] = {}
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        for _, kind in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(kind, Method) and not inspect.isabstract(kind) and kind.__module__.startswith(module.name):
                found[kind.name] = kind
    return dict(sorted(found.items()))


def method_name(given: str) -> str | None:
    """Return the name of a method in any spelling: "rank1", "Rank1", "batch-ensemble", "ImplicitNodes"; else None."""
    spelled = {_letters(spelling): name for name, kind in all_methods().items() for spelling in (name, kind.__name__)}
    return spelled.get(_letters(given))


def closest(given: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the known name that is nearest to a wrong one; empty if none is near."""
    spelled = {_letters(name): name for name in known}
    near = difflib.get_close_matches(_letters(given), spelled, n=1)
    return f"; did you mean {spelled[near[0]]!r}?" if near else ""


def as_method(method: Method | str) -> Method:
    """Return the method itself, or the method of a name such as "rank1" with its defaults."""
    if not isinstance(method, str):
        return method
    known, name = all_methods(), method_name(method)
    if name is None:
        names = ", ".join(known)
        raise ValueError(
            f"expected a method such as lb.Rank1() or a name among {names}, got {method!r}{closest(method, known)}"
        )
    return known[name]()


def _letters(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
