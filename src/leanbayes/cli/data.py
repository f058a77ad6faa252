"""`leanbayes data` and `leanbayes list`: data sets, and the names of methods, nets and suites."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from leanbayes import models
from leanbayes.cli.main import parse
from leanbayes.cli.reproduce import suites
from leanbayes.data import describe, describe_annotated, prepare
from leanbayes.methods import all_methods
from leanbayes.report.text import Table


@dataclass(frozen=True)
class Listing:
    """List methods, nets, data or suites.

    Attributes:
        what: methods, nets, data or suites; all lists everything.
    """

    what: Literal["methods", "nets", "data", "suites", "all"]


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


def list_names(arguments: list[str]) -> int:
    """Print a table of names, with a line for each."""
    options = parse(Listing, arguments or ["all"], "list")
    tables = {
        "methods": [("plain", "The unconverted network."), *((n, _summary(k)) for n, k in all_methods().items())],
        "nets": list(models.describe().items()),
        "suites": [(name, _summary(suite)) for name, suite in suites().items()],
    }
    for name, rows in tables.items():
        if options.what in (name, "all"):
            Table(heads=(name, "description"), rows=rows, left=2).print()
    return data(["list"]) if options.what in ("data", "all") else 0


def data(arguments: list[str]) -> int:
    """List or prepare data sets."""
    if not arguments or arguments[0] not in ("list", "prepare"):
        asked = bool(arguments) and arguments[0] in ("-h", "--help")
        sys.stdout.write("usage: leanbayes data list | leanbayes data prepare NAME [--source FOLDER]\n")
        return 0 if asked else 2
    if arguments[0] == "prepare":
        wanted = parse(DataPrepare, arguments[1:], "data prepare")
        prepare(wanted.name, wanted.root, wanted.source)
        return 0
    root = parse(DataList, arguments[1:], "data list").root
    _print_sets("name", "task", [(row, row.task) for row in describe(root)])
    annotated = [(row, row.annotators) for row in describe_annotated(root)]
    _print_sets("lb.data.load_annotated", "annotators", annotated)
    return 0


def _print_sets(name: str, kind: str, sets: Sequence[tuple[Any, str]]) -> None:
    rows = [
        (row.name, own, f"{row.train:,}", f"{row.test:,}", "x".join(map(str, row.shape)), row.where)
        for row, own in sets
    ]
    Table(heads=(name, kind, "train", "test", "shape", "where"), rows=rows, left=6).print()


def _summary(thing: Any) -> str:
    return (thing.__doc__ or "").strip().splitlines()[0]
