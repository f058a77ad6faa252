"""Masks side by side: what annotators and models say of a few images, as text in JSON and as a grid of tiles."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leanbayes.data import AnnotatedImages
from leanbayes_papers.study import new_figure, Numbers, save_figure

Tile = npt.NDArray[np.uint8]

IMAGES = 3
MASKS = 4
ANNOTATORS = "annotators"
TILE, LABEL = 0.6, 1.5
"""Inches of the height of a mask, and of the names beside them."""

GAP, PAPER, MARKED, UNMARKED = 2, 255, 40, 235
"""Pixels between tiles; grey levels of the ground, of what is marked and of what is not."""


def pictures(images: AnnotatedImages, masks: Mapping[str, Tensor]) -> Numbers:
    """Return a few test images, evenly spaced, and the first masks of annotators and models, packed as hex.

    Args:
        images: all splits.
        masks: of each model, (S, B, H, W), of two classes.
    """
    test = images.split("test")
    chosen = torch.arange(IMAGES) * len(test) // IMAGES
    raw = test.images[chosen]
    raw = raw if raw.dtype == torch.uint8 else (255 * raw).round().byte()
    people = {ANNOTATORS: [test.annotations[i, : min(MASKS, int(test.annotators[i]))] for i in chosen]}
    models = {name: [each[:MASKS, i] for i in chosen] for name, each in masks.items()}
    return {
        "shape": list(raw.shape[1:]),
        "images": [image.numpy().tobytes().hex() for image in raw],
        "masks": {
            name: [[_packed(mask) for mask in group] for group in groups] for name, groups in (people | models).items()
        },
    }


def draw_pictures(numbers: Numbers, path: Path) -> None:
    """Draw a column for each image, which stands on top, and a row of masks for the annotators and each model."""
    channels, height, width = numbers["shape"]
    names, columns = list(numbers["masks"]), len(numbers["images"])
    figure = new_figure(TILE * width / height * MASKS * columns + LABEL, TILE * (len(names) + 1))
    for axis, k in zip(figure.subplots(1, columns, squeeze=False)[0], range(columns), strict=True):
        masks = [[_unpacked(mask, height, width) for mask in groups[k]] for groups in numbers["masks"].values()]
        strips = [_strip([_image(numbers["images"][k], (channels, height, width))]), *map(_strip, masks)]
        axis.imshow(np.concatenate(strips), interpolation="none")  # "none" keeps thin lines, which resampling breaks
        labels = ["image", *names] if k == 0 else []
        axis.set(xticks=[], yticks=[(height + GAP) * (row + 0.5) for row in range(len(labels))], yticklabels=labels)
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    save_figure(figure, path)


def _packed(mask: Tensor) -> str:
    return np.packbits(mask.numpy().astype(bool)).tobytes().hex()


def _unpacked(text: str, height: int, width: int) -> Tile:
    """Return a mask as a tile (H, W, 3): dark where it is marked."""
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8), count=height * width)
    grey = np.where(bits.reshape(height, width, 1) > 0, MARKED, UNMARKED).astype(np.uint8)
    return np.repeat(grey, 3, axis=2)


def _image(text: str, shape: tuple[int, int, int]) -> Tile:
    """Return an image as a tile (H, W, 3), grey or in colours."""
    planes = np.frombuffer(bytes.fromhex(text), np.uint8).reshape(shape)
    return np.moveaxis(np.repeat(planes, 3, axis=0) if shape[0] == 1 else planes[:3], 0, 2)


def _blank(height: int, width: int) -> Tile:
    return np.full((height, width, 3), PAPER, np.uint8)


def _strip(tiles: list[Tile]) -> Tile:
    """Return tiles in a row, room for as many as there are masks, a gap beside and below each."""
    height, width, _ = tiles[0].shape
    tiles = [*tiles, *(_blank(height, width) for _ in range(MASKS - len(tiles)))]
    gaps = ((0, GAP), (0, GAP), (0, 0))
    return np.concatenate([np.pad(tile, gaps, constant_values=PAPER) for tile in tiles], axis=1)
