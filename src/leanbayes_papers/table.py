"""Ours beside the paper's: two lines for every row, as JSON, as Markdown, in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

from leanbayes.evaluation.statistics import Estimate, estimate, number
from leanbayes.shift import corrupted_means
from leanbayes_papers.suite import Printed, Row, Table

if TYPE_CHECKING:
    from rich.table import Table as RichTable

Result = Mapping[str, Any]
ResultsOf = Callable[[Row], Sequence[Result]]


@dataclass(frozen=True)
class Measure:
    """A column: how it is headed, how many decimals it is written with, and how it is read from a result."""

    head: str
    digits: int
    read: Callable[[Result], float | None]


def _test(name: str, scale: float = 1.0, offset: float = 0.0) -> Callable[[Result], float | None]:
    """Return offset + scale * a figure on the test data."""

    def read(result: Result) -> float | None:
        value = number(result.get("metrics", {}).get("test", {}).get(name))
        return None if value is None else offset + scale * value

    return read


def _corrupted(name: str, scale: float = 1.0) -> Callable[[Result], float | None]:
    """Return the mean of a figure over all corruptions and severities, times scale; None where some are missing."""

    def read(result: Result) -> float | None:
        rows = result.get("metrics", {}).get("shift", [])
        if not any(row["severity"] > 0 for row in rows) or any(None in row.values() for row in rows):
            return None
        return scale * corrupted_means(rows)[name]

    return read


def _parameters(result: Result) -> float | None:
    """Return the parameters of the model in millions: those of the plain network and what the method adds."""
    cost = result.get("cost", {})
    counts = [number(cost.get(name)) for name in ("parameters", "extra_parameters")]
    return None if None in counts else sum(count or 0.0 for count in counts) / 1e6


MEASURES: dict[str, Measure] = {
    "nll": Measure("NLL", 4, _test("nll")),
    "accuracy": Measure("acc., %", 2, _test("accuracy", 100)),
    "error": Measure("error, %", 2, _test("accuracy", -100, 100)),
    "ece": Measure("ECE", 4, _test("ece")),
    "ece20": Measure("ECE, 20 bins", 4, _test("ece20")),
    "top5": Measure("top-5, %", 2, _test("top5", 100)),
    "c_nll": Measure("corr. NLL", 3, _corrupted("nll")),
    "c_accuracy": Measure("corr. acc., %", 1, _corrupted("accuracy", 100)),
    "c_ece": Measure("corr. ECE", 3, _corrupted("ece")),
    "disagreement": Measure("disagr. / error", 3, _test("disagreement")),
    "parameters": Measure("parameters, M", 3, _parameters),
}


def as_record(table: Table, results_of: ResultsOf) -> dict[str, Any]:
    """Return a table with our means and standard errors, as JSON holds it."""
    return {
        "title": table.title,
        "claim": table.claim,
        "measures": {name: MEASURES[name].head for name in table.measures},
        "rows": [
            {
                "name": row.name,
                "data": row.job.source.name,
                "net": row.job.net,
                "label": row.job.label,
                "ours": {
                    name: {"mean": found.mean, "sem": found.sem, "count": found.count}
                    for name, found in _ours(row, table.measures, results_of).items()
                    if found is not None
                },
                "paper": {
                    name: {"value": row.paper[name].value, "spread": row.paper[name].spread}
                    for name in table.measures
                    if name in row.paper
                },
            }
            for row in table.rows
        ],
    }


def lines_of(table: Table, results_of: ResultsOf) -> list[list[str]]:
    """Return the written lines of a table: the row's name, whose numbers they are, the numbers.

    The paper's line is left out where it has no numbers.
    """
    lines = []
    for row in table.rows:
        ours = _ours(row, table.measures, results_of)
        lines.append([row.name, "ours", *(_estimate(name, ours[name]) for name in table.measures)])
        if row.paper:
            lines.append(["", "paper", *(_printed(row.paper.get(name)) for name in table.measures)])
    return lines


def heads_of(table: Table) -> list[str]:
    """Return the heads of the columns."""
    return ["", "", *(MEASURES[name].head for name in table.measures)]


def markdown(table: Table, results_of: ResultsOf) -> str:
    """Write a table in Markdown, with its title and the paper's claim."""
    heads = heads_of(table)
    ruler = ["---", "---", *("---:" for _ in table.measures)]
    lines = [heads, ruler, *lines_of(table, results_of)]
    body = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"## {table.title}\n\n{body}\n\nThe paper: {table.claim}\n"


def rich_table(table: Table, results_of: ResultsOf) -> RichTable:
    """Lay a table out for the terminal."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table as RichTable

    drawn = RichTable(box=box.SIMPLE_HEAD, title=escape(table.title), title_justify="left", padding=(0, 1, 0, 0))
    for position, head in enumerate(heads_of(table)):
        left = position < 2  # the row's name, and whose numbers they are
        drawn.add_column(escape(head), justify="left" if left else "right", vertical="bottom", overflow="fold")
    for line in lines_of(table, results_of):
        drawn.add_row(*map(escape, line), style="dim" if line[1] == "paper" else "")
    return drawn


def _ours(row: Row, measures: Sequence[str], results_of: ResultsOf) -> dict[str, Estimate | None]:
    results = results_of(row)
    return {name: estimate(MEASURES[name].read(result) for result in results) for name in measures}


def _estimate(measure: str, found: Estimate | None) -> str:
    if found is None:
        return "-"
    digits = MEASURES[measure].digits
    sem = "" if found.sem is None else f" ± {found.sem:.{digits}f}"
    return f"{found.mean:.{digits}f}{sem}"


def _printed(printed: Printed | None) -> str:
    return "-" if printed is None else printed.text.replace("±", " ± ")
