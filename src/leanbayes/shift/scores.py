"""Scores of a corruption sweep, from records {corruption, severity, accuracy, nll, ece, epistemic, aleatoric}.

With E(c, s) the error (1 - accuracy) under corruption c at severity s, S severities, and E' that of the plain network:
    mCE          = mean_c  sum_s E(c, s) / sum_s E'(c, s),
    relative mCE = mean_c  (sum_s E(c, s) - S E(clean)) / (sum_s E'(c, s) - S E'(clean)).
1 equals the plain network, less is better (Hendrycks & Dietterich, 2019; they give per cent).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

Row = Mapping[str, Any]


def corrupted_means(rows: Sequence[Row]) -> dict[str, float]:
    """Return the mean accuracy (cA), nll (cNLL) and ece (cECE) over corruptions and severities, without clean rows."""
    corrupted = [row for row in rows if row["severity"] > 0]
    if not corrupted:
        raise ValueError("expected rows of severity 1 to 5, got none. Evaluate corrupted images first.")
    return {key: fmean(row[key] for row in corrupted) for key in ("accuracy", "nll", "ece")}


def severity_curve(rows: Sequence[Row], key: str) -> list[float]:
    """Return the mean of a number over corruptions, for each severity from the lowest (0: clean) up."""
    severities = sorted({row["severity"] for row in rows})
    return [fmean(row[key] for row in rows if row["severity"] == severity) for severity in severities]


def mean_corruption_error(rows: Sequence[Row], plain_rows: Sequence[Row]) -> float:
    """Return the mean corruption error relative to the plain network; nan if that network makes no error."""
    return _mean_ratio(_errors(rows), _errors(plain_rows))


def relative_mean_corruption_error(rows: Sequence[Row], plain_rows: Sequence[Row]) -> float:
    """Return the mean ratio of the errors that corruption adds; nan if it adds none to the plain network."""
    return _mean_ratio(_added_errors(rows), _added_errors(plain_rows))


def _errors(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Return the error by corruption and severity."""
    errors: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["severity"] > 0:
            errors.setdefault(row["corruption"], {})[row["severity"]] = 1 - row["accuracy"]
    return errors


def _added_errors(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Return the errors minus the clean one."""
    clean = [1 - row["accuracy"] for row in rows if row["severity"] == 0]
    if len(clean) != 1:
        raise ValueError(f"expected one clean row (severity 0), got {len(clean)}. Begin the sweep with clean images.")
    return {
        name: {severity: error - clean[0] for severity, error in by_severity.items()}
        for name, by_severity in _errors(rows).items()
    }


def _mean_ratio(errors: dict[str, dict[int, float]], plain: dict[str, dict[int, float]]) -> float:
    """Return the mean over corruptions of the ratio of two sums over severities."""
    covered = {name: set(by_severity) for name, by_severity in errors.items()}
    if not errors or covered != {name: set(by_severity) for name, by_severity in plain.items()}:
        raise ValueError(
            f"expected rows of the same corruptions and severities from both networks, got {sorted(errors)} and "
            f"{sorted(plain)}. Evaluate both with the same Shift."
        )
    sums = [(sum(by_severity.values()), sum(plain[name].values())) for name, by_severity in errors.items()]
    return fmean(own / against if against else math.nan for own, against in sums)
