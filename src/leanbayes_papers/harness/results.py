"""Tables of records. A record is one measurement: a flat dict of names and numbers, one for each row and seed.

Means and standard errors over seeds, Markdown and JSON follow from the columns that a table names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from leanbayes.evaluation.statistics import Estimate, estimate, number
from leanbayes_papers.harness.numbers import numbers, Printed, printed

Record = dict[str, Any]
Key = tuple[Any, ...]
Text = Callable[[Sequence[Record]], str]


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    name: str  # in the records
    head: str
    form: str = ".3f"  # format of a mean; its error has as many decimals
    scale: float = 1.0  # factor of all values
    sign: int = 0  # 1 if more is better, -1 if less is
    error: Literal["sem", "std", ""] = "sem"  # the number after the ±, over seeds
    text: Text | None = None  # writes a cell from its records, in place of mean and error

    def estimate(self, records: Iterable[Record]) -> Estimate | None:
        """Return mean and standard error over records; None if none has the column."""
        values = (number(record.get(self.name)) for record in records)
        return estimate(None if value is None else self.scale * value for value in values)

    def cell(self, records: Sequence[Record]) -> str:
        """Write the cell of a row."""
        if self.text is not None:
            return self.text(records)
        found = self.estimate(records)
        return "-" if found is None else self.write(found)

    def write(self, found: Estimate) -> str:
        """Write a mean, and its error if there is one."""
        mean = f"{found.mean:{self.form}}"
        if found.sem is None or not self.error:
            return mean
        error = found.sem * (found.count**0.5 if self.error == "std" else 1.0)
        return f"{mean} ± {error:.{len(mean.partition('.')[2])}f}"


def group(records: Iterable[Record], by: Sequence[str]) -> dict[Key, list[Record]]:
    """Return the records that have all columns `by`, by their values, in order of appearance."""
    found: dict[Key, list[Record]] = {}
    for record in records:
        if all(name in record for name in by):
            found.setdefault(tuple(record[name] for name in by), []).append(record)
    return found


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of records."""

    by: tuple[str, ...]  # columns that name a row
    columns: tuple[Column, ...]
    title: str = ""
    paper: Mapping[Key, Mapping[str, Printed]] = field(default_factory=dict)  # the paper's numbers by row and column
    derive: Callable[[list[Record]], list[Record]] = list  # returns the records of the table from those of the study

    @property
    def heads(self) -> list[str]:
        """Heads of all columns."""
        names = ["" if name in ("name", "method", "data") else name for name in self.by]
        return [*names, *([""] if self.paper else []), *(column.head for column in self.columns)]

    def lines(self, records: Sequence[Record]) -> list[list[str]]:
        """Return the cells of every line: our numbers, and below them the paper's, if it has any."""
        lines = []
        for key, rows in group(self.derive(list(records)), self.by).items():
            names, paper = [_word(name) for name in key], self.paper.get(key)
            cells = (column.cell(rows) for column in self.columns)
            lines.append([*names, *(["ours"] if self.paper else []), *cells])
            if paper:
                texts = (paper[c.name].text.replace("±", " ± ") if c.name in paper else "-" for c in self.columns)
                lines.append([*("" for _ in names), "paper", *texts])
        return lines

    def markdown(self, records: Sequence[Record]) -> str:
        """Write the table in Markdown."""
        left = len(self.heads) - len(self.columns)
        ruler = [*("---" for _ in range(left)), *("---:" for _ in self.columns)]
        body = "\n".join(f"| {' | '.join(cells)} |" for cells in (self.heads, ruler, *self.lines(records)))
        return f"### {self.title}\n\n{body}\n" if self.title else f"{body}\n"

    @classmethod
    def of(cls, paper: str, name: str, texts: Mapping[str, Text] | None = None, /, **fields: Any) -> Table:
        """Return a table whose columns are in the paper's numbers.toml; `texts` write the cells of some columns."""
        found, texts = numbers(paper)["tables"][name], texts or {}
        columns = tuple(Column(**column, text=texts.get(column["name"])) for column in found["columns"])
        known = {"by": tuple(found["by"]), "columns": columns, "title": found.get("title", "")}
        if "paper" in found:
            known["paper"] = {(row,): numbers for row, numbers in printed(paper, found["paper"]).items()}
        return cls(**known | fields)

    def some(self, *names: str) -> tuple[Column, ...]:
        """Return the columns of these names."""
        return tuple(column for column in self.columns if column.name in names)

    @classmethod
    def of_gains(
        cls, by: str, baseline: str, columns: Sequence[Column], *, title: str, keep: Callable[[Record], bool] = bool
    ) -> Table:
        """Return a table of gains of the rows `by` over a baseline, paired by seed, for the records to `keep`.

        Plus is better; "level" is within two standard errors.
        """
        signed = (replace(c, scale=c.sign * c.scale, form=f"+{c.form}") for c in columns)
        texts = tuple(replace(column, text=partial(_gain, column)) for column in signed)
        return cls(by=(by,), columns=texts, title=title, derive=partial(gains, by=by, baseline=baseline, keep=keep))

    def record(self, records: Sequence[Record]) -> Record:
        """Return the table as JSON holds it: means, standard errors, counts, and the paper's numbers."""
        rows = []
        for key, mine in group(self.derive(list(records)), self.by).items():
            found = {column.name: column.estimate(mine) for column in self.columns}
            ours = {n: {"mean": f.mean, "sem": f.sem, "count": f.count} for n, f in found.items() if f}
            paper = {name: {"value": p.value, "spread": p.spread} for name, p in self.paper.get(key, {}).items()}
            rows.append(dict(zip(self.by, key, strict=True)) | {"ours": ours, "paper": paper})
        return {"title": self.title, "columns": {column.name: column.head for column in self.columns}, "rows": rows}


def gains(records: Sequence[Record], *, by: str, baseline: str, keep: Callable[[Record], bool] = bool) -> list[Record]:
    """Return the differences of all numbers to those of the baseline with the same seed."""
    kept = [record for record in records if keep(record) and "seed" in record]
    start = {record["seed"]: record for record in kept if record[by] == baseline}
    found = []
    for record in kept:
        if record[by] != baseline and (other := start.get(record["seed"])) is not None:
            names = [n for n in record if number(record[n]) is not None and number(other.get(n)) is not None]
            found.append({n: record[n] - other[n] for n in names} | {by: record[by], "seed": record["seed"]})
    return found


def verdict(found: Estimate) -> str:
    """Return whether a gain is beyond two of its standard errors; one seed decides nothing."""
    if found.sem is None or abs(found.mean) <= 2 * found.sem:
        return "level"
    return "better" if found.mean > 0 else "worse"


def _gain(column: Column, records: Sequence[Record]) -> str:
    found = column.estimate(records)
    return "-" if found is None else f"{verdict(found)} ({column.write(found)})"


def _word(name: Any) -> str:
    return f"{name:.3g}" if isinstance(name, float) else str(name)
