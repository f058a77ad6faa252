"""Compare the numbers of the library with those recorded, to the bit; or record them again.

python -m tests.golden.record [--part fast|fit|compare|suites|all] [--only NAME ...] [--tolerance X] [--write]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.golden import digest

PARTS = ("fast", "fit", "data", "compare")
HERE = Path(__file__).parent


def read(part: str) -> tuple[dict[str, str], digest.Records]:
    """Return the machine and the records of a part."""
    file = HERE / f"{part}.json"
    stored = json.loads(file.read_text()) if file.is_file() else {"machine": digest.machine(), "records": {}}
    return stored["machine"], stored["records"]


def write(part: str, records: digest.Records) -> None:
    """Store the records of a part, with the machine."""
    stored = {"machine": digest.machine(), "records": dict(sorted(records.items()))}
    (HERE / f"{part}.json").write_text(json.dumps(stored, indent=0) + "\n")


def compare(part: str, new: digest.Records, tolerance: float | None = None, *, whole: bool = True) -> list[str]:
    """List the differences of a part from its record: to the bit, or on another machine up to a tolerance."""
    machine, old = read(part)
    allowed = None if machine == digest.machine() else digest.elsewhere
    if tolerance is not None:
        allowed = lambda key: tolerance  # noqa: E731
    if allowed is not None:
        print(f"{part}: compared up to a tolerance; bits count on {machine}")  # noqa: T201
    return digest.differences(old if whole else {key: old.get(key, "missing") for key in new}, new, allowed)


def _cpu() -> float:
    """Return the CPU seconds of this process and of those it has waited for."""
    return sum(os.times()[:4])


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if all numbers are the recorded ones, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden.record", description=__doc__)
    parser.add_argument("--part", choices=[*PARTS, "all"], default="fast")
    parser.add_argument("--tolerance", type=float, help="compare sums up to this share, and not bits")
    parser.add_argument("--write", action="store_true", help="record the numbers")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    failed = False
    for part in PARTS if chosen.part == "all" else (chosen.part,):
        start = _cpu()
        records = importlib.import_module(f"tests.golden.{part}").record()
        spent = _cpu() - start
        if chosen.write:
            write(part, records)
        found = compare(part, records, chosen.tolerance)
        print(*found, f"{part}: {len(found)} of {len(records)} differ ({spent:.0f} CPU seconds)", sep="\n")  # noqa: T201
        failed = failed or bool(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
