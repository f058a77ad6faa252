"""`leanbayes compare` on digits with every method and two seeds, the report of fixed results, and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

import leanbayes as lb
from tests.golden import digest
from tests.report import make

TINY = [
    "--data", "digits", "--train-rows", "200", "--test-images", "60", "--shift-images", "12", "--samples", "4",
    "--recipe.epochs", "2", "--device", "cpu", "--workers", "1", "--backend", "local",
    "--validation", "0", "--seeds", "0",
]  # fmt: skip
MACHINE = ("created", "commit", "project_commit", "command", "environment", "seconds", "peak_memory_mb", "ratios")
"""Fields of results that say when, where and how fast; so do those that end as below."""
ENDS = ("_seconds", "_ratio", "_ratio_std", "_memory_mb", "_ms", "_ms_one", "_quartiles")
CODES: dict[str, list[str]] = {
    "no command": [],
    "help": ["--help"],
    "list": ["list", "methods"],
    "unknown command": ["compete"],
    "unknown method": ["compare", "--methods", "rank7", "--out", "wrong"],
    "unknown data": ["compare", "--data", "nothing", "--out", "wrong"],
    "unknown flag": ["compare", "--rank1.parts", "3"],
    "diverged": ["compare", *TINY, "--methods", "plain", "--recipe.lr", "1e30", "--no-shift", "--out", "diverged"],
    "not trained": ["evaluate", *TINY, "--methods", "plain", "--out", "untrained"],
    "other settings": ["compare", *TINY, "--methods", "plain", "--recipe.lr", "0.01", "--out", "runs"],
    "kept": ["compare", *TINY, "--methods", "plain", "--out", "runs"],
    "no results": ["report", "nowhere"],
    "unknown suite": ["reproduce", "rank1-mnist"],
}


def record() -> digest.Records:
    """Return the records of one comparison, of exit codes and of three reports."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        code = call(["compare", *TINY, "--methods", "all", "--seeds", "0,1", "--out", "runs"], folder)
        records = {"exit/compare": str(code), **_runs(folder / "runs")}
        records |= {f"exit/{label}": str(call(arguments, folder)) for label, arguments in CODES.items()}
        return records | _reports(folder)


def call(arguments: list[str], folder: Path) -> int:
    """Run the command line in a folder and return its exit code."""
    source = str(Path(lb.__file__).parents[1])  # the copy that is compared, not the installed one
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100", "PYTHONPATH": source}
    command = [sys.executable, "-m", "leanbayes", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False).returncode


def without_machine(value: Any) -> Any:
    """Return a JSON value without the fields that differ from run to run."""
    if isinstance(value, Mapping):
        kept = {name: part for name, part in value.items() if name not in MACHINE and not name.endswith(ENDS)}
        return {name: without_machine(part) for name, part in kept.items()}
    return [without_machine(part) for part in value] if isinstance(value, list) else value


def _runs(out: Path) -> digest.Records:
    files = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    records = {"files": digest.text("\n".join(files))}
    for path in sorted(out.rglob("result.json")):
        run = str(path.parent.relative_to(out))
        result = without_machine(json.loads(path.read_text()))
        records |= {f"{run}/id": result.pop("id"), f"{run}/status": result.pop("status")}
        records[f"{run}/layers"] = digest.data(result["cost"].pop("layers", None))
        records |= {f"{run}/{name}": digest.data(value) for name, value in result.pop("metrics").items()}
        records |= {f"{run}/{name}": digest.data(value) for name, value in result.items()}
        records[f"{run}/job.json"] = digest.data(json.loads((path.parent / "job.json").read_text()))
        records[f"{run}/model"] = digest.tensors(load_file(path.parent / "model.safetensors"))
    return records


def _reports(folder: Path) -> digest.Records:
    make.tree(folder / "classes", seeds=2)
    make.regression_tree(folder / "numbers", seeds=2)
    make.tree(folder / "failed", {"plain": make.METHODS["plain"], "rank1": make.METHODS["rank1"]}, seeds=1)
    make.write(folder / "failed", make.failed("patch", 0, "RuntimeError: <out of memory>"))
    records = {}
    for name in ("classes", "numbers", "failed"):
        records[f"exit/report {name}"] = str(call(["report", name], folder))
        records[f"report/{name}"] = digest.text((folder / name / "report.html").read_bytes())
    return records
