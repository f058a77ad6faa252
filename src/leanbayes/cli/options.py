"""The flags of the commands, as dataclasses; those of methods and recipes come from their own dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints, Literal, NamedTuple, TypeVar

from leanbayes import data
from leanbayes.compare.experiment import load
from leanbayes.compare.job import (
    Budget,
    DataSpec,
    EvaluationSpec,
    Job,
    method_of,
    MethodSpec,
    PLAIN,
    recipe_for,
    stretched,
    wanted,
)
from leanbayes.compare.job import recipe as recipe_of
from leanbayes.compare.run import device_of
from leanbayes.data.loading import resolve
from leanbayes.methods import all_methods
from leanbayes.methods._base import Method
from leanbayes.runtime._files import local
from leanbayes.training import Recipe

Options = TypeVar("Options")

NET_OF_KIND = {"image": "lenet", "table": "mlp", "series": "lstm-ehr"}
SMALLEST_LENET = 28
"""Images below so many pixels are too small for LeNet's kernels; the small network takes them."""

FOREIGN = {
    "digits": ("noise", "shuffled"),
    "mnist": ("fashion-mnist", "notmnist"),
    "fashion-mnist": ("notmnist", "mnist"),
    "cifar10": ("svhn",),
    "cifar100": ("svhn",),
}
"""What serves as foreign inputs where nothing is said; other images get noise and shuffled pixels."""


@dataclass(frozen=True, kw_only=True)
class Common:
    """Train methods on one data set and network, evaluate them alike.

    Attributes:
        data: a known name (leanbayes list data), or a file or folder of your own: .npz with x_train, y_train, x_test,
            y_test; .csv; a folder train/CLASS/*.png, test/CLASS/*.png.
        net: a known name (leanbayes list nets), or your own as package.module:function; default lenet for images, small
            for images below 28 pixels, mlp for tables, lstm-ehr for series.
        methods: which methods, separated by commas; "all" for every one, "plain" is the network as it is. One method in
            several versions: "patch,patch[crossed=true]".
        where: which layers are converted, globs on dotted paths separated by commas; default as each method chooses.
        seeds: separated by commas; several give standard errors.
        budget: how long to train: quick is minutes, short about an hour on two cores, full the papers' schedules.
        samples: draws of every prediction.
        ood: data sets that serve as foreign inputs, separated by commas; "none" for none; default what is usual for the
            data set and here, else noise and shuffled pixels.
        shift: evaluate on corrupted images, too.
        shift_images: how many test images are corrupted; 0 is all.
        test_images: use so many test rows; 0 is all.
        train_rows: use so many training rows, evenly spaced; 0 is all.
        hold_out: judge on so many training rows, left out of training, instead of the test set: for choosing settings
            without looking at it.
        split: number of the train/test split, for the UCI sets, digits and .csv files.
        target: column of a .csv file that is to be predicted; default the last.
        task: classification or regression, for data of your own; default by its targets.
        channels: first or last, where images of an .npz file have their channels; default by their shape.
        root: folder of the known data sets; default $LEANBAYES_DATA, else your cache folder.
        late: share of the epochs that the plain network is trained before it is converted; default by method, 0
            converts at the start.
        device: auto, cpu, cuda or mps.
        precision: bf16-mixed runs networks in bfloat16.
        devices: processes on this machine; torchrun overrules it.
        workers: runs at a time, each a process with one thread; useful for small networks on a CPU. Default 1, on a Ray
            cluster as many as it has room for.
        backend: where workers are: ray, or local processes; auto is ray where it is installed and there are several
            workers or RAY_ADDRESS names a cluster, local otherwise. Results are the same.
        out: where results go; default runs/DATA.
        fresh: begin anew instead of keeping finished runs and resuming others.
    """

    data: str = "digits"
    net: str = ""
    methods: str = "all"
    where: str = ""
    seeds: str = "0"
    budget: Budget = "quick"
    samples: int = 16
    ood: str = ""
    shift: bool = True
    shift_images: int = 1000
    test_images: int = 0
    train_rows: int = 0
    hold_out: int = 0
    split: int = 0
    target: str | None = None
    task: Literal["classification", "regression"] | None = None
    channels: Literal["first", "last"] | None = None
    root: str | None = None
    late: float | None = None
    device: str = "auto"
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    devices: int = 1
    workers: int | None = None
    backend: Literal["auto", "local", "ray"] = "auto"
    out: Path | None = None
    fresh: bool = False


def parse(kind: type[Options], arguments: list[str], command: str) -> Options:
    """Read flags into a dataclass; prints help and leaves on --help or a wrong flag.

    Raises:
        ValueError: if a path has a scheme; a `Path` would no longer be spelt as it was given.
    """
    import tyro

    for argument in arguments:
        local(argument.partition("=")[2] if argument.startswith("--") else argument)
    read = ["--no-fresh" if argument == "--resume" else argument for argument in arguments]
    return tyro.cli(kind, args=read, prog=f"leanbayes {command}")


def comparison_options() -> type[Any]:
    """Return the flags of a comparison: the common ones, --recipe.FIELD, and --METHOD.FIELD for every method."""
    nested = {"recipe": _recipe_flags(), **all_methods()}
    members = [(name, kind, field(default=kind())) for name, kind in nested.items()]
    made = make_dataclass("Comparison", members, bases=(Common,), frozen=True, kw_only=True)
    made.__doc__ = Common.__doc__
    return made


class Plan(NamedTuple):
    """What the flags of a comparison ask for: the jobs, and a sentence that says what was understood."""

    jobs: list[Job]
    sentence: str


