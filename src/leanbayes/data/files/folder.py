"""Read a folder of images in ImageNet's layout: train/<class>/*.png and test/<class>/*.png (or val/<class>/).

Pixels of 8 bits stay uint8. If one image of a set has 16 bits, all are float32 from 0 to 1: 16-bit values are divided
by 65535, 8-bit values by 255. Palettes and CMYK become RGB. An opaque alpha channel is dropped. Photos are turned as
their EXIF orientation says.
"""

from __future__ import annotations

import contextlib
import glob
import math
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from leanbayes.data.dataset import Array, Raw
from leanbayes.data.files.npz import check_memory, USUAL

Result = TypeVar("Result")
_DEEP = ("I;16", "I;16B", "I;16L", "I;16N", "I")  # "I" has 32 bits; for a 16-bit .pgm file Pillow uses 16 of them
_GREY = ("1", "L", "LA", *_DEEP)
_COLOUR = ("P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV")
_BRIGHTEST = 65535
_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
_UNREAD = (".jfif", ".jpe", ".heic", ".heif", ".avif", ".jp2", ".tga", ".dcm", ".npy")  # images, too
_PATTERN = "*?["  # signs of a pattern of file names
_TEST_NAMES = ("test", "val", "validation")
_LARGEST = 224  # pixels of a side
_MOST_NAMED = 10  # files with faults
_EXIF = ("exif", "xmp", "XML:com.adobe.xmp")  # where Pillow has read an orientation
_ORIENTATION, _ON_ITS_SIDE = 0x0112, (5, 6, 7, 8)  # tag of EXIF, and its values that exchange height and width


class Header(NamedTuple):
    """Properties of an image file.

    Attributes:
        size: height and width of the upright image.
        colour: whether it has colours.
        deep: whether grey levels have 16 bits.
        cut: whether several channels have 16 bits each; Pillow reads 8 of them.
        frames: whether it has several frames; only the first is read.
    """

    size: tuple[int, int]
    colour: bool
    deep: bool
    cut: bool
    frames: bool


class Form(NamedTuple):
    """Common form of the images of a set: height and width, colours, and 16 bits; see `Header`."""

    size: tuple[int, int]
    colour: bool
    deep: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        return (3 if self.colour else 1, *self.size)

    @property
    def dtype(self) -> Any:
        """The type of the pixels."""
        return np.float32 if self.deep else np.uint8


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """Image files in the form of a training set, decoded when they are read.

    Attributes:
        paths: the files.
        form: the form of the training set.
    """

    paths: list[Path]
    form: Form

    @classmethod
    def like(cls, paths: list[Path], shape: tuple[int, ...], *, deep: bool) -> ImageFiles:
        """Return files for a network that takes images of a shape (C, H, W), `deep` ones as floats from 0 to 1.

        Raises:
            ValueError: A file is no image, or images of this shape are neither grey nor in colours.
        """
        if len(shape) != 3 or shape[0] not in USUAL:
            raise ValueError(
                f"expected rows of shape {shape}, as in training, got image files, which are grey or have three "
                "colours. Save the rows to an .npz or .csv file."
            )
        _read_headers(paths)
        return cls(paths, Form((shape[1], shape[2]), colour=shape[0] == 3, deep=deep))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, rows: slice) -> Array:
        """Return the pixels of consecutive files, (n, C, H, W)."""
        return read_all(self.paths[rows], partial(decode, form=self.form), self.form.shape, self.form.dtype)

    @property
    def state(self) -> str:
        """Return names, sizes and times of the files as one text."""
        stats = [(str(path), path.stat()) for path in self.paths]
        return "\n".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)


