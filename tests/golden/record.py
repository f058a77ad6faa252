"""Compare the numbers of the library with the recorded ones; or record them again.

Bits count on the machine of the recording; on another one, sums count up to a tolerance. To compare two versions to the
bit elsewhere, record the one with --write --folder DIR and compare the other with --folder DIR.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from tests.golden import digest

PARTS = ("fast", "fit", "data", "topics", "compare", "suites")
HERE = Path(__file__).parent
Record = Callable[[], digest.Records]


def jobs(part: str, only: Sequence[str]) -> Iterator[tuple[str, Record]]:
    """Yield the beginning of the keys of each recording of a part, and the function that makes it."""
    module = importlib.import_module(f"tests.golden.{part}")
    if part != "suites":
        yield "", module.record
        return
    if unknown := sorted({*only} - {*module.NAMES}):
        raise ValueError(f"expected suites among {', '.join(module.NAMES)}, got {unknown[0]!r}")
    for name in only or module.NAMES:
        yield f"{name}/", lambda name=name: {f"{name}/{key}": value for key, value in module.record(name).items()}


def read(file: Path) -> tuple[dict[str, str], digest.Records]:
    """Return the machine and the records of a file; none, of this machine, where there is no file."""
    stored = json.loads(file.read_text()) if file.is_file() else {"machine": digest.machine(), "records": {}}
    return stored["machine"], stored["records"]


def write(file: Path, records: digest.Records, prefix: str = "") -> None:
    """Store records in place of those whose keys begin as given; all are of one machine."""
    machine, old = read(file)
    kept = {key: value for key, value in old.items() if not key.startswith(prefix)}
    if kept and machine != digest.machine():
        raise ValueError(f"'{file}' has records of {machine}, this is {digest.machine()}; record all of them again")
    stored = {"machine": digest.machine(), "records": dict(sorted((kept | records).items()))}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(stored, indent=0) + "\n")


def compare(file: Path, new: digest.Records, tolerance: float | None = None, *, prefix: str | None = "") -> list[str]:
    """List the differences from the records whose keys begin as given; with None, from those of the same keys."""
    machine, old = read(file)
    chosen = {key: value for key, value in old.items() if (key in new if prefix is None else key.startswith(prefix))}
    allowed = None if machine == digest.machine() else digest.elsewhere
    if tolerance is not None:
        allowed = lambda key: tolerance  # noqa: E731
    return digest.differences(chosen, new, allowed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if all numbers are the recorded ones, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden.record", description=__doc__)
    parser.add_argument("--part", choices=[*PARTS, "all"], default="fast")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="only these suites, of the part suites")
    parser.add_argument("--tolerance", type=float, help="compare sums up to this share instead of bits")
    parser.add_argument("--folder", type=Path, default=HERE, help="where the records are")
    parser.add_argument("--write", action="store_true", help="record the numbers")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    failed = False
    for part in PARTS if chosen.part == "all" else (chosen.part,):
        for prefix, record in jobs(part, chosen.only):
            file, spent, clock = chosen.folder / f"{part}.json", _cpu(), time.monotonic()
            records = record()
            spent, clock = _cpu() - spent, time.monotonic() - clock
            if chosen.write:
                write(file, records, prefix)
            found = compare(file, records, chosen.tolerance, prefix=prefix)
            seconds = f"{spent:.0f} CPU seconds, {clock:.0f} in all"
            _report(f"{part} {prefix}".rstrip(" /") + f": {len(found)} of {len(records)} differ ({seconds})")
            _report(*found)
            failed = failed or bool(found)
    return int(failed)


def _cpu() -> float:
    """Return the CPU seconds of this process and of those it has waited for."""
    return sum(os.times()[:4])


def _report(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
