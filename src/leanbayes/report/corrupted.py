"""What runs tell about corrupted images: means, errors relative to the plain network, curves over severity."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from leanbayes import shift
from leanbayes.report.estimate import number
from leanbayes.report.load import Run

Rows = Sequence[dict[str, Any]]
MEASURES = ("accuracy", "nll", "ece", "epistemic", "aleatoric")


def rows_of(run: Run) -> list[dict[str, Any]]:
    """Return the rows {corruption, severity, accuracy, nll, ece, ...} of a run, without those that lack a number."""
    rows = [dict(row) for row in run.rows("metrics", "shift")]
    return [row for row in rows if all(number(row.get(key)) is not None for key in ("severity", *MEASURES))]


def mean_rows(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """Average rows over seeds: the plain network's are what an mCE divides by."""
    found: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for run in runs:
        for row in rows_of(run):
            found.setdefault((str(row["corruption"]), row["severity"]), []).append(row)
    return [
        {"corruption": name, "severity": severity, **{m: statistics.fmean(r[m] for r in rows) for m in MEASURES}}
        for (name, severity), rows in found.items()
    ]


def corrupted_facts(run: Run, plain: Rows) -> dict[str, float | None]:
    """Return means over corruptions and severities and, where the plain network is known, the (relative) mCE."""
    rows = rows_of(run)
    if not any(row["severity"] for row in rows):
        return {}
    facts: dict[str, float | None] = dict(shift.corrupted_means(rows))
    if _cells(rows) == _cells(plain):
        facts["mce"] = number(shift.mce(rows, plain))
        if any(severity == 0 for _, severity in _cells(rows)):
            facts["relative_mce"] = number(shift.relative_mce(rows, plain))
    return facts


def over_severity(run: Run, measure: str) -> dict[float, float | None]:
    """Average one measure over the corruptions of each severity; severity 0 is the clean images."""
    rows = rows_of(run)
    severities = sorted({float(row["severity"]) for row in rows})
    return dict(zip(severities, shift.severity_curve(rows, measure), strict=True))


def _cells(rows: Rows) -> set[tuple[str, float]]:
    return {(str(row["corruption"]), row["severity"]) for row in rows}
