"""Load the result files under a folder; group runs by data and network, and name each contender."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from leanbayes.evaluation.result import differing, FILE, flag_of, SCHEMA, settings_of, write_value
from leanbayes.evaluation.statistics import number
from leanbayes.runtime._files import local

REFERENCE = "plain"  # the network without a method, the unit of all costs and of the mCE
TEMPERED = "tempered"  # the same network at a temperature from held-out rows
BASELINES = ("mean", "linear", "boosting")  # rows without a network
SECTIONS: dict[str, type] = {
    **dict.fromkeys(("method", "network", "data", "recipe", "metrics", "cost", "figures", "environment"), dict),
    "history": list,
}
LARGEST = 1e100  # the square of a larger number overflows
DEEPEST = 30  # levels of lists and mappings
SHOWN = 40  # characters of a field or a value in a message
ABOVE = {  # lower limits of these numbers
    "cost.train_step_ratio": 0,
    "cost.predict_ratio": 0,
    "cost.passes": 0,
    "cost.answer_madds_ratio": 0,
    "cost.extra_percent": -100,
    "recipe.epochs": 0,
    "recipe.samples": 0,
    "method.fields.components": 0,
}
LONGEST = 80  # characters of a label on the page; the whole label shows on hover
TAIL = 24  # of them from the end, where versions differ
COLOURS = 15  # number of colours in the style sheet
VERSIONS = 4  # looks of one colour: the method, and three for its versions
DASHED = {
    "mean": 2,
    "seed_ensemble": 1,
    "student": 2,
}  # rows that share the colour of another, and the version that they look like first
UNKNOWN_SHAPE = 7  # the marker of methods that are not in FIXED
FIXED = {  # colour and marker
    "plain": (0, 0),
    "tempered": (0, 3),
    "mean": (0, 6),
    "student": (0, 5),
    "rank1": (1, 1),
    "patch": (2, 4),
    "implicit": (3, 3),
    "variance": (4, 5),
    "batch_ensemble": (5, 2),
    "nested": (6, 6),
    "deep_ensemble": (7, 0),
    "seed_ensemble": (7, 3),
    "dropconnect": (8, 3),
    "mc_dropout": (9, 1),
    "mean_field": (10, 2),
    "laplace": (11, 4),
    "swag": (12, 5),
    "linear": (13, 1),
    "boosting": (14, 2),
}


@dataclass(frozen=True)
class Look:
    """Colour and marker of one contender, the same in every report.

    Attributes:
        series: its number in the group; the page selects its marks by it.
        colour: number of the colour in the style sheet.
        shape: number of the marker.
        version: 0 for the method; its versions have hollow markers and dashed lines.
    """

    series: int
    colour: int
    shape: int
    version: int = 0

    @property
    def classes(self) -> str:
        return f"n{self.series} s{self.colour}" + (f" v{self.version}" if self.version else "")


def looks_of(contenders: Iterable[tuple[str, str]]) -> list[Look]:
    """Return a look for each pair of a method's name and a label.

    Colour and marker depend on the name alone. A label that differs from the name is a version of the method.
    """
    found: list[Look] = []
    versions: dict[str, int] = {}
    for series, (name, label) in enumerate(contenders):
        version = DASHED.get(name, 0)
        if label != name:
            versions[name] = versions.get(name, 0) + 1
            version = 1 + (max(version, 1) + versions[name] - 2) % (VERSIONS - 1)
        # the colour of an unknown method is a checksum of its name
        fixed = FIXED.get(name) or (1 + zlib.crc32(name.encode()) % (COLOURS - 1), UNKNOWN_SHAPE)
        found.append(Look(series, *fixed, version))
    return found


class DamagedResult(ValueError):
    """A result file that cannot be read; the message has its name and the reason."""


@dataclass(frozen=True)
class Run:
    """One result file.

    Attributes:
        path: of the file, relative to the folder of the report.
        record: its content.
    """

    path: str
    record: Mapping[str, Any]

    @property
    def done(self) -> bool:
        return bool(self.record["status"] == "done")

    @property
    def name(self) -> str:
        return str(self.record["method"]["name"])

    @property
    def fields(self) -> dict[str, Any]:
        found = self.part("method", "fields")
        return dict(found) if isinstance(found, Mapping) else {}

    @property
    def label(self) -> str:
        return str(self.record["method"].get("label") or self.name)

    @cached_property
    def settings(self) -> dict[str, str]:
        """The settings that all seeds of its method share."""
        return settings_of(self.record)

    @property
    def seed(self) -> str:
        return str(self.record.get("seed"))

    @property
    def key(self) -> tuple[str, str, str]:
        """Data, network and task; runs with equal keys are compared."""
        data = self.record["data"]
        rows = " (held-out training rows)" if number(data.get("held_out")) else ""
        return str(data["name"]) + rows, str(self.record["network"]["name"]), str(data.get("task", "classification"))

    def part(self, *path: str) -> Any:
        """Return the value at a path of keys; None if the path does not exist."""
        value: Any = self.record
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def number(self, *path: str) -> float | None:
        """Return the finite number at a path, or None."""
        return number(self.part(*path))

    def rows(self, *path: str) -> list[Mapping[str, Any]]:
        """Return the records of the list at a path; an absent list is empty."""
        value = self.part(*path)
        return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []


@dataclass(frozen=True)
class Contender:
    """A method with its settings, and its finished seeds.

    Attributes:
        label: the name, with the settings that differ if one method occurs several times; cut if it is long.
        name: the name of the method.
        runs: the finished runs, by seed; each seed once.
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
        return self.name == REFERENCE

    @property
    def is_plain(self) -> bool:
        return self.name in (REFERENCE, TEMPERED)

    @property
    def series(self) -> int:
        return self.look.series


