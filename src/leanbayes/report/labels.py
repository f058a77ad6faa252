"""What contenders are called: by their method, with the settings that differ, and not too long."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from leanbayes.report.settings import flag_of, telling, write_value

if TYPE_CHECKING:
    from leanbayes.report.load import Run

LONGEST = 80  # characters of a label on the page; the rest shows on hover
TAIL = 24  # of them from the end, where versions differ


def cut(text: str) -> str:
    """Return a text of at most LONGEST characters: the middle of a longer one is left out."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - TAIL - 1]}…{text[-TAIL:]}"


def cut_apart(labels: Iterable[str]) -> dict[str, str]:
    """Cut labels so that different ones stay different: those that would read alike get a number."""
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
    """Name every run (by its path): as it calls itself, else by its method, with the settings that differ."""
    values: dict[tuple[str, str], set[str]] = {}
    runs = list(runs)
    for run in runs:
        for field, value in run.fields.items():
            values.setdefault((run.name, field), set()).add(write_value(value))
    versions: dict[tuple[str, str, tuple[str, ...]], list[Run]] = {}
    for run in runs:
        differing = sorted(field for (name, field), found in values.items() if name == run.name and len(found) > 1)
        told = tuple(f"{field}={write_value(run.fields.get(field))}" for field in differing)
        versions.setdefault((run.name, run.label, told if run.label == run.name else ()), []).append(run)
    labels = {}
    for (name, label, told), alike in versions.items():
        names = telling([run.settings for run in alike])
        for run in alike:
            apart = ", ".join([*told, *(f"{flag_of(each)}={run.settings.get(each, 'unset')}" for each in names)])
            labels[run.path] = (name, f"{label} ({apart})" if apart else label)
    return labels


def natural(text: str) -> list[tuple[float, str]]:
    """Split a label so that components=4 comes before components=16."""
    return [(float(part), "") if part.isdecimal() else (0.0, part) for part in re.split(r"(\d+)", text)]
