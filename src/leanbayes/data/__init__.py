"""Data sets: known ones from a cache of `.npz` files, the user's own, and foreign ones to test a model against."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from leanbayes.data.cache import data_root
from leanbayes.data.dataset import DataSet, Split, Task
from leanbayes.data.foreign import foreign
from leanbayes.data.known import load_known, where
from leanbayes.data.own import load_own, resolve
from leanbayes.data.prepare import prepare
from leanbayes.data.sources import SOURCES

__all__ = ["DataSet", "Row", "Split", "Task", "describe", "foreign", "load", "names", "prepare"]


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
) -> DataSet:
    """Return a data set by name, or the user's own by path.

    Args:
        name: One of ``names()`` (case, hyphens and underscores do not matter), or the path of an `.npz` file, a
            `.csv` file, or a folder of images.
        root: Folder of the known sets; else ``$LEANBAYES_DATA``, else one in the user's cache folder.
        split: Number of the train/test split, for the UCI sets, digits and `.csv` files.
        target: Column to predict of a `.csv` file, by header or position; None is the last.
        task: "classification" or "regression" for the user's own data; None goes by the targets.

    Raises:
        FileNotFoundError: The set is not here; the message says which file to put where.
        ValueError: The name is unknown, or something is wrong with the data.
    """
    known = resolve(name)
    if isinstance(known, Path):
        return load_own(known, split=split, target=target, task=task)
    if target is not None or task not in (None, known.task):
        raise ValueError(
            f"{known.name} is for {known.task} and has its own target; target and task are for your own data. "
            "Leave them out."
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
