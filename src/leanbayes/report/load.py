"""Find the result files under a folder and put together what belongs together."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from leanbayes.evaluation.result import FILE, SCHEMA, settings_of
from leanbayes.evaluation.statistics import number
from leanbayes.report.looks import cut, cut_apart, labels_of, Look, looks_of, natural
from leanbayes.runtime._files import local

# -------------------- checks
# Which numbers of a result cannot be true: the report names them instead of failing on them.


LARGEST = 1e100  # larger numbers overflow when they are squared
DEEPEST = 30  # levels of lists and mappings
SHOWN = 40  # characters of a field or a value in a message
ABOVE = {  # what these numbers must be larger than
    "cost.train_step_ratio": 0,
    "cost.predict_ratio": 0,
    "cost.passes": 0,
    "cost.extra_percent": -100,
    "recipe.epochs": 0,
    "recipe.samples": 0,
    "method.fields.components": 0,
}


def complaint(record: Mapping[str, Any]) -> str | None:
    """Name the first field that cannot be true, and say what was expected of it; None where there is none."""
    for field, value, depth in _fields(record):
        if depth > DEEPEST:
            return f"expected at most {DEEPEST} levels, got more in `{_short(field)}`"
        if not _is_number(value):
            continue
        if abs(value) > LARGEST:
            return f"expected `{_short(field)}` to be at most {LARGEST:g}, got {_short(str(value))}"
        if value <= ABOVE.get(field, -math.inf):
            return f"expected `{field}` to be above {ABOVE[field]}, got {value}"
    return None


def _fields(record: Mapping[str, Any]) -> Iterator[tuple[str, Any, int]]:
    """Yield every value with its path and its depth; without recursion, for a file may be nested deeply."""
    waiting: list[tuple[str, Any, int]] = [("", record, 0)]
    while waiting:
        path, value, depth = waiting.pop()
        yield path, value, depth
        items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
        waiting += [(f"{path}.{key}" if path else str(key), inner, depth + 1) for key, inner in items]


def _is_number(value: Any) -> bool:
    """Whether a value counts as a number; what is not finite counts as missing."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole or (isinstance(value, float) and math.isfinite(value))


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


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
