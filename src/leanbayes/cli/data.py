"""`leanbayes data` and `reproduce`: data sets, and suites of papers.

Other packages offer the suites, by the entry points `leanbayes.suites`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

from leanbayes.cli.main import complain, parse
from leanbayes.cli.names import first_line
from leanbayes.compare.time_limit import STOPPED, TimeIsUp
from leanbayes.data import describe, describe_annotated, prepare
from leanbayes.data.cache import data_root
from leanbayes.methods import closest
from leanbayes.report.text import Table

USAGE = """usage: leanbayes data list [--root FOLDER]
       leanbayes data prepare NAME [--root FOLDER] [--source FOLDER]

  list       the known data sets: task, numbers of rows, shape, and whether they are here
  prepare    download the data set NAME, verify it, and put it into the folder of the data sets

  --root FOLDER      the folder of the data sets; default $LEANBAYES_DATA, else your cache folder
  --source FOLDER    a folder with the original files, if you have them already: nothing is downloaded
"""


@dataclass(frozen=True)
class DataList:
    """List the known data sets and their files.

    Attributes:
        root: folder of the data sets; default $LEANBAYES_DATA, else your cache folder.
    """

    root: str | None = None


@dataclass(frozen=True)
class DataPrepare:
    """Download a data set, verify it, and put it into the cache.

    Attributes:
        name: a name of leanbayes data list.
        root: folder of the data sets; default $LEANBAYES_DATA, else your cache folder.
        source: a folder with the upstream files, if you have them already.
    """

    name: str
    root: str | None = None
    source: str | None = None


def data(arguments: list[str]) -> int:
    """List or prepare data sets."""
    if not arguments or arguments[0] not in ("list", "prepare"):
        asked = bool(arguments) and arguments[0] in ("-h", "--help")
        sys.stdout.write(USAGE)
        return 0 if asked else 2
    if arguments[0] == "prepare":
        wanted = parse(DataPrepare, arguments[1:], "data prepare")
        prepare(wanted.name, wanted.root, wanted.source)
        return 0
    root = parse(DataList, arguments[1:], "data list").root
    folder = data_root(root)
    _print_sets("task", [(row, row.task) for row in describe(root)], folder)
    sys.stdout.write("Sets with several annotators for each image (lb.data.load_annotated):\n")
    _print_sets("annotators", [(row, row.annotators) for row in describe_annotated(root)], folder)
    sys.stdout.write(f"Cached sets are in {folder}. leanbayes data prepare NAME fetches another one.\n")
    return 0


def _print_sets(kind: str, sets: Sequence[tuple[Any, str]], folder: Path) -> None:
    rows = [
        (r.name, own, f"{r.train:,}", f"{r.test:,}", "x".join(map(str, r.shape)), r.where.replace(f" at {folder}", ""))
        for r, own in sets
    ]
    Table(heads=("name", kind, "train", "test", "shape", "where"), rows=rows, left=6).print()


@dataclass(frozen=True)
class Reproduce:
    """Repeat a table or figure of a paper and print our numbers next to the paper's.

    Attributes:
        name: of the suite; leanbayes list suites has them.
        budget: quick shows that it works, short takes about an hour on a GPU, full is the paper's schedule.
        seeds: separated by commas; several give standard errors.
        device: auto, cpu, cuda or mps.
        precision: bf16-mixed runs networks in bfloat16.
        root: folder of the known data sets; default $LEANBAYES_DATA, else your cache folder.
        data: use only these of the suite's data sets, separated by commas; default all.
        out: folder of the results; default runs/NAME.
        fresh: start again instead of keeping finished runs and resuming others.
        compile: compile the training steps; recommended on a GPU.
        rows: train and show only these rows of the tables, separated by commas; they get files of their own.
        stop_after: minutes after which nothing new begins: a training stops after its epoch and keeps its state. The
            exit code is 3, and the same command resumes. Default no limit.
    """

    name: str
    budget: Literal["quick", "short", "full"] = "quick"
    seeds: str = "0"
    device: str = "auto"
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    root: str | None = None
    data: str = ""
    out: Path | None = None
    fresh: bool = False
    compile: bool = False
    rows: str = ""
    stop_after: float | None = None


def reproduce(arguments: list[str]) -> int:
    """Run a suite of a paper."""
    options = parse(Reproduce, arguments, "reproduce")
    packages = [package for package in _packages() if options.name in package.SUITES]
    if not packages:
        known = suites()
        raise ValueError(
            f"expected a suite among {', '.join(known)}, got {options.name!r}{closest(options.name, known)}"
        )
    out = options.out or Path("runs") / options.name
    try:
        code: int = packages[0].run_suite(options, out)
    except TimeIsUp as stop:
        complain(stop.sentence(fresh=options.fresh))
        return STOPPED
    return code


def suites() -> dict[str, Any]:
    """Return the suites of all packages by name."""
    return {name: suite for package in _packages() for name, suite in package.SUITES.items()}


def suite_lines() -> list[tuple[str, str]]:
    """Return every suite with the first line of its docstring."""
    return [(name, first_line(suite.__doc__)) for name, suite in suites().items()]


def _packages() -> list[Any]:
    """Return the packages of the entry-point group `leanbayes.suites`; each has `SUITES` and `run_suite`."""
    return [entry.load() for entry in entry_points(group="leanbayes.suites")]
