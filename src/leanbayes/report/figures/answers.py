"""Answers in detail: confusion matrices, predicted and true targets, and how well uncertainty finds other inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leanbayes.evaluation.statistics import Estimate, number
from leanbayes.report.figures.labels import cross, name_points
from leanbayes.report.load import Contender, cut, Group, Run
from leanbayes.report.svg import Axis, Chart, ends, Figure, linear_axis, Numbers, Panel, Size, SMALL, write
from leanbayes.report.table import CHANCE, estimates_of

SQUARE = Size(width=380, height=330, left=70, bottom=52)
WRITTEN = 10  # classes up to which the cells of a confusion matrix have numbers
NAME = 8  # letters of a class on an axis
Matrix = list[list[int]]
TARGETS = ("row", "target", "predicted", "low", "high")


def confusion_figure(group: Group, preferred: Contender | None) -> Figure | None:
    """Plot true against predicted classes, of the plain network and of the preferred contender."""
    wanted = [c for c in group.contenders if c.is_reference or (preferred and c.series == preferred.series)]
    found = [(c, matrix) for c in wanted if (matrix := _confusion(c.runs)) is not None]
    if not found:
        return None
    count = len(found[0][1])
    found = [(c, matrix) for c, matrix in found if len(matrix) == count]
    names = _class_names(group.runs, count)
    rows = [(c.label, names[i], *map(str, row)) for c, matrix in found for i, row in enumerate(matrix)]
    return Figure(
        key="confusion",
        title="Confusion matrix",
        caption="Test inputs by true class (down) and predicted class (across), summed over seeds. The diagonal is "
        "right. The shade is the share of the true class.",
        panels=[Panel(c.label, _matrix(c, matrix, names), contender=c) for c, matrix in found],
        numbers=Numbers(("Method", "True class", *names), rows),
    )


def _confusion(runs: Sequence[Run]) -> Matrix | None:
    """Add the matrices of runs; None if there is none."""
    total: Matrix | None = None
    for run in runs:
        matrix = _counts(run.part("figures", "confusion"))
        if matrix is not None and (total is None or len(total) == len(matrix)):
            old = total or [[0] * len(matrix) for _ in matrix]
            total = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(old, matrix, strict=True)]
    return total


def _counts(value: Any) -> Matrix | None:
    """Return a square matrix of whole numbers; None for anything else."""
    rows = value if isinstance(value, list) else []
    if not 2 <= len(rows) <= 20 or any(not isinstance(row, list) or len(row) != len(rows) for row in rows):
        return None
    whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for row in rows for n in row)
    return rows if whole else None


def _class_names(runs: Sequence[Run], count: int) -> list[str]:
    for run in runs:
        names = run.part("data", "classes")
        if isinstance(names, list) and len(names) == count:
            return [cut(str(name)) for name in names]
    return [str(i) for i in range(count)]


def _matrix(contender: Contender, matrix: Matrix, names: list[str]) -> str:
    count = len(matrix)
    chart = Chart(Axis("predicted class", 0, count, ()), Axis("true class", 0, count, ()), SQUARE)
    for i, row in enumerate(matrix):
        total = sum(row)
        for j, cell in enumerate(row):
            if not cell:
                continue
            level = 1 + round(8 * cell / total)
            title = f"{cell} of {names[i]} taken for {names[j]}"
            chart.bar((j, count - i - 1), (j + 1, count - i), f"cell k{level} {contender.look.classes}", title)
            if count <= WRITTEN:
                x, y = chart.at(j + 0.5, count - i - 0.5)
                chart.text((x, y + 4), str(cell), "middle", "count-dark" if level > 6 else "count-light")
    for i, name in enumerate(names):
        short = name if len(name) <= NAME else f"{name[: NAME - 1]}…"
        x, y = chart.at(0, count - i - 0.5)
        chart.text((x - 5, y + 4), short, "end", "number")
        x, y = chart.at(i + 0.5, 0)
        if count <= WRITTEN and max(map(len, names)) <= 4:
            chart.text((x, y + 14), short, "middle", "number")
        else:
            chart.slanted((x + 4, y + 10), short, "number")
    return chart.render(f"{contender.label}: confusion matrix of {count} classes")


def predicted_figure(group: Group) -> Figure | None:
    """Plot predicted against true targets with their intervals, of the first seed of each contender."""
    found = []
    for contender in group.contenders:
        kept = next((rows for run in contender.runs if (rows := _predicted(run))), None)
        if kept:
            found.append((contender, kept))
    if not found:
        return None
    across, upwards = _target_axes([row for _, rows in found for row in rows])
    name = group.target or "target"
    level = next((v for run in group.runs if (v := run.number("figures", "predicted", "level"))), 0.95)
    cells = [(c.label, *(f"{row[key]:.5g}" for key in TARGETS)) for c, kept in found for row in kept]
    return Figure(
        key="predicted",
        title="Predicted against true targets",
        caption=f"Evenly spaced test rows of the first seed, at most 200: the prediction with its {100 * level:g} % "
        f"interval against the true {name}. Points on the dashed line are right; darker lines miss it.",
        panels=[Panel(c.label, _targets(c, kept, across, upwards, name), contender=c) for c, kept in found],
        numbers=Numbers(("Method", "Row", f"True {name}", "Predicted", "Interval from", "Interval to"), cells),
        small=True,
    )


def _predicted(run: Run) -> list[dict[str, float]]:
    rows = [{name: number(row.get(name)) for name in TARGETS} for row in run.rows("figures", "predicted", "rows")]
    return [{k: v for k, v in row.items() if v is not None} for row in rows if None not in row.values()]


def _target_axes(rows: list[dict[str, float]]) -> tuple[Axis, Axis]:
    """Return the axes of true and predicted targets; intervals extend the latter by at most the range of the values."""
    targets = [row["target"] for row in rows]
    values = [*targets, *(row["predicted"] for row in rows)]
    low, high = min(values), max(values)
    span = high - low
    reach = max(low - span, min(row["low"] for row in rows)), min(high + span, max(row["high"] for row in rows))
    return linear_axis("", targets, wanted=3), linear_axis("", (*values, *reach), wanted=3)


def _targets(contender: Contender, rows: list[dict[str, float]], x: Axis, y: Axis, name: str) -> str:
    chart = Chart(Axis(f"true {name}", x.low, x.high, x.ticks[:: max(len(x.ticks) - 1, 1)]), y, SMALL)
    look = contender.look.classes

    def lines(missed: bool) -> list[Any]:
        chosen = [row for row in rows if (row["low"] <= row["target"] <= row["high"]) != missed]
        return [((row["target"], row["low"]), (row["target"], row["high"])) for row in chosen]

    chart.strokes(lines(missed=False), f"interval {look}")
    chart.strokes(lines(missed=True), f"interval missed {look}")
    chart.line([(end, end) for end in (max(x.low, y.low), min(x.high, y.high))], "diagonal")
    chart.strokes([((row["target"], row["predicted"]),) * 2 for row in rows], f"dots {look}")
    missed = len(lines(missed=True))
    return chart.render(f"{contender.label}: predicted against true {name}; {missed} of {len(rows)} intervals miss it")


def ood_figure(group: Group) -> Figure | None:
    """Plot the AUROC by epistemic against that by total uncertainty, for each out-of-distribution set."""
    estimates = estimates_of(group)
    names = sorted({key[1] for found in estimates for key in found if key[0] == "ood" and key[2:] == _TOTAL})
    panels: list[Panel] = []
    rows: list[tuple[str, ...]] = []
    for name in names:
        known = [
            (c, found[("ood", name, *_TOTAL)], found.get(("ood", name, *_EPISTEMIC)))
            for c, found in zip(group.contenders, estimates, strict=True)
            if ("ood", name, *_TOTAL) in found
        ]
        both = [(c, total, epistemic) for c, total, epistemic in known if epistemic is not None]
        if both:
            panels.append(Panel(cut(name), _areas(both, name)))
        rows += [(c.label, cut(name), _area(total), _area(epistemic)) for c, total, epistemic in known]
    if not panels:
        return None
    shown = {c.series for name in names for c, e in zip(group.contenders, estimates, strict=True)
             if ("ood", name, *_EPISTEMIC) in e}  # fmt: skip
    return Figure(
        key="ood",
        title="Detection of out-of-distribution inputs",
        caption="AUROC with the total and with the epistemic uncertainty as the score: 1 separates test from "
        "out-of-distribution inputs, 0.5 is chance. Below 0.5, in the shade, the order is reversed: such inputs look "
        "more familiar than test inputs. Networks without epistemic uncertainty are in the table alone.",
        panels=panels,
        numbers=Numbers(("Method", "Inputs", "AUROC by total", "AUROC by epistemic"), rows),
        legend=tuple(c for c in group.contenders if c.series in shown),
    )


_TOTAL, _EPISTEMIC = ("entropy", "auroc"), ("mutual_information", "auroc")
Area = tuple[Contender, Estimate, Estimate]


def _area(found: Estimate | None) -> str:
    return "" if found is None else write(found) + (" (reversed)" if found.mean < CHANCE else "")


def _areas(found: list[Area], name: str) -> str:
    low = min(0.45, *(end for _, *both in found for each in both for end in ends(each)))
    axis = linear_axis("", (max(low, 0.0), 1.0))
    x = Axis("AUROC by total uncertainty", axis.low, axis.high, axis.ticks)
    chart = Chart(x, Axis("AUROC by epistemic", axis.low, axis.high, axis.ticks))
    if axis.low < CHANCE:
        chart.bar((axis.low, axis.low), (axis.high, CHANCE), "dear", "reversed by epistemic uncertainty")
        chart.bar((axis.low, CHANCE), (CHANCE, axis.high), "dear", "reversed by total uncertainty")
    chart.line([(axis.low, axis.low), (axis.high, axis.high)], "diagonal")
    crosses = []
    for contender, total, epistemic in found:
        place = total.mean, epistemic.mean
        bars = [(end, place[1]) for end in ends(total)], [(place[0], end) for end in ends(epistemic)]
        for bar in bars:
            chart.line(bar, f"whisker {contender.look.classes}")
        crosses.append(cross(chart, place, *bars))
    name_points(chart, crosses, [c.label for c, *_ in found], [])
    for contender, total, epistemic in found:
        title = f"{contender.label}: {write(total)} by total, {write(epistemic)} by epistemic uncertainty"
        chart.marker((total.mean, epistemic.mean), contender.look, title)
    return chart.render(f"AUROC of {name} by epistemic against total uncertainty")
