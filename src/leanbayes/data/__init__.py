"""Data sets: known ones from a cache of `.npz` files, the user's own, and out-of-distribution inputs.

``load`` reads sets with one target a row. ``load_annotated``, ``load_lidc`` and ``ambiguous_images`` return images with
masks by several annotators.
"""

from __future__ import annotations

from leanbayes.data.annotated import AnnotatedRow, describe_annotated, load_annotated
from leanbayes.data.annotated.ambiguous import (
    ambiguous_images,
    AmbiguousImages,
    mode_frequencies,
    optimal_energy_distance,
    true_pixel_probabilities,
)
from leanbayes.data.annotated.images import AnnotatedImages, OneAnnotator
from leanbayes.data.annotated.published import load_lidc, prepare_bsds500
from leanbayes.data.catalogue import prepare
from leanbayes.data.dataset import DataSet, Split, Task
from leanbayes.data.loading import describe, load, names, Row
from leanbayes.data.out_of_distribution import ood, shifted

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
    "shifted",
    "true_pixel_probabilities",
]
