"""How the regressions of ensemble model patching are shown: sentences, a figure for each set, and the whole table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from leanbayes_papers.overview import Overview
from leanbayes_papers.study import new_figure, Numbers, save_figure

HEADS = {"rmse": "RMSE", "lpd": "LPD"}
SIGN = {"rmse": 1.0, "lpd": -1.0}
"""Whether more is worse (1) or better (-1)."""

ERRORS, ROUNDING = 2.0, 0.005
NOTES = {
    "uci-energy": "The paper has both targets, our copy the heating load alone.",
    "uci-naval": "The paper has both targets, our copy the decay of the compressor alone.",
    "uci-protein": "The targets have a standard deviation of 6.1: an RMSE of 1.95 would leave a tenth of the variance.",
}
"""What else there is to know of a set."""


def against(row: Mapping[str, Any], measure: str) -> Literal["worse", "equal", "better"]:
    """Compare a number with the paper's: equal where both differ by at most 2 sqrt(sem^2 + sem'^2) + 0.005."""
    ours, paper = row["ours"][measure], row["paper"][measure]
    worse = SIGN[measure] * (ours["mean"] - paper["value"])
    if abs(worse) <= ERRORS * math.hypot(ours["sem"] or 0.0, paper["spread"]) + ROUNDING:
        return "equal"
    return "worse" if worse > 0 else "better"


def say_set(numbers: Numbers) -> list[str]:
    """Tell both measures of every method."""
    return [f"{row['method']}: {'; '.join(_beside(row, measure) for measure in HEADS)}" for row in numbers["rows"]]


def overview(studies: Mapping[str, Numbers]) -> Overview:
    """Put all sets into one table, and count for every method where its numbers are worse, equal and better."""
    rows = [(numbers["data"], row) for numbers in studies.values() for row in numbers["rows"]]
    heads = ["", "method", *(f"{head}{of}" for head in HEADS.values() for of in (", ours", ", paper", ": ours is"))]
    lines = []
    for name, row in rows:
        cells = [(_ours(row, m), _paper(row, m), against(row, m)) for m in HEADS]
        lines.append([name, row["method"], *(cell for three in cells for cell in three)])
    methods = dict.fromkeys(row["method"] for _, row in rows)
    says = [_count(method, [(name, row) for name, row in rows if row["method"] == method]) for method in methods]
    says += [f"{name}: {NOTES[name]}" for name in studies if name in NOTES]
    return Overview(title="Ensemble model patching, Tables 12 and 13", heads=heads, rows=lines, says=says)


def draw_set(numbers: Numbers, path: Path) -> None:
    """Draw both measures of every method with two standard errors, ours beside the paper's."""
    rows = numbers["rows"]
    figure = new_figure(6.4, 2.6)
    for axis, (measure, head) in zip(figure.subplots(1, 2), HEADS.items(), strict=True):
        places = range(len(rows))
        ours = [row["ours"][measure] for row in rows]
        paper = [row["paper"][measure] for row in rows]
        errors = [ERRORS * (one["sem"] or 0.0) for one in ours]
        axis.errorbar([p - 0.1 for p in places], [one["mean"] for one in ours], errors, fmt="o", label="ours")
        errors = [ERRORS * one["spread"] for one in paper]
        axis.errorbar([p + 0.1 for p in places], [one["value"] for one in paper], errors, fmt="s", label="paper")
        axis.set(title=f"{numbers['data']}: {head}", xticks=list(places))
        axis.set_xticklabels([row["method"] for row in rows])
    figure.axes[0].legend()
    save_figure(figure, path)


def _count(method: str, rows: list[tuple[str, Mapping[str, Any]]]) -> str:
    """Say on how many sets no number of a method is worse than the paper's, the counts of both, and the exceptions."""
    worse = {name: [measure for measure in HEADS if against(row, measure) == "worse"] for name, row in rows}
    exceptions = [f"{name} ({', '.join(_beside(row, m) for m in worse[name])})" for name, row in rows if worse[name]]
    told = f"; worse: {', '.join(exceptions)}" if exceptions else ""
    counts = "; ".join(f"{head} {_counted(rows, measure)}" for measure, head in HEADS.items())
    return f"{method}: neither is worse on {len(rows) - len(exceptions)} of {len(rows)} sets ({counts}){told}."


def _counted(rows: list[tuple[str, Mapping[str, Any]]], measure: str) -> str:
    """Write how many sets are worse, equal and better."""
    found = [against(row, measure) for _, row in rows]
    return ", ".join(f"{found.count(kind)} {kind}" for kind in ("worse", "equal", "better"))


def _beside(row: Mapping[str, Any], measure: str) -> str:
    return f"{HEADS[measure]} {_ours(row, measure)}, paper {_paper(row, measure)}"


def _ours(row: Mapping[str, Any], measure: str) -> str:
    found = row["ours"][measure]
    mean = found["mean"]
    digits = 3 if abs(mean) >= 0.1 else 5
    return f"{mean:.{digits}f}" + (f" ± {found['sem']:.{digits}f}" if found["sem"] is not None else "")


def _paper(row: Mapping[str, Any], measure: str) -> str:
    return f"{row['paper'][measure]['value']:.2f} ± {row['paper'][measure]['spread']:.2f}"