@dataclass(frozen=True)
class Failure:
    """A failed run: label, seed, path and error."""

    label: str
    seed: str
    path: str
    error: str


@dataclass(frozen=True)
class Group:
    """All runs on one data set with one network; `replaced` has a sentence for each run that does not count."""

    data: str
    network: str
    task: str
    contenders: tuple[Contender, ...]
    failures: tuple[Failure, ...]
    replaced: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"{self.data}, {self.network}"

    @property
    def plain(self) -> Contender | None:
        return next((contender for contender in self.contenders if contender.is_reference), None)

    @cached_property
    def target(self) -> str:
        """The name of a real target with its unit, where the results have one."""
        for run in self.runs:
            name = run.part("data", "target") or run.part("settings", "data", "target")
            if isinstance(name, str) and name:
                unit = run.part("data", "unit")
                return cut(f"{name}, {unit}" if isinstance(unit, str) and unit else name)
        return ""

    @property
    def largest_class(self) -> tuple[str, float] | None:
        """The largest class of the training rows and its share of the evaluated rows, where the results have them."""
        for run in self.runs:
            name, share = run.part("data", "largest_class", "name"), run.number("data", "largest_class", "share")
            if isinstance(name, str) and share is not None:
                return cut(name), share
        return None

    @property
    def target_unit(self) -> str:
        """The unit of errors and intervals, in words."""
        return f"units of {self.target}" if self.target else "units of the target"

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        return tuple(run for contender in self.contenders for run in contender.runs)


@dataclass(frozen=True)
class Results:
    """Groups of runs, and a sentence for each file that cannot be read."""

    groups: tuple[Group, ...]
    damaged: tuple[str, ...]


