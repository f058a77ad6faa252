"""Decode image files: any mode of Pillow to grey or colour, 16-bit grey with all its values, or refused by name.

Pixels of 8 bits stay uint8. If one image of a set has 16 bits, all are float32 from 0 to 1: v / 65535 of 16-bit values,
v / 255 of 8-bit values. Colours of palettes and CMYK become RGB. An alpha channel is left out where it is opaque.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from leanbayes.data.checks import Array

_DEEP = ("I;16", "I;16B", "I;16L", "I;16N", "I")  # "I" has 32 bits; of a 16-bit .pgm file Pillow uses 16 of them
_GREY = ("1", "L", "LA", *_DEEP)
_COLOUR = ("P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV")
_BRIGHTEST = 65535


class Header(NamedTuple):
    """What an image file says of itself.

    Attributes:
        size: height and width.
        colour: whether it has colours.
        deep: whether grey levels have 16 bits.
        cut: whether it has 16 bits in each of several channels, of which Pillow reads 8.
        frames: whether it has several frames, of which the first is read.
    """

    size: tuple[int, int]
    colour: bool
    deep: bool
    cut: bool
    frames: bool


class Form(NamedTuple):
    """What the images of a set are brought to: height and width, colours, and 16 bits; see `Header`."""

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


def read_header(path: Path) -> Header:
    """Read mode and size of an image, without its pixels.

    Raises:
        ValueError: The file is no image, is too large, or has a mode that would not be read right.
    """
    from PIL import Image

    with _readable(path), Image.open(path) as image:
        mode, size, frames = image.mode, (image.height, image.width), bool(getattr(image, "is_animated", False))
        tiles = str(getattr(image, "tile", ""))
    if mode not in (*_GREY, *_COLOUR):
        raise ValueError(
            f"{path} has pixels of the mode {mode}; expected grey, colour, a palette or CMYK. Convert it to one of "
            "them, or save arrays to an .npz file: uint8, or floats from 0 to 1, with any number of channels."
        )
    return Header(size, mode in _COLOUR, mode in _DEEP, mode not in _DEEP and ";16" in tiles, frames)


def decode(path: Path, form: Form) -> Array:
    """Return the pixels (C, H, W) of an image: scaled so that it covers the size, and cut around the centre.

    Raises:
        ValueError: The file is damaged, has transparent pixels, or values beyond 16 bits.
    """
    from PIL import Image, ImageOps

    with _readable(path), Image.open(path) as image:
        whole = image.copy()
    _check_opaque(whole, path)
    deep = whole.mode in _DEEP
    picture = _grey_levels(whole, path) if deep else whole.convert("RGB" if form.colour else "L")
    if (picture.height, picture.width) != form.size:
        picture = ImageOps.fit(picture, (form.size[1], form.size[0]), Image.Resampling.BILINEAR)
    pixels = np.asarray(picture)
    if form.deep:
        pixels = pixels.astype(np.float32) / np.float32(_BRIGHTEST if deep else 255)
    channels = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    return np.broadcast_to(channels, form.shape)


def _grey_levels(image: Any, path: Path) -> Any:
    """Return 16-bit grey levels as an image of floats, which Pillow can scale."""
    from PIL import Image

    values = np.asarray(image)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > _BRIGHTEST:
        raise ValueError(
            f"{path} has values from {low} to {high}; expected at most 16 bits, from 0 to {_BRIGHTEST}. Scale them."
        )
    return Image.fromarray(values.astype(np.float32))


def _check_opaque(image: Any, path: Path) -> None:
    """Refuse transparent pixels: which colour is seen there is a matter of the background."""
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
    """Say which file is broken, and how."""
    from PIL import Image

    try:
        yield
    except (FileNotFoundError, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        raise ValueError(f"{path} is too large an image ({error}). Scale it down, or remove it.") from error
    except Exception as error:  # each decoder has errors of its own
        raise ValueError(f"{path} cannot be read as an image ({error}). Replace or remove it.") from error
