"""Looks: the colour and the marker of a method, which are the same in every report."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

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