def load_results(folder: str | Path) -> Results:
    """Read every `result.json` under a folder.

    The folder is the output of `leanbayes compare`, with <data>/<net>/<method>/seed<k>/result.json. The results are
    grouped by data and network; `damaged` names the damaged files.
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
    return Results(grouped(runs), tuple(damaged))


def grouped(runs: Iterable[Run]) -> tuple[Group, ...]:
    """Group runs by data and network; a plain network with a temperature is a further row."""
    runs = list(runs)
    runs += [changed for run in runs if (changed := _tempered(run)) is not None]
    keys = sorted({run.key for run in runs})
    return tuple(_group(key, [run for run in runs if run.key == key]) for key in keys)


def _tempered(run: Run) -> Run | None:
    """Return the run of a plain network at the temperature of its held-out rows, as a row of its own."""
    found = run.part("metrics", "tempered")
    if run.name != REFERENCE or not run.done or not isinstance(found, Mapping):
        return None
    losses = {"test": run.part("figures", "losses", "tempered")}
    changed = {"method": {"name": TEMPERED, "label": "plain + temperature"}, "metrics": found, "history": []}
    return Run(f"{run.path} at its temperature", {**run.record, **changed, "figures": {"losses": losses}})


def _read(file: Path, name: str) -> Run:
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
    """Return contenders, the reference first and the others by name, and failures."""
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


def cut(text: str) -> str:
    """Return a text of at most LONGEST characters; a longer one loses its middle."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - TAIL - 1]}…{text[-TAIL:]}"


def cut_apart(labels: Iterable[str]) -> dict[str, str]:
    """Cut labels, and number those that would become equal."""
    found: dict[str, str] = {}
    taken: set[str] = set()
    for label in labels:
        short, number = cut(label), 1
        while short in taken:
            number += 1
            short = f"{cut(label)} ({number})"
        found[label] = short
        taken.add(short)
    return found


def labels_of(runs: Iterable[Run]) -> dict[str, tuple[str, str]]:
    """Return method and label of each run by path: its own label or method, with the settings that differ."""
    values: dict[tuple[str, str], set[str]] = {}
    runs = list(runs)
    for run in runs:
        for field, value in run.fields.items():
            values.setdefault((run.name, field), set()).add(write_value(value))
    versions: dict[tuple[str, str, tuple[str, ...]], list[Run]] = {}
    for run in runs:
        fields = sorted(field for (name, field), found in values.items() if name == run.name and len(found) > 1)
        values_of = tuple(f"{field}={write_value(run.fields.get(field))}" for field in fields)
        versions.setdefault((run.name, run.label, values_of if run.label == run.name else ()), []).append(run)
    labels = {}
    for (name, label, values_of), alike in versions.items():
        names = differing([run.settings for run in alike])
        for run in alike:
            apart = ", ".join([*values_of, *(f"{flag_of(each)}={run.settings.get(each, 'unset')}" for each in names)])
            labels[run.path] = (name, f"{label} ({apart})" if apart else label)
    return labels


def natural(text: str) -> list[tuple[float, str]]:
    """Return a sort key by which components=4 comes before components=16."""
    return [(float(part), "") if part.isdecimal() else (0.0, part) for part in re.split(r"(\d+)", text)]


def complaint(record: Mapping[str, Any]) -> str | None:
    """Return a sentence on the first number that cannot be true; None if all are plausible."""
    waiting: list[tuple[str, Any, int]] = [("", record, 0)]
    while waiting:  # no recursion: a file may be nested deeply
        field, value, depth = waiting.pop()
        if depth > DEEPEST:
            return f"expected at most {DEEPEST} levels, got more in `{_short(field)}`"
        items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
        waiting += [(f"{field}.{key}" if field else str(key), inner, depth + 1) for key, inner in items]
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole and not (isinstance(value, float) and math.isfinite(value)):
            continue  # counts as missing
        if abs(value) > LARGEST:
            return f"expected `{_short(field)}` to be at most {LARGEST:g}, got {_short(str(value))}"
        if value <= ABOVE.get(field, -math.inf):
            return f"expected `{field}` to be above {ABOVE[field]}, got {value}"
    return None


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
