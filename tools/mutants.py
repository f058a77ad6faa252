"""Plant faults in a copy of the source, one at a time, and list those that the fast tests do not notice.

The faults are in tools/mutants.toml: a file, a text that occurs in it once, its faulty replacement, and a note. Of the
test files, those that are closest to the faulty module run first. A test counts as a witness only if it passes without
the fault. Recorded numbers (tests/golden) do not take part: they notice every change, and prove nothing.

python tools/mutants.py [--check] [--only TEXT ...] [--files N] [--whole] [--workers N] [--tree DIR]
    [--json FILE] [--against FILE]
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import multiprocessing
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = Path("src") / "leanbayes"
PYTEST = (
    "-q",
    "-x",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:randomly",
    "-m",
    "not slow and not gpu",
    "--no-header",
    "-W",
    "ignore:Module already",
)
FORKS = multiprocessing.get_context("forkserver")
SLOW = ("torch", "torch.distributed.fsdp", "pytest", "_pytest.assertion.rewrite", "scipy.stats", "lightning_fabric")
LEFT_OUT = ("golden", "docs", "data", "report", "examples")
"""Folders of tests that do not compute with the library's mathematics, or that record numbers."""
GENERAL = ("test_contract", "test_objective", "test_predict", "test_draws", "test_convert")
"""Test files that every method passes through: first among those without a tie to the module."""
FEWEST_SECONDS = 300.0
"""A fault may make a test run for ever: after this time, it counts as noticed."""


@dataclass(frozen=True)
class Fault:
    """One line of the list: the file below src/leanbayes, a text in it, its replacement, and a note."""

    file: str
    old: str
    new: str
    note: str


@dataclass(frozen=True)
class Outcome:
    """A fault's fate: "caught" by a test, "survived", or "no match" where its text is not in the file once."""

    file: str
    note: str
    fate: str
    witness: str = ""


def faults(only: Sequence[str] = ()) -> list[Fault]:
    """Read the list; with `only`, the faults whose file or note contains one of the texts."""
    listed = [Fault(**entry) for entry in tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["fault"]]
    return [f for f in listed if not only or any(text in f.file or text in f.note for text in only)]


def planted(fault: Fault, root: Path) -> str | None:
    """Return the faulty content of a file; None if its text is not there exactly once."""
    path = root / SOURCE / fault.file
    text = path.read_text() if path.is_file() else ""
    return text.replace(fault.old, fault.new) if text.count(fault.old) == 1 and fault.old != fault.new else None


def ranked_tests(fault: Fault, root: Path) -> list[str]:
    """Return the test files, closest to the faulty module first."""
    module = Path(fault.file).with_suffix("")
    dotted = "leanbayes." + ".".join(module.parts)
    tree = ast.parse((root / SOURCE / fault.file).read_text())
    names = [
        node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name[0] != "_"
    ]
    uses = re.compile(rf"\b({'|'.join(names) or dotted})\b")

    def closeness(path: Path) -> float:
        text, stem = path.read_text(), path.stem.removeprefix("test_")
        near = 8.0 * (module.name.strip("_") in stem or stem in module.name) + 4.0 * (dotted in text)
        near += 2.0 * (module.parts[0] in path.parts or module.parts[-2:-1] == path.parts[-2:-1])
        return near + 1.5 * (path.stem in GENERAL) + min(1.0, len(uses.findall(text)) / 20)

    found = [path for path in sorted((root / "tests").rglob("test_*.py")) if not set(path.parts) & set(LEFT_OUT)]
    return [str(path.relative_to(root)) for path in sorted(found, key=closeness, reverse=True)]


def run_tests(root: Path, tests: Sequence[str], seconds: float) -> tuple[bool, str]:
    """Return whether tests pass, and the name of the first that does not.

    They run in a process that is forked from a server, which has imported torch once for all faults.
    """
    with tempfile.NamedTemporaryFile("r") as log:
        process = FORKS.Process(target=_run_pytest, args=(str(root), list(tests), log.name))
        process.start()
        process.join(seconds)
        if process.is_alive() and process.pid is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
            return False, "(no end)"
        said = log.read()
    first = first_failure(said)
    if process.exitcode in (0, 5):
        return True, ""
    if first is None and (process.exitcode or 0) > 0:
        raise RuntimeError(f"pytest returned {process.exitcode}: {said[-1000:]}")
    return False, first or "(crash)"


def first_failure(said: str) -> str | None:
    """Return the name of the first test that pytest's summary lists as failed; a name may have spaces."""
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.M)
    return found.group(1) if found else None


def _run_pytest(root: str, tests: list[str], log: str) -> None:
    os.setsid()  # so that a timeout ends what the tests have started, too
    os.chdir(root)
    os.environ["PYTHONPATH"] = f"{root}/src"
    sys.path[:0], sys.dont_write_bytecode = [f"{root}/src", root], True
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), stream)
    code = int(importlib.import_module("pytest").main([*PYTEST, *tests]))
    sys.stdout.flush()
    os._exit(code)


