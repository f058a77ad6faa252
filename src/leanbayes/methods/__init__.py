"""What noise goes into a layer: one file a method, found by scanning this folder."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

from leanbayes.methods.base import Method


def all_methods() -> dict[str, type[Method]]:
    """Return every method of the package by name, in the order of the names."""
    found: dict[str, type[Method]] = {}
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        for _, kind in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(kind, Method) and not inspect.isabstract(kind) and kind.__module__ == module.name:
                found[kind.name] = kind
    return dict(sorted(found.items()))
