"""`leanbayes list`: the names of everything, with a line for each.

Methods and networks are read from the source text, so that listing them needs no torch.
"""

from __future__ import annotations

import ast
import difflib
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
WHAT = ("methods", "nets", "data", "suites", "all")
USAGE = """usage: leanbayes list [methods | nets | data | suites | all]

List names with a line for each; all, the default, lists everything.
"""
Names = list[tuple[str, str]]


def list_names(arguments: list[str]) -> int:
    """Print a table of names, with a line for each."""
    if {"-h", "--help"} & set(arguments):
        sys.stdout.write(USAGE)
        return 0
    what = (arguments or ["all"])[0]
    if what not in WHAT or len(arguments) > 1:
        near = difflib.get_close_matches(what.lower(), WHAT, n=1)
        meant = f"; did you mean {near[0]!r}?" if near and what not in WHAT else ""
        raise ValueError(f"expected one of {', '.join(WHAT)}, got {' '.join(arguments)!r}{meant}")
    if what in ("methods", "all"):
        _print("methods", [("plain", "The unconverted network."), *method_lines()])
    if what in ("nets", "all"):
        _print("nets", net_lines())
    if what not in ("methods", "nets"):
        from leanbayes.cli.data import data, suite_lines

        if what != "data":
            _print("suites", suite_lines())
        return data(["list"]) if what != "suites" else 0
    return 0


def first_line(docstring: str | None) -> str:
    """Return the first line of a docstring, without its markup."""
    return (docstring or "").strip().partition("\n")[0].replace("`", "")


def method_lines() -> Names:
    """Return every method with the first line of its docstring, in the order of the names."""
    found = []
    for node in _definitions(PACKAGE / "methods"):
        fields = [line for line in node.body if isinstance(line, ast.AnnAssign)]
        for line in fields if isinstance(node, ast.ClassDef) else ():
            if ast.unparse(line.target) == "name" and isinstance(line.value, ast.Constant):
                found.append((str(line.value.value), first_line(ast.get_docstring(node))))
    return sorted(found)


def net_lines() -> Names:
    """Return every network with the first line of the docstring of its class or function, small ones first."""
    known = {node.name: first_line(ast.get_docstring(node)) for node in _definitions(PACKAGE / "models")}
    return [(name, known[maker]) for name, maker in _makers()]


def _makers() -> Iterator[tuple[str, str]]:
    """Yield the pairs of the table `_MAKERS`: name, and class or function, which `partial` may surround."""
    for node in ast.parse((PACKAGE / "models" / "__init__.py").read_text(encoding="utf-8")).body:
        if not (isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "_MAKERS"):
            continue
        assert isinstance(node.value, ast.Tuple)
        for pair in node.value.elts:
            assert isinstance(pair, ast.Tuple)
            name, maker = pair.elts
            yield ast.literal_eval(name), ast.unparse(maker.args[0] if isinstance(maker, ast.Call) else maker)


def _definitions(folder: Path) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    """Yield the classes and functions of the modules of a folder."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                yield node


def _print(title: str, names: Sequence[tuple[str, str]]) -> None:
    """Print names and descriptions in two columns, as wide as the terminal."""
    left = max(len(name) for name, _ in names) + 2
    width = max(left + 20, min(120, shutil.get_terminal_size((100, 24)).columns))
    lines = [title]
    for name, text in names:
        wrapped = textwrap.wrap(text, width - left - 2) or [""]
        lines += [f"  {name:<{left}}{wrapped[0]}", *(f"  {'':<{left}}{line}" for line in wrapped[1:])]
    sys.stdout.write("\n".join(lines) + "\n\n")
