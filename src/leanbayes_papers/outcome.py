"""What a suite found, written three ways: reproduce.json, reproduce.md, and the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leanbayes.compare.job import Job
from leanbayes.evaluation import result as results
from leanbayes.runtime._files import write_text
from leanbayes_papers.overview import Overview
from leanbayes_papers.study import FOLDER
from leanbayes_papers.suite import of_seed, Row, Setting, Suite
from leanbayes_papers.table import as_record, markdown, rich_table

WIDTH = 100
LEGEND = "Ours: mean ± standard error over seeds. Paper: as printed; its ± is a standard deviation over seeds."
BUDGETS = {
    "quick": "The quick budget shows that everything runs: small networks, few rows, few epochs. It decides nothing.",
    "short": "The short budget has fewer epochs than the paper, mostly smaller networks: compare rows, not numbers.",
    "full": "The full budget has the paper's networks, epochs and hyper-parameters.",
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A suite after its runs.

    Attributes:
        name: the name of the suite.
        suite: what was run.
        setting: how it was run.
        results: the results of the runs that are done.
        says: what each study that came to its end says, by its name.
        remarks: sentences on what was left out or failed.
        overview: the numbers of all studies side by side, where the suite has that.
    """

    name: str
    suite: Suite
    setting: Setting
    results: Mapping[Job, dict[str, Any]]
    says: Mapping[str, Sequence[str]]
    remarks: Sequence[str]
    overview: Overview | None = None

    @property
    def legend(self) -> str:
        """How to read the tables."""
        return self.suite.legend or f"{LEGEND} {BUDGETS[self.setting.budget]}"

    def results_of(self, row: Row) -> list[dict[str, Any]]:
        """Return the results of a row's job, seed by seed."""
        jobs = (of_seed(row.job, seed) for seed in self.setting.seeds)
        return [self.results[job] for job in jobs if job in self.results]

    def write(self, out: Path) -> None:
        """Write reproduce.json and reproduce.md."""
        write_text(json.dumps(self.record(), indent=1, allow_nan=False) + "\n", out / "reproduce.json")
        write_text(self.page(), out / "reproduce.md")

    def record(self) -> dict[str, Any]:
        """Return everything as JSON holds it."""
        return {
            "schema": results.SCHEMA,
            "suite": self.name,
            "paper": self.suite.paper,
            "budget": self.setting.budget,
            "seeds": list(self.setting.seeds),
            "command": results.command(),
            "created": results.now(),
            "commit": results.commit(),
            "legend": self.legend,
            "overview": self.overview.record() if self.overview is not None else None,
            "tables": [as_record(table, self.results_of) for table in self.suite.tables],
            "studies": [
                {"title": study.title, "claim": study.claim, "file": f"{FOLDER}/{study.name}.json", "says": list(says)}
                for study in self.suite.studies
                if (says := self.says.get(study.name)) is not None
            ],
            "remarks": list(self.remarks),
        }

    def page(self) -> str:
        """Return the page in Markdown: tables, studies with their figures, what was left out."""
        seeds = ", ".join(map(str, self.setting.seeds))
        parts = [f"# {self.name}\n\n{self.suite.paper}. Budget {self.setting.budget}, seeds {seeds}. {self.legend}\n"]
        parts += [self.overview.markdown()] if self.overview is not None else []
        parts += [markdown(table, self.results_of) for table in self.suite.tables]
        for study in self.suite.studies:
            if study.name in self.says:
                lines = "\n".join(f"* {line}" for line in self.says[study.name])
                figure = f"![{study.title}]({FOLDER}/{study.name}.svg)"
                parts.append(f"## {study.title}\n\n{figure}\n\n{lines}\n\nThe paper: {study.claim}\n")
        if self.remarks:
            parts.append("## Remarks\n\n" + "\n".join(f"* {sentence}" for sentence in self.remarks) + "\n")
        return "\n".join(parts)

    def show(self) -> None:
        """Print the tables, what the studies say, and the remarks."""
        from rich.console import Console
        from rich.markup import escape

        console = Console()
        if not console.is_terminal:
            console.width = WIDTH
        for table in self.suite.tables:
            console.print(rich_table(table, self.results_of))
            console.print(f"The paper: {escape(table.claim)}\n", highlight=False)
        for study in self.suite.studies:
            if study.name in self.says:
                console.print(f"[bold]{escape(study.title)}[/]", highlight=False)
                for line in (*self.says[study.name], f"The paper: {study.claim}\n"):
                    console.print(escape(line), highlight=False)
        if self.overview is not None:
            self.overview.show(console)
        for sentence in (self.legend, *self.remarks):
            console.print(escape(sentence), highlight=False)
