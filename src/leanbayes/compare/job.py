"""The data of one run: `Job` is one training and one evaluation, `MethodSpec` a method of the command line.

Recipes by budget: `quick` takes minutes, `short` about an hour on two cores, `full` is the schedule of the papers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from leanbayes.data.loading import resolve
from leanbayes.methods import all_methods, closest, method_name
from leanbayes.methods._base import Method
from leanbayes.runtime.distributed import Launch, launched
from leanbayes.runtime.noise import check_design, Design, INDEPENDENT
from leanbayes.training import Recipe
from leanbayes.training.distillation import default_recipe, PERTURBED

PLAIN = "plain"  # name of the unconverted network in lists of methods
STUDENT = "student"  # one pass that has learned the answers of a method
SEED_ENSEMBLE = "seed_ensemble"  # the trained plain networks of all seeds, as one ensemble
BASELINES = ("mean", "linear", "boosting")  # rows without a network, for tables (`compare.baselines`)

Budget = Literal["quick", "short", "full"]
BUDGETS: tuple[Budget, ...] = ("quick", "short", "full")

FEW = 5000  # fewer training images than this get small batches: they need many steps, also after conversion
LARGE = 28  # pixels of the shorter side from which on images get LeNet
PATIENCE = 30  # epochs without improvement on the held-out rows of a table
MOST_EPOCHS = 500  # of a table
KL_EPOCHS = 200  # epochs until the KL has its full weight, as in the papers; shorter trainings end before
TABLE_FIELDS = ("drop", "group", "time", "weight", "types")  # of `DataSpec`, for tables
METHOD = re.compile(r"\s*([\w-]+)\s*(?:\[([^\]]*)\])?\s*(?:,|$)")


@dataclass(frozen=True, kw_only=True)
class EvaluationSpec:
    """Settings of an evaluation.

    Attributes:
        samples: draws per prediction.
        ood: names of out-of-distribution data sets.
        shift: evaluate on corrupted images, if the data are images.
        shift_images: number of test images to corrupt; 0 means all.
        test_images: number of test rows to use; 0 means all.
        shift_corruptions: names of the corruptions; none means all.
        shift_severities: severities from 1 to 5; none means all.
        design: of the draws, "independent" or "paired".
        shift_data: names or paths of rows of another origin with targets.
    """

    samples: int = 16
    ood: tuple[str, ...] = ()
    shift: bool = True
    shift_images: int = 1000
    test_images: int = 0
    shift_corruptions: tuple[str, ...] = ()
    shift_severities: tuple[int, ...] = ()
    design: Design = field(default=INDEPENDENT, repr=False)
    shift_data: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_design(self.design)
        _check_counts(1, samples=self.samples)
        _check_counts(0, shift_images=self.shift_images, test_images=self.test_images)


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """A data set by name or file, and the rows to use.

    Attributes:
        name: a known name, or a path.
        root: folder of the known sets.
        split: number of the train/test split, if there are several.
        target: column to predict, of a .csv file.
        task: "classification" or "regression", for the user's own data.
        train_rows: number of training rows to use, evenly spaced; 0 means all.
        hold_out: number of training rows to evaluate on, instead of the test set. They are evenly spaced and not
            trained on.
        validation: share of the training rows that validate the training instead; 0 trains on all rows.
        channels: "first" or "last": the channel axis of images in an .npz file; None infers it from the shape.
        drop, group, time, weight, types: options for tables, as texts; see `leanbayes.data.load`.
    """

    name: str
    root: str | None = None
    split: int = 0
    target: str | None = None
    task: str | None = None
    train_rows: int = 0
    hold_out: int = 0
    validation: float = field(default=0.0, repr=False)
    channels: str | None = field(default=None, repr=False)  # digests in older folder names lack it and those below
    drop: str | None = field(default=None, repr=False)
    group: str | None = field(default=None, repr=False)
    time: str | None = field(default=None, repr=False)
    weight: str | None = field(default=None, repr=False)
    types: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        _check_counts(0, train_rows=self.train_rows, hold_out=self.hold_out, split=self.split)
        if not 0 <= self.validation < 1:
            raise ValueError(f"expected validation to be at least 0 and below 1, got {self.validation}")


LATER: dict[str, Any] = {"channels": None, "validation": 0.0} | dict.fromkeys(TABLE_FIELDS)
"""Fields of `DataSpec` that ids leave out at these defaults."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training and one evaluation.

    Attributes:
        source: the data.
        net: a name of `leanbayes.models`, or `package.module:function`.
        method: None for the plain network.
        recipe: the training, including the seed.
        evaluation: the settings of the evaluation.
        label: name of the run's folder; by default the method's name.
        where: globs on the paths of the layers to convert; empty leaves the choice to the method.
        launch: processes started by torchrun or Slurm; they override the recipe's.
        baseline: name of a row without a network (`compare.baselines`); empty for networks.
        members: seeds of the trained plain networks that form an ensemble; empty for other rows.
        keeps: epochs after which a plain training keeps its state, for rows that convert there (`plain_state`).
        tune: number of trials that choose values of the row (`compare.tuning`); 0 for none.
        student: whether the row is a student (`lb.distill`) of the row with this method, recipe and seed.
        scaled: whether the initial noise of the method follows that of the plain network (`row_training.noise_scale`).
    """

    source: DataSpec
    net: str
    method: Method | None
    recipe: Recipe
    evaluation: EvaluationSpec = field(default_factory=EvaluationSpec)
    label: str = ""
    where: tuple[str, ...] = ()
    launch: Launch | None = field(default_factory=launched)
    baseline: str = ""
    members: tuple[int, ...] = ()
    keeps: tuple[int, ...] = field(default=(), compare=False)
    tune: int = 0
    student: bool = False
    scaled: bool = False

    @property
    def name(self) -> str:
        if self.members or self.student:
            return SEED_ENSEMBLE if self.members else STUDENT
        return self.baseline or (PLAIN if self.method is None else self.method.name)

    @property
    def title(self) -> str:
        return self.label or self.name

    @property
    def follows(self) -> bool:
        """Whether the row uses the trained networks of other rows."""
        return bool(self.followed)

    @property
    def followed(self) -> list[Job]:
        """The rows whose trained networks it uses: the members of an ensemble of seeds, the teacher of a student."""
        if self.student:
            return [self.teacher]
        return [replace(self, members=(), recipe=replace(self.recipe, seed=seed)) for seed in self.members]

    @property
    def teacher(self) -> Job:
        """The row that a student learns from."""
        return replace(self, student=False, label="")

    @property
    def seed(self) -> int:
        return self.recipe.seed

    @property
    def processes(self) -> int:
        return self.recipe.devices * self.recipe.nodes if self.launch is None else self.launch.processes

    def folder(self, out: Path) -> Path:
        """Return the folder of the run, OUT/<data>/<net>/<method>/seed<k>."""
        parts = (file_name(Path(self.source.name).stem), file_name(self.net), self.title)
        return out.joinpath(*parts, f"seed{self.seed}")

    def settings(self) -> dict[str, Any]:
        """Return all settings that affect the outcome, as JSON values. Ids and result.json depend on the keys."""
        source = asdict(self.source) | {"name": located(self.source.name)}
        for name, default in LATER.items():
            if source[name] == default:
                del source[name]  # ids from before this field stay valid
        settings: dict[str, Any] = {
            "data": source,
            "net": self.net,
            "method": {"name": self.name, "fields": self._fields()},
            "recipe": self.recipe.fields(),
            "judging": {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in asdict(self.evaluation).items()
                if (value != () or name == "ood") and (name, value) != ("design", INDEPENDENT)  # older ids stay valid
            },
        }
        if self.where and self.method is not None:
            settings["where"] = list(self.where)
        if self.processes != self.recipe.devices * self.recipe.nodes:
            settings["processes"] = self.processes  # only if it differs: older ids stay valid
        if self.tune:
            settings["tune"] = self.tune
        if self.scaled:
            settings["scaled"] = True
        return settings

    def _fields(self) -> dict[str, Any]:
        if self.members:
            return {"components": len(self.members), "members": list(self.members)}
        own = {} if self.method is None else self.method.fields()
        return {"of": self.teacher.name, **own} if self.student else own

    @property
    def id(self) -> str:
        return hashlib.sha256(json.dumps(self.settings(), sort_keys=True).encode()).hexdigest()[:16]


def plain_of(job: Job) -> Job | None:
    """Return the plain job of the same seed, as which a job that converts late or at the end begins, else None."""
    if job.method is None or not (job.recipe.convert_at_epoch or job.method.post_hoc):
        return None
    return replace(
        job, method=None, recipe=recipe_for(None, job.recipe), label="", where=(), keeps=(), student=False, scaled=False
    )


def from_plain(job: Job) -> bool:
    """Return whether a row is the plain network of its seed, or continues its training."""
    return not job.baseline and (job.method is None or plain_of(job) is not None)


def located(name: str) -> str:
    """Return the absolute path of a user's file, or a known name unchanged."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() and isinstance(resolve(name), Path) else name


