"""LIDC-IDRI: crops of lung scans with the masks of four radiologists, in the layout of their public release.

Kohl et al. (2019) publish a tar archive of 180 x 180 PNG files for each of train, val and test:
``images/<patient>/z-<position>_c<crop>.png`` and ``gt/<patient>/z-<position>_c<crop>_l<grader>.png``, with four graders
for each crop. Up to three of them marked nothing. Licence: CC BY 3.0.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from leanbayes.data.annotated.images import AnnotatedImages
from leanbayes.data.cache import sha256_of_files
from leanbayes.data.dataset import Array
from leanbayes.data.files.folder import read_all
from leanbayes.runtime._files import local

WHERE = "https://console.cloud.google.com/storage/browser/hpunet-data/lidc_crops"
GRADERS = 4
_SPLITS = ("train", "val", "test")
_MASK = re.compile(r"(?P<crop>.+)_l(?P<grader>\d+)\.png")
_PICKLES = (".pickle", ".pkl", ".p")


class Crop(NamedTuple):
    """The files of a crop: the image, and the masks in the order of the graders."""

    image: Path
    masks: tuple[Path, ...]


def load_lidc(folder: str | Path) -> AnnotatedImages:
    """Read the crops of a folder into memory (2 GB for the whole release), sorted by name.

    Args:
        folder: Has ``<split>/images`` and ``<split>/gt`` for one or more of train, val and test; the folders of the
            unpacked archives, ``lidc_crops_<split>/<split>``, are found as well.

    Raises:
        FileNotFoundError: The folder has no crops.
        ValueError: The folder has the pickle of another release; or files are missing, broken or of different sizes.
    """
    root = local(folder).expanduser()
    crops = {name: _crops(place) for name in _SPLITS if (place := _place(root, name)) is not None}
    if not crops:
        raise _nothing_here(root)
    every = [crop for part in crops.values() for crop in part]
    size = _grey(every[0].image).shape
    images = read_all([crop.image for crop in every], partial(_grey, size=size), size, np.uint8)
    masks = read_all([mask for crop in every for mask in crop.masks], partial(_marked, size=size), size, np.uint8)
    return AnnotatedImages(
        name="lidc",
        images=torch.from_numpy(images[:, None]),
        annotations=torch.from_numpy(masks.reshape(len(every), GRADERS, *size)),
        annotators=torch.full((len(every),), GRADERS),
        classes=("background", "abnormality"),
        splits={name: len(part) for name, part in crops.items()},
        sha256=sha256_of_files(path for crop in every for path in (crop.image, *crop.masks)),
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
            f"Unpack the archives of {WHERE} and give their folder."
        )
    return FileNotFoundError(
        f"{root} has no crops of LIDC-IDRI: expected <split>/images/<patient>/*.png and <split>/gt/<patient>/*.png for "
        f"train, val or test. Unpack the archives of {WHERE} there."
    )


def _crops(place: Path) -> list[Crop]:
    """Match the images of a split with their masks."""
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
    return [Crop(images[crop], tuple(masks[crop][grader] for grader in sorted(masks[crop]))) for crop in sorted(images)]


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
