"""The settings of a run as a flat table: runs whose settings are equal differ by chance alone and may be averaged."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from leanbayes.results import processes_of

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
