"""Methods that make layers stochastic: one file per method, found by scanning this folder."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil

from leanbayes.methods._base import Method


def all_methods() -> dict[str, type[Method]]:
    """Return every method of the package by name, in the order of the names."""
    found: dict[str, type[Method]] = {}
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        for _, kind in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(kind, Method) and not inspect.isabstract(kind) and kind.__module__.startswith(module.name):
                found[kind.name] = kind
    return dict(sorted(found.items()))


def as_method(method: Method | str) -> Method:
    """Return the method itself, or the method of a name such as "rank1" with its defaults."""
    if not isinstance(method, str):
        return method
    known = all_methods()
    if method not in known:
        near = difflib.get_close_matches(method.lower(), known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        names = ", ".join(known)
        raise ValueError(f"expected a method such as lb.Rank1() or a name among {names}, got {method!r}{hint}")
    return known[method]()