def attempt(fault: Fault, root: Path, groups: Sequence[Sequence[str]], seconds: float) -> Outcome:
    """Plant a fault, run groups of tests until one notices it, and take the fault out again."""
    path, faulty = root / SOURCE / fault.file, planted(fault, root)
    if faulty is None:
        return Outcome(fault.file, fault.note, "no match")
    sound = path.read_text()
    path.write_text(faulty)
    try:
        for group in groups:
            passed, witness = run_tests(root, group, seconds)
            if not passed:
                return Outcome(fault.file, fault.note, "caught", witness)
    finally:
        path.write_text(sound)
    return Outcome(fault.file, fault.note, "survived")


def without_false_witnesses(outcomes: Sequence[Outcome], root: Path, seconds: float) -> list[Outcome]:
    """Run the witnesses without faults; a fault whose witness fails then, too, was not noticed."""
    names = {o.witness for o in outcomes if "::" in o.witness}
    while names:
        passed, false = run_tests(root, sorted(names), seconds + 10 * len(names))
        if passed or false not in names:
            break
        names.remove(false)
        outcomes = [replace(o, fate="survived") if o.witness == false else o for o in outcomes]
    return list(outcomes)


def copy_tree(tree: Path, folder: Path) -> Path:
    """Copy the files of a tree that git knows of."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=tree, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (tree / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, folder / name)
    return folder


def attempt_all(tree: Path, chosen: Sequence[Fault], options: argparse.Namespace) -> list[Outcome]:
    """Attempt every fault that has no outcome yet, in as many copies of the tree as there are workers."""
    done = {(o.file, o.note): o for o in read(options.json)}
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(options.workers) as pool:
        copies: queue.Queue[Path] = queue.Queue()
        for number in range(options.workers):
            copies.put(copy_tree(tree, Path(place) / str(number)))

        def one(fault: Fault) -> Outcome:
            root = copies.get()
            try:
                tests = ranked_tests(fault, root) if planted(fault, root) is not None else []
                groups = [tests[: options.files], tests[options.files :]] if options.whole else [tests[: options.files]]
                return attempt(fault, root, groups, options.seconds)
            finally:
                copies.put(root)

        for found in pool.map(one, [fault for fault in chosen if (fault.file, fault.note) not in done]):
            done[found.file, found.note] = found
            write(list(done.values()), options.json)
            print(f"{found.fate:9} {found.file}: {found.note} {found.witness}", file=sys.stderr, flush=True)
        outcomes = [done[fault.file, fault.note] for fault in chosen]
        return without_false_witnesses(outcomes, copies.get(), options.seconds)


def read(file: Path | None) -> list[Outcome]:
    """Read outcomes; none where there is no file."""
    return [Outcome(**entry) for entry in json.loads(file.read_text())] if file and file.is_file() else []


def write(outcomes: Sequence[Outcome], file: Path | None) -> None:
    """Write outcomes, if there is a file for them."""
    if file:
        file.write_text(json.dumps([asdict(o) for o in outcomes], indent=1) + "\n")


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as a Markdown table, with their numbers below."""
    rows = [f"| {o.file} | {o.note} | {o.fate} | {o.witness} |" for o in outcomes]
    counts = {fate: sum(o.fate == fate for o in outcomes) for fate in ("caught", "survived", "no match")}
    total = ", ".join(f"{count} {fate}" for fate, count in counts.items())
    return "\n".join(
        ["| file | fault | fate | first test |", "|---|---|---|---|", *rows, "", f"{len(rows)} faults: {total}"]
    )


def lost(outcomes: Sequence[Outcome], before: Sequence[Outcome]) -> list[str]:
    """Return the notes of faults that were caught before and are not now."""
    caught = {(o.file, o.note) for o in before if o.fate == "caught"}
    return [o.note for o in outcomes if (o.file, o.note) in caught and o.fate != "caught"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if every fault is caught; with `--against`, if every fault is caught that was caught before."""
    parser = argparse.ArgumentParser(prog="python tools/mutants.py", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only look whether the texts are in the files")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="faults whose file or note contains it")
    parser.add_argument("--files", type=int, default=8, help="number of test files, the closest ones")
    parser.add_argument("--whole", action="store_true", help="after them, run all other fast tests")
    parser.add_argument("--tree", type=Path, default=ROOT, help="another checkout, to compare its tests")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=FEWEST_SECONDS, help="limit of one run of pytest")
    parser.add_argument("--json", type=Path, help="outcomes, written as they come; those in it are kept")
    parser.add_argument("--against", type=Path, help="compare with the outcomes in this file")
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    FORKS.set_forkserver_preload(list(SLOW))
    chosen = faults(options.only)
    if options.check:
        missing = [f"{f.file}: {f.note}" for f in chosen if planted(f, options.tree) is None]
        print(*missing, f"{len(chosen)} faults, {len(missing)} without a match", sep="\n")
        return int(bool(missing))
    outcomes = attempt_all(options.tree, chosen, options)
    print(table(outcomes))
    if options.against is None:
        return int(any(o.fate != "caught" for o in outcomes))
    gone = lost(outcomes, read(options.against))
    print(*(f"no longer caught: {note}" for note in gone), sep="\n")
    return int(bool(gone))


if __name__ == "__main__":
    sys.exit(main())
