"""PhysioNet 2012: the first 48 hours of 12,000 intensive-care stays, and who died in hospital (Silva et al. 2012).

Networks see tokens, as health records have them: which variable was measured in an hour, and in which of ten quantile
bins its hourly mean lies. Set a is for training and defines the bins; sets b and c are for testing.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from leanbayes.data.cache import read_array, read_cached, sha256_of_files
from leanbayes.data.checks import Array
from leanbayes.data.dataset import DataSet, Split
from leanbayes.data.series import binned, quantile_edges

# N stays

FILE = "physionet2012_hourly.npz"
HOURS = 48
SERIES = (
    "ALP", "ALT", "AST", "Albumin", "BUN", "Bilirubin", "Cholesterol", "Creatinine", "DiasABP", "FiO2", "GCS",
    "Glucose", "HCO3", "HCT", "HR", "K", "Lactate", "MAP", "MechVent", "Mg", "NIDiasABP", "NIMAP", "NISysABP", "Na",
    "PaCO2", "PaO2", "Platelets", "RespRate", "SaO2", "SysABP", "Temp", "TroponinI", "TroponinT", "Urine", "WBC",
    "Weight", "pH",
)  # fmt: skip
"""What is measured again and again, in the order of the columns."""

STATIC = ("Age", "Gender", "Height", "ICUType", "Weight")
"""What is known at admission; these columns come behind those of the series."""

SHAPE = (HOURS, len(SERIES) + len(STATIC))
"""Of one stay: a row for every hour, a column for every variable."""

CLASSES = ("survived", "died")
SETS = ("set-a", "set-b", "set-c")
_DEATH = "In-hospital_death"


def load_physionet2012(root: Path) -> DataSet:
    """Read the stays from the cache and turn their values into tokens.

    Rows are int64 (48, 42): the bin of each variable in each hour, 1 to 10, and 0 where it was not measured. What is
    known at admission is repeated in every hour: a network that read it once, before the hours, did worse on held-out
    stays of set a. The ten stays without any series are kept.

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
    """Return series (N, 48, 37), what is static (N, 5), deaths (N,) and numbers of the sets (N,), checked."""
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
