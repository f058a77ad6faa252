"""The stays of PhysioNet 2012 as they are published, a text for each, and the hourly means that the cache holds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from leanbayes.data import icu
from leanbayes.data.checks import Array
from leanbayes.data.converters import Files
from leanbayes.data.formats import read_tar

OUTCOMES = ("RecordID", "SAPS-I", "SOFA", "Length_of_stay", "Survival", "In-hospital_death")
_START = "00:00"


def physionet2012(folder: Path) -> Files:
    """Convert the records and outcomes of the three sets of stays, from the archives or from the folders they hold."""
    parts = [_set(folder, name) for name in icu.SETS]
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    arrays["set_id"] = np.repeat(np.arange(len(parts), dtype=np.uint8), [len(part["x"]) for part in parts])
    names = {"ts_names": icu.SERIES, "static_names": icu.STATIC, "outcome_names": OUTCOMES}
    return {icu.FILE: arrays | {name: np.array(words) for name, words in names.items()}}


def read_stay(text: str) -> tuple[Array, Array]:
    """Read one stay: lines "hh:mm,variable,value" under a header.

    A negative value stands for one that is missing. What is measured at the end, 48:00, belongs to the last hour.

    Returns:
        Means of every hour (48, 37), NaN where nothing was measured, and what is known at admission (5,), float32.
    """
    series, static = {name: k for k, name in enumerate(icu.SERIES)}, {name: k for k, name in enumerate(icu.STATIC)}
    total, count = np.zeros((2, icu.HOURS, len(series)))
    admission = np.full(len(static), np.nan, np.float32)
    for time, variable, value in _measured(text.splitlines()[1:]):
        if time == _START and variable in static and np.isnan(admission[static[variable]]):
            admission[static[variable]] = value
        if variable in series:
            hour = min(int(time.partition(":")[0]), icu.HOURS - 1)
            total[hour, series[variable]] += value
            count[hour, series[variable]] += 1
    mean = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return mean.astype(np.float32), admission


def _measured(lines: Iterable[str]) -> Iterable[tuple[str, str, float]]:
    """Yield time, variable and value of every line with a value that is not missing."""
    for line in lines:
        time, variable, value = line.split(",")
        if variable and float(value) >= 0:
            yield time, variable, float(value)


def _set(folder: Path, name: str) -> dict[str, Array]:
    """Read the records of a set in the order of their numbers, and the outcomes of the same stays."""
    unpacked = folder / name
    if unpacked.is_dir():
        texts = {int(path.stem): path.read_text() for path in unpacked.glob("*.txt")}
    else:
        contents = read_tar(folder / f"{name}.tar.gz", ending=(".txt",))
        texts = {int(Path(path).stem): text.decode() for path, text in contents.items()}
    header, *lines = (folder / f"Outcomes-{name[-1]}.txt").read_text().split()
    if tuple(header.split(",")) != OUTCOMES:
        raise ValueError(
            f"{folder / f'Outcomes-{name[-1]}.txt'} has the columns {header}, expected {','.join(OUTCOMES)}. Get the "
            "file anew."
        )
    rows = {int(line.partition(",")[0]): [int(value) for value in line.split(",")] for line in lines}
    if set(rows) != set(texts):
        raise ValueError(
            f"{name} has {len(texts)} records and {len(rows)} outcomes, which are not those of the same stays. Get "
            "the files anew."
        )
    stays = [read_stay(texts[record]) for record in sorted(texts)]
    return {
        "x": np.stack([x for x, _ in stays]),
        "static": np.stack([static for _, static in stays]),
        "outcomes": np.array([rows[record] for record in sorted(rows)], np.int32),
    }
