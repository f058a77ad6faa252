"""What the studies of a suite found, side by side: one table and a few sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class Overview:
    """A table as text, and what follows from it.

    Attributes:
        title: what the table shows.
        heads: of its columns.
        rows: its lines.
        says: sentences below it.
    """

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    says: Sequence[str]

    def record(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        return asdict(self)

    def markdown(self) -> str:
        """Write it in Markdown."""
        lines = [self.heads, ["---"] * len(self.heads), *self.rows]
        body = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        says = "\n".join(f"* {sentence}" for sentence in self.says)
        return f"## {self.title}\n\n{body}\n\n{says}\n"

    def show(self, console: Console) -> None:
        """Print the table and the sentences."""
        from rich import box
        from rich.markup import escape
        from rich.table import Table

        drawn = Table(box=box.SIMPLE_HEAD, title=escape(self.title), title_justify="left", padding=(0, 1, 0, 0))
        for head in self.heads:
            drawn.add_column(escape(head), overflow="fold")
        for row in self.rows:
            drawn.add_row(*map(escape, row))
        console.print(drawn)
        for sentence in self.says:
            console.print(escape(sentence), highlight=False)
