"""The networks of a curve of quality against price: settings, trainings by name, and trained models.

See `tools/curve.py` for the commands.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args, Self

import torch
from torch import nn

from leanbayes.compare import job as jobs_of
from leanbayes.compare.experiment import Experiment, load
from leanbayes.compare.job import DataSpec, EvaluationSpec, Job, method_of, PLAIN, recipe_for
from leanbayes.compare.kept import finished
from leanbayes.compare.load_run import load_model
from leanbayes.compare.plain_state import keeping
from leanbayes.compare.run import MODEL, perform
from leanbayes.data import Split
from leanbayes.layers.select import LatePart
from leanbayes.runtime._files import write_text
from leanbayes.training import Recipe

MEMBERS = 4
"""Plain networks of a seed: enough for ensembles of two and of four."""
APART = 100
"""Distance of their seeds."""
LATE: tuple[str, ...] = get_args(LatePart)
STUDENT = "student"
SETTINGS = "study.json"


@dataclass(frozen=True, kw_only=True)
class Study:
    """The settings that all networks share.

    Attributes:
        data: a name of `leanbayes.data`.
        net: a name of `leanbayes.models`.
        methods: of the converted networks.
        ood: out-of-distribution data.
        budget: of the recipe, as in `leanbayes compare`.
        epochs: of each training; 0 is that of the budget.
        train_rows: training rows, evenly spaced; 0 means all but the held-out ones.
        hold_out: further training rows, for temperatures.
        test_rows: test rows, evenly spaced; 0 means all.
        ood_rows: rows of each out-of-distribution set, evenly spaced; 0 means all.
        samples: draws of an answer that the others are compared with, and of the student's teacher.
        device, precision, compile: of the trainings; `precision` also of the predictions.
    """

    data: str
    net: str
    methods: tuple[str, ...] = ("implicit", "rank1")
    ood: tuple[str, ...] = ()
    budget: jobs_of.Budget = "short"
    epochs: int = 0
    train_rows: int = 0
    hold_out: int = 5000
    test_rows: int = 0
    ood_rows: int = 0
    samples: int = 16
    device: str = "cpu"
    precision: str = "32-true"
    compile: bool = False

    @property
    def rows(self) -> tuple[str, ...]:
        """The names of the trainings of a seed, in an order in which each has what it begins from."""
        plain = (PLAIN, *(f"member{k + 1}" for k in range(1, MEMBERS)))
        return (*plain, *(f"{m}{end}" for m in self.methods for end in ("", *(f"-{p}" for p in (*LATE, STUDENT)))))

    @property
    def flags(self) -> dict[str, Any]:
        """The settings that differ from the defaults of the command, as its flags take them."""
        usual = {field.name: field.default for field in fields(self)}
        own = {name: value for name, value in asdict(self).items() if value != usual[name]}
        return {name: ",".join(value) if isinstance(value, tuple) else value for name, value in own.items()}

    @classmethod
    def read(cls, out: Path) -> Self:
        """Return the study of a folder."""
        found = json.loads((out / SETTINGS).read_text(encoding="utf-8"))
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in found.items()})

    def write(self, out: Path) -> None:
        """Write the study into a folder; one with other settings raises."""
        path = out / SETTINGS
        if path.is_file() and (there := self.read(out)) != self:
            raise ValueError(f"expected the settings of '{path}', {there}, got {self}; choose another --out")
        out.mkdir(parents=True, exist_ok=True)
        write_text(json.dumps(asdict(self), indent=1) + "\n", path)


class Runs:
    """The networks of a study in a folder."""

    def __init__(self, study: Study, out: Path, root: str | None = None) -> None:
        """Load the data and try the network."""
        self.study, self.out = study, out
        rows = {"train_rows": study.train_rows, "hold_out": study.hold_out}
        self.source = DataSpec(name=study.data, root=root, **rows)
        spec = EvaluationSpec(samples=study.samples, ood=study.ood, shift=False, test_images=study.ood_rows)
        self.experiment = Experiment(self.source, study.net, spec)

    @cached_property
    def test(self) -> Split:
        """The test rows of the data; those of the experiment are the held-out training rows."""
        whole = load(replace(self.source, hold_out=0, train_rows=0)).test
        count = self.study.test_rows or len(whole)
        return whole.take(torch.arange(count) * len(whole) // count)

    def recipe(self, seed: int) -> Recipe:
        """Return the recipe that `leanbayes compare` has for these data."""
        study, data = self.study, self.experiment.data
        side = min(data.input_shape[1:]) if data.kind == "image" else 0
        found = jobs_of.recipe(study.budget, kind=data.kind, rows=len(data.train), augment=data.augment, side=side)
        found = jobs_of.stretched(found, study.epochs or found.epochs)
        machine: dict[str, Any] = {"accelerator": study.device, "precision": study.precision, "compile": study.compile}
        return replace(found, **machine, channels_last=study.device.startswith("cuda"), seed=seed)

    def jobs(self, seed: int) -> dict[str, Job]:
        """Return the trainings of a seed by name; the plain one keeps the states that others begin from."""
        if not 0 <= seed < APART:
            raise ValueError(f"expected seeds from 0 to {APART - 1}, as members have higher ones, got {seed}")
        given: dict[str, Any] = {"source": self.source, "net": self.study.net, "launch": None}
        given["evaluation"] = self.experiment.evaluation
        found: list[Job] = []
        for k in range(MEMBERS):
            found.append(Job(method=None, recipe=recipe_for(None, self.recipe(seed + APART * k)), **given))
        for name in self.study.methods:
            method = method_of(name)
            one = Job(method=method, recipe=recipe_for(method, self.recipe(seed)), **given)
            late = [replace(one, where=(part,), label=f"{name}-{part}") for part in LATE]
            found += [one, *late, replace(one, student=True, label=f"{name}-{STUDENT}")]
        return dict(zip(self.study.rows, keeping(found), strict=True))

    def model(self, seed: int, row: str, device: str) -> nn.Module:
        """Return a trained network in eval mode."""
        job = self.jobs(seed)[row]
        path = job.folder(self.out) / MODEL
        if not path.is_file():
            raise FileNotFoundError(f"{row} of seed {seed} is not trained: there is no '{path}'")
        model = load_model(path, self.experiment.plain(job.seed), PLAIN if job.method is None else job.name)
        model = model.to(device).eval()
        return model.to(memory_format=torch.channels_last) if job.recipe.channels_last else model  # type: ignore[call-overload]

    def train(self, seed: int, row: str) -> str | None:
        """Train one network, resume it, or keep the finished one; return the error of one that failed."""
        job = self.jobs(seed)[row]
        folder = job.folder(self.out)
        if finished(job, folder) is None and (folder / MODEL).is_file():  # other settings raise
            return None
        start = time.perf_counter()
        found = perform(job, self.experiment, self.out, stage="train")
        said = found["error"] or f"{time.perf_counter() - start:.0f} s"
        sys.stderr.write(f"{time.strftime('%H:%M:%S')} seed {seed}, {row}: {said}\n")
        sys.stderr.flush()
        torch.compiler.reset()
        if torch.cuda.is_available():  # on a CPU the memory is free by itself
            gc.collect()
            torch.cuda.empty_cache()
        return None if found["error"] is None else str(found["error"])
