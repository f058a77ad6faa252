"""Data sets: known ones from a cache of `.npz` files, the user's own, foreign ones to test a model against.

Sets with one target a row come from ``load``; images that several people annotated, who do not agree, from
``load_annotated``, ``load_lidc`` and ``ambiguous_images``.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from leanbayes.data.annotated.ambiguous import (
    ambiguous_images,
    AmbiguousImages,
    mode_frequencies,
    optimal_energy_distance,
    true_pixel_probabilities,
)
from leanbayes.data.annotated.bsds import prepare_bsds500
from leanbayes.data.annotated.images import AnnotatedImages, OneAnnotator
from leanbayes.data.annotated.lidc import load_lidc
from leanbayes.data.annotated.sets import annotated_name, AnnotatedRow, describe_annotated, load_annotated
from leanbayes.data.cache import data_root
from leanbayes.data.catalogue import SOURCES
from leanbayes.data.dataset import DataSet, Split, Task
from leanbayes.data.load import load_known, load_own, resolve, where
from leanbayes.data.out_of_distribution import ood
from leanbayes.data.prepare import prepare

__all__ = [
    "AmbiguousImages",
    "AnnotatedImages",
    "AnnotatedRow",
    "DataSet",
    "OneAnnotator",
    "Row",
    "Split",
    "Task",
    "ambiguous_images",
    "describe",
    "describe_annotated",
    "load",
    "load_annotated",
    "load_lidc",
    "mode_frequencies",
    "names",
    "ood",
    "optimal_energy_distance",
    "prepare",
    "prepare_bsds500",
    "true_pixel_probabilities",
]


class Row(NamedTuple):
    """A line of the table of known data sets."""

    name: str
    task: Task
    train: int
    test: int
    shape: tuple[int, ...]
    where: str
    note: str


def load(
    name: str | Path,
    root: str | Path | None = None,
    *,
    split: int = 0,
    target: str | int | None = None,
    task: str | None = None,
    channels: str | None = None,
) -> DataSet:
    """Return a data set by name, or the user's own by path.

    Args:
        name: One of ``names()`` (case, hyphens and underscores do not matter), or the path of an `.npz` file, a
            `.csv` file, or a folder of images.
        root: Folder of the known sets; else ``$LEANBAYES_DATA``, else one in the user's cache folder.
        split: Number of the train/test split, for the UCI sets, digits and `.csv` files.
        target: Column to predict of a `.csv` file, by header or position; None is the last.
        task: "classification" or "regression" for the user's own data; None goes by the targets.
        channels: "first" or "last", where images of an `.npz` file have their channels; None goes by the shape, and
            refuses shapes that can be read in both ways.

    Raises:
        FileNotFoundError: The set is not here; the message says which file to put where.
        ValueError: The name is unknown, or something is wrong with the data.
    """
    if isinstance(name, str) and annotated_name(name):
        raise ValueError(f"{name} has several annotators an image, not one target. Use data.load_annotated({name!r}).")
    known = resolve(name)
    if isinstance(known, Path):
        return load_own(known, split=split, target=target, task=task, channels=channels)
    if target is not None or channels is not None or task not in (None, known.task):
        raise ValueError(
            f"{known.name} is for {known.task} and has its own target; target, task and channels are for your own "
            "data. Leave them out."
        )
    return load_known(known, data_root(root), split)


def names() -> list[str]:
    """Return the names of the known data sets."""
    return list(SOURCES)


def describe(root: str | Path | None = None) -> list[Row]:
    """Return a row for every known data set: what it is, and whether it is here."""
    folder = data_root(root)
    return [
        Row(source.name, source.task, *source.rows, source.shape, where(source, folder), source.note)
        for source in SOURCES.values()
    ]
