"""`leanbayes compare`, `train`, `evaluate` and `report`: flags to jobs, jobs to results, results to a report.

The flags --recipe.FIELD and --METHOD.FIELD come from the dataclasses of recipes and methods.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints, Literal, NamedTuple, TypeVar

from leanbayes import data, shift
from leanbayes.cli.main import complain, parse
from leanbayes.compare import job as jobs_of
from leanbayes.compare.experiment import load, refusal, shifted_rows
from leanbayes.compare.job import Budget, DataSpec, EvaluationSpec, Job
from leanbayes.compare.kept import check_data
from leanbayes.compare.loggers import check_log, Log
from leanbayes.compare.plain_state import keeping
from leanbayes.compare.run import Stage
from leanbayes.compare.run_all import check_alike
from leanbayes.compare.time_limit import STOPPED, TimeIsUp, TimeLimit
from leanbayes.compare.tuning import check_tune, forget, space_of
from leanbayes.compare.workers import on_ray, run_on_ray, run_on_workers
from leanbayes.data.loading import resolve
from leanbayes.methods import all_methods, closest
from leanbayes.report.load import load_results
from leanbayes.report.page import build
from leanbayes.report.text import markdown, terminal
from leanbayes.runtime.display import counted
from leanbayes.runtime.distributed import is_first
from leanbayes.runtime.noise import Design, INDEPENDENT
from leanbayes.training import Recipe
from leanbayes.training.devices import pick_device

Spec = TypeVar("Spec", DataSpec, EvaluationSpec)
NET_OF_KIND = {"image": "lenet", "table": "mlp", "series": "lstm-ehr"}
SMALLEST_LENET = jobs_of.LARGE  # smaller images get the small network: LeNet has large kernels
OOD = {
    "digits": ("noise", "shuffled"),
    "fashion-demo": ("left-out",),
    "mnist": ("fashion-mnist", "notmnist"),
    "fashion-mnist": ("notmnist", "mnist"),
    "cifar10": ("svhn",),
    "cifar100": ("svhn",),
}
"""Default out-of-distribution sets; other images get noise and shuffled pixels."""

SEEDS: dict[Budget, str] = {"quick": "0,1,2", "short": "0,1,2", "full": "0"}
"""Default seeds by budget: one seed shows a difference, and cannot say whether it is chance."""


@dataclass(frozen=True, kw_only=True)
class Common:
    """Train methods on one data set and network, evaluate them alike.

    Attributes:
        data: a known name (leanbayes list data), or a file or folder of your own: .npz with x_train, y_train, x_test,
            y_test; .csv or .parquet; a folder train/CLASS/*.png, test/CLASS/*.png.
        net: a known name (leanbayes list nets), or your own as package.module:function; default lenet for images, small
            for images below 28 pixels, mlp for tables, lstm-ehr for series.
        methods: methods separated by commas; "all" for every one, "plain" is the unconverted network. One method in
            several versions: "patch,patch[crossed=true]".
        where: layers to convert, globs on dotted paths separated by commas; last_stage, last_block and head are late
            parts, whose answers are cheap. Default the choice of each method.
        seeds: separated by commas; several give standard errors. Default 0,1,2 for the budgets quick and short, 0 for
            full.
        budget: length of the training: quick is minutes, short about an hour on two cores, full the papers' schedules.
        tune: number of trials that choose the learning rate of each row, and the noise level of each method, on
            held-out training rows, never on test rows. Every row has the same number. All seeds use the values chosen
            with seed 0. Each row takes up to this number of further trainings. It needs pip install leanbayes[tune].
            By default there are no trials.
        samples: draws per prediction.
        design: of these draws: independent, or paired with mirrored noise.
        ood: out-of-distribution data sets, separated by commas; "none" for none; default the usual ones for the data
            set if they are here, else noise and shuffled pixels.
        shift: evaluate on corrupted images too.
        shift_images: number of test images to corrupt; 0 means all.
        shift_corruptions: corruptions separated by commas; default all.
        shift_severities: severities from 1 to 5, separated by commas; default all.
        shift_data: rows of another origin with targets, such as another year or clinic: files as for --data, or names,
            separated by commas. They measure the robustness to a shift; of an .npz file and a name the test rows.
        test_images: number of test rows to use; 0 means all.
        train_rows: number of training rows to use, evenly spaced; 0 means all.
        hold_out: number of training rows to evaluate on instead of the test set. They are not trained on. Use it to
            choose settings without looking at the test set.
        validation: share of the training rows to hold out, by class or target quantile. They give the temperature or
            the noise, for tables also the epochs. Five folds replace them if rows are few. 0 trains on all rows.
        split: number of the train/test split, for the UCI sets, digits and tables.
        target: column of a table to predict; default the last.
        task: classification or regression, for data of your own; default by its targets.
        channels: first or last, the channel axis of images in an .npz file; default by their shape.
        drop: columns of a table to leave out, separated by commas.
        group: column of a table whose groups are not split between training and test rows, such as a patient.
        time: column of a table with dates or numbers; the latest rows are the test rows.
        weight: column of a table with the weights of the rows in training.
        types: types of columns of a table, such as zip=category,when=date; one of number, comma (decimal comma),
            boolean, category, embedding, date, day (first), month (first). Default by their cells.
        root: folder of the known data sets; default $LEANBAYES_DATA, else your cache folder.
        late: share of the epochs before the network is converted; default by method, 0 converts at the start.
        device: auto, cpu, cuda or mps.
        precision: bf16-mixed runs networks in bfloat16.
        devices: processes on this machine; torchrun overrides it.
        workers: number of runs at a time, each a process with one thread; useful for small networks on a CPU.
            The default is one, on a Ray cluster as many as it has resources for.
        backend: ray, or local processes. auto is ray if it is installed and there are several workers or RAY_ADDRESS
            names a cluster, else local. Results are the same.
        log: also log every epoch: csv and tensorboard into the folder of the run, wandb and mlflow to their servers.
            history.jsonl in the folder of the run has the epochs in any case.
        stop_after: minutes after which nothing new begins: a training stops after its epoch and keeps its state, no
            evaluation begins. The exit code is 3, and the same command resumes. Default no limit.
        out: folder of the results; default runs/DATA.
        fresh: start again instead of keeping finished runs and resuming others.
    """

    data: str = "digits"
    net: str = ""
    methods: str = "all"
    where: str = ""
    seeds: str = ""
    budget: Budget = "quick"
    tune: int = 0
    samples: int = 16
    design: Design = INDEPENDENT
    ood: str = ""
    shift: bool = True
    shift_images: int = 1000
    shift_corruptions: str = ""
    shift_severities: str = ""
    shift_data: str = ""
    test_images: int = 0
    train_rows: int = 0
    hold_out: int = 0
    validation: float = 0.1
    split: int = 0
    target: str | None = None
    task: Literal["classification", "regression"] | None = None
    channels: Literal["first", "last"] | None = None
    drop: str | None = None
    group: str | None = None
    time: str | None = None
    weight: str | None = None
    types: str | None = None
    root: str | None = None
    late: float | None = None
    device: str = "auto"
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    devices: int = 1
    workers: int | None = None
    backend: Literal["auto", "local", "ray"] = "auto"
    log: Log | None = None
    stop_after: float | None = None
    out: Path | None = None
    fresh: bool = False


@dataclass(frozen=True)
class Report:
    """Write the report of a folder of results again.

    Attributes:
        folder: a folder of results, such as runs/digits.
        out: the file to write, or a folder for report.html; default the folder of results.
        markdown: print the tables as Markdown instead.
    """

    folder: Path
    out: Path | None = None
    markdown: bool = False


def compare(arguments: list[str]) -> int:
    """Train, evaluate, print the table, write the report."""
    return _run(arguments, "compare")


def train(arguments: list[str]) -> int:
    """Train only."""
    return _run(arguments, "train")


def evaluate(arguments: list[str]) -> int:
    """Evaluate trained models."""
    return _run(arguments, "evaluate")


def report(arguments: list[str]) -> int:
    """Write a report, or print its tables."""
    options = parse(Report, arguments, "report")
    if options.markdown:
        sys.stdout.write(markdown(load_results(options.folder)))
    else:
        sys.stdout.write(f"{build(options.folder, options.out)}\n")
    return 0


def comparison_options() -> type[Any]:
    """Return the flags of a comparison: the common ones, --recipe.FIELD, and --METHOD.FIELD for every method."""
    nested = {"recipe": _recipe_flags(), **all_methods()}
    members = [(name, kind, field(default=kind())) for name, kind in nested.items()]
    made = make_dataclass("Comparison", members, bases=(Common,), frozen=True, kw_only=True)
    made.__doc__ = Common.__doc__
    return made


class Plan(NamedTuple):
    """The jobs of a comparison, a sentence on data, network and number of runs, and the digest of the data."""

    jobs: list[Job]
    sentence: str
    sha256: str


def plan_of(options: Any, arguments: Sequence[str] = ()) -> Plan:
    """Return the jobs of a comparison from its flags, plain network first, seed by seed; a wrong flag raises.

    `arguments` are the flags as they were written: a field that equals its default may have been given.
    """
    source = _flags_of(DataSpec, options, name=options.data)
    loaded = load(source)
    recipe, late = _recipe(options, loaded)
    evaluation = _flags_of(
        EvaluationSpec,
        options,
        ood=_ood(options.ood, loaded),
        shift_corruptions=_words(options.shift_corruptions, shift.names(), "corruptions"),
        shift_severities=tuple(map(int, _words(options.shift_severities, "12345", "severities"))),
        shift_data=tuple(filter(None, (name.strip() for name in options.shift_data.split(",")))),
    )
    net = options.net or _net_for(loaded)
    where = tuple(filter(None, options.where.split(",")))
    shared: dict[str, Any] = {"source": source, "net": net, "evaluation": evaluation, "where": where}
    jobs, left_out = [], []
    seeds = _seeds(options.seeds or SEEDS[options.budget])
    for spec in _method_specs(options.methods, loaded):
        if spec.name == jobs_of.SEED_ENSEMBLE:
            own = replace(jobs_of.recipe_for(None, recipe), seed=seeds[0])
            jobs.append(Job(**shared, method=None, recipe=own, members=tuple(seeds), tune=options.tune))
            continue
        if spec.name == jobs_of.STUDENT:
            of = spec.fields["of"]
            taught = _students(spec, options, recipe, late, seeds, shared)
            scaled = loaded.task == "regression" and _follows_noise(taught[0], _given(of, arguments))
            jobs += [replace(job, scaled=scaled) for job in taught]
            continue
        baseline = spec.name if spec.name in jobs_of.BASELINES else ""
        flags = {} if spec.name == jobs_of.PLAIN or baseline else getattr(options, spec.name).fields()
        method = jobs_of.method_of(spec.name, flags | spec.fields)
        if options.methods.strip() == "all" and (reason := refusal(method, net, loaded, where)):
            left_out.append(f"{spec.name} is left out: {reason} (--methods {spec.name} says more)")
            continue
        for seed in seeds:
            own = replace(jobs_of.recipe_for(method, recipe, late), seed=seed)
            job = Job(**shared, method=method, recipe=own, label=spec.label, baseline=baseline)
            scaled = loaded.task == "regression" and _follows_noise(job, {*spec.fields, *_given(spec.name, arguments)})
            jobs.append(replace(job, tune=options.tune if space_of(job) else 0, scaled=scaled))
    # Rows that convert late begin from a state of the plain one; ensembles of seeds and students follow others.
    order = sorted(jobs, key=lambda job: (job.follows, job.seed, jobs_of.plain_of(job) is not None))
    return Plan(keeping(order), "\n  ".join((_describe(loaded, net, jobs), *left_out)), loaded.sha256)


def _students(
    spec: jobs_of.MethodSpec, options: Any, recipe: Recipe, late: float | None, seeds: list[int], shared: dict[str, Any]
) -> list[Job]:
    """Return the students of the row of a method, one for each seed; they have its method and recipe."""
    method = jobs_of.method_of(spec.fields["of"], getattr(options, spec.fields["of"]).fields())
    own = jobs_of.recipe_for(method, recipe, late)
    how: dict[str, Any] = {**shared, "method": method, "label": spec.label, "student": True, "tune": options.tune}
    return [Job(**how, recipe=replace(own, seed=seed)) for seed in seeds]


def _given(name: str, arguments: Sequence[str]) -> set[str]:
    """Return the fields of a method that flags such as --rank1.init-std give."""
    start = f"--{name}.".replace("_", "-")
    words = (word.partition("=")[0].replace("_", "-") for word in arguments)
    return {word.removeprefix(start).replace("-", "_") for word in words if word.startswith(start)}


def _follows_noise(job: Job, given: set[str]) -> bool:
    """Return whether the initial noise follows that of the plain network; a field that the user gives is kept."""
    if job.method is None or not (job.recipe.patience and job.recipe.convert_at_epoch and job.source.validation):
        return False
    usual = type(job.method)()
    changed = {name for name in job.method.scaled if getattr(job.method, name) != getattr(usual, name)}
    return bool(job.method.scaled) and not changed and given.isdisjoint(job.method.scaled)


def _words(text: str, known: Sequence[str], what: str) -> tuple[str, ...]:
    """Return the words of a flag, separated by commas; an unknown one raises."""
    words = tuple(filter(None, (word.strip() for word in text.split(","))))
    for word in words:
        if word not in known:
            raise ValueError(f"expected {what} among {', '.join(known)}, got {word!r}{closest(word, known)}")
    return words


def _method_specs(text: str, loaded: data.DataSet) -> list[jobs_of.MethodSpec]:
    """Return the rows of a comparison; "all" of a table includes those without a network."""
    found = jobs_of.parse_methods(text)
    if text.strip() == "all" and loaded.kind == "table":
        found += [jobs_of.MethodSpec(name) for name in jobs_of.BASELINES]
    if loaded.kind != "table" and (odd := [spec.name for spec in found if spec.name in jobs_of.BASELINES]):
        raise ValueError(f"expected a table for the row {odd[0]}, got {loaded.name}, which is {loaded.kind}")
    return found


def _flags_of(kind: type[Spec], options: Any, **own: Any) -> Spec:
    """Return a dataclass with the flags of the same names, but for `own`."""
    return kind(**({f.name: getattr(options, f.name) for f in fields(kind) if f.name not in own} | own))


def _run(arguments: list[str], stage: Stage) -> int:
    """Run the jobs of the flags; then print the table and write the report, unless they only trained."""
    options = parse(comparison_options(), arguments, stage)
    limit = None if options.stop_after is None else TimeLimit.of(options.stop_after)
    check_log(options.log)
    plan, out = plan_of(options, arguments), out_of(options)
    check_tune(options.tune, options.validation, max(job.processes for job in plan.jobs))
    check_alike(plan.jobs, out)
    for job in () if options.fresh else plan.jobs:
        check_data(job, out, plan.sha256)
    if options.fresh and stage != "evaluate":
        forget(plan.jobs, out)
    if is_first():
        sys.stderr.write(f"{plan.sentence}\n")
    how: dict[str, Any] = {"stage": stage, "fresh": options.fresh, "log": options.log}
    try:
        found = _performed(plan.jobs, out, options, limit, how)
    except TimeIsUp as stop:
        complain(stop.sentence(fresh=options.fresh))
        return STOPPED
    code = 0 if all(result["status"] == "done" for result in found) else 1
    return max(code, _show(out)) if is_first() and stage != "train" else code


def _performed(
    jobs: list[Job], out: Path, options: Any, limit: TimeLimit | None, how: dict[str, Any]
) -> list[dict[str, Any]]:
    """Perform the jobs in this process, on several or on Ray; a time limit is for one machine alone."""
    ray = on_ray(options.backend, options.workers)
    if limit is not None and (ray or max(job.processes for job in jobs) > 1):
        where = "Ray" if ray else "several processes a network"
        raise ValueError(
            f"--stop-after does not work on {where} yet; leave it out, or take --backend local and --devices 1"
        )
    if ray:
        return run_on_ray(jobs, out, workers=options.workers, **how)
    return run_on_workers(jobs, out, workers=options.workers or 1, limit=limit, **how)


def _show(out: Path) -> int:
    try:
        path = build(out)
    except OSError as error:
        complain(f"cannot write the report in '{out}' ({error.strerror or error}); the results are kept")
        return 1
    try:
        terminal(load_results(out))
        sys.stdout.write(f"report: {path}\n")
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # the reader closed the pipe (| head); rich exits on that
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115  # the interpreter flushes it once more
    return 0


def out_of(options: Any) -> Path:
    """Return the folder of a comparison."""
    return Path(options.out) if options.out is not None else Path("runs") / Path(options.data).stem


def _recipe(options: Any, loaded: data.DataSet) -> tuple[Recipe, float | None]:
    """Return the recipe of the flags, and the share of the epochs before conversion."""
    shape: dict[str, Any] = {"kind": loaded.kind, "rows": len(loaded.train), "augment": loaded.augment}
    side = min(loaded.input_shape[1:]) if loaded.kind == "image" else 0
    base = jobs_of.recipe(options.budget, **shape, validated=options.validation > 0, side=side)
    given = {f.name: value for f in fields(options.recipe) if (value := getattr(options.recipe, f.name)) is not None}
    base = jobs_of.stretched(base, given.get("epochs", base.epochs))
    if given.get("schedule", "constant") != "constant":
        base = replace(base, patience=0)  # such a schedule is made for its last epoch
    machine = {"accelerator": options.device, "precision": options.precision, "devices": options.devices}
    on_gpu = pick_device(options.device).type == "cuda" and loaded.kind == "image"
    recipe = replace(base, **machine, **({"channels_last": on_gpu} | given))
    if recipe.batch_size % recipe.devices:
        raise ValueError(
            f"expected a batch size that {recipe.devices} processes can share, got {recipe.batch_size}; set "
            "--recipe.batch-size to a multiple"
        )
    return recipe, given["convert_at_epoch"] / recipe.epochs if "convert_at_epoch" in given else options.late


def _describe(loaded: data.DataSet, net: str, jobs: list[Job]) -> str:
    """Return a sentence on data and flags, so that a mistake is seen before hours of work."""
    shape = "x".join(map(str, loaded.input_shape))
    what = f"{len(loaded.classes)} classes" if loaded.task == "classification" else f"{loaded.num_outputs} real target"
    what += "s" if loaded.task == "regression" and loaded.num_outputs > 1 else ""
    own = isinstance(resolve(jobs[0].source.name), Path)
    where = f" (channels {loaded.channels} in the file)" if loaded.channels and own else ""
    rows = {"image": f"images {shape}{where}", "series": f"series {shape}", "text": f"texts of {shape} tokens"}
    kind = rows.get(loaded.kind, f"{shape} columns")
    if loaded.table is not None and not loaded.table.plain:
        kind = f"{shape} inputs from {len(loaded.table.columns)} columns"
    seeds = list(dict.fromkeys(job.seed for job in jobs))
    named = f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"
    test = min(jobs[0].evaluation.test_images or len(loaded.test), len(loaded.test))
    sentence = (
        f"{loaded.name}: {loaded.task}, {what}, {len(loaded.train):,} + {test:,} rows, {kind}; "
        f"network {net}; {counted(len(jobs), 'run')} of {_epochs(jobs[0].recipe)}; {named}{_trials(jobs)}"
    )
    moved = shifted_rows(jobs[0].evaluation.shift_data, loaded, jobs[0].source.root)
    notes = [f"shift data {name}: {'; '.join((f'{len(m.rows):,} rows', *m.notes))}" for name, m in moved.items()]
    return "\n  ".join((sentence, *loaded.notes, *_largest_class(loaded), *notes))


def _largest_class(loaded: data.DataSet) -> list[str]:
    if loaded.table is None or loaded.largest_class is None:
        return []
    name, share = loaded.largest_class
    return [f"always predicting the largest class, {name!r}, is right for {100 * share:.1f} % of the test rows"]


def _epochs(recipe: Recipe) -> str:
    epochs = counted(recipe.epochs, "epoch")
    return f"at most {epochs}, until held-out rows stop improving" if recipe.patience else epochs


def _trials(jobs: list[Job]) -> str:
    tuned = dict.fromkeys(job.title for job in jobs if job.tune and not job.members)
    return f"; before them {counted(jobs[0].tune, 'trial')} for each of {counted(len(tuned), 'row')}" if tuned else ""


def _seeds(text: str) -> list[int]:
    try:
        seeds = [int(seed) for seed in text.split(",")]
    except ValueError:
        seeds = []
    if not seeds or min(seeds) < 0:
        raise ValueError(f"expected seeds such as 0,1,2, got {text!r}")
    return list(dict.fromkeys(seeds))


def _ood(text: str, loaded: data.DataSet) -> tuple[str, ...]:
    if text == "none" or (not text and loaded.kind != "image"):
        return ()
    if text:
        return tuple(name.strip() for name in text.split(",") if name.strip())
    here = {row.name for row in data.describe() if not row.where.startswith("not here")}
    usual = tuple(name for name in OOD.get(loaded.name, ()) if name in here | {"noise", "shuffled", *loaded.further})
    return usual or ("noise", "shuffled")


def _net_for(loaded: data.DataSet) -> str:
    if loaded.kind == "image" and min(loaded.input_shape[1:]) < SMALLEST_LENET:
        return "small"
    if loaded.kind not in NET_OF_KIND:
        raise ValueError(
            f"{loaded.name} is {loaded.kind}, and leanbayes has no network for it; pass your own: --net "
            "package.module:function"
        )
    return NET_OF_KIND[loaded.kind]


def _recipe_flags() -> type[Any]:
    """Return the recipe's fields as flags with default None; the budget decides those."""
    import tyro
    from docstring_parser import parse as parse_docstring

    hints, documented = get_type_hints(Recipe), parse_docstring(Recipe.__doc__ or "").params
    helps = {p.arg_name: " ".join((p.description or "").split()) for p in documented}

    def flag(name: str) -> Any:
        return tyro.conf.arg(help=helps.get(name, ""), help_behavior_hint="(default: by --budget)")

    taken = ("seed", "accelerator", "devices", "precision")  # they have flags of their own
    members = [
        (f.name, Annotated[hints[f.name] | None, flag(f.name)], field(default=None))
        for f in fields(Recipe)
        if f.name not in taken
    ]
    return make_dataclass("RecipeFlags", members, frozen=True, kw_only=True)
