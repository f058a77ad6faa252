"""Measure the source against the house's budgets: file and function length, class depth, docstrings, smells."""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "leanbayes"
BUDGETS = {
    "longest file (lines)": 500,
    "median file (lines)": 150,
    "longest function (lines)": 60,
    "95th percentile function (lines)": 40,
    "public definitions without docstring": 0,
    "arguments without type": 0,
    "hasattr(": 0,
    "TODO, FIXME, NotImplementedError": 0,
    "unpickling": 0,
    "code outside methods/ that asks which method it has": 0,
}


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Yield every function of a module."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def untyped(function: ast.FunctionDef) -> int:
    """Count arguments without annotation; `self` and `cls` need none."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return sum(a.annotation is None and a.arg not in ("self", "cls") for a in arguments)


def code_lines(function: ast.FunctionDef) -> int:
    """Count the lines of a function without its docstring: a long explanation is no fault."""
    length = (function.end_lineno or 0) - function.lineno + 1
    first = function.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return length - ((first.end_lineno or 0) - first.lineno + 1) * documented


def undocumented(tree: ast.Module) -> int:
    """Count public classes and functions at the top level without docstring."""
    public = [n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and not n.name.startswith("_")]
    return sum(ast.get_docstring(node) is None for node in public)


def measure() -> dict[str, float]:
    """Return every measure by name."""
    files = sorted(SOURCE.rglob("*.py"))
    texts = {file: file.read_text() for file in files}
    trees = {file: ast.parse(text) for file, text in texts.items()}
    sizes = [len(text.splitlines()) for text in texts.values()]
    lengths = sorted(code_lines(f) for tree in trees.values() for f in functions(tree))
    outside = {file: text for file, text in texts.items() if "methods" not in file.parts}

    def count(pattern: str, where: dict[Path, str]) -> int:
        return sum(len(re.findall(pattern, text)) for text in where.values())

    return {
        "longest file (lines)": max(sizes),
        "median file (lines)": statistics.median(sizes),
        "longest function (lines)": lengths[-1],
        "95th percentile function (lines)": lengths[int(0.95 * len(lengths))],
        "public definitions without docstring": sum(map(undocumented, trees.values())),
        "arguments without type": sum(untyped(f) for tree in trees.values() for f in functions(tree)),
        "hasattr(": count(r"hasattr\(", texts),
        "TODO, FIXME, NotImplementedError": count(r"TODO|FIXME|NotImplementedError", texts),
        "unpickling": count(r"torch\.load\(|pickle\.load|allow_pickle=True", texts),
        "code outside methods/ that asks which method it has": count(r"method(\.name)? *== *['\"]", outside),
    }


def main() -> int:
    """Print the measures that are over budget and return their number."""
    measures = measure()
    over = {name: value for name, value in measures.items() if value > BUDGETS[name]}
    for name, value in over.items():
        print(f"over budget: {name}: {value:g}, at most {BUDGETS[name]}")
    print(f"budgets: {len(measures) - len(over)} of {len(measures)} kept")
    return len(over)


if __name__ == "__main__":
    sys.exit(main())
