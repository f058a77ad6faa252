"""Kill `leanbayes compare` at random moments, resume it, and compare the results with those of an undisturbed run.

python tools/kills.py [--kills 20] [--seed 0] [--ways one,two,ray] [--late]

Small comparisons run in each way: in one process, on two workers, on Ray. The process group gets SIGKILL, then the same
command resumes. With --late the kills fall after the last result, while prices are measured and the report is written.
In the end everything in result.json must be the same but for times, dates and measured prices, and so must all tensors
of the models.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leanbayes.runtime._files import read_tensors

WAYS = {
    "one": ["--workers", "1", "--backend", "local"],
    "two": ["--workers", "2", "--backend", "local"],
    "ray": ["--workers", "2", "--backend", "ray"],
}
COMMON = ["--samples", "4", "--device", "cpu"]
COMPARISONS = {
    "digits": [
        *("--data", "digits", "--train-rows", "300", "--test-images", "200", "--methods", "plain,rank1,swag"),
        *(
            "--seeds",
            "0,1",
            "--recipe.epochs",
            "6",
            "--shift-images",
            "40",
            "--shift-corruptions",
            "fog,contrast",
            *COMMON,
        ),
    ],
    "table": [
        *(
            "--data",
            "table.csv",
            "--methods",
            "plain,implicit,linear",
            "--seeds",
            "0",
            "--recipe.epochs",
            "12",
            *COMMON,
        ),
    ],
}
TIMES = ("created", "commit", "project_commit", "command", "environment", "seconds", "peak_memory_mb", "price_seed")
ENDS = ("_seconds", "_ratio", "_memory_mb", "_ms", "_ms_one", "_quartiles")
MOST_FILES, LONGEST, LONGEST_LATE = 40, 0.5, 6.0
"""A process is killed after at most this number of files, and this number of seconds more; or by --late after all
results, and at most this number of seconds more."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything and return 0 if all results are the same."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="in all")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--ways", default="one,two,ray", help="among one, two and ray, separated by commas")
    parser.add_argument("--late", action="store_true", help="kill after the last result: while prices are measured")
    given = parser.parse_args(arguments)
    pairs = [(way, name) for way in given.ways.split(",") for name in COMPARISONS]
    moments, wrong, kills = random.Random(given.seed), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write_table(home / "table.csv", moments)
        for name in COMPARISONS:
            finish(start(home, name, "one", f"{name}-undisturbed"))
        for number, (way, name) in enumerate(pairs):
            share = given.kills * (number + 1) // len(pairs) - given.kills * number // len(pairs)
            out = home / f"{name}-{way}"
            results = len(results_of(home / f"{name}-undisturbed")) if given.late else 0
            kills += killed(home, name, way, out, share, moments, results)
            found = differences(home / f"{name}-undisturbed", out)
            wrong += len(found)
            show(f"{name}, {way}: {'; '.join(found) or 'the same'}")
    show(f"{kills} kills, {wrong} differences")
    return int(wrong > 0)


def show(line: str) -> None:
    """Write a line now."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def write_table(path: Path, numbers: random.Random) -> None:
    """Write a small table with a real target."""
    rows = [[numbers.gauss(0, 1) for _ in range(3)] for _ in range(150)]
    lines = [",".join(f"{value:.5f}" for value in (*row, row[0] + 0.3 * numbers.gauss(0, 1))) for row in rows]
    path.write_text("\n".join(["a,b,c,y", *lines]) + "\n", encoding="utf-8")


def start(home: Path, name: str, way: str, out: str) -> subprocess.Popen[bytes]:
    """Start a comparison in a process group of its own."""
    command = [sys.executable, "-m", "leanbayes", "compare", *COMPARISONS[name], *WAYS[way], "--out", out]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, cwd=home, env=environment, stdout=quiet, stderr=quiet, start_new_session=True)


def finish(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a comparison; raise RuntimeError if it failed."""
    if process.wait() != 0:
        raise RuntimeError(f"expected the comparison to end with code 0, got {process.returncode}: {process.args}")


