"""Studies: measurements that no single run can hold, such as curves over epochs; each leaves numbers and a figure.

The numbers of a study are JSON in `OUT/studies/NAME.json`, its figure is `OUT/studies/NAME.svg`. A study whose runs did
not change is kept as it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import nn

from leanbayes.compare.experiment import Experiment, pick_device
from leanbayes.compare.job import DataSpec, EvaluationSpec, Job
from leanbayes.compare.run import MODEL
from leanbayes.core.checkpoint import load
from leanbayes.runtime._files import read_tensors, write_text, write_whole

FOLDER = "studies"
Numbers = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """What a study may look at.

    Attributes:
        jobs: its runs, all of them done, every job with every seed.
        out: the folder in which they lie.
        seeds: the seeds that were asked for.
        budget: "quick", "short" or "full".
        device: where to run, as a recipe names it.
        fresh: whether everything is to be measured anew, also what a study keeps on its own.
    """

    jobs: tuple[Job, ...]
    out: Path
    seeds: tuple[int, ...]
    budget: str
    device: str
    fresh: bool = False

    def trained(self, job: Job) -> tuple[nn.Module, Experiment]:
        """Return the trained model of a run, on its device and in eval mode, and the experiment of its data."""
        experiment = _workshop(job.source, job.net, job.evaluation)
        path, net = job.folder(self.out) / MODEL, experiment.plain(job.seed)
        if job.method is not None:
            net = load(path, net)
        else:
            net.load_state_dict(read_tensors(path)[1])
        return net.to(pick_device(self.device)).eval(), experiment


@dataclass(frozen=True, kw_only=True)
class Study:
    """A measurement on trained models, or on a training of its own.

    Attributes:
        name: what its files are called.
        title: which figure of the paper it repeats.
        claim: what the paper says, in a sentence.
        jobs: the runs it needs, with any seed.
        data: the data sets it needs beside those of its runs.
        measure: the measurement; its numbers are all that the rest sees.
        draw: draws the numbers into an SVG file.
        say: tells what came out, in a few lines.
    """

    name: str
    title: str
    claim: str
    measure: Callable[[Case], Numbers]
    draw: Callable[[Numbers, Path], None]
    say: Callable[[Numbers], list[str]]
    jobs: tuple[Job, ...] = ()
    data: tuple[str, ...] = ()

    @property
    def needs(self) -> frozenset[str]:
        """The names of all data sets it needs."""
        return frozenset((*self.data, *(job.source.name for job in self.jobs)))


def conduct(study: Study, case: Case) -> Numbers:
    """Return the numbers of a study: those on disk if they are of the same runs, else measured anew and drawn."""
    path = case.out / FOLDER / f"{study.name}.json"
    figure = path.with_suffix(".svg")
    of = _digest([case.budget, *map(str, case.seeds), *(job.id for job in case.jobs)])
    record = None if case.fresh else _read(path)
    if record is None or record.get("of") != of:
        figure.unlink(missing_ok=True)
        record = {"title": study.title, "claim": study.claim, "of": of, "numbers": study.measure(case)}
        write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", path)
    numbers: Numbers = record["numbers"]
    if not figure.is_file():
        study.draw(numbers, figure)
    return numbers


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure; sizes in inches.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib, which is not here; install leanbayes[examples]") from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure as SVG, whole or not at all."""
    options = {"format": "svg", "bbox_inches": "tight", "metadata": {"Date": None}}
    write_whole(path, lambda temporary: figure.savefig(temporary, **options))


@lru_cache(maxsize=1)
def _workshop(source: DataSpec, net: str, judging: EvaluationSpec) -> Experiment:
    """Return a experiment; the last one is kept, since the runs of a study mostly share theirs."""
    return Experiment(source, net, judging)


def _digest(words: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]


def _read(path: Path) -> dict[str, Any] | None:
    """Return the record of a study; None where there is none, or a damaged one, which is measured again."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("numbers"), dict) else None
