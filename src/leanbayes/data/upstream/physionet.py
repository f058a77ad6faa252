"""PhysioNet 2012: first 48 hours of 12,000 intensive-care stays, and deaths in hospital (Silva et al. 2012).

The hourly mean of a variable becomes a token: its quantile bin, 1 to 10, or 0 if it was not measured. Set a is for
training and defines the bins; sets b and c are for testing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from leanbayes.data.cache import read_cached, sha256_of_files
from leanbayes.data.dataset import Array, DataSet, Split
from leanbayes.data.files.npz import read_array
from leanbayes.data.upstream import Files, read_tar

# N stays, V variables

BINS = 10
"""Largest number of bins of a variable."""

NOT_MEASURED = 0

FILE = "physionet2012_hourly.npz"
HOURS = 48
SERIES = (
    "ALP", "ALT", "AST", "Albumin", "BUN", "Bilirubin", "Cholesterol", "Creatinine", "DiasABP", "FiO2", "GCS",
    "Glucose", "HCO3", "HCT", "HR", "K", "Lactate", "MAP", "MechVent", "Mg", "NIDiasABP", "NIMAP", "NISysABP", "Na",
    "PaCO2", "PaO2", "Platelets", "RespRate", "SaO2", "SysABP", "Temp", "TroponinI", "TroponinT", "Urine", "WBC",
    "Weight", "pH",
)  # fmt: skip
"""Repeatedly measured variables, in the order of the columns."""

STATIC = ("Age", "Gender", "Height", "ICUType", "Weight")
"""Variables known at admission; their columns follow those of the series."""

SHAPE = (HOURS, len(SERIES) + len(STATIC))
"""Shape of one stay: hours, variables."""

CLASSES = ("survived", "died")
SETS = ("set-a", "set-b", "set-c")
OUTCOMES = ("RecordID", "SAPS-I", "SOFA", "Length_of_stay", "Survival", "In-hospital_death")
_DEATH = OUTCOMES[-1]
_START = "00:00"


def quantile_edges(x: Array, bins: int = BINS) -> list[Array]:
    """Return the bin edges of every variable: its distinct quantiles at 1/bins, ..., (bins - 1)/bins.

    Every edge is a measured value. A variable with few values (yes or no, a score) has fewer bins.

    Args:
        x: Training values (N, ..., V); NaN is not measured.
        bins: Largest number of bins of a variable.
    """
    shares = np.arange(1, bins) / bins
    columns = x.reshape(-1, x.shape[-1]).T
    measured = [column[~np.isnan(column)] for column in columns]
    none = np.empty(0, x.dtype)
    return [np.unique(np.quantile(v, shares, method="inverted_cdf")) if len(v) else none for v in measured]


def binned(x: Array, edges: Sequence[Array]) -> Array:
    """Return the bin of every value, uint8 of the shape of `x`: 0 for NaN, else 1 + (number of edges below it).

    The first and the last bin are open, so they absorb outliers. `edges` is the result of `quantile_edges`.
    """
    found = np.empty(x.shape, np.uint8)
    for variable, between in enumerate(edges):
        values = x[..., variable]
        # An edge belongs to the bin below it: a value that several quantiles share has its own bin.
        place = 1 + np.searchsorted(between, values, side="left")
        found[..., variable] = np.where(np.isnan(values), NOT_MEASURED, place)
    return found


def load_physionet2012(root: Path) -> DataSet:
    """Read the stays from the cache as tokens, int64 (48, 42) each.

    Variables known at admission are repeated in every hour: a network that read them once did worse on held-out stays
    of set a. The ten stays without any series are kept.

    Returns:
        Set a to train on, set b to test on; ``further`` has "set-c".
    """
    path = root / FILE
    series, static, death, number = _read(path)
    in_a = number == 0
    hourly = binned(series, quantile_edges(series[in_a]))
    admission = binned(static, quantile_edges(static[in_a]))
    tokens = np.concatenate([hourly, np.repeat(admission[:, None], HOURS, axis=1)], axis=-1)
    splits = {
        name: Split(torch.from_numpy(tokens[number == k]).long(), torch.from_numpy(death[number == k]).long())
        for k, name in enumerate(SETS)
    }
    return DataSet(
        name="physionet2012",
        task="classification",
        train=splits.pop("set-a"),
        test=splits.pop("set-b"),
        classes=CLASSES,
        sha256=sha256_of_files([path]),
        further=splits,
    )


def _read(path: Path) -> tuple[Array, Array, Array, Array]:
    """Return series (N, 48, 37), static variables (N, 5), deaths (N,) and set numbers (N,), checked."""
    series, static, outcomes = (read_cached(path, name) for name in ("x", "static", "outcomes"))
    number, *named = (read_array(path, name) for name in ("set_id", "ts_names", "static_names", "outcome_names"))
    count, (measured, known, results) = len(series), (tuple(map(str, names)) for names in named)
    shapes = (series.shape, static.shape, outcomes.shape, number.shape)
    wanted = ((count, HOURS, len(SERIES)), (count, len(STATIC)), (count, len(results)), (count,))
    if shapes != wanted or (measured, known) != (SERIES, STATIC) or _DEATH not in results:
        raise ValueError(
            f"{path} is not the cache of physionet2012: expected x, static, outcomes and set_id of the shapes (N, "
            f"{HOURS}, {len(SERIES)}), (N, {len(STATIC)}), (N, 6), (N,) with the published names of the variables, got "
            f"{shapes}. Delete it and run `leanbayes data prepare physionet2012`."
        )
    death = outcomes[:, results.index(_DEATH)]
    missing = [name for k, name in enumerate(SETS) if set(np.unique(death[number == k])) != {0, 1}]
    if missing:
        raise ValueError(
            f"{path} is not the cache of physionet2012: expected survivors (0) and deaths (1) in each of "
            f"{', '.join(SETS)}, got others in {missing[0]}. Delete it and run `leanbayes data prepare physionet2012`."
        )
    return series, static, death, number


def physionet2012(folder: Path) -> Files:
    """Convert the records and outcomes of the three sets, from the archives or from the unpacked folders."""
    parts = [_set(folder, name) for name in SETS]
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    arrays["set_id"] = np.repeat(np.arange(len(parts), dtype=np.uint8), [len(part["x"]) for part in parts])
    names = {"ts_names": SERIES, "static_names": STATIC, "outcome_names": OUTCOMES}
    return {FILE: arrays | {name: np.array(words) for name, words in names.items()}}


def read_stay(text: str) -> tuple[Array, Array]:
    """Read one stay: lines "hh:mm,variable,value" under a header.

    Negative values are missing values. Measurements at 48:00 belong to the last hour.

    Returns:
        Hourly means (48, 37), NaN if not measured, and the variables at admission (5,), float32.
    """
    series, static = {name: k for k, name in enumerate(SERIES)}, {name: k for k, name in enumerate(STATIC)}
    total, count = np.zeros((2, HOURS, len(series)))
    admission = np.full(len(static), np.nan, np.float32)
    for time, variable, value in _measured(text.splitlines()[1:]):
        if time == _START and variable in static and np.isnan(admission[static[variable]]):
            admission[static[variable]] = value
        if variable in series:
            hour = min(int(time.partition(":")[0]), HOURS - 1)
            total[hour, series[variable]] += value
            count[hour, series[variable]] += 1
    mean = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return mean.astype(np.float32), admission


def _measured(lines: Iterable[str]) -> Iterable[tuple[str, str, float]]:
    """Yield time, variable and value of the lines, without missing values."""
    for line in lines:
        time, variable, value = line.split(",")
        if variable and float(value) >= 0:
            yield time, variable, float(value)


def _set(folder: Path, name: str) -> dict[str, Array]:
    """Read the records of a set in the order of their numbers, and their outcomes."""
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
            "file again."
        )
    rows = {int(line.partition(",")[0]): [int(value) for value in line.split(",")] for line in lines}
    if set(rows) != set(texts):
        raise ValueError(
            f"{name} has {len(texts)} records and {len(rows)} outcomes, which are not those of the same stays. Get "
            "the files again."
        )
    stays = [read_stay(texts[record]) for record in sorted(texts)]
    return {
        "x": np.stack([x for x, _ in stays]),
        "static": np.stack([static for _, static in stays]),
        "outcomes": np.array([rows[record] for record in sorted(rows)], np.int32),
    }
