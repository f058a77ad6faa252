"""Say which line of a network's code cannot be traced, and what to write instead."""

from __future__ import annotations

import ast
import inspect
import textwrap
import traceback
from pathlib import Path

import torch
from torch import nn

OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
"""Folders whose code is never at fault: torch's, and that of the tracer."""

CURES = (
    ("'len' is not supported", "write x.shape[0] instead of len(x)"),
    ("cannot be iterated", "a loop over the sizes or rows of a tensor cannot be traced"),
    ("control flow", "a condition on values or sizes of tensors cannot be traced"),
)


def blame(error: BaseException) -> str:
    """Return the line that raised an error, the error, and the cure where it is known."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(OWN)]
    message = (str(error).splitlines() or ["no message"])[0]
    cure = next((f": {cure}" for words, cure in CURES if words in str(error)), "")
    said = f"{type(error).__name__}: {message[:80]}" if not cure else type(error).__name__
    if not frames:
        return f"{said}{cure}"
    last = frames[-1]
    return f"line {last.lineno} of {Path(last.filename).name}, `{last.line}` ({said}){cure}"


def names_in(module: nn.Module) -> set[str]:
    """Return the names of all attributes that the code of a module's class mentions; none where it has no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(type(module))))
    except (OSError, TypeError, SyntaxError):
        return set()
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
