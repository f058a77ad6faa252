"""Tables as text: Markdown for pages, rich tables for the terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TYPE_CHECKING

from leanbayes.report.load import Failure, Group, Results
from leanbayes.report.provenance import provenance, TUNED
from leanbayes.report.table import comparison
from leanbayes.report.verdict import RULE, verdict

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

WIDTH = 100
NAME_WIDTH = 8  # least width of the methods' names in the terminal; longer names are folded
MARKDOWN_MARKS = {"best": "**{}**", "near": "*{}*", "": "{}"}
TERMINAL_MARKS = {"best": "[bold green]{}[/]", "near": "[green]{}[/]", "": "{}"}
LEGEND = (
    "Bold: the best mean. Italic: within one standard error of the difference to it. Costs are not ranked. "
    "± is a standard error over seeds."
)


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of text.

    Attributes:
        heads: names of the columns.
        rows: cells of each row.
        marks: "best", "near" or "" for each cell; empty if no cell is marked.
        title: heading in the terminal.
        left: number of columns with text, aligned left; the others hold numbers, aligned right.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    marks: Sequence[Sequence[str]] = ()
    title: str = ""
    left: int = 1

    def markdown(self) -> str:
        ruler = ["---" if i < self.left else "---:" for i in range(len(self.heads))]
        texts = [[inline(cell) if i < self.left else cell for i, cell in enumerate(row)] for row in self.rows]
        lines = [list(self.heads), ruler, *_marked(texts, self.marks, MARKDOWN_MARKS)]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)

    def rich(self) -> RichTable:
        from rich import box
        from rich.markup import escape
        from rich.table import Table as RichTable

        with_numbers = self.left < len(self.heads)
        padding = 0 if with_numbers else (0, 1, 0, 0)
        vertical: Literal["bottom", "top"] = "bottom" if with_numbers else "top"
        made = RichTable(box=box.SIMPLE_HEAD, title=escape(self.title), title_justify="left", padding=padding)
        for i, head in enumerate(self.heads):
            if i < self.left:
                made.add_column(escape(head), overflow="fold", min_width=NAME_WIDTH, vertical=vertical)
            else:
                made.add_column(escape(head.replace(" ", "\n")), justify="right", vertical="bottom", no_wrap=True)
        texts = [[escape(cell) for cell in row] for row in self.rows]
        for row in _marked(texts, self.marks, TERMINAL_MARKS):
            made.add_row(*row)
        return made

    def print(self) -> None:
        from rich.console import Console

        Console().print(self.rich(), highlight=False)


def _marked(
    rows: Sequence[Sequence[str]], marks: Sequence[Sequence[str]], forms: dict[str, str]
) -> Sequence[Sequence[str]]:
    if not marks:
        return rows
    return [
        [forms[mark].format(cell) if cell else "" for cell, mark in zip(*pair, strict=True)]
        for pair in zip(rows, marks, strict=True)
    ]


def markdown(results: Results) -> str:
    """Return each group as a section of Markdown: the verdict, the table, the settings.

    The text depends on the results alone, so a committed table can be checked against them.
    """
    sections = [_section(group) for group in results.groups]
    damaged = [f"Not read: {inline(sentence)}" for sentence in results.damaged]
    return "\n\n".join([*sections, *damaged]) + "\n"


def terminal(results: Results, console: Console | None = None) -> None:
    """Print each group as a table of at most 100 columns, with the verdict and the failures below.

    A narrower terminal gets fewer figures. The default console is standard output.
    """
    from rich.console import Console
    from rich.markup import escape

    if console is None:
        console = Console()
        if not console.is_terminal or console.width > WIDTH:
            console.width = WIDTH
    for group in results.groups:
        if group.contenders:
            _print_group(group, console)
        found = verdict(group)
        console.print(f"[bold]{escape(found.sentence)}[/]", highlight=False)
        for need in found.needs:
            console.print(f"{escape(need.name)}: {escape(need.sentence)}", highlight=False)
        for line in _failed(group.failures):
            console.print(f"[red]{escape(line)}[/]", highlight=False)
    for sentence in results.damaged:
        console.print(f"[red]Not read: {escape(sentence)}[/]", highlight=False)


def inline(text: str) -> str:
    """Escape Markdown's special characters, and keep the text on one line."""
    return re.sub(r"([\\`*_|<>\[\]#])", r"\\\1", " ".join(text.split()))


def _section(group: Group) -> str:
    history = provenance(group)
    found = verdict(group)
    parts = [f"## {inline(group.title)}", inline(found.sentence)]
    parts += ["\n".join(f"* {need.name}: {inline(need.sentence)}" for need in found.needs), RULE]
    if group.contenders:
        parts += [_table(group, ("brief", "main", "text"), with_errors=True).markdown(), LEGEND]
    parts += [inline(remark) for remark in history.remarks]
    parts.append("\n".join(f"* {inline(line)}" for line in _failed(group.failures)))
    parts.append("\n".join(f"* {name}: {inline(text)}" for name, text in history.facts))
    parts.append("\n".join(f"* {inline(f'{each.contender.label}: {each.sentence}')}" for each in history.layers))
    if history.tuned:
        parts.append("\n".join([TUNED, "", *(f"* {inline(f'{t.contender.label}: {t.line}')}" for t in history.tuned)]))
    if history.commands:
        parts.append("\n".join(["```text", *(command.replace("`", "'") for command in history.commands), "```"]))
    return "\n\n".join(part for part in parts if part)


def _table(group: Group, places: Sequence[str], *, with_errors: bool) -> Table:
    found = comparison(group).only(*places)
    return Table(
        heads=["Method", *(column.head for column in found.columns)],
        rows=[
            [row.contender.label, *((c.text if with_errors else c.mean) if c else "" for c in row.cells)]
            for row in found.rows
        ],
        marks=[["", *(cell.mark if cell else "" for cell in row.cells)] for row in found.rows],
        title=group.title,
    )


def _print_group(group: Group, console: Console) -> None:
    """Print as many of the brief columns as fit, and name the others."""
    from rich.markup import escape

    table = _table(group, ("brief",), with_errors=False)
    count = _fitting(table, console.width)
    rows, marks = ([row[:count] for row in cells] for cells in (table.rows, table.marks))
    console.print(replace(table, heads=table.heads[:count], rows=rows, marks=marks).rich())
    if left := ", ".join(table.heads[count:]):
        console.print(f"Left out, for the terminal is narrow: {escape(left)}")


def _fitting(table: Table, width: int) -> int:
    """Return the number of columns that fit without cutting a number."""
    left = width - NAME_WIDTH - 2  # edges
    for i, head in enumerate(table.heads[1:], 1):
        left -= 1 + max(map(len, (*head.split(), *(row[i] for row in table.rows))))
        if left < 0:
            return i
    return len(table.heads)


def _failed(failures: Sequence[Failure]) -> list[str]:
    """Return failures in a line each, with the last line of the traceback; seeds with the same one share a line."""
    alike: dict[tuple[str, str], list[Failure]] = {}
    for failure in failures:
        last = (failure.error.strip().splitlines() or [""])[-1]
        alike.setdefault((failure.label, last), []).append(failure)
    lines = []
    for (label, last), some in alike.items():
        seeds = f"seed{'s' if len(some) > 1 else ''} {', '.join(each.seed for each in some)}"
        lines.append(f"Failed: {label}, {seeds}: {last} ({some[0].path})")
    return lines
