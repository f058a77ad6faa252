"""The folder of a run belongs to one job and one data set: `job.json` names both before the training begins.

The digest of the data is not in the settings, so ids and names of folders do not depend on it. A run that was moved
with its data resumes; one whose rows have changed does not. Files of earlier versions have no digest, and any rows fit.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from leanbayes.compare import tuning
from leanbayes.compare.job import Job, relocated
from leanbayes.compare.row_training import FILE as VALIDATION
from leanbayes.evaluation import result as results

SETTINGS_FILE = "job.json"
DIGEST = "sha256"


def claim(job: Job, folder: Path, sha256: str | None) -> None:
    """Write the job and the digest of its training data into a folder; from then on, other ones raise there."""
    own = {} if sha256 is None else {DIGEST: sha256}
    results.write_json(training_settings(job) | {"environment": launch_of(job)} | own, folder / SETTINGS_FILE)


def training_settings(job: Job) -> dict[str, Any]:
    """Return the settings that the training depends on, as JSON values."""
    return {name: value for name, value in _as_json(job.settings()).items() if name != "judging"}


def launch_of(job: Job) -> dict[str, Any]:
    """Return the number of processes and their launcher."""
    return {"processes": job.processes, "launcher": "local" if job.launch is None else job.launch.launcher}


def finished(job: Job, folder: Path) -> dict[str, Any] | None:
    """Return the result of a finished run, else None; raise ValueError if the folder has a run of other settings."""
    _check_settings_file(job, folder)
    found = results.read_result(folder)
    if found is None or found.get("status") != "done":
        return None
    here = _as_json(job.settings())
    changed = results.difference(relocated(found.get("settings"), here), here)
    if found.get("id") != job.id and changed:
        raise ValueError(
            f"'{folder}' holds a finished run with other settings ({changed}); run leanbayes evaluate --fresh to "
            "evaluate its model again, or choose another --out"
        )
    return found


def data_of(folder: Path) -> str | None:
    """Return the digest of the data that the run in a folder was trained on; None if no file says it."""
    with suppress(OSError, ValueError):
        found = results.read_json(folder / SETTINGS_FILE).get(DIGEST)
        return _digest_in(results.read_result(folder) or {}) if found is None else str(found)
    return None  # there is no run, or a damaged file, which others name


def check_data(job: Job, out: Path, sha256: str) -> None:
    """Raise ValueError if a run that this job would keep, continue or use has other data.

    They may have changed under the same name. A run without a state or a finished trial begins again in any case.
    """
    for one in (job, *job.followed):
        folder = one.folder(out)
        found = results.read_result(folder) or {}
        done = found.get("status") == "done"
        before = _digest_in(found) if done else data_of(folder) if _has_state(folder) else None
        kind = "a finished run" if done else "an unfinished run"
        if before in (None, sha256) and job.tune:
            folder, before, kind = tuning.folder_of(job, out), tuning.data_of(job, out), "trials of --tune"
        if before not in (None, sha256):
            raise ValueError(
                f"'{folder}' holds {kind} on other data: {job.source.name!r} has changed since; restore it, choose "
                "another --out, or --fresh to begin again"
            )


def _digest_in(result: dict[str, Any]) -> str | None:
    data = result.get("data")
    found = data.get("sha256") if isinstance(data, dict) else data
    return None if found is None else str(found)


def _has_state(folder: Path) -> bool:
    return (folder / VALIDATION).is_file() or any(folder.rglob("*.safetensors"))


def _check_settings_file(job: Job, folder: Path) -> None:
    path = folder / SETTINGS_FILE
    if not path.is_file():
        return
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return  # a killed process cut it off; the training state is checked on its own
    if not isinstance(recorded, dict):
        raise ValueError(f"'{path}' is damaged (expected an object, got a {type(recorded).__name__}); remove it")
    there = {name: value for name, value in recorded.items() if name not in ("environment", DIGEST)}
    here = training_settings(job)
    if changed := results.difference(relocated(there, here), here):
        raise ValueError(
            f"'{folder}' holds a run with other settings ({changed}); choose another --out, or --fresh to begin again"
        )


def _as_json(settings: dict[str, Any]) -> dict[str, Any]:
    return dict(json.loads(json.dumps(settings)))