def killed(home: Path, name: str, way: str, out: Path, kills: int, moments: random.Random, results: int = 0) -> int:
    """Run a comparison to its end and kill it on the way; a finished one begins again, and must be the same.

    With a number of `results`, it is killed when it has them all.
    """
    done = 0
    while True:
        process = start(home, name, way, out.name)
        if done == kills:
            finish(process)
            return done
        if results:
            wait_for_prices(process, out, results, moments.uniform(0, LONGEST_LATE))
        else:
            wait_for_files(process, out, moments.randrange(MOST_FILES), moments.uniform(0, LONGEST))
        if process.poll() is None:
            where = newest(out)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            done += 1
            priced = ["answer_ms" in json.loads(path.read_text("utf-8"))["cost"] for path in results_of(out)]
            show(f"  {name}, {way}: killed with {len(priced)} results, {sum(priced)} with prices, after {where}")
        else:
            finish(process)
            found = differences(home / f"{name}-undisturbed", out)
            if found:
                return done
            show(f"  {name}, {way}: came to its end; begins again")
            out.rename(out.with_name(f"{out.name}-{done}-{time.time_ns()}"))


def wait_for_prices(process: subprocess.Popen[bytes], out: Path, results: int, delay: float) -> None:
    """Wait until a process is at work, all results are there, and some time more, or until it has ended."""
    begun = files_of(out)
    while process.poll() is None and (len(results_of(out)) < results or files_of(out) == begun):
        time.sleep(0.01)
    until = time.time() + delay
    while process.poll() is None and time.time() < until:
        time.sleep(0.005)


def wait_for_files(process: subprocess.Popen[bytes], out: Path, files: int, delay: float) -> None:
    """Wait until a process has written a number of files, and some time more, or has ended."""
    seen = files_of(out)
    first = len(seen)
    while process.poll() is None and len(seen) - first <= files:
        time.sleep(0.01)
        seen |= files_of(out)
    until = time.time() + delay
    while process.poll() is None and time.time() < until:
        time.sleep(0.005)


def files_of(out: Path) -> set[tuple[float, str]]:
    """Return the times and names of the files in a folder."""
    found = set()
    paths = (Path(folder, name) for folder, _, names in os.walk(out) for name in names)  # passes over removed folders
    for path in (path for path in paths if path.suffix[:2] in (".j", ".s") and path.name != "progress.json"):
        try:
            found.add((path.stat().st_mtime, str(path.relative_to(out))))
        except OSError:
            continue  # a temporary file
    return found


def results_of(out: Path) -> list[Path]:
    """Return the results in a folder from which other files may vanish."""
    return [Path(folder, "result.json") for folder, _, names in os.walk(out) if "result.json" in names]


def newest(out: Path) -> str:
    """Return the name of the last file in a folder."""
    return max(files_of(out), default=(0.0, "nothing"))[1]


def differences(one: Path, other: Path) -> list[str]:
    """Return the files of runs that differ, but for times."""
    files = [
        path.relative_to(one) for path in sorted(one.rglob("*")) if path.name in ("result.json", "model.safetensors")
    ]
    found = [f"{file} is missing" for file in files if not (other / file).is_file()]
    found += [f"{path} is left over" for path in other.rglob("shared")] + [f"{path}" for path in other.rglob("*.tmp")]
    for file in (file for file in files if (other / file).is_file()):
        if file.suffix == ".json":
            first, second = (json.loads((out / file).read_text(encoding="utf-8")) for out in (one, other))
            names = [
                name for name in first | second if without_times(first.get(name)) != without_times(second.get(name))
            ]
            found += [f"{file}: {name}" for name in names if name not in TIMES]
            found += [] if "answer_ms" in second["cost"] else [f"{file} has no prices"]
        else:
            (_, mine), (_, theirs) = (read_tensors(out / file) for out in (one, other))
            same = mine.keys() == theirs.keys() and all(bool((mine[key] == theirs[key]).all()) for key in mine)
            found += [] if same else [str(file)]
    return found


def without_times(value: Any) -> Any:
    """Return a JSON value without times, dates and measured prices."""
    if isinstance(value, dict):
        kept = {name: part for name, part in value.items() if name not in TIMES and not name.endswith(ENDS)}
        return {name: without_times(part) for name, part in kept.items()}
    return [without_times(part) for part in value] if isinstance(value, list) else value


if __name__ == "__main__":
    sys.exit(main())
