"""`leanbayes reproduce`: repeat a table or figure of a paper. Other packages offer the suites."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

from leanbayes.cli.main import parse


@dataclass(frozen=True)
class Reproduce:
    """Repeat a table or figure of a paper and print our numbers next to the paper's.

    Attributes:
        name: a name of leanbayes list suites.
        budget: quick shows that it works, short takes about an hour on a GPU, full is the paper's schedule.
        seeds: separated by commas.
        device: auto, cpu, cuda or mps.
        precision: bf16-mixed runs networks in bfloat16.
        root: folder of the known data sets; default $LEANBAYES_DATA, else your cache folder.
        data: use only these of the suite's data sets, separated by commas; default all.
        out: folder of the results; default runs/NAME.
        fresh: start again instead of keeping finished runs and resuming others.
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


def reproduce(arguments: list[str]) -> int:
    """Run a suite of a paper."""
    options = parse(Reproduce, arguments, "reproduce")
    packages = [package for package in _packages() if options.name in package.SUITES]
    if not packages:
        raise ValueError(f"expected a suite among {', '.join(suites())}, got {options.name!r}")
    out = options.out or Path("runs") / options.name
    code: int = packages[0].run_suite(options, out)
    return code


def suites() -> dict[str, Any]:
    """Return the suites of all packages by name."""
    return {name: suite for package in _packages() for name, suite in package.SUITES.items()}


def _packages() -> list[Any]:
    """Return the packages of the entry-point group `leanbayes.suites`; each has `SUITES` and `run_suite`."""
    return [entry.load() for entry in entry_points(group="leanbayes.suites")]
