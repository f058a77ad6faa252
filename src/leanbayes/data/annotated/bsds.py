"""BSDS500: photographs with boundaries by four to nine people each (Arbelaez et al. 2011).

The cache has 64 x 96 pixels, five times fewer on a side: images are averaged over 5 x 5 pixels, and a pixel is a
boundary if any of its 5 x 5 is one. Portraits are rotated to the left. For non-commercial research and education.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from leanbayes.data.annotated.images import AnnotatedImages
from leanbayes.data.cache import data_root, read_cached, sha256_of_files, write_npz
from leanbayes.data.dataset import Array
from leanbayes.runtime._files import local

FILE = "bsds500_boundaries_64x96.npz"
WHERE = "https://github.com/BIDS/BSDS500"
SPLITS = ("train", "val", "test")
SHAPE = (3, 64, 96)
MOST = 9  # annotators of an image
_SHRINK = 5
_ARRAYS = ("x", "masks_packed", "n_annotators", "split")


def load_bsds500(root: Path) -> AnnotatedImages:
    """Read BSDS500 from the cache."""
    path = root / FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"bsds500 is not in {root}: {FILE} missing. Get the folder BSDS500 from {WHERE} and run "
            "leanbayes.data.prepare_bsds500(folder) once, with that folder."
        )
    x, packed, counts, split = (read_cached(path, name) for name in _ARRAYS)
    _check(path, x, packed, counts, split)
    order = np.argsort(split, kind="stable")
    return AnnotatedImages(
        name="bsds500",
        images=torch.from_numpy(x[order]),
        annotations=torch.from_numpy(np.unpackbits(packed[order], axis=-1)),
        annotators=torch.from_numpy(counts[order].astype(np.int64)),
        classes=("inside", "boundary"),
        splits={name: int((split == number).sum()) for number, name in enumerate(SPLITS)},
        sha256=sha256_of_files([path]),
    )


def prepare_bsds500(folder: str | Path, root: str | Path | None = None) -> Path:
    """Convert the published images and annotations to the file of the cache, and return its path.

    Args:
        folder: ``BSDS500`` of the published repository, or its ``data``, with ``images/<split>/*.jpg`` and
            ``groundTruth/<split>/*.mat`` for train, val and test.
        root: The cache, as in ``load``.
    """
    source = local(folder).expanduser()
    source = next((place for place in (source, source / "data") if (place / "groundTruth").is_dir()), source)
    found = [(number, path) for number, name in enumerate(SPLITS) for path in _published(source, name)]
    rows = [_read(image, annotations) for _, (image, annotations) in found]
    packed = np.zeros((len(rows), max(MOST, *(len(row.masks) for row in rows)), SHAPE[1], SHAPE[2] // 8), np.uint8)
    for index, row in enumerate(rows):
        packed[index, : len(row.masks)] = np.packbits(row.masks, axis=-1)
    path = data_root(root) / FILE
    arrays = {
        "x": np.stack([row.image for row in rows]),
        "masks_packed": packed,
        "n_annotators": np.array([len(row.masks) for row in rows], np.uint8),
        "split": np.array([number for number, _ in found], np.uint8),
    }
    write_npz(path, arrays)
    return path


class _Row(NamedTuple):
    """A small image (3, 64, 96) and its masks (annotators, 64, 96)."""

    image: Array
    masks: Array


def _published(source: Path, split: str) -> Iterator[tuple[Path, Path]]:
    """Yield the images of a split with the files of their annotations, sorted by name."""
    images = sorted((source / "images" / split).glob("*.jpg"))
    if not images:
        raise FileNotFoundError(
            f"{source / 'images' / split} has no .jpg files; expected images/<split>/*.jpg and "
            f"groundTruth/<split>/*.mat for {', '.join(SPLITS)}. Get the folder BSDS500 from {WHERE}."
        )
    for image in images:
        annotations = source / "groundTruth" / split / f"{image.stem}.mat"
        if not annotations.is_file():
            raise FileNotFoundError(f"{annotations} is missing, the annotations of {image}. Get them from {WHERE}.")
        yield image, annotations


def _read(image: Path, annotations: Path) -> _Row:
    """Read an image and its boundaries, shrink both, and rotate portraits to the left."""
    from PIL import Image
    from scipy.io import loadmat  # type: ignore[import-untyped]

    try:
        with Image.open(image) as opened:
            pixels = np.asarray(opened.convert("RGB")).transpose(2, 0, 1)
        people = loadmat(annotations)["groundTruth"][0]
        masks = np.stack([person["Boundaries"][0, 0] for person in people])
    except Exception as error:  # each reader has its own errors
        raise ValueError(f"{image} or {annotations} cannot be read ({error}). Get both again from {WHERE}.") from error
    small = np.round(_blocks(pixels).mean((-3, -1))).astype(np.uint8)
    marked = np.asarray(_blocks(masks).any((-3, -1)), np.uint8)
    if small.shape[1] > small.shape[2]:
        small, marked = (np.rot90(turned, axes=(1, 2)) for turned in (small, marked))
    if small.shape != SHAPE or marked.shape[1:] != SHAPE[1:]:
        raise ValueError(
            f"{image} has {pixels.shape[1]} x {pixels.shape[2]} pixels and masks of {masks.shape[1]} x "
            f"{masks.shape[2]}; expected 321 x 481 or 481 x 321 as published. Get both again from {WHERE}."
        )
    return _Row(small, marked)


def _blocks(planes: Array) -> Array:
    """View planes (n, H, W) as blocks (n, H / 5, 5, W / 5, 5), without the last row and column."""
    count, height, width = planes.shape
    rows, columns = height // _SHRINK, width // _SHRINK
    cut = planes[:, : rows * _SHRINK, : columns * _SHRINK]
    return cut.reshape(count, rows, _SHRINK, columns, _SHRINK)


def _check(path: Path, x: Array, packed: Array, counts: Array, split: Array) -> None:
    """Raise ``ValueError`` for a file with other contents."""
    rows, (_, height, width) = x.shape[:1], SHAPE
    wanted = ((*rows, *SHAPE), (*rows, *packed.shape[1:2], height, width // 8), rows, rows)
    shapes = tuple(array.shape for array in (x, packed, counts, split))
    bytes_only = all(array.dtype == np.uint8 for array in (x, packed, counts, split))
    if shapes != wanted or not bytes_only or set(np.unique(split)) != set(range(len(SPLITS))):
        raise ValueError(
            f"{path} is not the cache of BSDS500: expected uint8 arrays {', '.join(_ARRAYS)} of the shapes (N, 3, 64, "
            f"96), (N, A, 64, 12), (N,), (N,) and rows of the splits 0 to {len(SPLITS) - 1}, got the shapes {shapes}. "
            "Delete it and run leanbayes.data.prepare_bsds500(folder)."
        )
