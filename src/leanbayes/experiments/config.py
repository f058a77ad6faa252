"""What is run, as data: a `Job` is one training and one evaluation; `Plan` says which jobs a comparison has."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from leanbayes.data.own import resolve
from leanbayes.methods import all_methods
from leanbayes.methods.base import Method
from leanbayes.processes import Launch, launched
from leanbayes.training import Recipe

PLAIN = "plain"
"""What the unconverted network is called beside the methods."""


@dataclass(frozen=True, kw_only=True)
class Judging:
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
class Source:
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

    source: Source
    net: str
    method: Method | None
    recipe: Recipe
    judging: Judging = field(default_factory=Judging)
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