def find_images(given: str) -> list[Path] | None:
    """Return the image files that a path or a pattern such as "new/*.png" names; None if it names none.

    Several paths are separated by line ends. A folder counts with the images in it, or in its folders. A folder with
    train/ and test/ is a data set instead.

    Raises:
        FileNotFoundError: An image file does not exist, or a folder has no images.
    """
    if "\n" in given:
        return [image for one in given.split("\n") for image in find_images(one) or ()]
    path = Path(given).expanduser()
    if path.is_dir():
        if (path / "train").is_dir():
            return None
        images = sorted(filter(is_image, path.iterdir())) or sorted(filter(is_image, path.rglob("*")))
        if not images:
            raise FileNotFoundError(
                f"{path} has no images; expected files with one of the endings {', '.join(_ENDINGS)}. Check the path."
            )
        return images
    if is_image(path):
        return [path]
    if path.suffix.lower() in _ENDINGS and not any(sign in given for sign in _PATTERN):
        raise FileNotFoundError(f"there is no image {path} (looked in {Path.cwd()}). Check the path.")
    if any(sign in given for sign in _PATTERN):
        found = glob.glob(str(path), recursive=True)  # noqa: PTH207  # patterns may be absolute
        return sorted(filter(is_image, map(Path, found))) or None
    return None


def is_image(path: Path) -> bool:
    """Return whether there is an image file, by its ending."""
    return path.suffix.lower() in _ENDINGS and path.is_file() and not path.name.startswith(".")


def read_header(path: Path) -> Header:
    """Read mode and size of an image, without its pixels.

    Raises:
        ValueError: The file is no image, is too large, or has an unsupported mode.
    """
    from PIL import Image

    with _readable(path), Image.open(path) as image:
        mode, size, frames = image.mode, (image.height, image.width), bool(getattr(image, "is_animated", False))
        tiles = str(getattr(image, "tile", ""))
        if _orientation(image) in _ON_ITS_SIDE:
            size = size[::-1]
    if mode not in (*_GREY, *_COLOUR):
        raise ValueError(
            f"{path} has pixels of the mode {mode}; expected grey, colour, a palette or CMYK. Convert it to one of "
            "them, or save arrays to an .npz file: uint8, or floats from 0 to 1, with any number of channels."
        )
    return Header(size, mode in _COLOUR, mode in _DEEP, mode not in _DEEP and ";16" in tiles, frames)


def _orientation(image: Any) -> int:
    """Return the EXIF orientation of a photo; 1 if it is not said or damaged, and for .tif files: Pillow turns them."""
    if image.format == "TIFF" or not any(source in image.info for source in _EXIF):
        return 1
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except (SyntaxError, TypeError, ValueError):
        return 1


def decode(path: Path, form: Form) -> Array:
    """Return the pixels (C, H, W) of an image: turned upright, scaled to cover the size, and cut around the centre.

    Raises:
        ValueError: The file is damaged, has transparent pixels, or values beyond 16 bits.
    """
    from PIL import Image, ImageOps

    with _readable(path), Image.open(path) as image:
        image.load()  # a .png file may say its orientation after its pixels
        whole = image.copy() if _orientation(image) == 1 else ImageOps.exif_transpose(image)
    _check_opaque(whole, path)
    deep = whole.mode in _DEEP
    picture = _grey_levels(whole, path) if deep else whole.convert("RGB" if form.colour else "L")
    if (picture.height, picture.width) != form.size:
        picture = ImageOps.fit(picture, (form.size[1], form.size[0]), Image.Resampling.BILINEAR)
    pixels = np.asarray(picture)
    if form.deep:
        pixels = pixels.astype(np.float32) / np.float32(_BRIGHTEST if deep else 255)
    elif deep:  # a new image for a network of 8-bit images
        pixels = np.round(pixels * (255 / _BRIGHTEST)).astype(np.uint8)
    channels = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    return np.broadcast_to(channels, form.shape)


def _grey_levels(image: Any, path: Path) -> Any:
    """Return 16-bit grey levels as an image of floats, because Pillow can scale these."""
    from PIL import Image

    values = np.asarray(image)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > _BRIGHTEST:
        raise ValueError(
            f"{path} has values from {low} to {high}; expected at most 16 bits, from 0 to {_BRIGHTEST}. Scale them."
        )
    return Image.fromarray(values.astype(np.float32))


