"""Check the language of the project: words that are not used, and the average length of a sentence.

    python tools/language.py                      all enforced paths (see `CLEAN`)
    python tools/language.py --only src/leanbayes/core docs/glossary.md

The check reads docstrings, comments and messages of Python files, and the prose of Markdown files without code.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import statistics
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
CLEAN = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks", "docs", "examples", "src", "tests", "tools")
"""Paths that `make check` enforces."""
LONGEST_AVERAGE = 18  # words
SHOWN = 3  # longest sentences shown for a text over the limit

RULES = (
    (r"\b[Jj]udg(?:e|es|ed|ing|ement|ements|ment|ments)\b", "evaluate, score"),
    (r"\b[Ff]oreign\b", "out-of-distribution, another library's"),
    (r"\b[Aa]new\b", "again"),
    (r"\b[Bb]esides?\b", "next to, in addition to"),
    (r"\b[Bb]ehind\b", "after"),
    (r"\bWhat\b", "begin with the name of the thing"),
    (r"\bwhat\s+(?:is|was|are|were)\b", "the name of the thing"),
    (r"\b[Aa]s\s+(?:it\s+is|they\s+are)\b", "unchanged"),
    (r"\b(?:[Ll]ies?|[Ss]tands?)\s+in\b", "is stored in, is in"),
    (r"\b[Ss]o\s+many\b", "n, the number of"),
    (r"\b[Oo]f\s+which\b", "two sentences"),
    (r"\b[Gg]o(?:es)?\s+on\b", "resumes, continues"),
    (r"\b(?:[Ss]omebody|[Nn]obody|[Ww]hoever)\b", "the caller, another module"),
    (r"\b[Tt]ak(?:e|es|en|ing)\s+apart\b", "lowered, decomposed"),
    # The class `Law`, its module, arguments of that name and the law of large numbers keep the word.
    (r"\blaws?\b(?!\.\w|\(|=|:|\s+of\s+large\s+numbers)", "distribution"),
    (r"\brests\b", "is frozen"),
)
ANY = re.compile("|".join(pattern for pattern, _ in RULES))
WORDS = [(re.compile(pattern), instead) for pattern, instead in RULES]
NAMES = (
    (re.compile(r"(?:^|_)(?:tell|tells|telling|say|says)(?:_|$)"), "return, report, list"),
    (re.compile(r"(?:^|_)(?:[Jj]udg(?:e|es|ed|ing)|foreign|anew)(?:_|$)|Judg(?:e|ing)|Foreign"), "evaluate; ood"),
)
# Texts that keep a word of the list, each with its reason.
ALLOWED = {
    ("tools/language.py", "*"): "the list itself",
    ("tests/tools/test_language.py", "*"): "sentences that the check must find",
}

FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2[^\n]*$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"``[^`]+``|`[^`]+`")
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
SENTENCE = re.compile(r"(?<=[.!?])[\"')*]*\s+(?=[\"'(*\[]*[A-Z`0-9])")
ABBREVIATED = re.compile(r"\b(et al|e\.g|i\.e|cf|vs|Eq|Eqs|Fig|Sec|No|approx)\.")
MESSAGE = re.compile(r"[A-Za-z,;:]\s+[a-z]")  # two words: a path or a key has none


@dataclass(frozen=True)
class Prose:
    """One text of a file: its kind is docstring, comment, message or page; `margin` is its indentation."""

    text: str
    line: int
    kind: str
    margin: int = 0


@dataclass(frozen=True)
class Hit:
    """A place that breaks a rule."""

    file: str
    line: int
    found: str
    instead: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: '{self.found}': {self.instead}"


def blanked(match: re.Match[str]) -> str:
    """Return an empty text with the line breaks of a match, so that line numbers stay."""
    return "\n" * match.group().count("\n")


def without_code(text: str) -> str:
    """Replace each code span by one word and each link by its text."""
    text = CODE.sub(lambda match: "`x`" + blanked(match), text)
    return LINK.sub(lambda match: match[1] + "\n" * (match[0].count("\n") - match[1].count("\n")), text)


def markdown(text: str) -> list[Prose]:
    """Return the prose of a page."""
    return [Prose(without_code(FENCE.sub(blanked, text)), 1, "page")]


def comments(text: str) -> Iterator[Prose]:
    """Yield the comments of a module; comments of consecutive lines are one text.

    Tokens are slow to find, so a module whose lines have no word of the list after a # is left out.
    """
    rough = "\n".join(line.partition("#")[2].lstrip("#: ") for line in text.splitlines() if "#" in line)
    if not ANY.search(rough):
        return
    lines: list[str] = []
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        row = token.start[0]
        if lines and row != last + 1:
            yield Prose(without_code("\n".join(lines)), last - len(lines) + 1, "comment")
            lines = []
        lines.append(token.string.lstrip("#: "))
        last = row
    if lines:
        yield Prose(without_code("\n".join(lines)), last - len(lines) + 1, "comment")


def docstrings(tree: ast.Module) -> dict[int, ast.Constant]:
    """Return the docstring constants of a module by object identity."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                found[id(first.value)] = first.value
    return found


