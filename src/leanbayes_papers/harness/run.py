"""`Run` holds the flags and trains, `Study` measures records of a table or figure, `Suite` is a list of studies."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

import leanbayes as lb
from leanbayes.compare.experiment import Experiment
from leanbayes.compare.job import Budget, DataSpec, EvaluationSpec, Job
from leanbayes.compare.run import MODEL
from leanbayes.compare.time_limit import TimeLimit
from leanbayes.evaluation.result import read_result
from leanbayes.evaluation.statistics import number
from leanbayes.runtime._files import read_tensors, write_text
from leanbayes.training.devices import pick_device
from leanbayes.training.fit import epochs_of
from leanbayes.training.recipe import Precision
from leanbayes.training.state import STATE
from leanbayes_papers.harness.numbers import numbers, Printed
from leanbayes_papers.harness.results import Column, Record, Table
from leanbayes_papers.harness.spec import Trained, TrainingSpec

FOLDER = "studies"
LONGEST = 100  # letters of the rows in a name of a file
Choice = TypeVar("Choice")
Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """The flags of `leanbayes reproduce`, and the trainings of one run; no `data` means all data sets of the suite."""

    budget: Budget = "quick"
    seeds: tuple[int, ...] = (0,)
    device: str = "auto"
    precision: Precision = "32-true"
    root: str | None = None
    data: tuple[str, ...] = ()
    out: Path = Path("runs")
    fresh: bool = False
    compile: bool = False
    rows: tuple[str, ...] = ()  # labels of the networks of a partial run; none for all
    trained: set[Path] = field(default_factory=set, repr=False, compare=False)  # folders of trainings of this run
    limit: TimeLimit | None = field(default=None, repr=False, compare=False)
    stored: set[Path] = field(default_factory=set, repr=False, compare=False)  # by this call of the command

    def pick(self, *, quick: Choice, short: Choice, full: Choice) -> Choice:
        """Return the value for the budget."""
        return {"quick": quick, "short": short, "full": full}[self.budget]

    def source(self, name: str, *, quick_rows: int) -> DataSpec:
        """Return a data set; the quick budget has `quick_rows` training rows."""
        return DataSpec(name=name, root=self.root, train_rows=self.pick(quick=quick_rows, short=0, full=0))

    def recipe(self, recipe: lb.Recipe) -> lb.Recipe:
        """Set the device and the precision of the flags; half precision on a GPU has channels last."""
        channels_last = self.precision != "32-true" and self.torch_device.type == "cuda"
        recipe = replace(recipe, accelerator=self.device, precision=self.precision, channels_last=channels_last)
        return replace(recipe, compile=recipe.compile or self.compile)

    def recipe_of(self, paper: str, name: str, **changes: Any) -> lb.Recipe:
        """Return a recipe of the paper's numbers.toml: common fields, those of the budget, and `changes`."""
        found = numbers(paper)["recipes"][name]
        common = {key: tuple(v) if isinstance(v, list) else v for key, v in found.items() if not isinstance(v, dict)}
        return self.recipe(lb.Recipe(**common | found.get(self.budget, {}) | changes))

    def spec(
        self, name: str, data: str, net: str, recipe: lb.Recipe, *, quick_rows: int, **fields: Any
    ) -> TrainingSpec:
        """Return a training on a data set, on the device and in the precision of the flags."""
        source = self.source(data, quick_rows=quick_rows)
        return TrainingSpec(name=name, source=source, net=net, recipe=self.recipe(recipe), **fields)

    def evaluation(self, samples: int, quick_images: int, **fields: Any) -> EvaluationSpec:
        """Return the evaluation of a compared network; the quick budget has `quick_images` test images."""
        images = self.pick(quick=quick_images, short=0, full=0)
        return EvaluationSpec(samples=samples, test_images=images, **{"shift": False} | fields)

    @property
    def part(self) -> str:
        """End of the names of a partial run's files; empty if the run has all rows."""
        words = re.sub(r"[^a-z0-9.]+", "-", "-".join(self.rows).lower())
        long = hashlib.sha256(words.encode()).hexdigest()[:16]
        return f".rows-{words if len(words) <= LONGEST else long}" if words else ""

    @property
    def svhn(self) -> tuple[str, ...]:
        """SVHN as out-of-distribution inputs, if it is here."""
        return ("svhn",) if self.has("svhn", ood=True) else ()

    @property
    def torch_device(self) -> torch.device:
        """The device of the flags."""
        return pick_device(self.device)

    def has(self, name: str, *, ood: bool = False) -> bool:
        """Return whether a data set is here, to train on or as out-of-distribution inputs; own files are here."""
        rows: list[Any] = [*lb.data.describe(self.root), *lb.data.describe_annotated(self.root)]
        where = {row.name: row.where for row in rows}.get(name, "")
        return "not here" not in where and (ood or "set only" not in where)

    def train(self, spec: TrainingSpec, seed: int, *, start: nn.Module | None = None) -> Trained:
        """Train a network (or `start`, in place), resume its training, or read it if it is finished or compared."""
        if spec.evaluation is not None:
            return _compared(spec, self.out, seed, self.torch_device)
        data, folder = spec.load(spec.source), spec.folder(self.out, seed)
        model = spec.make(data, seed) if start is None else start
        watch = None if spec.watch is None else spec.watch(spec, folder, data, self)
        recipe, rows = replace(spec.recipe, seed=seed), spec.rows(data, seed)
        self.stop(f"{spec.name}, seed {seed}: not begun", unless=folder / STATE)
        options: Json = {
            "folder": folder,
            "resume": self.keeps(folder),
            "callbacks": [*([] if watch is None else [watch]), *self._after_epoch(spec, seed, folder, model)],
            "progress": self.budget != "quick",
        }
        if isinstance(model, (lb.generative.Autoencoder, lb.generative.ProbabilisticUNet)):
            lb.generative.fit(model, rows, recipe, **options)
        else:
            lb.fit(model, rows, recipe, likelihood=lb.Categorical(), **options)
        self.trained.add(folder)
        return Trained(model.to(self.torch_device).eval(), data, [] if watch is None else watch.rows)

    def stop(self, where: str, unless: Path | None = None) -> None:
        """Raise `TimeIsUp` if the time is over, unless a file is there.

        A call that has stored nothing yet continues: the same command would come no further.
        """
        if self.limit is not None and self.stored and not (unless is not None and unless.is_file()):
            self.limit.check(where)

    def _after_epoch(self, spec: TrainingSpec, seed: int, folder: Path, model: nn.Module) -> list[Callable[[Any], Any]]:
        """Return the callback that stops a training, after all others; `fit` stores the state."""
        if self.limit is None:
            return []
        after = self.limit.after_epoch(f"{spec.name}, seed {seed}", "training", epochs_of(model, spec.recipe))
        return [lambda state: self.stored.add(folder), after]

    def keeps(self, folder: Path) -> bool:
        """Return whether a training on disk is kept: a fresh run keeps only its own."""
        return not self.fresh or folder in self.trained

    def result(self, spec: TrainingSpec, seed: int) -> Json:
        """Return the result of a compared network."""
        found = read_result(spec.folder(self.out, seed))
        assert found is not None, "studies are made of runs that are done"
        return found

    def cached(self, path: Path, compute: Callable[[], Json], *, valid: Callable[[Json], bool] = bool) -> Json:
        """Return a JSON file if it is there, whole and valid, else compute it, write it and look at the time."""
        found = self.known(path, valid)
        if found is None:
            found = self.write(compute(), path)
            self.stop(f"{path.name} is stored")
        return found

    def write(self, found: Json, path: Path) -> Json:
        """Write a JSON file and return what it holds."""
        write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", path)
        self.stored.add(path)
        return found

    def known(self, path: Path, valid: Callable[[Json], bool] = bool) -> Json | None:
        """Return a JSON file if it is there, whole and valid, and the run is not fresh."""
        try:
            found = None if self.fresh else json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # none, or a damaged one
            return None
        return found if isinstance(found, dict) and valid(found) else None


