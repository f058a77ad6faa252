"""Looks: the colour and the marker of a method, which are the same in every report."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leanbayes.evaluation.result import flag_of, telling, write_value

if TYPE_CHECKING:
    from leanbayes.report.load import Run

COLOURS = 11  # how many the style sheet defines
VERSIONS = 4  # how many looks a colour has: the method itself, and three for its versions
STRANGER = 7  # the marker of methods that are not listed here
FIXED = {  # colour and marker
    "plain": (0, 0),
    "rank1": (1, 1),
    "patch": (2, 4),
    "implicit": (3, 3),
    "variance": (4, 5),
    "batch_ensemble": (5, 2),
    "nested": (6, 6),
    "deep_ensemble": (7, 0),
    "dropconnect": (8, 3),
    "mc_dropout": (9, 1),
    "mean_field": (10, 2),
}


@dataclass(frozen=True)
class Look:
    """How one contender is drawn.

    Attributes:
        series: its number in the group, by which the page finds its marks.
        colour: number of the colour in the style sheet.
        shape: number of the marker.
        version: 0 for the method itself; versions of it have hollow markers and dashed lines.
    """

    series: int
    colour: int
    shape: int
    version: int = 0

    @property
    def classes(self) -> str:
        """Class names for the style sheet: the series, the colour, the version."""
        return f"n{self.series} s{self.colour}" + (f" v{self.version}" if self.version else "")


def looks_of(contenders: Iterable[tuple[str, str]]) -> list[Look]:
    """Return a look for every pair of a method's name and a label.

    Colour and marker depend on the name alone. A label that is not the name is a version of the method; versions are
    numbered in their order.
    """
    found: list[Look] = []
    versions: dict[str, int] = {}
    for series, (name, label) in enumerate(contenders):
        version = 0
        if label != name:
            versions[name] = versions.get(name, 0) + 1
            version = 1 + (versions[name] - 1) % (VERSIONS - 1)
        found.append(Look(series, *_fixed(name), version))
    return found


def _fixed(name: str) -> tuple[int, int]:
    """Return colour and marker of a method; those of an unknown one come from a checksum of its name."""
    return FIXED.get(name) or (1 + zlib.crc32(name.encode()) % (COLOURS - 1), STRANGER)


# -------------------- labels
# What contenders are called: by their method, with the settings that differ, and not too long.


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