def strings(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield every string of a tree and its line; an f-string is one string with {} for its values."""
    if isinstance(node, ast.JoinedStr):
        parts = [str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values]
        yield "".join(parts), node.lineno
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value, node.lineno
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant)):
            yield from strings(child)


def python(text: str, tree: ast.Module, messages: bool) -> Iterator[Prose]:
    """Yield docstrings, comments and, if asked for, messages of a module."""
    documented = docstrings(tree)
    for constant in documented.values():
        yield Prose(without_code(str(constant.value)), constant.lineno, "docstring", constant.col_offset)
    yield from comments(text)
    if messages:
        taken = {(constant.value, constant.lineno) for constant in documented.values()}
        for string, line in strings(tree):
            if (string, line) not in taken and MESSAGE.search(string):
                yield Prose(CODE.sub("`x`", string), line, "message")


def names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the names of functions and classes that are not tests."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("test_"):
            yield node.name, node.lineno


def sentences(prose: Prose) -> Iterator[tuple[str, int]]:
    """Yield the sentences of a docstring or page with their lines; headings, tables and indented blocks are none."""
    block: list[str] = []
    start = prose.line
    for number, raw in enumerate([*prose.text.splitlines(), ""]):
        line = raw[prose.margin :] if number and prose.kind == "docstring" else raw
        item = re.match(r"\s*(?:[*+-]|\d+\.) +", line)
        skipped = (
            not line.strip() or re.match(r"\s*[#|<]", line) or (prose.kind == "docstring" and line.startswith("  "))
        )
        if skipped or item:
            yield from _split(block, start)
            block = []
        if not skipped:
            start = start if block else prose.line + number
            block.append(line[item.end() :] if item else line)


def _split(block: list[str], start: int) -> Iterator[tuple[str, int]]:
    text = ABBREVIATED.sub(lambda match: match.group().replace(".", ""), "\n".join(block))
    position = 0
    for end in [*(match.end() for match in SENTENCE.finditer(text)), len(text)]:
        sentence = text[position:end]
        if len(words(sentence)) > 1:
            yield " ".join(sentence.split()), start + text[:position].count("\n")
        position = end


def words(sentence: str) -> list[str]:
    """Return the words of a sentence; marks without letter or digit are none."""
    return [word for word in sentence.split() if re.search(r"\w", word)]


def files(paths: Iterable[str]) -> Iterator[Path]:
    """Yield the Python and Markdown files of the given paths, relative to the root."""
    for path in paths:
        where = ROOT / path
        if not where.exists():
            raise SystemExit(
                f"language: expected a path of the repository, got {path}; there is no such file or folder"
            )
        found = sorted(where.rglob("*")) if where.is_dir() else [where]
        yield from (file for file in found if file.suffix in (".py", ".md") and ".venv" not in file.parts)


def unreleased(text: str) -> str:
    """Return a changelog without its released part, which is history."""
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    return "".join(parts[:2])


def look(file: Path) -> tuple[list[Hit], list[tuple[str, int]]]:
    """Return the hits of a file, and the sentences of its docstrings or of its page."""
    path = file.relative_to(ROOT).as_posix()
    text = file.read_text(encoding="utf-8")
    hits = []
    if file.suffix == ".md":
        prose = markdown(unreleased(text) if file.name == "CHANGELOG.md" else text)
    else:
        tree = ast.parse(text)
        prose = list(python(text, tree, messages=not path.startswith("tests/")))
        for name, line in names(tree):
            hits += [Hit(path, line, name, instead) for pattern, instead in NAMES if pattern.search(name)]
    for piece in prose:
        for pattern, instead in WORDS if ANY.search(piece.text) else ():
            for match in pattern.finditer(piece.text):
                down = 0 if piece.kind == "message" else piece.text[: match.start()].count("\n")
                hits.append(Hit(path, piece.line + down, " ".join(match.group().split()), instead))
    kept = [h for h in hits if not {(path, "*"), (path, h.found)} & ALLOWED.keys()]
    spoken = [s for piece in prose if piece.kind in ("docstring", "page") for s in sentences(piece)]
    return sorted(kept, key=lambda hit: hit.line), spoken


def group(file: Path) -> str:
    """Return the text that a file belongs to: a page is its own, docstrings count by folder."""
    path = file.relative_to(ROOT)
    return path.as_posix() if file.suffix == ".md" else f"docstrings of {path.parent.as_posix()}"


def main(arguments: list[str] | None = None) -> int:
    """Print every hit and every text whose sentences are too long on average; return 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="PATH", default=CLEAN, help="files or folders to look at")
    hits: list[Hit] = []
    spoken: dict[str, list[tuple[int, str]]] = {}
    for file in files(parser.parse_args(arguments).only):
        found, sentences_ = look(file)
        hits += found
        path = file.relative_to(ROOT).as_posix()
        spoken.setdefault(group(file), []).extend((len(words(s)), f"{path}:{line}: {s}") for s, line in sentences_)
    for hit in hits:
        print(hit)
    averages = {name: statistics.mean(n for n, _ in found) for name, found in spoken.items() if found}
    wordy = {name: average for name, average in averages.items() if average > LONGEST_AVERAGE}
    for name, average in wordy.items():
        print(f"{name}: {average:.1f} words a sentence, at most {LONGEST_AVERAGE}; the longest:")
        for count, sentence in sorted(spoken[name], reverse=True)[:SHOWN]:
            print(f"  {count} words, {sentence}")
    lengths = [n for found in spoken.values() for n, _ in found]
    average = statistics.mean(lengths) if lengths else 0
    print(f"language: {len(hits)} words of the list, {len(wordy)} texts too long, {average:.1f} words a sentence")
    return int(bool(hits or wordy))


if __name__ == "__main__":
    sys.exit(main())
