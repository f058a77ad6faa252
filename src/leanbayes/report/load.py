"""Find the result files under a folder and put together what belongs together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from leanbayes.paths import local
from leanbayes.report.checks import complaint
from leanbayes.report.estimate import number
from leanbayes.report.labels import cut, cut_apart, labels_of, natural
from leanbayes.report.looks import Look, looks_of
from leanbayes.report.settings import settings_of
from leanbayes.results import FILE, SCHEMA

REFERENCE = "plain"  # the network without a method: what every cost and every mCE is relative to
SECTIONS: dict[str, type] = {
    "method": dict,
    "network": dict,
    "data": dict,
    "recipe": dict,
    "metrics": dict,
    "cost": dict,
    "figures": dict,
    "history": list,
    "environment": dict,
}


class DamagedResult(ValueError):
    """A result file that cannot be read; the message says which and why."""


@dataclass(frozen=True)
class Run:
    """One result file.

    Attributes:
        path: where it was found, relative to the folder of the report.
        record: its content.
    """

    path: str
    record: Mapping[str, Any]

    @property
    def done(self) -> bool:
        """Whether the run came to its end."""
        return bool(self.record["status"] == "done")

    @property
    def name(self) -> str:
        """Name of the method."""
        return str(self.record["method"]["name"])

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of the method."""
        found = self.part("method", "fields")
        return dict(found) if isinstance(found, Mapping) else {}

    @property
    def label(self) -> str:
        """What the run calls its method."""
        return str(self.record["method"].get("label") or self.name)

    @cached_property
    def settings(self) -> dict[str, str]:
        """What it shares with the other seeds of its method."""
        return settings_of(self.record)

    @property
    def seed(self) -> str:
        """The seed, as text."""
        return str(self.record.get("seed"))

    @property
    def key(self) -> tuple[str, str, str]:
        """Data, network and task: runs with equal keys can be compared."""
        data = self.record["data"]
        judged = " (held-out training rows)" if number(data.get("held_out")) else ""
        return str(data["name"]) + judged, str(self.record["network"]["name"]), str(data.get("task", "classification"))

    def part(self, *path: str) -> Any:
        """Return what lies at the end of a path of keys, None where the path breaks off."""
        value: Any = self.record
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def number(self, *path: str) -> float | None:
        """Return the finite number at the end of a path, or None."""
        return number(self.part(*path))

    def rows(self, *path: str) -> list[Mapping[str, Any]]:
        """Return the records of the list at the end of a path; an absent list is empty."""
        value = self.part(*path)
        return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []


@dataclass(frozen=True)
class Contender:
    """A method with its settings, and the seeds it came through.

    Attributes:
        label: the name; with the settings that differ where one method takes part several times; cut if it is long.
        name: the name of the method.
        runs: the runs that came to their end, by seed; each seed once.
        look: its colour and its marker.
        whole: the label, not cut.
    """

    label: str
    name: str
    runs: tuple[Run, ...]
    look: Look
    whole: str

    @property
    def is_reference(self) -> bool:
        """Whether this is the network without a method."""
        return self.name == REFERENCE

    @property
    def series(self) -> int:
        """Its number in the group."""
        return self.look.series


@dataclass(frozen=True)
class Failure:
    """A run that did not come to its end: who, which seed, where, and the error it left."""

    label: str
    seed: str
    path: str
    error: str


@dataclass(frozen=True)
class Group:
    """Everything that was run on one data set with one network; a sentence for every run that another one replaces."""

    data: str
    network: str
    task: str
    contenders: tuple[Contender, ...]
    failures: tuple[Failure, ...]
    replaced: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Data and network."""
        return f"{self.data}, {self.network}"

    @property
    def plain(self) -> Contender | None:
        """The network without a method, if it took part."""
        return next((contender for contender in self.contenders if contender.is_reference), None)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """All runs that came to their end."""
        return tuple(run for contender in self.contenders for run in contender.runs)


@dataclass(frozen=True)
class Results:
    """What lay under a folder: groups of runs, and a sentence for every file that could not be read."""

    groups: tuple[Group, ...]
    damaged: tuple[str, ...]


def load_results(folder: str | Path) -> Results:
    """Read every `result.json` under a folder.

    Args:
        folder: the output folder of `leanbayes compare`: <data>/<net>/<method>/seed<k>/result.json lie below it.

    Returns:
        The results, grouped by data and network; a damaged file becomes a sentence in `damaged`.
    """
    folder = local(folder)
    files = sorted(folder.rglob(FILE))
    if not files:
        raise FileNotFoundError(
            f"expected {FILE} files under {folder}, found none; `leanbayes compare --out {folder}` writes them"
        )
    runs, damaged = [], []
    for file in files:
        try:
            runs.append(_read(file, file.relative_to(folder).as_posix()))
        except DamagedResult as error:
            damaged.append(str(error))
    keys = sorted({run.key for run in runs})
    return Results(tuple(_group(key, [r for r in runs if r.key == key]) for key in keys), tuple(damaged))


def _read(file: Path, name: str) -> Run:
    """Read one file, or say what is wrong with it."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedResult(f"{name} is not readable JSON ({error}); delete it and run it again") from error
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        found = repr(record.get("schema")) if isinstance(record, dict) else f"a {type(record).__name__}"
        raise DamagedResult(f"{name}: expected a result of schema {SCHEMA}, got {found}; run it again")
    for section, kind in SECTIONS.items():
        if not isinstance(record.get(section) or kind(), kind):
            got = type(record[section]).__name__
            raise DamagedResult(f"{name}: expected `{section}` to be a {kind.__name__}, got a {got}; run it again")
    missing = [s for s in ("method", "network", "data") if not isinstance((record.get(s) or {}).get("name"), str)]
    if missing or record.get("status") not in ("done", "failed"):
        lacks = ", ".join([f"{section}.name" for section in missing] or ["status (done or failed)"])
        raise DamagedResult(f"{name}: expected {lacks}, which is not there; run it again")
    if odd := complaint(record):
        raise DamagedResult(f"{name}: {odd}; run it again")
    return Run(name, record)


def _group(key: tuple[str, str, str], runs: list[Run]) -> Group:
    """Sort runs into contenders, the reference first and the others by name, and failures."""
    labels = labels_of(runs)
    order = sorted(set(labels.values()), key=lambda label: (label[0] != REFERENCE, *map(natural, label)))
    shown = cut_apart(dict.fromkeys(label for _, label in order))
    found = {label: [run for run in runs if labels[run.path] == label] for label in order}
    alive = {label: sorted((r for r in some if r.done), key=_by_seed) for label, some in found.items()}
    latest = {label: {run.seed: run for run in done} for label, done in alive.items() if done}
    data, network, task = key
    return Group(
        cut(data),
        cut(network),
        task,
        contenders=tuple(
            Contender(shown[label], name, tuple(once.values()), look, label)
            for look, ((name, label), once) in zip(looks_of(latest), latest.items(), strict=True)
        ),
        replaced=tuple(
            f"{shown[label[1]]}, seed {run.seed} was run more than once with equal settings: {once[run.seed].path} "
            f"counts, {run.path} does not."
            for label, once in latest.items()
            for run in alive[label]
            if run is not once[run.seed]
        ),
        failures=tuple(
            Failure(shown[label[1]], run.seed, run.path, str(run.record.get("error") or "no error was recorded"))
            for label, some in found.items()
            for run in sorted(some, key=_by_seed)
            if not run.done
        ),
    )


def _by_seed(run: Run) -> tuple[float, str, str]:
    return number(run.record.get("seed")) or 0.0, str(run.record.get("created")), run.path
