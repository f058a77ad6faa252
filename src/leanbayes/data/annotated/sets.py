"""The known sets with several annotators: how to load them, and a table of them."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import NamedTuple

from leanbayes.data.annotated import bsds
from leanbayes.data.annotated.ambiguous import ambiguous_images
from leanbayes.data.annotated.images import AnnotatedImages
from leanbayes.data.cache import data_root


class AnnotatedRow(NamedTuple):
    """A line of the table of known sets with several annotators."""

    name: str
    train: int
    val: int
    test: int
    shape: tuple[int, ...]
    annotators: str
    where: str
    note: str


def load_annotated(name: str, root: str | Path | None = None) -> AnnotatedImages:
    """Return a known set whose images have several annotators each.

    Args:
        name: "bsds500" (from the cache), or "ambiguous" (made up, needs nothing; `ambiguous_images` makes others of
            the kind). Case, hyphens and underscores do not matter.
        root: Folder of the cache; else ``$LEANBAYES_DATA``, else one in the user's cache folder.

    Raises:
        FileNotFoundError: The set is not here; the message says where to get it.
        ValueError: The name is unknown.
    """
    known = annotated_name(name)
    if known == "bsds500":
        return bsds.load_bsds500(data_root(root))
    if known == "ambiguous":
        return ambiguous_images()
    close = difflib.get_close_matches(name.lower(), _NAMES, n=1)
    raise ValueError(
        f"unknown set {name!r} with several annotators{f', did you mean {close[0]}?' if close else '.'} Expected one "
        f"of {', '.join(_NAMES)}; load_lidc reads a folder of LIDC-IDRI crops, load the sets with one target a row."
    )


def annotated_name(name: str) -> str | None:
    """Return the name of the known set that is meant, None if there is none."""
    wanted = name.lower().replace("-", "").replace("_", "").replace(" ", "")
    return wanted if wanted in _NAMES else None


def describe_annotated(root: str | Path | None = None) -> list[AnnotatedRow]:
    """Return a row for every known set with several annotators: what it is, and whether it is here."""
    folder = data_root(root)
    where = f"cached at {folder}" if (folder / bsds.FILE).is_file() else "not here"
    note = "boundaries, Arbelaez et al. 2011; non-commercial research and education only"
    return [
        AnnotatedRow("bsds500", 200, 100, 200, bsds.SHAPE, "4-9", where, note),
        AnnotatedRow(
            "ambiguous", 2000, 500, 500, (1, 32, 32), "4", "built in", "made up, with a known law of the masks"
        ),
    ]


_NAMES = ("bsds500", "ambiguous")
