"""`result.json`: what one run leaves behind. The schema is docs/design/0009; the report reads nothing else."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, UTC
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from leanbayes.files import write_text

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
    """Return the commit of the source that is running, "+" where it was changed; "unknown" outside a repository.

    A copy without the repository that it was made of, as in a container, is told by the variable LEANBAYES_COMMIT.
    """
    if said := os.environ.get("LEANBAYES_COMMIT"):
        return said
    here = Path(__file__).parent
    try:
        head = _git(here, "rev-parse", "HEAD")
        return head + ("+" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


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


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
