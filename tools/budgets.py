"""Measure the source against its budgets: sizes of files, functions and packages, importers, docstrings, smells."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "leanbayes"
PAPERS = SOURCE.parent / "leanbayes_papers"
EXEMPT = ("__init__.py", "__main__.py")
TOPICS = {"slim": "nested", "phase": "variance"}
"""Packages that are about one method, whose classes they may ask for."""

GOALS = {
    "lines": 28_000,
    "files of the papers": 40,
    "lines of the papers": 4_600,
    "modules with exactly one importer (%)": 25,
}
"""Goals that are not reached yet: a miss is printed and does not fail."""

BUDGETS = {
    "files": 200,
    "longest file (lines)": 500,
    "files below 40 lines": 0,
    "modules at the root": 0,
    "isinstance on classes of methods outside methods/": 0,
    "longest function (lines)": 60,
    "95th percentile function (lines)": 40,
    "public definitions without docstring": 0,
    "arguments without type": 0,
    "hasattr(": 0,
    "TODO, FIXME, NotImplementedError": 0,
    "unpickling": 0,
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


def share_with_one_importer(trees: dict[Path, ast.Module]) -> float:
    """Return the share of modules that exactly one other module imports; packages and the root are left out."""
    names = {_module(file): file for file in trees}
    importers: dict[str, set[str]] = {name: set() for name in names}
    for name, file in names.items():
        for node in ast.walk(trees[file]):
            for target in _targets(node, names):
                importers[target].add(name)
    modules = [name for name, file in names.items() if file.name not in EXEMPT]
    others = {name: importers[name] - {name} for name in modules}
    return sum(len(found) == 1 for found in others.values()) / len(modules)


def _module(file: Path) -> str:
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _targets(node: ast.AST, names: dict[str, Path]) -> Iterator[str]:
    """Yield the modules of the package that a statement imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in names)
    elif isinstance(node, ast.ImportFrom) and node.module in names:
        inner = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name if name in names else node.module for name in inner)


def class_questions(trees: dict[Path, ast.Module]) -> Iterator[tuple[Path, int]]:
    """Yield the places outside `methods/` that ask for a class of a method, other than its base classes."""
    own: dict[str, Path] = {}
    for file, tree in trees.items():
        if "methods" in file.parts and file.name != "_base.py":
            own |= {node.name: file for node in tree.body if isinstance(node, ast.ClassDef)}
    for file, tree in trees.items():
        if "methods" in file.parts or file.relative_to(SOURCE).parts[0] in TOPICS:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
                asked = {inner.id for inner in ast.walk(node.args[1]) if isinstance(inner, ast.Name)}
                if asked & set(own):
                    yield file, node.lineno


def measure() -> dict[str, float]:
    """Return every measure by name."""
    files = sorted(SOURCE.rglob("*.py"))
    texts = {file: file.read_text() for file in files}
    trees = {file: ast.parse(text) for file, text in texts.items()}
    sizes = [len(text.splitlines()) for text in texts.values()]
    lengths = sorted(code_lines(f) for tree in trees.values() for f in functions(tree))
    papers = [file.read_text() for file in PAPERS.rglob("*.py")]

    def count(pattern: str, where: dict[Path, str]) -> int:
        return sum(len(re.findall(pattern, text)) for text in where.values())

    return {
        "files": len(files),
        "lines": sum(sizes),
        "files of the papers": len(papers),
        "lines of the papers": sum(len(text.splitlines()) for text in papers),
        "longest file (lines)": max(sizes),
        "files below 40 lines": sum(len(t.splitlines()) < 40 for f, t in texts.items() if f.name not in EXEMPT),
        "modules at the root": sum(f.parent == SOURCE and f.name not in EXEMPT for f in files),
        "modules with exactly one importer (%)": 100 * share_with_one_importer(trees),
        "isinstance on classes of methods outside methods/": len(list(class_questions(trees))),
        "longest function (lines)": lengths[-1],
        "95th percentile function (lines)": lengths[int(0.95 * len(lengths))],
        "public definitions without docstring": sum(map(undocumented, trees.values())),
        "arguments without type": sum(untyped(f) for tree in trees.values() for f in functions(tree)),
        "hasattr(": count(r"hasattr\(", texts),
        "TODO, FIXME, NotImplementedError": count(r"TODO|FIXME|NotImplementedError", texts),
        "unpickling": count(r"torch\.load\(|pickle\.load|allow_pickle=True", texts),
    }


def main() -> int:
    """Print the measures that are over budget or beyond a goal; return the number of the former."""
    measures = measure()
    over = {name: value for name, value in measures.items() if value > BUDGETS.get(name, value)}
    for name, value in over.items():
        print(f"over budget: {name}: {value:g}, at most {BUDGETS[name]}")
    for name, goal in GOALS.items():
        if measures[name] > goal:
            print(f"goal not reached: {name}: {measures[name]:g}, at most {goal}")
    print(f"budgets: {len(BUDGETS) - len(over)} of {len(BUDGETS)} kept")
    return len(over)


if __name__ == "__main__":
    sys.exit(main())
