"""What came of a trained network that was trained on in several ways: lines, table and figure."""

from __future__ import annotations

from pathlib import Path

from leanbayes.evaluation.statistics import estimate
from leanbayes_papers.study import new_figure, Numbers, save_figure

DIGITS = {"error": 2, "nll": 4, "ece": 4}
HEADS = {"error": "error, %", "nll": "NLL", "ece": "ECE"}


def cell(runs: list[dict[str, float]], measure: str) -> str:
    """Write a mean over seeds with its standard error; "-" where nothing was measured."""
    found = estimate(run[measure] for run in runs)
    if found is None:
        return "-"
    digits = DIGITS[measure]
    return f"{found.mean:.{digits}f}" + ("" if found.sem is None else f" ± {found.sem:.{digits}f}")


def gain(numbers: Numbers, name: str, measure: str) -> str:
    """Write how far a row is below the plain network it began with, seed by seed: mean and standard error."""
    pairs = zip(numbers["rows"]["SGD"]["after"], numbers["rows"][name]["after"], strict=True)
    return cell([{measure: start[measure] - end[measure]} for start, end in pairs], measure)


def printed(row: Numbers, measure: str) -> str:
    """Write the paper's number; "-" where it has none."""
    return f"{row['paper'][measure]:.{DIGITS[measure]}f}" if "paper" in row else "-"


def table(numbers: Numbers) -> list[list[str]]:
    """Return the lines of the table: name, then before, after and the paper's for each measure."""
    return [
        [name, *(text for m in DIGITS for text in (cell(row["before"], m), cell(row["after"], m), printed(row, m)))]
        for name, row in numbers["rows"].items()
    ]


def say(numbers: Numbers) -> list[str]:
    """Tell every row, and what it gained on the network it began with."""
    lines = []
    for name, row in numbers["rows"].items():
        parts = [f"{HEADS[m]} {cell(row['after'], m)} (paper: {printed(row, m)})" for m in DIGITS]
        if name != "SGD":
            parts.append("below SGD by " + ", ".join(gain(numbers, name, m) for m in DIGITS))
        if "posterior_bytes" in row:
            parts.append(f"a file of {row['posterior_bytes']:,} bytes holds all that was learned")
        lines.append(f"{name}: {'; '.join(parts)}")
    return lines


def draw(numbers: Numbers, path: Path) -> None:
    """Draw every measure: before as a ring, after as a dot with its standard error, the plain network as a line."""
    figure = new_figure(10, 0.7 + 0.28 * len(numbers["rows"]))
    axes = figure.subplots(1, len(DIGITS), sharey=True)
    names = list(numbers["rows"])
    for axis, measure in zip(axes, DIGITS, strict=True):
        for place, row in enumerate(numbers["rows"].values()):
            before, after = (estimate(run[measure] for run in row[when]) for when in ("before", "after"))
            if before is not None:
                axis.plot(before.mean, place, "o", mfc="none", color="#888888")
            if after is not None:
                axis.errorbar(after.mean, place, xerr=after.sem or 0.0, fmt="o", color="#1f5f9f")
        start = estimate(run[measure] for run in numbers["rows"]["SGD"]["after"])
        assert start is not None
        axis.axvline(start.mean, color="#888888", linewidth=0.8, linestyle=":")
        axis.set(xlabel=HEADS[measure])
    axes[0].set_yticks(range(len(names)), names, fontsize=8)
    axes[0].invert_yaxis()
    save_figure(figure, path)
