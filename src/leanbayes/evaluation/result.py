"""`result.json`: what one run leaves behind. The schema is docs/design/0009; the report reads nothing else."""

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

from leanbayes.runtime._files import write_text

SCHEMA = 1
FILE = "result.json"


def write_result(folder: Path, result: dict[str, Any]) -> Path:
    """Write a result under a temporary name, then rename it: there is a whole file or none."""
    path = folder / FILE
    write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", path)
    return path


def read_result(folder: Path) -> dict[str, Any] | None:
    """Read a run's result; None where there is none.

    Raises:
        ValueError: in one sentence, if the file is damaged.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        result = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"'{path}' is damaged ({error}); remove it to run again") from error
    if not isinstance(result, dict) or result.get("schema") != SCHEMA:
        raise ValueError(f"'{path}' is no result of schema {SCHEMA}; remove it to run again")
    return result


def now() -> str:
    """Return the time, ISO 8601 in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def command() -> str:
    """Return the command line that led here, as one can type it again."""
    name = Path(sys.argv[0]).name
    return shlex.join(["leanbayes" if name in ("__main__.py", "cli.py", "leanbayes") else name, *sys.argv[1:]])


@cache
def commit() -> str:
    """Return the commit of leanbayes, "+" where its source was changed; "unknown" outside of its own repository.

    A copy without the repository that it was made of, as in a container, is told by the variable LEANBAYES_COMMIT.
    """
    if said := os.environ.get("LEANBAYES_COMMIT"):
        return said
    here = Path(__file__).resolve().parent
    return (_head(here) if _is_own(here) else None) or "unknown"


@cache
def project_commit() -> str | None:
    """Return the commit of the repository in which the command was typed; None outside of one, or if it is ours."""
    here = Path.cwd()
    top = _git(here, "rev-parse", "--show-toplevel")
    return None if top is None or _is_ours(Path(top)) else _head(here)


def processes_of(settings: Mapping[str, Any]) -> int:
    """Return the number of processes that settings stand for: that of the launcher, else what the recipe says."""
    recipe = settings.get("recipe")
    fields = recipe if isinstance(recipe, Mapping) else {}
    said = [settings.get("processes"), fields.get("devices", 1), fields.get("nodes", 1)]
    launched, devices, nodes = (number if isinstance(number, int) else 0 for number in said)
    return launched or devices * nodes or 1


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


def _is_own(package: Path) -> bool:
    """Say whether a package lies in leanbayes' own repository, where its source is; an installed copy does not."""
    top = _git(package, "rev-parse", "--show-toplevel")
    return top is not None and package == Path(top).resolve() / "src" / "leanbayes" and _is_ours(Path(top))


def _is_ours(top: Path) -> bool:
    """Say whether a repository is that of leanbayes."""
    try:
        with (top / "pyproject.toml").open("rb") as file:
            return bool(tomllib.load(file).get("project", {}).get("name") == "leanbayes")
    except (OSError, ValueError, AttributeError):
        return False


def _head(folder: Path) -> str | None:
    """Return the commit of a folder's repository, "+" where a file in it was changed."""
    head = _git(folder, "rev-parse", "HEAD")
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return head and head + ("+" if changed else "")


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what git says; None where it is not there, or fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


# -------------------- settings
# The settings of a run as a flat table: runs whose settings are equal differ by chance alone and may be averaged.


PLACE = ("data.name", "data.root", "net")
"""Where the data lie and what the network is called: the group of a run tells both."""
MACHINE = ("accelerator", "devices", "nodes", "compile", "channels_last")
"""Fields of a recipe that say where and how fast it runs, not what it does."""
APART = frozenset((*PLACE, "recipe.seed", *(f"recipe.{name}" for name in MACHINE)))
"""Settings in which the seeds of one method may differ."""
UNSAID = ("data.", "judging.", "method.fields.")
"""What flags of the command line leave out of a setting's name."""


def settings_of(record: Mapping[str, Any]) -> dict[str, str]:
    """Return what two results must share to be seeds of one another, as {"recipe.epochs": "30", ...}.

    Args:
        record: the content of a result file, or as much as {"settings": ...} of it.
    """
    own = record.get("settings")
    settings: dict[str, Any] = {"recipe": record.get("recipe") or {}, "where": []} | (
        own if isinstance(own, dict) else {}
    )
    settings["processes"] = processes_of(settings)
    digest = str((record.get("data") or {}).get("sha256") or "")[:8]
    found = {name: write_value(value) for name, value in _flat(settings, "") if name not in APART}
    return found | ({"data.sha256": digest} if digest else {})


def telling(runs: Sequence[Mapping[str, str]]) -> list[str]:
    """Name the settings that tell runs apart, in their order; those that say nothing new are left out.

    A setting that a run lacks, because a younger version introduced it, tells nothing by that.
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
    """Return what a setting is called on the command line."""
    return next((name.removeprefix(prefix) for prefix in UNSAID if name.startswith(prefix)), name)


def write_value(value: Any) -> str:
    """Write a field as a person would: text without quotes, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _flat(settings: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield above + name, value
