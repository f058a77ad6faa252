"""What is run, as data: a `Job` is one training and one evaluation; `Plan` says which jobs a comparison has."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from leanbayes.data.loading import resolve
from leanbayes.methods import all_methods
from leanbayes.methods._base import Method
from leanbayes.runtime.distributed import Launch, launched
from leanbayes.training import Recipe

PLAIN = "plain"
"""What the unconverted network is called beside the methods."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSpec:
    """How models are evaluated.

    Attributes:
        samples: draws of every prediction.
        ood: names of data sets that serve as foreign inputs.
        shift: evaluate on corrupted images, where the data are images.
        shift_images: number of test images that are corrupted, 0 for all.
        test_images: number of test rows used, 0 for all.
    """

    samples: int = 16
    ood: tuple[str, ...] = ()
    shift: bool = True
    shift_images: int = 1000
    test_images: int = 0

    def __post_init__(self) -> None:
        """Check the numbers before anything is trained."""
        _check_counts(1, samples=self.samples)
        _check_counts(0, shift_images=self.shift_images, test_images=self.test_images)


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Where data come from: a known name or a file, with what a file leaves open.

    Attributes:
        name: a known name, or a path.
        root: folder of the known sets.
        split: number of the train/test split, where there are several.
        target: column to predict, of a .csv file.
        task: "classification" or "regression", of the user's own data.
        train_rows: use so many training rows, evenly spaced; 0 is all.
        hold_out: judge on so many training rows, evenly spaced and left out of training, instead of the test set.
        channels: "first" or "last", where images of an .npz file have their channels; None goes by the shape.
    """

    name: str
    root: str | None = None
    split: int = 0
    target: str | None = None
    task: str | None = None
    train_rows: int = 0
    hold_out: int = 0
    channels: str | None = field(default=None, repr=False)  # digests of sources in folder names are older

    def __post_init__(self) -> None:
        """Check the numbers."""
        _check_counts(0, train_rows=self.train_rows, hold_out=self.hold_out, split=self.split)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training and one evaluation.

    Attributes:
        source: the data.
        net: a name of `leanbayes.models`, or `package.module:function`.
        method: None for the plain network.
        label: what the run's folder is called; the method's name unless a suite runs it in several versions.
        recipe: how it is trained, seed included.
        judging: how it is evaluated.
        where: globs on the paths of the layers that are converted; none leaves the choice to the method.
        launch: processes that torchrun or Slurm started; they overrule the recipe's.
    """

    source: DataSpec
    net: str
    method: Method | None
    recipe: Recipe
    judging: EvaluationSpec = field(default_factory=EvaluationSpec)
    label: str = ""
    where: tuple[str, ...] = ()
    launch: Launch | None = field(default_factory=launched)

    @property
    def name(self) -> str:
        """The method's name, or "plain"."""
        return PLAIN if self.method is None else self.method.name

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self.recipe.seed

    @property
    def processes(self) -> int:
        """How many processes train it together."""
        return self.recipe.devices * self.recipe.nodes if self.launch is None else self.launch.processes

    def folder(self, out: Path) -> Path:
        """Return where the run lies below `out`: <data>/<net>/<method>/seed<k>."""
        parts = (_file_name(Path(self.source.name).stem), _file_name(self.net), self.label or self.name)
        return out.joinpath(*parts, f"seed{self.seed}")

    def settings(self) -> dict[str, Any]:
        """Return all that decides the outcome, as JSON holds it."""
        source = asdict(self.source) | {"name": located(self.source.name)}
        if self.source.channels is None:
            del source["channels"]  # so that ids are those of versions that did not have it
        settings: dict[str, Any] = {
            "data": source,
            "net": self.net,
            "method": {"name": self.name, "fields": {} if self.method is None else self.method.fields()},
            "recipe": self.recipe.fields(),
            "judging": asdict(self.judging) | {"ood": list(self.judging.ood)},
        }
        if self.where and self.method is not None:
            settings["where"] = list(self.where)
        if self.processes != self.recipe.devices * self.recipe.nodes:
            settings["processes"] = self.processes  # else the recipe says it: older ids stay
        return settings

    @property
    def id(self) -> str:
        """A short digest of the settings: equal settings, equal id."""
        return hashlib.sha256(json.dumps(self.settings(), sort_keys=True).encode()).hexdigest()[:16]


