"""A folder of images in ImageNet's layout: train/<class>/*.png and test/<class>/*.png (or val/<class>/)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np

from leanbayes.data.arrays import Raw
from leanbayes.data.checks import Array

_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
_TEST_NAMES = ("test", "val", "validation")
_LARGEST = 224  # pixels of a side
_GREY = ("1", "L", "LA", "I;16")

Mode = Literal["L", "RGB"]


def read_folder(folder: Path) -> Raw:
    """Read all images of a folder into memory.

    Images of different sizes are brought to the median height and width, at most 224 pixels each: scaled so that the
    image just covers that size, then cut around the centre. One colour image makes all of them colour images.
    """
    files = {split: list(_of_split(path)) for split, path in _splits(folder).items()}
    classes = sorted({path.parent.name for path in files["train"]})
    for path in files["test"]:
        if path.parent.name not in classes:
            raise ValueError(
                f"{path} is of a class that {folder / 'train'} does not have ({', '.join(classes[:10])}). "
                "Give both splits the same classes."
            )
    mode, size = _common_form([*files["train"], *files["test"]])
    _check_memory(folder, sum(map(len, files.values())), mode, size)
    number = {name: label for label, name in enumerate(classes)}
    labels = {split: np.array([number[path.parent.name] for path in paths]) for split, paths in files.items()}
    return Raw(
        x_train=_read_all(files["train"], mode, size),
        y_train=labels["train"],
        x_test=_read_all(files["test"], mode, size),
        y_test=labels["test"],
        classes=tuple(classes),
    )


def image_files(folder: Path) -> list[Path]:
    """Return the images of both splits, in the order in which they are read."""
    return [path for split in _splits(folder).values() for path in _of_split(split)]


def _splits(folder: Path) -> dict[str, Path]:
    """Return the folders of the two splits, or say what is missing."""
    test = next((folder / name for name in _TEST_NAMES if (folder / name).is_dir()), None)
    if test is None or not (folder / "train").is_dir():
        inside = sorted(path.name for path in folder.iterdir())[:10]
        raise FileNotFoundError(
            f"{folder} is no folder of images: expected train/<class>/ and test/<class>/ (or val/<class>/), got "
            f"{', '.join(inside) or 'an empty folder'}. Sort the images so."
        )
    splits = {"train": folder / "train", "test": test}
    for path in splits.values():
        _check_not_empty(path)
        if next(_of_split(path), None) is None:
            raise FileNotFoundError(
                f"{path} has no images in class folders; expected <class>/<image> with one of the endings "
                f"{', '.join(_ENDINGS)}. Put one folder a class there."
            )
    return splits


def _check_not_empty(split: Path) -> None:
    """Refuse a class without images, unless none has any."""
    empty = [directory for directory in _class_folders(split) if not _images(directory)]
    if empty and len(empty) < len(_class_folders(split)):
        raise ValueError(
            f"{empty[0]} is a class without images; expected files there with one of the endings "
            f"{', '.join(_ENDINGS)}. Add images, or remove the folder."
        )


def _of_split(split: Path) -> Iterator[Path]:
    for directory in _class_folders(split):
        yield from _images(directory)


def _class_folders(split: Path) -> list[Path]:
    """Return the folders of the classes; hidden ones belong to other programs."""
    return sorted(path for path in split.iterdir() if path.is_dir() and not path.name.startswith("."))


def _images(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.suffix.lower() in _ENDINGS)


def _common_form(paths: list[Path]) -> tuple[Mode, tuple[int, int]]:
    """Return the mode and the (height, width) that all images are brought to; warn if that changes any."""
    with ThreadPoolExecutor() as pool:
        forms = list(pool.map(_form, paths))
    heights, widths = zip(*(size for _, size in forms), strict=True)
    height, width = (min(_LARGEST, int(np.median(lengths))) for lengths in (heights, widths))
    if changed := sum(size != (height, width) for _, size in forms):
        warnings.warn(
            f"{changed} of {len(paths)} images are scaled and cut to {height} x {width} pixels, the median of all "
            f"sizes or at most {_LARGEST}; for another size bring them to it yourself",
            stacklevel=5,
        )
    return ("L" if all(mode in _GREY for mode, _ in forms) else "RGB"), (height, width)


def _form(path: Path) -> tuple[str, tuple[int, int]]:
    """Read mode and (height, width) from an image's header."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            return image.mode, (image.height, image.width)
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"{path} cannot be read as an image ({error}). Replace or remove it.") from error


def _read_all(paths: list[Path], mode: Mode, size: tuple[int, int]) -> Array:
    """Decode images on several threads, straight into their place."""
    images = np.empty((len(paths), 1 if mode == "L" else 3, *size), np.uint8)

    def read(index: int) -> None:
        images[index] = _read(paths[index], mode, size)

    with ThreadPoolExecutor() as pool:
        list(pool.map(read, range(len(paths))))
    return images


def _read(path: Path, mode: Mode, size: tuple[int, int]) -> Array:
    """Decode one image, cover the wanted size with it, and cut around the centre."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            converted = image.convert(mode)
    except OSError as error:
        raise ValueError(f"{path} cannot be read as an image ({error}). Replace or remove it.") from error
    if (converted.height, converted.width) != size:
        converted = ImageOps.fit(converted, (size[1], size[0]), Image.Resampling.BILINEAR)
    pixels = np.asarray(converted)
    return pixels[None] if mode == "L" else pixels.transpose(2, 0, 1)


def _check_memory(folder: Path, count: int, mode: Mode, size: tuple[int, int]) -> None:
    """Refuse a folder that cannot fit into memory, before the machine grinds to a halt."""
    needed = count * (1 if mode == "L" else 3) * size[0] * size[1]
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError):  # no such question on this system
        return
    if needed > memory:
        raise ValueError(
            f"{folder} has {count} images, {needed / 2**30:.0f} GiB as {size[0]} x {size[1]} pixels; this machine has "
            f"{memory / 2**30:.0f} GiB of memory. Use a part of them, or smaller images."
        )