@dataclass(frozen=True, kw_only=True)
class Study:
    """A table or figure of a paper; its files are `OUT/studies/NAME.json` and `.svg`."""

    name: str
    title: str
    claim: str  # the paper's statement, in a sentence
    measure: Callable[..., list[Record]] = lambda run: []
    tables: tuple[Table, ...] = ()
    plot: Callable[[list[Record], Path], None] | None = None
    specs: tuple[TrainingSpec, ...] = ()  # networks that `leanbayes compare` trains first
    data: tuple[str, ...] = ()  # data sets in addition to those of `specs`

    @classmethod
    def of(cls, paper: str, kind: str, words: Mapping[str, Any] | None = None, **fields: Any) -> Study:
        """Return a study whose title and claim are in the paper's numbers.toml, with `words` filled in.

        The word `data`, if any, is the data set of the study, and part of its name; `measure` takes it, too.
        """
        words, texts = words or {}, numbers(paper)["studies"][kind]
        title, claim = (texts[name].format(**words) for name in ("title", "claim"))
        known: Json = {"name": kind, "title": title, "claim": claim}
        if (data := words.get("data")) is not None and "measure" in fields:
            known |= {"name": f"{kind}-{data}", "data": (data,)}
            fields["measure"] = partial(fields["measure"], data=data)
        return cls(**known | fields)

    def compared(
        self,
        specs: Mapping[str, TrainingSpec],
        measures: tuple[str, ...],
        paper: Mapping[str, Mapping[str, Printed]] | None = None,
    ) -> Study:
        """Return the study of a table whose rows are compared networks, by the paper's name of each."""
        columns = tuple(MEASURES[measure][0] for measure in measures)
        known = {(row,): printed for row, printed in (paper or {}).items() if row in specs}
        table = Table(by=("name",), columns=columns, paper=known)
        measure = partial(_read_results, specs=specs, measures=measures)
        return replace(self, measure=measure, tables=(table,), specs=tuple(specs.values()))

    @property
    def needs(self) -> frozenset[str]:
        """Names of all data sets that it needs."""
        return frozenset((*self.data, *(spec.source.name for spec in self.specs)))

    @property
    def rows(self) -> dict[str, TrainingSpec]:
        """Networks that can be chosen, by the name of their row: the `specs` of `measure`."""
        known = getattr(self.measure, "keywords", {}).get("specs", self.specs)
        return dict(known) if isinstance(known, Mapping) else {label_of(spec, known): spec for spec in known}

    def only(self, labels: tuple[str, ...]) -> Study | None:
        """Return the study of the networks of these labels; None if it has none of them, or needs others, too."""
        kept = {name: spec for name, spec in self.rows.items() if {spec.name, spec.label} & set(labels)}
        if len(kept) == len(self.rows):
            return self if kept else None
        keywords = getattr(self.measure, "keywords", {})
        if not kept or "specs" not in keywords:
            return None
        specs = kept if isinstance(keywords["specs"], Mapping) else tuple(kept.values())
        compared = tuple(spec for spec in self.specs if {spec.name, spec.label} & set(labels))
        return replace(self, measure=partial(self.measure, specs=specs), specs=compared)

    def jobs(self, seeds: tuple[int, ...]) -> list[Job]:
        """Return the jobs of its compared networks, every network with every seed."""
        return [spec.job(seed) for spec in self.specs for seed in seeds]

    def records(self, run: Run) -> list[Record]:
        """Return the records: those on disk if they are of the same runs, else measured; plot them if need be."""
        path = run.out / FOLDER / f"{self.name}{run.part}.json"
        words = [run.budget, *map(str, run.seeds), *(job.id for job in self.jobs(run.seeds)), *run.rows]
        part = {"rows": list(self.rows)} if run.rows else {}
        of = hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]
        figure = path.with_name(f"{self.name}{run.part}.svg")

        found = run.known(path, lambda known: known.get("of") == of and "records" in known)
        if found is None:
            run.stop(f"{self.title}: not begun")
            figure.unlink(missing_ok=True)
            about = {"title": self.title, "claim": self.claim, "of": of, **part}
            found = run.write(about | {"records": self.measure(run)}, path)
        records: list[Record] = found["records"]
        if self.plot is not None and not figure.is_file():
            self.plot(records, figure)
        return records


