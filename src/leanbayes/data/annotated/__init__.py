"""Images with masks by several annotators: load the known sets by name, and list them."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import NamedTuple

from leanbayes.data.annotated.ambiguous import ambiguous_images
from leanbayes.data.annotated.images import AnnotatedImages
from leanbayes.data.annotated.published import BSDS_FILE, BSDS_SHAPE, load_bsds500
from leanbayes.data.cache import data_root

_NAMES = ("bsds500", "ambiguous")


class AnnotatedRow(NamedTuple):
    """A row of the table of known sets with several annotators."""

    name: str
    train: int
    val: int
    test: int
    shape: tuple[int, ...]
    annotators: str
    where: str
    note: str


def load_annotated(name: str, root: str | Path | None = None) -> AnnotatedImages:
    """Return a known set with several annotators for each image.

    The sets are "bsds500" (from the cache; `root` as in ``load``) and "ambiguous" (synthetic; `ambiguous_images` has
    its options). Case, hyphens and underscores do not matter. Raises ``FileNotFoundError`` with the address of a set
    that is not in the cache.
    """
    known = annotated_name(name)
    if known == "bsds500":
        return load_bsds500(data_root(root))
    if known == "ambiguous":
        return ambiguous_images()
    close = difflib.get_close_matches(name.lower(), _NAMES, n=1)
    raise ValueError(
        f"unknown set {name!r} with several annotators{f', did you mean {close[0]}?' if close else '.'} Expected one "
        f"of {', '.join(_NAMES)}; load_lidc reads a folder of LIDC-IDRI crops, load the sets with one target a row."
    )


def annotated_name(name: str) -> str | None:
    """Return the known set of that name, None if there is none."""
    wanted = name.lower().replace("-", "").replace("_", "").replace(" ", "")
    return wanted if wanted in _NAMES else None


def describe_annotated(root: str | Path | None = None) -> list[AnnotatedRow]:
    """Return name, sizes, shape, place and note of every known set with several annotators."""
    folder = data_root(root)
    where = f"cached at {folder}" if (folder / BSDS_FILE).is_file() else "not here"
    note = "boundaries, Arbelaez et al. 2011; non-commercial research and education only"
    made = "synthetic, with a known distribution of the masks"
    return [
        AnnotatedRow("bsds500", 200, 100, 200, BSDS_SHAPE, "4-9", where, note),
        AnnotatedRow("ambiguous", 2000, 500, 500, (1, 32, 32), "4", "built in", made),
    ]
