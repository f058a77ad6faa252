"""Run a suite: compared networks first, then the studies; write reproduce.json and reproduce.md, print the page."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import leanbayes as lb
from leanbayes.compare.experiment import Experiment
from leanbayes.compare.job import Job
from leanbayes.compare.run import Callback
from leanbayes.compare.run_all import run_all
from leanbayes.compare.time_limit import TimeLimit
from leanbayes.evaluation import result as results
from leanbayes.runtime._files import write_text
from leanbayes.runtime.distributed import launched, rank_and_world
from leanbayes_papers.harness.results import Record
from leanbayes_papers.harness.run import FOLDER, label_of, Run, Suite

SuiteOf = Callable[[Run], Suite]
WIDTH = 100
LEGEND = "Ours: mean ± standard error over seeds. Paper: as printed; its ± is a standard deviation over seeds."
BUDGETS = {
    "quick": "The quick budget shows that everything runs: small networks, few rows, few epochs. It decides nothing.",
    "short": "The short budget has fewer epochs than the paper, mostly smaller networks: compare rows, not numbers.",
    "full": "The full budget has the paper's networks, epochs and hyper-parameters.",
}
FAILURES = (RuntimeError, ValueError, ArithmeticError, OSError, ImportError)


def run_named(suites: Mapping[str, SuiteOf], options: Any, out: Path) -> int:
    """Run the suite that the flags of `leanbayes reproduce` name; return 0, or 1 if a run or a study failed."""
    if options.name not in suites:
        raise ValueError(f"expected a suite among {', '.join(suites)}, got {options.name!r}")
    same = {name: getattr(options, name) for name in ("budget", "device", "precision", "root", "fresh", "compile")}
    data = tuple(name for name in options.data.split(",") if name)
    run = Run(**same, seeds=_seeds(options.seeds), data=data, out=out, limit=_limit(options.stop_after))
    suite = suites[options.name](run)
    run = replace(run, rows=_labels(options.rows, suite, options.name))
    outcome = run_suite(options.name, suite, run)
    if rank_and_world()[0] != 0:
        return 0
    outcome.write()
    outcome.show()
    sys.stdout.write(f"tables: {out / outcome.file}.md\n")
    if any(study.specs for study in outcome.suite.studies):
        from leanbayes.report import build

        sys.stdout.write(f"report: {build(out)}\n")
    return 0 if outcome.complete else 1


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A suite after its run."""

    name: str
    suite: Suite
    run: Run
    records: Mapping[str, list[Record]]  # of the studies that are done, by name
    remarks: Sequence[str]  # sentences on all that was left out or failed
    complete: bool  # whether every run and study is done

    @property
    def legend(self) -> str:
        """How to read the tables."""
        return self.suite.legend or f"{LEGEND} {BUDGETS[self.run.budget]}"

    @property
    def file(self) -> str:
        """Name of both files, without its end."""
        return f"reproduce{self.run.part}"

    @property
    def rows(self) -> list[str]:
        """Names of the rows of a partial run; none for a run of all."""
        return list(dict.fromkeys(row for study in self.suite.studies for row in study.rows)) if self.run.rows else []

    @property
    def together(self) -> list[Record]:
        """The records of all studies."""
        return [record for found in self.records.values() for record in found]

    def write(self) -> None:
        """Write reproduce.json and reproduce.md; files of a partial run have its rows in their names."""
        text = json.dumps(self.record(), indent=1, allow_nan=False) + "\n"
        write_text(text, self.run.out / f"{self.file}.json")
        write_text(self.page(), self.run.out / f"{self.file}.md")

    def record(self) -> dict[str, Any]:
        """Return everything as JSON holds it."""
        studies = [
            {
                "title": study.title,
                "claim": study.claim,
                "file": f"{FOLDER}/{study.name}{self.run.part}.json",
                "tables": [table.record(self.records[study.name]) for table in study.tables],
            }
            for study in self.suite.studies
            if study.name in self.records
        ]
        return {
            "schema": results.SCHEMA,
            "suite": self.name,
            "paper": self.suite.paper,
            "budget": self.run.budget,
            "seeds": list(self.run.seeds),
            **({"rows": self.rows} if self.rows else {}),
            "command": results.command(),
            "created": results.now(),
            "commit": results.commit(),
            "legend": self.legend,
            "tables": [table.record(self.together) for table in self.suite.tables],
            "studies": studies,
            "remarks": list(self.remarks),
        }

    def page(self) -> str:
        """Return the page in Markdown: tables, figures, remarks."""
        seeds = ", ".join(map(str, self.run.seeds))
        parts = [f"# {self.name}\n\n{self.suite.paper}. Budget {self.run.budget}, seeds {seeds}. {self.legend}\n"]
        parts += [f"A partial run, of these rows alone: {'; '.join(self.rows)}.\n"] if self.rows else []
        parts += [table.markdown(self.together) for table in self.suite.tables]
        for study in self.suite.studies:
            if (records := self.records.get(study.name)) is not None:
                parts.append(f"## {study.title}\n")
                parts += (
                    [f"![{study.title}]({FOLDER}/{study.name}{self.run.part}.svg)\n"] if study.plot is not None else []
                )
                parts += [table.markdown(records) for table in study.tables]
                parts.append(f"The paper: {study.claim}\n")
        if self.remarks:
            parts.append("## Remarks\n\n" + "\n".join(f"* {sentence}" for sentence in self.remarks) + "\n")
        return "\n".join(parts)

    def show(self) -> None:
        """Print the page without its figures."""
        from rich.console import Console
        from rich.markdown import Markdown

        console = Console()
        if not console.is_terminal:
            console.width = WIDTH
        console.print(Markdown("\n".join(line for line in self.page().splitlines() if not line.startswith("!["))))