@dataclass(frozen=True, kw_only=True)
class Suite:
    """All that `leanbayes reproduce` runs under one name."""

    paper: str
    studies: tuple[Study, ...]
    tables: tuple[Table, ...] = ()  # of the records of all studies together
    legend: str = ""  # how to read the numbers, if it differs from the usual legend


# ------------------------------------------------------------------------------------ compared networks


def _test(name: str, scale: float = 1.0, offset: float = 0.0) -> Callable[[Json], float | None]:
    def read(result: Json) -> float | None:
        value = number(result.get("metrics", {}).get("test", {}).get(name))
        return None if value is None else offset + scale * value

    return read


def _corrupted(name: str, scale: float = 1.0) -> Callable[[Json], float | None]:
    def read(result: Json) -> float | None:
        rows = result.get("metrics", {}).get("shift", [])
        if not any(row["severity"] > 0 for row in rows) or any(None in row.values() for row in rows):
            return None
        return scale * lb.shift.corrupted_means(rows)[name]

    return read


def _parameters(result: Json) -> float | None:
    counts = [number(result.get("cost", {}).get(name)) for name in ("parameters", "extra_parameters")]
    return None if None in counts else sum(count or 0.0 for count in counts) / 1e6


MEASURES: dict[str, tuple[Column, Callable[[Json], float | None]]] = {
    column.name: (column, read)
    for column, read in (
        (Column("nll", "NLL", ".4f"), _test("nll")),
        (Column("accuracy", "acc., %", ".2f"), _test("accuracy", 100)),
        (Column("error", "error, %", ".2f"), _test("accuracy", -100, 100)),
        (Column("ece", "ECE", ".4f"), _test("ece")),
        (Column("ece20", "ECE, 20 bins", ".4f"), _test("ece20")),
        (Column("top5", "top-5, %", ".2f"), _test("top5", 100)),
        (Column("c_nll", "corr. NLL", ".3f"), _corrupted("nll")),
        (Column("c_accuracy", "corr. acc., %", ".1f"), _corrupted("accuracy", 100)),
        (Column("c_ece", "corr. ECE", ".3f"), _corrupted("ece")),
        (Column("disagreement", "disagr. / error", ".3f"), _test("disagreement")),
        (Column("parameters", "parameters, M", ".3f", error=""), _parameters),
    )
}  # columns of comparisons, and how each is read from a result


