"""Running a suite: its jobs, then its studies, then ours beside the paper's."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from leanbayes.compare.experiment import Experiment
from leanbayes.compare.job import Job
from leanbayes.compare.run import Callback
from leanbayes.compare.run_all import run_all
from leanbayes.data.annotated import annotated_name
from leanbayes.runtime.distributed import rank_and_world
from leanbayes_papers.checkpoints import Checkpoints
from leanbayes_papers.outcome import Outcome
from leanbayes_papers.study import Case, conduct, Numbers
from leanbayes_papers.suite import seeded, Setting, Suite, SuiteOf


def run_named(suites: Mapping[str, SuiteOf], options: Any, out: Path) -> int:
    """Run the suite that the flags name, and return 0, or 1 if a run or a study failed.

    Args:
        suites: the suites there are.
        options: the flags of `leanbayes reproduce`: name, budget, seeds, device, precision, root, data, fresh.
        out: where everything goes.

    Raises:
        ValueError: if there is no such suite, or none of its data sets is here.
    """
    if options.name not in suites:
        raise ValueError(f"expected a suite among {', '.join(suites)}, got {options.name!r}")
    setting = Setting(
        budget=options.budget,
        seeds=_seeds(options.seeds),
        device=options.device,
        precision=options.precision,
        root=options.root,
        data=tuple(name for name in options.data.split(",") if name),
    )
    outcome = run(options.name, suites[options.name](setting), setting, out, fresh=options.fresh)
    if rank_and_world()[0] != 0:
        return 0
    outcome.write(out)
    outcome.show()
    sys.stdout.write(f"tables: {out / 'reproduce.md'}\n")
    jobs = _jobs(outcome.suite, setting)
    if jobs:
        from leanbayes.report import build

        sys.stdout.write(f"report: {build(out)}\n")
    complete = len(outcome.results) == len(jobs)
    return 0 if complete and len(outcome.says) == len(outcome.suite.studies) else 1


def run(name: str, suite: Suite, setting: Setting, out: Path, *, fresh: bool = False) -> Outcome:
    """Run what a suite has data for; what failed is told in the outcome's remarks.

    Raises:
        ValueError: if none of the data sets is here.
    """
    suite, remarks = present(suite, setting)
    jobs = _jobs(suite, setting)

    def watch(job: Job, experiment: Experiment) -> tuple[Callback, ...]:
        return (Checkpoints(job, experiment, out),) if job.label in suite.watched else ()

    found = dict(zip(jobs, run_all(jobs, out, fresh=fresh, watch=watch), strict=True))
    done = {job: result for job, result in found.items() if result["status"] == "done"}
    remarks += [f"{job.label}, seed {job.seed}, failed: {found[job]['error']}" for job in jobs if job not in done]
    numbers: dict[str, Numbers] = {}
    says: dict[str, list[str]] = {}
    for study in suite.studies if rank_and_world()[0] == 0 else ():
        mine = tuple(seeded(study.jobs, setting.seeds))
        if any(job not in done for job in mine):
            remarks.append(f"{study.title} is left out: not all of its runs are done.")
            continue
        sys.stderr.write(f"{study.title} ...\n")
        case = Case(mine, out, setting.seeds, setting.budget, setting.device, fresh)
        try:
            numbers[study.name] = conduct(study, case)
            says[study.name] = study.say(numbers[study.name])
        except (RuntimeError, ValueError, ArithmeticError, OSError, ImportError) as error:
            remarks.append(f"{study.title} failed: {type(error).__name__}: {error}")
    overview = suite.overview(numbers) if suite.overview is not None and numbers else None
    return Outcome(name=name, suite=suite, setting=setting, results=done, says=says, remarks=remarks, overview=overview)


def present(suite: Suite, setting: Setting) -> tuple[Suite, list[str]]:
    """Leave out rows and studies whose data set was not asked for, or is not here, with a sentence for each of those.

    Raises:
        ValueError: if nothing is left, or the suite is not about a data set that was asked for.
    """
    beside = (name for study in suite.studies for name in study.data)
    names = tuple(dict.fromkeys((*(job.source.name for job in _jobs(suite, setting)), *beside)))
    if wrong := [name for name in setting.data if name not in names]:
        raise ValueError(f"expected data sets among {', '.join(names)}, got {wrong[0]!r}")
    wanted = setting.data or names
    missing = [name for name in wanted if not setting.has(name)]
    there = set(wanted) - set(missing)
    tables = [
        replace(table, rows=tuple(row for row in table.rows if row.job.source.name in there)) for table in suite.tables
    ]
    studies = tuple(study for study in suite.studies if study.needs <= there)
    remarks = [f"{name} is not here, so what needs it is left out; {_remedy(name)}." for name in missing]
    kept = tuple(table for table in tables if table.rows)
    if not kept and not studies:
        raise ValueError(f"nothing to run: {' '.join(remarks)}")
    return replace(suite, tables=kept, studies=studies), remarks


def _remedy(name: str) -> str:
    """Say how a data set is got; those with several annotators need files that their loader names."""
    if annotated_name(name):
        return f"`leanbayes.data.load_annotated({name!r})` says where to get it"
    return f"`leanbayes data prepare {name}` fetches it"


def _jobs(suite: Suite, setting: Setting) -> list[Job]:
    """Return every job of the tables and of the studies, with every seed."""
    rows = [row.job for table in suite.tables for row in table.rows]
    return seeded([*rows, *(job for study in suite.studies for job in study.jobs)], setting.seeds)


def _seeds(text: str) -> tuple[int, ...]:
    try:
        seeds = tuple(dict.fromkeys(int(seed) for seed in text.split(",")))
    except ValueError:
        seeds = ()
    if not seeds or min(seeds) < 0:
        raise ValueError(f"expected seeds such as 0,1,2, got {text!r}")
    return seeds