def relocated(settings: Any, job: Mapping[str, Any]) -> dict[str, Any]:
    """Return recorded settings with the places of the data that a job's settings have, if the data were moved.

    They were moved if nothing is at the recorded place. A file must have the same name.
    """
    known: dict[str, Any] = settings if isinstance(settings, dict) else {}
    data, here = known.get("data"), job.get("data")
    if not (here and isinstance(data, dict) and isinstance(data.get("name"), str)):
        return known
    there, root = Path(located(data["name"])), data.get("root")
    own: dict[str, Any] = {}
    if str(there) == here["name"] or (not there.exists() and there.name == Path(here["name"]).name):
        own["name"] = here["name"]
    if isinstance(root, str) and not Path(root).expanduser().exists():
        own["root"] = here["root"]
    return known | {"data": data | own}


def _check_counts(least: int, **numbers: int) -> None:
    for name, number in numbers.items():
        if number < least:
            raise ValueError(f"expected {name.replace('_', '-')} to be at least {least}, got {number}")


def file_name(name: str) -> str:
    """Return a name with signs that any file system takes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "unnamed"


@dataclass(frozen=True)
class MethodSpec:
    """A method as the command line names it: `patch`, or `patch[crossed=true,components=3]`.

    Attributes:
        name: the method's name, or "plain".
        fields: the fields in brackets.
        label: name of its folder and of its row in the report; empty if it equals `name`.
    """

    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    label: str = ""


def parse_methods(text: str) -> list[MethodSpec]:
    """Return the methods in a text such as "plain,rank1,patch[crossed=true]", each once; an unknown one raises.

    "all" are all methods; for a table, the caller adds the rows without a network.
    """
    known = [PLAIN, *all_methods(), SEED_ENSEMBLE, STUDENT, *BASELINES]
    if text.strip() == "all":
        return [MethodSpec(name) for name in (PLAIN, *all_methods())]
    found: dict[str, MethodSpec] = {}
    position = 0
    while position < len(text):
        word = METHOD.match(text, position)
        if word is None:
            raise ValueError(f"expected methods such as plain,rank1,patch[crossed=true], got {text[position:]!r}")
        spec = _parse_method(method_name(word[1]) or word[1].lower().replace("-", "_"), word[2], known)
        found.setdefault(spec.label or spec.name, spec)
        position = word.end()
    if not found:
        raise ValueError(f"expected at least one method among {', '.join(known)}, got none")
    return list(found.values())


def _parse_method(name: str, inside: str | None, known: list[str]) -> MethodSpec:
    if name not in known:
        raise ValueError(f"expected methods among {', '.join(known)}, got {name!r}{closest(name, known)}")
    given = dict(_parse_field(name, part) for part in (inside or "").split(",") if part.strip())
    if name == STUDENT:
        given = {"of": _teacher(given.get("of"))}
    if not given:
        return MethodSpec(name)
    written = ",".join(f"{key}={json.dumps(value).strip(chr(34))}" for key, value in given.items())
    return MethodSpec(name, given, f"{name}[{written}]")


def _teacher(given: object) -> str:
    """Return the name of the method that a student learns from, in any spelling."""
    found = method_name(str(given)) if given else None
    if found is None:
        near = closest(str(given), all_methods()) if given else ""
        raise ValueError(
            f"expected the method of the student's teacher, such as {STUDENT}[of=rank1], among "
            f"{', '.join(all_methods())}, got {given or 'none'}{near}"
        )
    return found


def _parse_field(name: str, part: str) -> tuple[str, Any]:
    """Parse `field=value`; a value is JSON if possible, else a word."""
    key, _, value = (piece.strip() for piece in part.partition("="))
    key = key.replace("-", "_")
    there: tuple[str, ...] = ("of",) if name == STUDENT else ()
    if name in all_methods():
        there = tuple(own.name for own in fields(all_methods()[name]))
    if key not in there or not value:
        raise ValueError(
            f"expected FIELD=VALUE with a field among {', '.join(there) or 'none'} of {name}, got {part!r}"
        )
    try:
        return key, json.loads({"True": "true", "False": "false", "None": "null"}.get(value, value))
    except json.JSONDecodeError:
        return key, value


def method_of(name: str, fields: Mapping[str, Any] | None = None) -> Method | None:
    """Return the method of that name with the given fields, None for "plain" and rows without a network."""
    if name in (PLAIN, SEED_ENSEMBLE, *BASELINES):
        return None
    kinds = all_methods()
    if name not in kinds:
        raise ValueError(f"expected methods among {', '.join((PLAIN, *kinds))}, got {name!r}")
    return kinds[name](**(fields or {}))


def recipe_for(method: Method | None, recipe: Recipe, late: float | None = None) -> Recipe:
    """Adapt a recipe to a method: the epoch of conversion, and the learning rate of the posterior.

    Fields that the recipe sets are kept. `late` is the share of the epochs before the conversion. Its default
    is that of the method: rank-1, batch ensemble, implicit nodes and mean field first train the network plainly, which
    costs little more than one plain training. docs/recipes.md has the measurements.
    """
    if method is None:
        return replace(recipe, convert_at_epoch=0, restart_at_conversion=0.0, posterior_lr=None, freeze=False)
    default = 0.0 if recipe.freeze else method.late
    share = default if late is None else late
    if not 0 <= share < 1:
        raise ValueError(f"expected late to be a share of the epochs, at least 0 and below 1, got {share}")
    epoch = recipe.convert_at_epoch or min(round(share * recipe.epochs), recipe.epochs - 1)
    return replace(
        recipe,
        convert_at_epoch=epoch,
        restart_at_conversion=recipe.restart_at_conversion if epoch else 0.0,
        posterior_lr=recipe.posterior_lr or recipe.lr * method.posterior_rate,
    )


def student_recipe(recipe: Recipe, rows: int) -> Recipe:
    """Return the recipe of a student: at most as many steps as the training of its teacher has."""
    same = ("batch_size", "augment", "accelerator", "devices", "nodes", "precision", "channels_last", "seed")
    own = default_recipe(rows, **{name: getattr(recipe, name) for name in same})
    return replace(own, epochs=min(own.epochs, max(1, round(recipe.epochs / (1 + PERTURBED)))))


def recipe(
    budget: Budget, *, kind: str, rows: int, augment: str = "none", validated: bool = False, side: int = 0
) -> Recipe:
    """Return the recipe of a budget for a kind of data: "image", "table", "series" or "text".

    Few training rows get small batches and many epochs. Images that are usually augmented get the recipe of CIFAR. A
    table with held-out rows (`validated`) is trained at a constant rate until these no longer improve. `side` is the
    shorter side of images: few large ones get LeNet, which has no norms and does not bear a high rate.
    """
    if kind == "table" and validated:
        batch = 32 if rows < 2000 else 128
        steps = {"quick": 20_000, "short": 60_000, "full": 200_000}[budget]
        epochs = min(MOST_EPOCHS, max(5, round(steps * batch / rows)))
        own: dict[str, Any] = {"optimizer": "adam", "lr": 3e-3, "schedule": "constant", "patience": PATIENCE}
        own |= {"weight_decay": 1e-4, "batch_size": batch}
    elif kind == "table":  # enough epochs for a few thousand steps
        steps = {"quick": 1500, "short": 6000, "full": 40_000}[budget]
        batch = 32 if rows < 2000 else 128
        epochs = max(5, round(steps * batch / rows))
        own = {"optimizer": "adam", "lr": 1e-2, "weight_decay": 1e-4, "batch_size": batch}
    elif kind in ("series", "text"):  # a few thousand rows are memorised after a dozen epochs
        epochs = {"quick": 4, "short": 6, "full": 8}[budget]
        own = {"optimizer": "adam", "lr": 2e-3, "clip_norm": 1.0, "batch_size": 128}
    elif augment != "none" and budget == "full":  # the schedule of the rank-1 paper
        epochs = 250
        own = {"lr": 0.1, "weight_decay": 2e-4, "schedule": "step", "milestones": (100, 200, 225), "batch_size": 128}
        own |= {"warmup_epochs": 1, "augment": augment}
    elif augment != "none":
        epochs = {"quick": 10, "short": 40}[budget]
        own = {"lr": 0.2, "weight_decay": 5e-4, "warmup_epochs": 3, "batch_size": 256, "augment": augment}
    elif rows < FEW:
        epochs = {"quick": 40, "short": 120, "full": 300}[budget]
        own = {"lr": 0.01 if side >= LARGE else 0.1, "weight_decay": 1e-4, "warmup_epochs": 1, "batch_size": 32}
    else:
        epochs = {"quick": 3, "short": 15, "full": 60}[budget]
        own = {"lr": 0.05, "warmup_epochs": min(1.0, epochs / 10), "batch_size": 128}
    return Recipe(epochs=epochs, anneal_epochs=KL_EPOCHS, **own)


def stretched(recipe: Recipe, epochs: int) -> Recipe:
    """Return the recipe with another number of epochs; warm-up and milestones keep their shares.

    Milestones are whole epochs, at least the first. With few epochs some meet, and are one step.
    """
    share = epochs / recipe.epochs
    return replace(
        recipe,
        epochs=epochs,
        warmup_epochs=recipe.warmup_epochs * share,
        milestones=tuple(dict.fromkeys(max(1, round(epoch * share)) for epoch in recipe.milestones)),
    )