def _read_results(run: Run, *, specs: Mapping[str, TrainingSpec], measures: tuple[str, ...]) -> list[Record]:
    """Return the measures of compared networks, one record for each row and seed."""
    return [
        {"name": name, "data": spec.source.name, "net": spec.net, "label": spec.name, "seed": seed}
        | {measure: MEASURES[measure][1](run.result(spec, seed)) for measure in measures}
        for name, spec in specs.items()
        for seed in run.seeds
    ]


def _compared(spec: TrainingSpec, out: Path, seed: int, device: torch.device) -> Trained:
    """Read the trained model of a compared network; its data are the `Experiment`."""
    assert spec.evaluation is not None
    experiment = _experiment(spec.source, spec.net, spec.evaluation)
    path, net = spec.folder(out, seed) / MODEL, experiment.plain(seed)
    if spec.method is not None:
        net = lb.load(path, net)
    else:
        net.load_state_dict(read_tensors(path)[1])
    return Trained(net.to(device).eval(), experiment, [])


@lru_cache(maxsize=1)
def _experiment(source: DataSpec, net: str, evaluation: EvaluationSpec) -> Experiment:
    return Experiment(source, net, evaluation)  # the last one is cached: the runs of a study mostly share theirs


def label_of(spec: TrainingSpec, specs: Iterable[TrainingSpec]) -> str:
    """Return the name of a spec; with its network, if one of another network has the same name."""
    return spec.name if all(other.net == spec.net for other in specs if other.name == spec.name) else spec.label
