"""`result.json`: the record of one run. Schema: docs/design/0009. The report reads no other file."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, UTC
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from leanbayes.runtime._files import parse_json, write_text
from leanbayes.runtime.noise import INDEPENDENT

SCHEMA = 1
FILE = "result.json"
GROUPED_BY = ("data.name", "data.root", "net")  # settings that define the group of a run in the report
MACHINE = ("accelerator", "devices", "nodes", "compile", "channels_last")
"""Fields of a recipe that choose the machine and the speed, not the result."""
FREE = frozenset((*GROUPED_BY, "recipe.seed", *(f"recipe.{name}" for name in MACHINE)))
"""Settings in which the seeds of one method may differ."""
PREFIXES = ("data.", "judging.", "method.fields.")  # parts of a setting's name that are no part of its flag


def read_result(folder: Path) -> dict[str, Any] | None:
    """Return the result of a run; None if there is no file; raise ValueError if the file is damaged."""
    path = folder / FILE
    if not path.is_file():
        return None
    result = read_json(path, "; remove it to run again")
    if result.get("schema") != SCHEMA:
        raise ValueError(f"'{path}' is no result of schema {SCHEMA}; remove it to run again")
    return result


def write_json(record: Mapping[str, Any], path: Path) -> None:
    """Write an object as JSON; the file appears whole or not at all."""
    write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", path)


def read_json(path: Path, remedy: str = "") -> dict[str, Any]:
    """Return the object in a JSON file; raise ValueError, ending with `remedy`, if it is damaged or holds no object."""
    try:
        found = parse_json(path.read_text(encoding="utf-8"), f"'{path}'")
    except UnicodeDecodeError as error:
        raise ValueError(f"'{path}' is damaged ({error}){remedy}") from error
    except ValueError as error:
        raise ValueError(f"{error}{remedy}") from error
    if not isinstance(found, dict):
        raise ValueError(f"'{path}' is damaged (expected an object, got a {type(found).__name__}){remedy}")
    return found


def now() -> str:
    """Return the time, ISO 8601 in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def command() -> str:
    """Return the command line of this process, ready to type again."""
    name = Path(sys.argv[0]).name
    return shlex.join(["leanbayes" if name in ("__main__.py", "main.py", "leanbayes") else name, *sys.argv[1:]])


@cache
def commit() -> str:
    """Return the commit of leanbayes, with "+" if its source was changed; "unknown" outside its repository.

    The variable LEANBAYES_COMMIT sets it for a copy without a repository, such as a container.
    """
    if known := os.environ.get("LEANBAYES_COMMIT"):
        return known
    package = Path(__file__).resolve().parent.parent
    top = _git(package, "rev-parse", "--show-toplevel")
    own = top is not None and package == Path(top).resolve() / "src" / "leanbayes" and _is_leanbayes(Path(top))
    return (_head(package) if own else None) or "unknown"


@cache
def project_commit() -> str | None:
    """Return the commit of the repository in the working folder; None outside of one, or if it is leanbayes."""
    here = Path.cwd()
    top = _git(here, "rev-parse", "--show-toplevel")
    return None if top is None or _is_leanbayes(Path(top)) else _head(here)


def environment(device: torch.device) -> dict[str, Any]:
    """Return versions and the machine."""
    try:
        own = version("leanbayes")
    except PackageNotFoundError:
        own = "unknown"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "leanbayes": own,
        "device": f"{device.type} ({name})",
        "threads": torch.get_num_threads(),
    }


def _is_leanbayes(top: Path) -> bool:
    try:
        with (top / "pyproject.toml").open("rb") as file:
            return bool(tomllib.load(file).get("project", {}).get("name") == "leanbayes")
    except (OSError, ValueError, AttributeError):
        return False


def _head(folder: Path) -> str | None:
    """Return the commit in a folder, with "+" if a tracked file was changed."""
    head = _git(folder, "rev-parse", "HEAD")
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return head and head + ("+" if changed else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def processes_of(settings: Mapping[str, Any]) -> int:
    """Return the number of processes of a run: the launcher's, else the recipe's."""
    recipe = settings.get("recipe")
    fields = recipe if isinstance(recipe, Mapping) else {}
    recorded = [settings.get("processes"), fields.get("devices", 1), fields.get("nodes", 1)]
    launched, devices, nodes = (number if isinstance(number, int) else 0 for number in recorded)
    return launched or devices * nodes or 1


def settings_of(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings in a result file that all seeds of a method share, as {"recipe.epochs": "30", ...}."""
    own = record.get("settings")
    settings: dict[str, Any] = {"recipe": record.get("recipe") or {}, "where": [], "tune": 0}
    settings |= own if isinstance(own, dict) else {}
    settings = _with_design(settings) | {"processes": processes_of(settings)}
    digest = str((record.get("data") or {}).get("sha256") or "")[:8]
    found = {name: write_value(value) for name, value in _flat(settings) if name not in FREE}
    return found | ({"data.sha256": digest} if digest else {})


def difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Return the first setting that differs, as "recipe.lr: 0.1 there, 0.2 now"; "" if there is none."""
    old, new = (
        dict(_flat({"tune": 0, **_with_design(settings), "processes": processes_of(settings)}))
        for settings in (there, here)
    )
    for name, value in new.items():
        if name not in old or old[name] != value:
            return f"{name}: {old.get(name)!r} there, {value!r} now"
    return "a newer format" if old.keys() - new.keys() else ""


def _with_design(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the design of the draws, which files leave out at its default."""
    evaluation = settings.get("judging")
    own = evaluation if isinstance(evaluation, Mapping) else {}
    return {**settings, "judging": {"design": INDEPENDENT, **own}} if own else dict(settings)


def differing(runs: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the names of settings that distinguish runs, in order, without redundant ones.

    A setting that a run lacks, because a later version introduced it, does not distinguish it.
    """
    chosen: list[str] = []
    kinds = 1
    for name in dict.fromkeys(name for run in runs for name in run):
        if len({run[name] for run in runs if name in run}) > 1:
            found = len({tuple(run.get(each) for each in (*chosen, name)) for run in runs})
            chosen += [name] if found > kinds else []
            kinds = max(kinds, found)
    return chosen


def flag_of(name: str) -> str:
    """Return the command-line name of a setting."""
    return next((name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)), name)


def write_value(value: Any) -> str:
    """Write a field: text without quotes, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _flat(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield above + name, value