def _check_opaque(image: Any, path: Path) -> None:
    """Reject transparent pixels, because their colour depends on the background."""
    see_through = image.info.get("transparency")
    if image.mode in _DEEP:
        transparent = see_through is not None and bool((np.asarray(image) == see_through).any())
    elif image.mode in ("LA", "PA", "RGBA") or see_through is not None:
        transparent = image.convert("RGBA").getchannel("A").getextrema()[0] < 255
    else:
        transparent = False
    if transparent:
        raise ValueError(
            f"{path} has transparent pixels; expected opaque ones, since their colour depends on the background. Put "
            "the image on a background (PIL.Image.alpha_composite), or save alpha as a fourth channel in an .npz file."
        )


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn errors of image decoders into ``ValueError`` with the name of the file."""
    from PIL import Image

    try:
        yield
    except (FileNotFoundError, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        raise ValueError(f"{path} is too large an image ({error}). Scale it down, or remove it.") from error
    except Exception as error:  # each decoder has its own errors
        raise ValueError(f"{path} cannot be read as an image ({error}). Replace or remove it.") from error


def read_folder(folder: Path) -> Raw:
    """Read all images of a folder into memory.

    Images of different sizes are scaled to cover the median height and width, at most 224 pixels each, then cut around
    the centre. If one image has colours, all become colour images.
    """
    files = image_files(folder)
    _warn_of_unread(folder, files)
    classes = sorted({path.parent.name for path in files["train"]})
    for path in files["test"]:
        if path.parent.name not in classes:
            raise ValueError(
                f"{path} is of a class that {folder / 'train'} does not have ({', '.join(classes[:10])}). "
                "Give both splits the same classes."
            )
    form, count = _common_form([*files["train"], *files["test"]]), sum(map(len, files.values()))
    needed = count * math.prod(form.shape) * np.dtype(form.dtype).itemsize
    check_memory(needed, f"{folder} has {count} images", f"as {form.size[0]} x {form.size[1]} pixels")
    number = {name: label for label, name in enumerate(classes)}
    labels = {split: np.array([number[path.parent.name] for path in paths]) for split, paths in files.items()}
    return Raw(
        x_train=read_all(files["train"], partial(decode, form=form), form.shape, form.dtype),
        y_train=labels["train"],
        x_test=read_all(files["test"], partial(decode, form=form), form.shape, form.dtype),
        y_test=labels["test"],
        classes=tuple(classes),
    )


def image_files(folder: Path) -> dict[str, list[Path]]:
    """Return the images of the splits "train" and "test", sorted by class and name; reject a folder without them."""
    test = next((folder / name for name in _TEST_NAMES if (folder / name).is_dir()), None)
    if test is None or not (folder / "train").is_dir():
        inside = sorted(path.name for path in folder.iterdir())[:10]
        raise FileNotFoundError(
            f"{folder} is no folder of images: expected train/<class>/ and test/<class>/ (or val/<class>/), got "
            f"{', '.join(inside) or 'an empty folder'}. Sort the images so."
        )
    return {"train": _of_split(folder / "train"), "test": _of_split(test)}


def _of_split(split: Path) -> list[Path]:
    folders = sorted(path for path in split.iterdir() if path.is_dir() and not path.name.startswith("."))
    classes = {folder: sorted(filter(is_image, folder.iterdir())) for folder in folders}
    empty = [folder for folder, images in classes.items() if not images]
    if len(empty) == len(classes):
        raise FileNotFoundError(
            f"{split} has no images in class folders; expected <class>/<image> with one of the endings "
            f"{', '.join(_ENDINGS)}. Put one folder a class there."
        )
    if empty:
        raise ValueError(
            f"{empty[0]} is a class without images; expected files there with one of the endings "
            f"{', '.join(_ENDINGS)}. Add images, or remove the folder."
        )
    return [image for images in classes.values() for image in images]


def _warn_of_unread(folder: Path, files: dict[str, list[Path]]) -> None:
    """Warn of images in the folders of the splits that are not read: in other folders, or with other endings."""
    splits = {path.parent.parent for paths in files.values() for path in paths}
    read = {path for paths in files.values() for path in paths}
    found = (path for split in splits for path in split.rglob("*") if path.suffix.lower() in (*_ENDINGS, *_UNREAD))
    named = {path: path.relative_to(folder) for path in found if path.is_file() and path not in read}
    unread = sorted(name for name in named.values() if not any(part.startswith(".") for part in name.parts))
    if unread:
        warnings.warn(
            f"images in {folder} that are not read: {len(unread)}, such as {unread[0]}; an image is read if it is "
            f"directly in a class folder and has one of the endings {', '.join(_ENDINGS)}",
            stacklevel=5,
        )


def _common_form(paths: list[Path]) -> Form:
    """Return the common form of all images; warn if it changes any."""
    headers = _read_headers(paths)
    heights, widths = zip(*(header.size for header in headers), strict=True)
    height, width = (min(_LARGEST, int(np.median(lengths))) for lengths in (heights, widths))
    form = Form(
        size=(height, width),
        colour=any(header.colour for header in headers),
        deep=any(header.deep for header in headers),
    )
    for sentence in _changes(headers, form):
        warnings.warn(sentence, stacklevel=5)
    return form


def _changes(headers: list[Header], form: Form) -> Iterator[str]:
    """Yield a sentence for each change of images."""
    height, width = form.size
    total = len(headers)
    if scaled := sum(header.size != form.size for header in headers):
        yield (
            f"{scaled} of {total} images are scaled and cut to {height} x {width} pixels, the median of all "
            f"sizes or at most {_LARGEST}; for another size bring them to it yourself"
        )
    if deep := sum(header.deep for header in headers):
        rest = ", 8-bit values divided by 255" if deep < total else ""
        yield (
            f"{deep} of {total} images have 16 bits a pixel: pixels are kept as floats from 0 to 1, 16-bit values "
            f"divided by 65535{rest}"
        )
    if cut := sum(header.cut for header in headers):
        yield (
            f"{cut} of {total} images have 16 bits in each of several channels, and only 8 are read; to keep all, save "
            "floats from 0 to 1 to an .npz file"
        )
    if frames := sum(header.frames for header in headers):
        yield f"{frames} of {total} images have several frames or pages, and only the first is read"


def read_all(paths: list[Path], read: Callable[[Path], Array], shape: tuple[int, ...], dtype: Any) -> Array:
    """Decode images in threads, directly into one array (N, *shape)."""
    images = np.empty((len(paths), *shape), dtype)

    def fill(index: int) -> None:
        images[index] = read(paths[index])

    _read_each(fill, paths)
    return images


def _read_headers(paths: list[Path]) -> list[Header]:
    return _read_each(lambda index: read_header(paths[index]), paths)


def _read_each(read: Callable[[int], Result], paths: list[Path]) -> list[Result]:
    """Call a function for the number of each file, in threads; the error for files with faults names all of them."""
    faults: dict[int, ValueError] = {}

    def attempt(index: int) -> Any:
        try:
            return read(index)
        except ValueError as error:
            faults[index] = error
            return None

    with ThreadPoolExecutor() as pool:
        found = list(pool.map(attempt, range(len(paths))))
    if faults:
        first, *more = sorted(faults)
        some = ", ".join(str(paths[index]) for index in more[: _MOST_NAMED - 1])
        rest = ", ..." * (len(faults) > _MOST_NAMED)
        also = f" {len(faults)} files have faults, also {some}{rest}." if more else ""
        raise ValueError(f"{faults[first]}{also}") from faults[first]
    return found