def plan_of(options: Any) -> Plan:
    """Return the jobs that the flags of a comparison ask for, plain network first, seed by seed.

    Raises:
        ValueError: in one sentence, if a flag, the data or the machine do not allow it.
    """
    source = DataSpec(
        name=options.data,
        root=options.root,
        split=options.split,
        target=options.target,
        task=options.task,
        train_rows=options.train_rows,
        hold_out=options.hold_out,
        channels=options.channels,
    )
    loaded = load(source)
    recipe = recipe_of(options.budget, kind=loaded.kind, rows=len(loaded.train), augment=loaded.augment)
    given = {f.name: value for f in fields(options.recipe) if (value := getattr(options.recipe, f.name)) is not None}
    recipe = stretched(recipe, given.get("epochs", recipe.epochs))
    machine = {"accelerator": options.device, "precision": options.precision, "devices": options.devices}
    on_gpu = device_of(options.device).type == "cuda" and loaded.kind == "image"
    recipe = replace(recipe, **machine, **({"channels_last": on_gpu} | given))
    _check_machine(recipe)
    late = given["convert_at_epoch"] / recipe.epochs if "convert_at_epoch" in given else options.late
    judging = EvaluationSpec(
        samples=options.samples,
        ood=_foreign(options.ood, loaded),
        shift=options.shift,
        shift_images=options.shift_images,
        test_images=options.test_images,
    )
    net = options.net or _net_for(loaded)
    common: dict[str, Any] = {
        "source": source,
        "net": net,
        "judging": judging,
        "where": tuple(filter(None, options.where.split(","))),
    }
    jobs = []
    for version in wanted(options.methods):
        method = _method(version, options)
        for seed in _numbers(options.seeds):
            own = replace(recipe_for(method, recipe, late), seed=seed)
            jobs.append(Job(**common, method=method, recipe=own, label=version.label))
    return Plan(sorted(jobs, key=lambda job: job.seed), _understood(loaded, net, jobs))


def _check_machine(recipe: Recipe) -> None:
    device_of(recipe.accelerator)
    if recipe.batch_size % recipe.devices:
        raise ValueError(
            f"expected a batch size that {recipe.devices} processes can share, got {recipe.batch_size}; set "
            "--recipe.batch-size to a multiple"
        )


def _understood(loaded: data.DataSet, net: str, jobs: list[Job]) -> str:
    """Say what was read out of the data and the flags: a mistake should be seen before hours of work."""
    shape = "x".join(map(str, loaded.input_shape))
    what = f"{len(loaded.classes)} classes" if loaded.task == "classification" else f"{loaded.num_outputs} real targets"
    own = isinstance(resolve(jobs[0].source.name), Path)
    where = f" (channels {loaded.channels} in the file)" if loaded.channels and own else ""
    rows = {"image": f"images {shape}{where}", "series": f"series {shape}", "text": f"texts of {shape} tokens"}
    kind = rows.get(loaded.kind, f"{shape} columns")
    runs = "1 run" if len(jobs) == 1 else f"{len(jobs)} runs"
    epochs = jobs[0].recipe.epochs
    judged = min(jobs[0].judging.test_images or len(loaded.test), len(loaded.test))
    return (
        f"{loaded.name}: {loaded.task}, {what}, {len(loaded.train):,} + {judged:,} rows, {kind}; "
        f"network {net}; {runs} of {epochs} epochs"
    )


def out_of(options: Any) -> Path:
    """Return the folder of a comparison."""
    if options.out is not None:
        return Path(options.out)
    return Path("runs") / Path(options.data).stem


def _method(version: MethodSpec, options: Any) -> Method | None:
    if version.name == PLAIN:
        return None
    return method_of(version.name, getattr(options, version.name).fields() | version.fields)


def _numbers(text: str) -> list[int]:
    try:
        seeds = [int(seed) for seed in text.split(",")]
    except ValueError:
        seeds = []
    if not seeds or min(seeds) < 0:
        raise ValueError(f"expected seeds such as 0,1,2, got {text!r}")
    return list(dict.fromkeys(seeds))


def _foreign(text: str, loaded: data.DataSet) -> tuple[str, ...]:
    if text == "none" or (not text and loaded.kind != "image"):
        return ()
    if text:
        return tuple(name.strip() for name in text.split(",") if name.strip())
    here = {row.name for row in data.describe() if not row.where.startswith("not here")}
    usual = tuple(name for name in FOREIGN.get(loaded.name, ()) if name in here | {"noise", "shuffled"})
    return usual or ("noise", "shuffled")


def _net_for(loaded: data.DataSet) -> str:
    if loaded.kind == "image" and min(loaded.input_shape[1:]) < SMALLEST_LENET:
        return "small"
    if loaded.kind not in NET_OF_KIND:
        raise ValueError(
            f"{loaded.name} is {loaded.kind}, for which there is no network of ours; pass your own: --net "
            "package.module:function"
        )
    return NET_OF_KIND[loaded.kind]


def _recipe_flags() -> type[Any]:
    """Return the recipe's fields as flags that are None unless given; the budget decides those."""
    import tyro

    hints, helps = get_type_hints(Recipe), _helps(Recipe)
    taken = ("seed", "accelerator", "devices", "precision")  # flags of their own
    members = [
        (f.name, Annotated[hints[f.name] | None, tyro.conf.arg(help=helps.get(f.name, ""))], field(default=None))
        for f in fields(Recipe)
        if f.name not in taken
    ]
    return make_dataclass("RecipeFlags", members, frozen=True, kw_only=True)


def _helps(kind: type[Any]) -> Mapping[str, str]:
    from docstring_parser import parse as parse_docstring

    said = parse_docstring(kind.__doc__ or "")
    return {p.arg_name: " ".join((p.description or "").split()) for p in said.params}
