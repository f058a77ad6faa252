"""Published images with several annotators: BSDS500 from the cache, and LIDC-IDRI from a folder.

BSDS500 (Arbelaez et al. 2011): photographs with boundaries by four to nine people each. The cache has 64 x 96 pixels,
five times fewer on a side: images are averaged over 5 x 5 pixels, and a pixel is a boundary if any of its 5 x 5 is one.
Portraits are rotated to the left. For non-commercial research and education.

LIDC-IDRI: crops of lung scans with the masks of four radiologists. Kohl et al. (2019) publish a tar archive of
180 x 180 PNG files for each of train, val and test: ``images/<patient>/z-<position>_c<crop>.png`` and
``gt/<patient>/z-<position>_c<crop>_l<grader>.png``, with four graders for each crop. Up to three of them marked
nothing. Licence: CC BY 3.0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from leanbayes.data.annotated.images import AnnotatedImages
from leanbayes.data.cache import data_root, read_cached, sha256_of_files, write_npz
from leanbayes.data.dataset import Array
from leanbayes.data.files.folder import read_all
from leanbayes.runtime._files import local

SPLITS = ("train", "val", "test")

BSDS_FILE = "bsds500_boundaries_64x96.npz"
BSDS_WHERE = "https://github.com/BIDS/BSDS500"
BSDS_SHAPE = (3, 64, 96)
MOST = 9  # annotators of an image
_SHRINK = 5
_ARRAYS = ("x", "masks_packed", "n_annotators", "split")

LIDC_WHERE = "https://console.cloud.google.com/storage/browser/hpunet-data/lidc_crops"
GRADERS = 4
_MASK = re.compile(r"(?P<crop>.+)_l(?P<grader>\d+)\.png")
_PICKLES = (".pickle", ".pkl", ".p")


def load_bsds500(root: Path) -> AnnotatedImages:
    """Read BSDS500 from the cache."""
    path = root / BSDS_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"bsds500 is not in {root}: {BSDS_FILE} missing. Get the folder BSDS500 from {BSDS_WHERE} and run "
            "leanbayes.data.prepare_bsds500(folder) once, with that folder."
        )
    x, packed, counts, split = (read_cached(path, name) for name in _ARRAYS)
    _check_bsds(path, x, packed, counts, split)
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

    The folder is ``BSDS500`` of the published repository, or its ``data``, with ``images/<split>/*.jpg`` and
    ``groundTruth/<split>/*.mat`` for train, val and test. `root` is the cache, as in ``load``.
    """
    source = local(folder).expanduser()
    source = next((place for place in (source, source / "data") if (place / "groundTruth").is_dir()), source)
    found = [(number, path) for number, name in enumerate(SPLITS) for path in _published(source, name)]
    rows = [_read_bsds(image, annotations) for _, (image, annotations) in found]
    counts = np.array([len(masks) for _, masks in rows], np.uint8)
    packed = np.zeros((len(rows), max(MOST, *counts), BSDS_SHAPE[1], BSDS_SHAPE[2] // 8), np.uint8)
    for index, (_, masks) in enumerate(rows):
        packed[index, : len(masks)] = np.packbits(masks, axis=-1)
    images, splits = np.stack([image for image, _ in rows]), np.array([number for number, _ in found], np.uint8)
    path = data_root(root) / BSDS_FILE
    write_npz(path, dict(zip(_ARRAYS, (images, packed, counts, splits), strict=True)))
    return path


def _published(source: Path, split: str) -> Iterator[tuple[Path, Path]]:
    """Yield the images of a split with the files of their annotations, sorted by name."""
    images = sorted((source / "images" / split).glob("*.jpg"))
    if not images:
        raise FileNotFoundError(
            f"{source / 'images' / split} has no .jpg files; expected images/<split>/*.jpg and "
            f"groundTruth/<split>/*.mat for {', '.join(SPLITS)}. Get the folder BSDS500 from {BSDS_WHERE}."
        )
    for image in images:
        annotations = source / "groundTruth" / split / f"{image.stem}.mat"
        if not annotations.is_file():
            raise FileNotFoundError(
                f"{annotations} is missing, the annotations of {image}. Get them from {BSDS_WHERE}."
            )
        yield image, annotations


def _read_bsds(image: Path, annotations: Path) -> tuple[Array, Array]:
    """Return a small image (3, 64, 96) and its masks (annotators, 64, 96); portraits are rotated to the left."""
    from PIL import Image
    from scipy.io import loadmat  # type: ignore[import-untyped]

    try:
        with Image.open(image) as opened:
            pixels = np.asarray(opened.convert("RGB")).transpose(2, 0, 1)
        people = loadmat(annotations)["groundTruth"][0]
        masks = np.stack([person["Boundaries"][0, 0] for person in people])
    except Exception as error:  # each reader has its own errors
        raise ValueError(
            f"{image} or {annotations} cannot be read ({error}). Get both again from {BSDS_WHERE}."
        ) from error
    small = np.round(_blocks(pixels).mean((-3, -1))).astype(np.uint8)
    marked = np.asarray(_blocks(masks).any((-3, -1)), np.uint8)
    if small.shape[1] > small.shape[2]:
        small, marked = (np.rot90(turned, axes=(1, 2)) for turned in (small, marked))
    if small.shape != BSDS_SHAPE or marked.shape[1:] != BSDS_SHAPE[1:]:
        raise ValueError(
            f"{image} has {pixels.shape[1]} x {pixels.shape[2]} pixels and masks of {masks.shape[1]} x "
            f"{masks.shape[2]}; expected 321 x 481 or 481 x 321 as published. Get both again from {BSDS_WHERE}."
        )
    return small, marked


def _blocks(planes: Array) -> Array:
    """View planes (n, H, W) as blocks (n, H / 5, 5, W / 5, 5), without the last row and column."""
    count, height, width = planes.shape
    rows, columns = height // _SHRINK, width // _SHRINK
    cut = planes[:, : rows * _SHRINK, : columns * _SHRINK]
    return cut.reshape(count, rows, _SHRINK, columns, _SHRINK)


def _check_bsds(path: Path, x: Array, packed: Array, counts: Array, split: Array) -> None:
    """Raise ``ValueError`` for a file with other contents."""
    rows, (_, height, width) = x.shape[:1], BSDS_SHAPE
    wanted = ((*rows, *BSDS_SHAPE), (*rows, *packed.shape[1:2], height, width // 8), rows, rows)
    shapes = tuple(array.shape for array in (x, packed, counts, split))
    bytes_only = all(array.dtype == np.uint8 for array in (x, packed, counts, split))
    if shapes != wanted or not bytes_only or set(np.unique(split)) != set(range(len(SPLITS))):
        raise ValueError(
            f"{path} is not the cache of BSDS500: expected uint8 arrays {', '.join(_ARRAYS)} of the shapes (N, 3, 64, "
            f"96), (N, A, 64, 12), (N,), (N,) and rows of the splits 0 to {len(SPLITS) - 1}, got the shapes {shapes}. "
            "Delete it and run leanbayes.data.prepare_bsds500(folder)."
        )


def load_lidc(folder: str | Path) -> AnnotatedImages:
    """Read the crops of a folder into memory (2 GB for the whole release), sorted by name.

    The folder has ``<split>/images`` and ``<split>/gt`` for one or more of train, val and test; the folders of the
    unpacked archives, ``lidc_crops_<split>/<split>``, are found as well. Raises ``FileNotFoundError`` if there are no
    crops, and ``ValueError`` for the pickle of another release, or files that are missing, broken or of several sizes.
    """
    root = local(folder).expanduser()
    crops = {name: _crops(place) for name in SPLITS if (place := _place(root, name)) is not None}
    if not crops:
        raise _nothing_here(root)
    every = [crop for part in crops.values() for crop in part]
    size = _grey(every[0][0]).shape
    images = read_all([image for image, *_ in every], partial(_grey, size=size), size, np.uint8)
    masks = read_all([mask for _, *masks in every for mask in masks], partial(_marked, size=size), size, np.uint8)
    return AnnotatedImages(
        name="lidc",
        images=torch.from_numpy(images[:, None]),
        annotations=torch.from_numpy(masks.reshape(len(every), GRADERS, *size)),
        annotators=torch.full((len(every),), GRADERS, device="cpu"),
        classes=("background", "abnormality"),
        splits={name: len(part) for name, part in crops.items()},
        sha256=sha256_of_files(path for crop in every for path in crop),
    )


def _place(root: Path, split: str) -> Path | None:
    """Return the folder of a split, or None."""
    unpacked = root / f"lidc_crops_{split}"
    places = (root / split, unpacked / split, unpacked, root / split / split)
    return next((place for place in places if (place / "images").is_dir() and (place / "gt").is_dir()), None)


def _nothing_here(root: Path) -> Exception:
    """Return the error about a folder without crops, or with a pickle, which is never read."""
    inside = sorted(root.iterdir()) if root.is_dir() else []
    pickles = [path for path in (root, *inside) if path.suffix.lower() in _PICKLES]
    if pickles:
        return ValueError(
            f"{pickles[0]}: a pickle is not read, because it can run any code; use the PNG release. "
            f"Unpack the archives of {LIDC_WHERE} and give their folder."
        )
    return FileNotFoundError(
        f"{root} has no crops of LIDC-IDRI: expected <split>/images/<patient>/*.png and <split>/gt/<patient>/*.png for "
        f"train, val or test. Unpack the archives of {LIDC_WHERE} there."
    )


def _crops(place: Path) -> list[tuple[Path, ...]]:
    """Return the files of each crop of a split: the image, then its masks in the order of the graders."""
    images = {path.relative_to(place / "images").with_suffix(""): path for path in (place / "images").rglob("*.png")}
    masks: dict[Path, dict[int, Path]] = {crop: {} for crop in images}
    for path in (place / "gt").rglob("*.png"):
        parts = _MASK.fullmatch(path.name)
        crop = path.relative_to(place / "gt").parent / parts["crop"] if parts else None
        if parts is None or crop not in masks:
            raise ValueError(
                f"{path} belongs to no image; expected <image>_l<grader>.png with the image under "
                f"{place / 'images'}. Unpack the archive again."
            )
        masks[crop][int(parts["grader"])] = path
    for crop, found in masks.items():
        if len(found) != GRADERS:
            raise ValueError(
                f"{images[crop]} has {len(found)} masks under {place / 'gt'}; expected {GRADERS}, one for each grader. "
                "Unpack the archive again."
            )
    if not images:
        raise ValueError(
            f"{place / 'images'} has no PNG files; expected <patient>/<image>.png. Unpack the archive again."
        )
    return [(images[crop], *(masks[crop][grader] for grader in sorted(masks[crop]))) for crop in sorted(images)]


def _grey(path: Path, size: tuple[int, ...] | None = None) -> Array:
    """Decode an image to grey levels, (H, W) uint8; raise ``ValueError`` if it has another size."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            if image.mode.startswith(("I", "F")):  # Pillow would clip values above 255
                raise ValueError(f"{path} has more than 8 bits a pixel (mode {image.mode}). Scale it to 0 to 255.")
            pixels = np.asarray(image.convert("L"))
    except (OSError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} cannot be read as an image ({error}). Unpack the archive again.") from error
    if size is not None and pixels.shape != size:
        raise ValueError(
            f"{path} has {pixels.shape[0]} x {pixels.shape[1]} pixels; expected {size[0]} x {size[1]} as the first "
            "image has. Bring all to one size."
        )
    return pixels


def _marked(path: Path, size: tuple[int, ...]) -> Array:
    return (_grey(path, size) > 0).astype(np.uint8)