def run_suite(name: str, suite: Suite, run: Run) -> Outcome:
    """Run everything that a suite has data for; remarks name what failed."""
    suite, remarks = present(suite, run)
    jobs = _ordered([job for study in suite.studies for job in study.jobs(run.seeds)])
    watched = {spec.name: spec for study in suite.studies for spec in study.specs if spec.watch is not None}

    def watch(job: Job, experiment: Experiment) -> tuple[Callback, ...]:
        spec = watched.get(job.label)
        return () if spec is None or spec.watch is None else (spec.watch(spec, job.folder(run.out), experiment, run),)

    waiting = [job.folder(run.out) for job in jobs if run.fresh or results.read_result(job.folder(run.out)) is None]
    found = dict(zip(jobs, run_all(jobs, run.out, fresh=run.fresh, watch=watch, limit=run.limit), strict=True))
    run.stored.update(waiting)
    done = {job for job, result in found.items() if result["status"] == "done"}
    remarks += [f"{job.label}, seed {job.seed}, failed: {found[job]['error']}" for job in jobs if job not in done]
    records: dict[str, list[Record]] = {}
    for study in suite.studies if rank_and_world()[0] == 0 else ():
        if not done.issuperset(study.jobs(run.seeds)):
            remarks.append(f"{study.title} is left out: not all of its runs are done.")
            continue
        sys.stderr.write(f"{study.title} ...\n")
        try:
            records[study.name] = study.records(run)
        except FAILURES as error:
            remarks.append(f"{study.title} failed: {type(error).__name__}: {error}")
    complete = len(done) == len(jobs) and len(records) == len(suite.studies)
    return Outcome(name=name, suite=suite, run=run, records=records, remarks=remarks, complete=complete)


def present(suite: Suite, run: Run) -> tuple[Suite, list[str]]:
    """Leave out studies whose data set was not asked for, or is not here, with a sentence for each missing set."""
    names = tuple(dict.fromkeys(name for study in suite.studies for name in sorted(study.needs)))
    if wrong := [name for name in run.data if name not in names]:
        raise ValueError(f"expected data sets among {', '.join(names)}, got {wrong[0]!r}")
    wanted = run.data or names
    missing = [name for name in wanted if not run.has(name)]
    studies = tuple(study for study in suite.studies if study.needs <= set(wanted) - set(missing))
    remarks = [f"{name} is not here, so what needs it is left out; {_remedy(name)}." for name in missing]
    if run.rows:
        chosen = {study.title: study.only(run.rows) for study in studies}
        remarks += [
            f"{title} is left out: it has none of the chosen rows, or needs others, too."
            for title, study in chosen.items()
            if study is None
        ]
        studies = tuple(study for study in chosen.values() if study is not None)
    if not studies:
        raise ValueError(f"nothing to run: {' '.join(remarks)}")
    return replace(suite, studies=studies), remarks


def _limit(minutes: float | None) -> TimeLimit | None:
    """Return the limit that begins now, None without one; several processes raise, since their clocks differ."""
    if minutes is None:
        return None
    launch = launched()
    if launch is not None and launch.processes > 1:
        raise ValueError(f"expected one process with --stop-after, got {launch.processes}; leave it out, or start one")
    return TimeLimit.of(minutes)


def _labels(text: str, suite: Suite, name: str) -> tuple[str, ...]:
    """Return the labels of the rows in a text; rows have names, in which there may be commas, and labels."""
    rows = [row for study in suite.studies for row in study.rows.items()]
    specs = [spec for _, spec in rows]
    labels: dict[str, list[str]] = {}
    for row, spec in rows:
        for known in {row.lower(), spec.name.lower()}:
            labels.setdefault(known, []).append(label_of(spec, specs))
    words, found = [word for word in text.split(",") if word.strip()], dict.fromkeys("")
    if words and not rows:
        raise ValueError(f"expected no --rows for {name}, which has no rows to choose, got {text!r}")
    while words:
        parts = {end: labels.get(",".join(words[:end]).strip().lower()) for end in range(len(words), 0, -1)}
        end, some = next(((end, some) for end, some in parts.items() if some), (0, None))
        if some is None:
            known = "; ".join(dict.fromkeys(row for row, _ in rows))
            raise ValueError(f"expected rows of {name} among {known}, got {words[0].strip()!r}")
        found |= dict.fromkeys(some)
        words = words[end:]
    every = tuple(dict.fromkeys(label_of(spec, specs) for spec in specs))
    return () if set(found) == set(every) else tuple(label for label in every if label in found)


def _ordered(jobs: Sequence[Job]) -> list[Job]:
    distinct = list(dict.fromkeys(jobs))
    groups = list(dict.fromkeys((job.source, job.net, job.evaluation) for job in distinct))
    return sorted(distinct, key=lambda job: groups.index((job.source, job.net, job.evaluation)))


def _remedy(name: str) -> str:
    if name in {row.name for row in lb.data.describe_annotated(None)}:
        return f"`leanbayes.data.load_annotated({name!r})` says where to get it"
    return f"`leanbayes data prepare {name}` fetches it"


def _seeds(text: str) -> tuple[int, ...]:
    try:
        seeds = tuple(dict.fromkeys(int(seed) for seed in text.split(",")))
    except ValueError:
        seeds = ()
    if not seeds or min(seeds) < 0:
        raise ValueError(f"expected seeds such as 0,1,2, got {text!r}")
    return seeds