def located(name: str) -> str:
    """Return a name of data that holds in every folder: the whole path of the user's own, a known name as it is."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() and isinstance(resolve(name), Path) else name


def method_of(name: str, fields: Mapping[str, Any] | None = None) -> Method | None:
    """Return the method of that name with the given fields; None for "plain".

    Raises:
        ValueError: naming the methods there are.
    """
    if name == PLAIN:
        return None
    kinds = all_methods()
    if name not in kinds:
        raise ValueError(f"expected methods among {', '.join((PLAIN, *kinds))}, got {name!r}")
    return kinds[name](**(fields or {}))


def recipe_for(method: Method | None, recipe: Recipe, late: float | None = None) -> Recipe:
    """Fit a recipe to a method: when to convert, and at what rate its own parameters learn.

    Settings of the recipe are kept. Methods are converted late unless they say otherwise: a network that is trained
    plainly first costs little more than one training. In trials it was better than noise from the start on health
    records, not on text; on CIFAR-10 it had the smaller ECE (docs/recipes.md).

    Args:
        method: None for the plain network, which needs nothing.
        recipe: the recipe of the comparison.
        late: share of the epochs before the conversion; None is the method's own habit.
    """
    if method is None:
        return replace(recipe, convert_at_epoch=0, posterior_lr=None, freeze=False)
    habit = 0.0 if recipe.freeze else method.late
    share = habit if late is None else late
    if not 0 <= share < 1:
        raise ValueError(f"expected late to be a share of the epochs, at least 0 and below 1, got {share}")
    return replace(
        recipe,
        convert_at_epoch=recipe.convert_at_epoch or min(round(share * recipe.epochs), recipe.epochs - 1),
        posterior_lr=recipe.posterior_lr or recipe.lr * method.posterior_rate,
    )


def _check_counts(least: int, **numbers: int) -> None:
    for name, number in numbers.items():
        if number < least:
            raise ValueError(f"expected {name.replace('_', '-')} to be at least {least}, got {number}")


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "unnamed"


# -------------------- versions
# Methods as the command line names them: `plain,rank1,patch[crossed=true,components=3]`.


WORD = re.compile(r"\s*([\w-]+)\s*(?:\[([^\]]*)\])?\s*(?:,|$)")


@dataclass(frozen=True)
class MethodSpec:
    """A method with fields of its own.

    Attributes:
        name: the method's name, or "plain".
        fields: those that were given in brackets.
        label: what its folder and its row in the report are called; empty where the name says all.
    """

    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    label: str = ""


def wanted(text: str) -> list[MethodSpec]:
    """Return the methods that a text names, each once, in their order.

    Raises:
        ValueError: in one sentence, if a method or a field is unknown.
    """
    known = [PLAIN, *all_methods()]
    if text.strip() == "all":
        return [MethodSpec(name) for name in known]
    found: dict[str, MethodSpec] = {}
    at = 0
    while at < len(text):
        word = WORD.match(text, at)
        if word is None:
            raise ValueError(f"expected methods such as plain,rank1,patch[crossed=true], got {text[at:]!r}")
        version = _version(word[1].replace("-", "_"), word[2], known)
        found.setdefault(version.label or version.name, version)
        at = word.end()
    if not found:
        raise ValueError(f"expected at least one method among {', '.join(known)}, got none")
    return list(found.values())


def _version(name: str, inside: str | None, known: list[str]) -> MethodSpec:
    if name not in known:
        raise ValueError(f"expected methods among {', '.join(known)}, got {name!r}")
    given = dict(_pair(name, part) for part in (inside or "").split(",") if part.strip())
    if not given:
        return MethodSpec(name)
    written = ",".join(f"{key}={json.dumps(value).strip(chr(34))}" for key, value in given.items())
    return MethodSpec(name, given, f"{name}[{written}]")


def _pair(name: str, part: str) -> tuple[str, Any]:
    """Read `field=value`; a value is JSON where it can be, else a word."""
    key, _, value = (piece.strip() for piece in part.partition("="))
    key = key.replace("-", "_")
    there = () if name == PLAIN else tuple(own.name for own in fields(all_methods()[name]))
    if key not in there or not value:
        raise ValueError(
            f"expected FIELD=VALUE with a field among {', '.join(there) or 'none'} of {name}, got {part!r}"
        )
    try:
        return key, json.loads({"True": "true", "False": "false", "None": "null"}.get(value, value))
    except json.JSONDecodeError:
        return key, value


# -------------------- budgets
# Recipes by budget: `quick` is minutes, `short` about an hour on two cores, `full` the schedule of the papers.


Budget = Literal["quick", "short", "full"]
BUDGETS: tuple[Budget, ...] = ("quick", "short", "full")

FEW = 5000
"""Fewer training images than this get small batches: what counts is the number of steps, also after a conversion."""

KL_EPOCHS = 200
"""Epochs until the KL has its full weight, as in the papers; shorter trainings end before."""


def recipe(budget: Budget, *, kind: str, rows: int, augment: str = "none") -> Recipe:
    """Return the recipe of a budget for data of a kind.

    Args:
        budget: "quick", "short" or "full".
        kind: "image", "table", "series" or "text".
        rows: number of training rows; few rows get small batches and many epochs.
        augment: the augmentation that is usual for the data; such data get the recipe of CIFAR.
    """
    if kind == "table":
        return _table(budget, rows)
    if kind in ("series", "text"):
        return _tokens(budget)
    if augment != "none":
        return _natural_images(budget, augment)
    if rows < FEW:
        epochs = {"quick": 40, "short": 120, "full": 300}[budget]
        return Recipe(epochs=epochs, batch_size=32, lr=0.1, weight_decay=1e-4, warmup_epochs=1, anneal_epochs=KL_EPOCHS)
    epochs = {"quick": 3, "short": 15, "full": 60}[budget]
    warmup = min(1.0, epochs / 10)
    return Recipe(epochs=epochs, batch_size=128, lr=0.05, warmup_epochs=warmup, anneal_epochs=KL_EPOCHS)


def stretched(recipe: Recipe, epochs: int) -> Recipe:
    """Return the recipe over another number of epochs: warm-up and steps keep their shares."""
    share = epochs / recipe.epochs
    return replace(
        recipe,
        epochs=epochs,
        warmup_epochs=recipe.warmup_epochs * share,
        milestones=tuple(round(epoch * share) for epoch in recipe.milestones),
    )


def _natural_images(budget: Budget, augment: str) -> Recipe:
    """The recipe of small natural images: 40 epochs in short, 250 with steps as the rank-1 paper has it in full."""
    if budget == "full":
        return Recipe(
            epochs=250,
            batch_size=128,
            lr=0.1,
            weight_decay=2e-4,
            schedule="step",
            milestones=(100, 200, 225),
            warmup_epochs=1,
            anneal_epochs=KL_EPOCHS,
            augment=augment,  # type: ignore[arg-type]
        )
    epochs = {"quick": 10, "short": 40}[budget]
    return Recipe(
        epochs=epochs,
        batch_size=256,
        lr=0.2,
        weight_decay=5e-4,
        warmup_epochs=3,
        anneal_epochs=KL_EPOCHS,
        augment=augment,  # type: ignore[arg-type]
    )


def _table(budget: Budget, rows: int) -> Recipe:
    """Adam, and as many epochs as make a few thousand steps."""
    steps = {"quick": 1500, "short": 6000, "full": 40_000}[budget]
    batch = 32 if rows < 2000 else 128
    epochs = max(5, round(steps * batch / rows))
    return Recipe(
        epochs=epochs, batch_size=batch, optimizer="adam", lr=1e-2, weight_decay=1e-4, anneal_epochs=KL_EPOCHS
    )


def _tokens(budget: Budget) -> Recipe:
    """Adam for networks that look tokens up; a few thousand rows are learned by heart after a dozen epochs."""
    epochs = {"quick": 4, "short": 6, "full": 8}[budget]
    return Recipe(epochs=epochs, batch_size=128, optimizer="adam", lr=2e-3, clip_norm=1.0, anneal_epochs=KL_EPOCHS)
