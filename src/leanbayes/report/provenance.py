"""Provenance of a group: data, network, commits, commands, converted layers, tuned values, remarks on fairness."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, UTC
from typing import Any

from leanbayes.core.summary import percent
from leanbayes.evaluation.result import write_value
from leanbayes.evaluation.statistics import number
from leanbayes.report.load import Contender, Group, Run, TEMPERED

VERSIONS = ("python", "torch", "leanbayes")


@dataclass(frozen=True)
class Layers:
    """The converted layers of a contender in a sentence; path, kind and reason of each skipped one with parameters."""

    contender: Contender
    sentence: str
    skipped: tuple[str, ...]


def _layers(contender: Contender) -> Layers | None:
    """Read the first run that records its layers (older results do not): all seeds convert the same network."""
    for run in contender.runs:
        names = ("converted", "total", "eligible", "things", "covered", "skipped")
        converted, total, eligible, things, covered, skipped = (run.part("cost", "layers", name) for name in names)
        if eligible == 0:  # a plain network with a temperature, a student
            return None
        if isinstance(converted, int) and isinstance(total, int):
            sentence = f"{converted} of {total} layers converted"
            if isinstance(eligible, int) and isinstance(things, str):  # older results count layers of all kinds
                share = f"{percent(covered)} of the weights, " if isinstance(covered, (int, float)) else ""
                sentence = f"{share}{converted} of {eligible} {things} converted"
            return Layers(contender, sentence, tuple(map(str, skipped)) if isinstance(skipped, list) else ())
    return None


TUNED = (
    "Trials choose values by the NLL of held-out training rows, never of test rows. Every row has the same number of "
    "trials. They use seed 0, and all seeds of a row use the values of its best complete trial."
)


@dataclass(frozen=True)
class Tuned:
    """The trials of a contender: a sentence on their number and outcome; name, chosen value and range of each value."""

    contender: Contender
    sentence: str
    values: tuple[tuple[str, str, str], ...]

    @property
    def line(self) -> str:
        """The sentence with the values."""
        return "; ".join([self.sentence, *(f"{name} {value} of {space}" for name, value, space in self.values)])


def _tuned(contender: Contender) -> Tuned | None:
    """Read the first run that records its trials: all seeds share them."""
    for run in contender.runs:
        trials, best, first = (run.number("tuning", name) for name in ("trials", "best_nll", "first_nll"))
        chosen, space = run.part("tuning", "chosen"), run.part("tuning", "space")
        if trials is None or best is None or not isinstance(chosen, dict) or not isinstance(space, dict):
            continue
        counts = ((name, run.number("tuning", name)) for name in ("pruned", "failed"))
        ended = "".join(f", {count:.0f} {name}" for name, count in counts if count)
        rows, how = run.number("tuning", "rows"), run.part("tuning", "how")
        where = f" of {rows:,.0f} held-out rows{' in five folds' if how == 'folds' else ''}" if rows else ""
        untuned = "" if first is None else f", {first:.4g} untuned"
        seconds = run.number("tuning", "seconds")
        took = "" if seconds is None else f", {seconds:.0f} s"
        sentence = f"{trials:.0f} trials{ended}{took}; NLL{where} {best:.4g}{untuned}"
        return Tuned(contender, sentence, tuple((str(n), _value(v), _range(space.get(n))) for n, v in chosen.items()))
    return None


def _value(value: Any) -> str:
    found = number(value)
    return "?" if found is None else f"{found:.4g}"


def _range(space: Any) -> str:
    """Return the range of a value in words."""
    known = space if isinstance(space, dict) else {}
    scale = " on a log scale" if known.get("scale") == "log" else ""
    return f"{_value(known.get('low'))} to {_value(known.get('high'))}{scale}"


@dataclass(frozen=True)
class Provenance:
    """The origin of the figures of a group.

    Attributes:
        facts: pairs of a name and a text: data, network, seeds, commit, device, versions.
        layers: the converted layers of each contender.
        tuned: the trials of each contender that has some.
        recipe: fields of the recipe that all runs share, with their values.
        differing: fields of the recipe that differ, with the value of each contender.
        commands: the command lines, each once.
        remarks: sentences on runs that do not count, and on differences between the runs.
    """

    facts: list[tuple[str, str]]
    layers: list[Layers]
    tuned: list[Tuned]
    recipe: list[tuple[str, str]]
    differing: list[tuple[str, str]]
    commands: list[str]
    remarks: list[str]


def provenance(group: Group) -> Provenance:
    """Return the provenance of a group."""
    runs = group.runs
    recipe, differing = _recipe(group)
    networks = [run.record["network"] for run in runs]
    machines = [run.record.get("environment") or {} for run in runs]
    facts = [
        ("Data", _join(_data(run) for run in runs)),
        ("Columns", _join(note for run in runs for note in _notes(run))),
        ("Network", _join(f"{net['name']}, {_count(net.get('parameters'))} parameters" for net in networks)),
        ("Seeds", _seeds(group)),
        ("Commit", _join(run.part("commit") for run in runs)),
        ("Project commit", _join(run.part("project_commit") for run in runs)),
        ("Device", _join(_device(run) for run in runs)),
        (
            "Versions",
            _join(", ".join(f"{name} {v}" for name in VERSIONS if (v := each.get(name))) for each in machines),
        ),
        ("Run", _period(runs)),
        ("Recipes", f"differ in {', '.join(name for name, _ in differing)}" if differing else ""),
    ]
    return Provenance(
        facts=[(name, text) for name, text in facts if text],
        layers=[layers for c in group.contenders if not c.is_reference and (layers := _layers(c))],
        tuned=[tuned for c in group.contenders if c.name != TEMPERED and (tuned := _tuned(c))],
        recipe=recipe,
        differing=differing,
        commands=_unique(run.part("command") for run in runs),
        remarks=[*group.replaced, *_differences(runs), *_untuned(group)],
    )


def _untuned(group: Group) -> list[str]:
    """Return a remark if some rows were tuned and others, which could have been, were not, or with fewer trials."""
    able = [c for c in group.contenders if c.name not in (TEMPERED, "mean")]
    trials = {c.label: run.number("tuning", "trials") or 0 for c in able for run in c.runs[:1]}
    if len(set(trials.values())) < 2:
        return []
    listed = ", ".join(f"{label} {count:.0f}" for label, count in trials.items())
    return [f"The rows had different numbers of trials ({listed}): their figures are not comparable."]


def _unique(values: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(str(value) for value in values if value not in (None, "")))


def _join(values: Iterable[Any]) -> str:
    return "; ".join(_unique(values))


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "?"


def _data(run: Run) -> str:
    data = run.record["data"]
    digest = f", sha256 {str(data['sha256'])[:12]}" if data.get("sha256") else ""
    rows = "held-out training inputs" if data.get("held_out") else "test inputs"
    return f"{data['name']}: {_count(data.get('train'))} training and {_count(data.get('test'))} {rows}{digest}"


def _notes(run: Run) -> list[str]:
    notes = run.part("data", "notes")
    return [str(note) for note in notes] if isinstance(notes, list) else []


def _device(run: Run) -> str:
    device, threads = run.part("environment", "device"), run.part("environment", "threads")
    if not device:
        return ""
    text = f"{device}, {threads} thread{'s' if threads != 1 else ''}" if threads else str(device)
    processes = run.part("environment", "processes") or 1
    return text if processes == 1 else f"{text}, {processes} processes"


def _seeds(group: Group) -> str:
    seeds = {contender.label: ", ".join(run.seed for run in contender.runs) for contender in group.contenders}
    if len(set(seeds.values())) == 1:
        return next(iter(seeds.values()))
    return "; ".join(f"{label}: {text}" for label, text in seeds.items())


def _period(runs: Iterable[Run]) -> str:
    """Return the first and the last time of runs, to the minute; a text that is no time stays unchanged."""
    times = []
    for time in _unique(run.part("created") for run in runs):
        try:
            times.append(f"{datetime.fromisoformat(time).astimezone(UTC):%Y-%m-%d %H:%M} UTC")
        except ValueError:
            times.append(time)
    return " to ".join(dict.fromkeys([min(times), max(times)])) if times else ""


def _recipe(group: Group) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Split the recipe, without the seed, into shared fields and fields that differ between contenders."""
    names = _unique(name for run in group.runs for name in (run.part("recipe") or {}) if name != "seed")
    shared, differing = [], []
    for name in names:
        values = {
            contender.label: " or ".join(_unique(write_value(run.part("recipe", name)) for run in contender.runs))
            for contender in group.contenders
        }
        if len(set(values.values())) == 1:
            shared.append((name, next(iter(values.values()))))
        else:
            differing.append((name, "; ".join(f"{label}: {value}" for label, value in values.items())))
    return shared, differing


def _differences(runs: Sequence[Run]) -> list[str]:
    table = (
        ("versions of the data", [run.part("data", "sha256") for run in runs], "their figures are not comparable"),
        ("devices", [_device(run) for run in runs], "their times are not comparable"),
        ("commits", [run.part("commit") for run in runs], "differences may come from the code"),
    )
    counted = ((what, len(_unique(values)), effect) for what, values, effect in table)
    return [f"The runs used {count} different {what}: {effect}." for what, count, effect in counted if count > 1]
