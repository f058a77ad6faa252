"""The comparison as text: Markdown for pages, a table for the terminal."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from leanbayes.report.load import Failure, Group, Results
from leanbayes.report.provenance import provenance
from leanbayes.report.table import comparison, Table
from leanbayes.report.verdict import RULE, verdict

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

WIDTH = 100
NAME_WIDTH = 8
"""Columns of the terminal that names of methods get at least; longer ones are folded."""
MARKDOWN_MARKS = {"best": "**{}**", "near": "*{}*", "": "{}"}
TERMINAL_MARKS = {"best": "[bold green]{}[/]", "near": "[green]{}[/]", "": "{}"}
LEGEND = (
    "Bold: the best mean. Italic: within one standard error of the difference to it. Costs are not ranked. "
    "± is a standard error over seeds."
)


def markdown(results: Results) -> str:
    """Write every group as a section of Markdown: the verdict, the table, what was run.

    The text depends on the results alone, so a committed table can be rendered again and compared.
    """
    sections = [_section(group) for group in results.groups]
    damaged = [f"Not read: {_inline(sentence)}" for sentence in results.damaged]
    return "\n\n".join([*sections, *damaged]) + "\n"


def terminal(results: Results, console: Console | None = None) -> None:
    """Print every group as a table that fits 100 columns, with the verdict and the failures below.

    A narrower terminal gets fewer figures.

    Args:
        results: what `load_results` returned.
        console: where to print; when not given, standard output, at most 100 columns wide.
    """
    from rich.console import Console
    from rich.markup import escape

    if console is None:
        console = Console()
        if not console.is_terminal or console.width > WIDTH:
            console.width = WIDTH
    for group in results.groups:
        if group.contenders:
            _print_table(group, console)
        console.print(f"[bold]{escape(verdict(group).sentence)}[/]", highlight=False)
        for failure in group.failures:
            console.print(f"[red]{escape(_failed(failure))}[/]", highlight=False)
    for sentence in results.damaged:
        console.print(f"[red]Not read: {escape(sentence)}[/]", highlight=False)


def _section(group: Group) -> str:
    """Write one group."""
    history = provenance(group)
    parts = [f"## {_inline(group.title)}", _inline(verdict(group).sentence), RULE]
    if group.contenders:
        parts += [_markdown_table(group), LEGEND]
    parts += [_inline(remark) for remark in history.remarks]
    parts.append("\n".join(f"* {_inline(_failed(failure))}" for failure in group.failures))
    parts.append("\n".join(f"* {name}: {_inline(text)}" for name, text in history.facts))
    parts.append("\n".join(f"* {_inline(f'{each.contender.label}: {each.sentence}')}" for each in history.layers))
    if history.commands:
        parts.append("\n".join(["```text", *(command.replace("`", "'") for command in history.commands), "```"]))
    return "\n\n".join(part for part in parts if part)


def _markdown_table(group: Group) -> str:
    """Write the main columns, means with standard errors."""
    table = comparison(group).only("brief", "main")
    lines = [["Method", *(column.head for column in table.columns)], ["---", *("---:" for _ in table.columns)]]
    for row in table.rows:
        cells = (MARKDOWN_MARKS[cell.mark].format(cell.text) if cell else "" for cell in row.cells)
        lines.append([_inline(row.contender.label), *cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _print_table(group: Group, console: Console) -> None:
    """Print as many of the brief columns as fit, and name the others."""
    from rich.markup import escape

    table = comparison(group).only("brief")
    count = _fitting(table, console.width)
    console.print(_rich_table(group, table, count))
    if left := ", ".join(column.head for column in table.columns[count:]):
        console.print(f"Left out, for the terminal is narrow: {escape(left)}")


def _fitting(table: Table, width: int) -> int:
    """Count the columns that fit beside the names without a number being cut."""
    left = width - NAME_WIDTH - 2  # edges
    for count, column in enumerate(table.columns):
        numbers = (cell.mean for row in table.rows if (cell := row.cells[count]))
        left -= 1 + max(map(len, (*column.head.split(), *numbers)))
        if left < 0:
            return count
    return len(table.columns)


def _rich_table(group: Group, table: Table, count: int) -> RichTable:
    """Lay out the first so many columns; means alone, for width."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table as RichTable

    drawn = RichTable(box=box.SIMPLE_HEAD, title=escape(group.title), title_justify="left", padding=0)
    drawn.add_column("Method", overflow="fold", min_width=NAME_WIDTH, vertical="bottom")
    for column in table.columns[:count]:
        drawn.add_column(escape(column.head.replace(" ", "\n")), justify="right", vertical="bottom", no_wrap=True)
    for row in table.rows:
        cells = (TERMINAL_MARKS[cell.mark].format(cell.mean) if cell else "" for cell in row.cells[:count])
        drawn.add_row(escape(row.contender.label), *cells)
    return drawn


def _failed(failure: Failure) -> str:
    """Tell of a failure in one line: the last line of a traceback says what went wrong."""
    lines = failure.error.strip().splitlines() or [""]
    return f"Failed: {failure.label}, seed {failure.seed}: {lines[-1]} ({failure.path})"


def _inline(text: str) -> str:
    """Escape what Markdown would read as markup, and keep the text on one line."""
    return re.sub(r"([\\`*_|<>\[\]#])", r"\\\1", " ".join(text.split()))
