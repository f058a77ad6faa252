"""What each command of the command line does: read its flags, call the library, say what came out."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Literal

from leanbayes.cli.options import comparison_options, out_of, parse, plan_of
from leanbayes.compare.run import Stage
from leanbayes.compare.run_all import check_alike
from leanbayes.compare.workers import on_ray, run_on_ray, run_on_workers
from leanbayes.runtime._files import write_text
from leanbayes.runtime.distributed import is_first


def compare(arguments: list[str]) -> int:
    """Train, evaluate, print the table, write the report."""
    options = parse(comparison_options(), arguments, "compare")
    out = out_of(options)
    code = _run(options, "compare")
    return max(code, _show(out))


def train(arguments: list[str]) -> int:
    """Train only."""
    options = parse(comparison_options(), arguments, "train")
    return _run(options, "train")


def evaluate(arguments: list[str]) -> int:
    """Evaluate what was trained."""
    options = parse(comparison_options(), arguments, "evaluate")
    out = out_of(options)
    code = _run(options, "evaluate")
    return max(code, _show(out))


@dataclass(frozen=True)
class Report:
    """Write the report of a folder of results anew.

    Attributes:
        folder: a folder of results, such as runs/digits.
        out: the file to write, or a folder for report.html; default the folder of results.
        markdown: print the tables as Markdown instead.
    """

    folder: Path
    out: Path | None = None
    markdown: bool = False


def report(arguments: list[str]) -> int:
    """Write a report, or print its tables."""
    from leanbayes.report import build, load_results, markdown

    options = parse(_positional(Report), arguments, "report")
    if options.markdown:
        sys.stdout.write(markdown(load_results(options.folder)))
    else:
        sys.stdout.write(f"{build(options.folder, options.out)}\n")
    return 0


@dataclass(frozen=True)
class Listing:
    """Say what there is.

    Attributes:
        what: methods, nets, data or suites; all is everything.
    """

    what: Literal["methods", "nets", "data", "suites", "all"]


def list_names(arguments: list[str]) -> int:
    """Print a table of what there is, with a line for each."""
    from leanbayes import models
    from leanbayes.methods import all_methods

    options = parse(_positional(Listing), arguments or ["all"], "list")
    tables = {
        "methods": [("plain", "The network as it is."), *((n, _summary(k)) for n, k in all_methods().items())],
        "nets": list(models.describe().items()),
        "suites": [(name, _summary(suite)) for name, suite in _suites().items()],
    }
    for name, rows in tables.items():
        if options.what in (name, "all"):
            _table((name, "what it is"), rows)
    return data(["list"]) if options.what in ("data", "all") else 0


@dataclass(frozen=True)
class DataList:
    """List the known data sets and where they are.

    Attributes:
        root: folder of the data sets; default $LEANBAYES_DATA, else your cache folder.
    """

    root: str | None = None


@dataclass(frozen=True)
class DataPrepare:
    """Fetch a data set, verify it, and put it into the cache.

    Attributes:
        name: which one; leanbayes data list names them.
        root: folder of the data sets; default $LEANBAYES_DATA, else your cache folder.
        source: a folder with the upstream files, if you have them already.
    """

    name: str
    root: str | None = None
    source: str | None = None


def data(arguments: list[str]) -> int:
    """List or prepare data sets."""
    from leanbayes.data import describe, describe_annotated, prepare

    if not arguments or arguments[0] not in ("list", "prepare"):
        asked = bool(arguments) and arguments[0] in ("-h", "--help")
        sys.stdout.write("usage: leanbayes data list | leanbayes data prepare NAME [--source FOLDER]\n")
        return 0 if asked else 2
    if arguments[0] == "list":
        listing = parse(DataList, arguments[1:], "data list")
        rows = [
            (r.name, r.task, f"{r.train:,}", f"{r.test:,}", "x".join(map(str, r.shape)), r.where)
            for r in describe(listing.root)
        ]
        _table(("name", "task", "train", "test", "shape", "where"), rows)
        annotated = [
            (r.name, r.annotators, f"{r.train:,}", f"{r.test:,}", "x".join(map(str, r.shape)), r.where)
            for r in describe_annotated(listing.root)
        ]
        _table(("lb.data.load_annotated", "annotators", "train", "test", "shape", "where"), annotated)
        return 0
    wanted = parse(_positional(DataPrepare), arguments[1:], "data prepare")
    prepare(wanted.name, wanted.root, wanted.source)
    return 0


@dataclass(frozen=True)
class Predict:
    """Predict for new rows with a network of a comparison; rows are prepared as those that it was trained on.

    Attributes:
        checkpoint: folder of a run, such as runs/digits/digits/small/rank1/seed0, or the model.safetensors in it.
        data: rows: .npy; .npz with one array, or one named x or x_test; .csv; or a known data set (leanbayes list
            data), of which the test rows are taken. Default the test rows of the run.
        net: the network of the run as package.module:function, where it is your own: its name in the run's folder alone
            is never imported.
        out: where predictions go: predictions.csv for a spreadsheet, part-*.npz for Python (read_scores). Default
            predictions/DATA.
        samples: draws of every prediction.
        seed: names the draws.
        part_rows: rows of a file; what is finished when you interrupt is kept.
        workers: processes, each with one thread; default this one, on a Ray cluster as many as it has room for.
        backend: where workers are: ray, or local processes; auto is ray where it is installed and there are several
            workers or RAY_ADDRESS names a cluster, local otherwise. Predictions are the same.
        device: auto, cpu, cuda or mps.
        root: folder of the known data sets; default that of the run.
        fresh: begin anew instead of keeping finished parts.
    """

    checkpoint: Path
    data: str = ""
    net: str = ""
    out: Path | None = None
    samples: int = 16
    seed: int = 0
    part_rows: int = 4096
    workers: int | None = None
    backend: Literal["auto", "local", "ray"] = "auto"
    device: str = "auto"
    root: str | None = None
    fresh: bool = False


def predict(arguments: list[str]) -> int:
    """Predict, part by part, and say where the predictions are."""
    from leanbayes.compare.load_run import load_run
    from leanbayes.compare.predictions import find_rows, judged, predict_rows, TABLE
    from leanbayes.compare.run import device_of

    options = parse(_positional(Predict), arguments, "predict")
    device = device_of(options.device)
    run = load_run(options.checkpoint, options.root, options.net)
    asked = find_rows(options.data, run, options.root)
    out = options.out or Path("predictions") / Path(options.data or run.data.name).stem
    sys.stderr.write(f"{asked.name}; network {run.net}, {run.method}, of '{run.folder}'\n")
    run.model.to(device)
    how = {name: getattr(options, name) for name in ("samples", "seed", "part_rows", "workers", "backend", "fresh")}
    try:
        predict_rows(run, asked, out, **how)
    except RuntimeError as error:  # a worker died, or the memory was too small
        sys.stderr.write(f"leanbayes: {error}\n")
        return 1
    if asked.y is not None:
        sys.stdout.write(f"{judged(out, asked.y, run.data.task)}\n")
    sys.stdout.write(f"predictions: {out / TABLE}\n")
    return 0


@dataclass(frozen=True)
class Bench:
    """Measure what each method costs, in units of the plain network in the same run.

    Attributes:
        net: a known name (leanbayes list nets), or your own as package.module:function.
        methods: separated by commas; "all" for every one.
        shape: of one input.
        classes: number of outputs.
        batch: rows of a batch.
        samples: draws of a prediction.
        turns: how often each is measured; medians are reported.
        device: auto, cpu, cuda or mps.
        out: a JSON file to write.
        json: print JSON instead of a table.
    """

    net: str = "wrn-16-2"
    methods: str = "all"
    shape: tuple[int, ...] = (3, 32, 32)
    classes: int = 10
    batch: int = 64
    samples: int = 16
    turns: int = 7
    device: str = "auto"
    out: Path | None = None
    json: bool = False


def bench(arguments: list[str]) -> int:
    """Measure costs and print them."""
    from leanbayes.compare.bench import measure

    options = vars(parse(Bench, arguments, "bench"))
    as_json, out = options.pop("json"), options.pop("out")
    found = measure(**options)
    text = json.dumps(found, indent=2) + "\n"
    if out is not None:
        write_text(text, out)
    if as_json:
        sys.stdout.write(text)
        return 0
    rows = [
        (
            name,
            f"{c['extra_percent']:.2f}",
            f"{c['train_step_ratio']:.2f}",
            f"{c['predict_ratio']:.2f}",
            str(c["passes"]),
            f"{c['passes'] * c['predict_ratio']:.1f}",
        )
        for name, c in found["methods"].items()
    ]
    _table(("method", "extra parameters %", "training step x", "one pass x", "passes", "answer passes"), rows)
    return 0


@dataclass(frozen=True)
class Reproduce:
    """Repeat a table or figure of a paper and print our numbers beside the paper's.

    Attributes:
        name: which one; leanbayes list suites names them.
        budget: quick shows that it works, short takes about an hour on a GPU, full is the paper's schedule.
        seeds: separated by commas.
        device: auto, cpu, cuda or mps.
        precision: bf16-mixed runs networks in bfloat16.
        root: folder of the known data sets; default $LEANBAYES_DATA, else your cache folder.
        data: of the data sets that it is about only these, separated by commas; default all.
        out: where results go; default runs/NAME.
        fresh: begin anew instead of keeping finished runs and resuming others.
    """

    name: str
    budget: Literal["quick", "short", "full"] = "quick"
    seeds: str = "0"
    device: str = "auto"
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    root: str | None = None
    data: str = ""
    out: Path | None = None
    fresh: bool = False


def reproduce(arguments: list[str]) -> int:
    """Run a suite of a paper."""
    options = parse(_positional(Reproduce), arguments, "reproduce")
    packages = [package for package in _suite_packages() if options.name in package.SUITES]
    if not packages:
        raise ValueError(f"expected a suite among {', '.join(_suites())}, got {options.name!r}")
    out = options.out or Path("runs") / options.name
    code: int = packages[0].run_suite(options, out)
    return code


def _suite_packages() -> list[Any]:
    """Return the packages of the entry-point group `leanbayes.suites`: each has `SUITES` and `run_suite`."""
    return [entry.load() for entry in entry_points(group="leanbayes.suites")]


def _suites() -> dict[str, Any]:
    """Return the suites of all packages by name."""
    return {name: suite for package in _suite_packages() for name, suite in package.SUITES.items()}


def _run(options: Any, stage: Stage) -> int:
    """Run the jobs that the flags ask for; 1 if any failed."""
    plan = plan_of(options)
    check_alike(plan.jobs, out_of(options))
    if is_first():
        sys.stderr.write(f"{plan.sentence}\n")
    how = {"stage": stage, "fresh": options.fresh}
    if on_ray(options.backend, options.workers):
        found = run_on_ray(plan.jobs, out_of(options), workers=options.workers, **how)
    else:
        found = run_on_workers(plan.jobs, out_of(options), workers=options.workers or 1, **how)
    return 0 if all(result["status"] == "done" for result in found) else 1


def _show(out: Path) -> int:
    """Write the report and print the table, from what lies in the folder; 1 if the report could not be written."""
    if not is_first():
        return 0
    from leanbayes.report import build, load_results, terminal

    try:
        path = build(out)
    except OSError as error:
        reason = error.strerror or error
        sys.stderr.write(f"leanbayes: cannot write the report in '{out}' ({reason}); the results are kept\n")
        return 1
    try:
        terminal(load_results(out))
        sys.stdout.write(f"report: {path}\n")
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # somebody has seen enough (| head); rich leaves on that
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115  # the interpreter flushes it once more
    return 0


def _positional(kind: type[Any]) -> Any:
    """Let fields without a default be given by position."""
    import tyro

    return Annotated[kind, tyro.conf.PositionalRequiredArgs]


def _summary(thing: Any) -> str:
    return (thing.__doc__ or "").strip().splitlines()[0]


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for head in heads:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*row[: len(heads)])
    Console().print(table, highlight=False)
