"""A suite as data: tables whose rows are a job and the paper's own numbers, and studies of what was trained.

A suite is a function `(Setting) -> Suite`: the budget decides networks and epochs, the paper's numbers stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from leanbayes import data
from leanbayes.compare.experiment import pick_device
from leanbayes.compare.job import Budget, DataSpec, Job
from leanbayes.training import Recipe
from leanbayes.training.recipe import Precision
from leanbayes_papers.overview import Overview
from leanbayes_papers.study import Numbers, Study

Choice = TypeVar("Choice")


@dataclass(frozen=True)
class Printed:
    """A number as a paper prints it: "0.159", or "6.72±0.06" with what is a standard deviation over seeds."""

    text: str

    @property
    def value(self) -> float:
        """The number."""
        return float(self.text.partition("±")[0])

    @property
    def spread(self) -> float | None:
        """What stands behind the ±."""
        spread = self.text.partition("±")[2]
        return float(spread) if spread else None


def printed(measures: Sequence[str], line: str) -> dict[str, Printed]:
    """Read a line of a paper's table, one number for each measure, "-" where there is none."""
    return {name: Printed(text) for name, text in zip(measures, line.split(), strict=True) if text != "-"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a table.

    Attributes:
        name: as the paper calls it.
        job: what we run for it, with any seed; the seeds of the setting take its place.
        paper: the paper's numbers by measure (`suites.table.MEASURES`); empty where it only draws a curve.
    """

    name: str
    job: Job
    paper: Mapping[str, Printed]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table or figure of a paper.

    Attributes:
        title: which one it is, and of what.
        measures: its columns, names of `suites.table.MEASURES`.
        rows: its lines.
        claim: what the paper says of it, in a sentence.
    """

    title: str
    measures: tuple[str, ...]
    rows: tuple[Row, ...]
    claim: str


@dataclass(frozen=True, kw_only=True)
class Suite:
    """What `leanbayes reproduce` runs under one name.

    Attributes:
        paper: which paper it is about.
        tables: ours beside the paper's.
        studies: what a row of a table cannot hold.
        watched: labels of the jobs whose checkpoints are looked at after every epoch.
        overview: puts the numbers of the studies that are done, by name, side by side; None if there is nothing to.
        legend: how to read its numbers, where that differs from what holds for most suites.
    """

    paper: str
    tables: tuple[Table, ...]
    studies: tuple[Study, ...] = ()
    watched: frozenset[str] = frozenset()
    overview: Callable[[Mapping[str, Numbers]], Overview] | None = None
    legend: str = ""


SuiteOf = Callable[["Setting"], Suite]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a suite is to be run: the flags of `leanbayes reproduce`; no `data` is all that the suite is about."""

    budget: Budget = "quick"
    seeds: tuple[int, ...] = (0,)
    device: str = "auto"
    precision: Precision = "32-true"
    root: str | None = None
    data: tuple[str, ...] = ()

    def pick(self, *, quick: Choice, short: Choice, full: Choice) -> Choice:
        """Return what belongs to the budget."""
        return {"quick": quick, "short": short, "full": full}[self.budget]

    def source(self, name: str, *, quick_rows: int) -> DataSpec:
        """Return a data set; the quick budget takes few of its training rows."""
        return DataSpec(name=name, root=self.root, train_rows=self.pick(quick=quick_rows, short=0, full=0))

    def recipe(self, recipe: Recipe) -> Recipe:
        """Put a recipe on the device and in the precision that were asked for; half precision likes channels last."""
        channels_last = self.precision != "32-true" and pick_device(self.device).type == "cuda"
        return replace(recipe, accelerator=self.device, precision=self.precision, channels_last=channels_last)

    def has(self, name: str, *, foreign: bool = False) -> bool:
        """Tell whether a data set is here, to train on or as a foreign set; other names are the user's own files."""
        known = {row.name: row.where for row in data.describe(self.root)}
        where = (known | {row.name: row.where for row in data.describe_annotated(self.root)}).get(name, "")
        return "not here" not in where and (foreign or "foreign set only" not in where)


def of_seed(job: Job, seed: int) -> Job:
    """Return the same job with another seed."""
    return replace(job, recipe=replace(job.recipe, seed=seed))


def seeded(jobs: Iterable[Job], seeds: Iterable[int]) -> list[Job]:
    """Return every distinct job with every seed; those that share data, network and judging stand together.

    They are loaded once for all that share them, and corrupted images are made once, hence the order.
    """
    distinct = list(dict.fromkeys(jobs))
    groups = list(dict.fromkeys((job.source, job.net, job.evaluation) for job in distinct))
    ordered = sorted(distinct, key=lambda job: groups.index((job.source, job.net, job.evaluation)))
    seeds = list(seeds)
    return [of_seed(job, seed) for job in ordered for seed in seeds]
