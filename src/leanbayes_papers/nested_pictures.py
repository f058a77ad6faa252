"""What codes of growing length look like: Figures 9 and 12 of the nested paper."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.generative import VNDAutoencoder
from leanbayes_papers.nested_coders import coder, dimensions, ORDERED, pixels, taught
from leanbayes_papers.study import Case, new_figure, Numbers, save_figure, Study
from leanbayes_papers.suite import Setting
from leanbayes_papers.trained import loaded, some

SHOWN = 8
DEPTH = 4
SPREAD = 1.5
"""How far apart the two values of a dimension of the tree are from zero; the prior's deviation is one."""

WIDTH, TREE_HEIGHT = 11.0, 4.0
"""Inches of the figure and of the tree in it."""

WHITE = 255


def pictures(setting: Setting, data: str) -> Study:
    """Return the study of one data set."""
    return Study(
        name=f"pictures-{data}",
        title=f"Nested paper, Figures 9 and 12: images at growing code lengths on {data}",
        claim="Short codes give what images have in common, further dimensions add details and sharpen them; in a tree "
        "of codes every level varies the images above it.",
        data=(data,),
        measure=partial(measure, setting=setting, data=data),
        draw=draw,
        say=say,
    )


def measure(case: Case, *, setting: Setting, data: str) -> Numbers:
    """Generate, reconstruct and branch with the VND-AE of the first seed."""
    plan = coder(setting, data, ORDERED, dimensions(setting, data))
    model = taught(plan, case, case.seeds[0])
    if not isinstance(model, VNDAutoencoder):
        raise ValueError(f"expected {ORDERED} to have ordered codes, got {type(model).__name__}")
    test = loaded(plan.source).test
    x = some((pixels(test), test.y), SHOWN)[0]
    growing = doubled(model.dimensions)
    again = [model.reconstruct(x.to(model.device), length=length).cpu() for length in growing]
    return {
        "lengths": growing,
        "new": packed(rows([framed(row) for row in model.progressive(SHOWN, growing).cpu()])),
        "again": packed(rows([framed(row) for row in (x, *again)])),
        "tree": packed(tree([framed(level.cpu()) for level in model.tree(DEPTH, spread=SPREAD)])),
    }


def doubled(whole: int) -> list[int]:
    """Return 1, 2, 4, ... and the full length."""
    return [*(2**k for k in range(whole.bit_length()) if 2**k < whole), whole]


def framed(images: Tensor) -> Tensor:
    """Put a white line around images, so that they stand apart."""
    return F.pad(images, (1, 1, 1, 1), value=1.0)


def rows(images: Sequence[Tensor]) -> Tensor:
    """Put rows of images (N, C, H, W) below each other, as one picture (H', W', C)."""
    return torch.cat([torch.cat(list(row), 2) for row in images], 1).movedim(0, 2)


def tree(levels: Sequence[Tensor]) -> Tensor:
    """Put the levels of a tree below each other on white, every image in the middle above its two successors."""
    leaves = len(levels[-1])
    _, channels, height, width = levels[0].shape
    canvas = torch.ones(channels, height * len(levels), width * leaves)
    for depth, level in enumerate(levels):
        step = width * leaves // len(level)
        for k, image in enumerate(level):
            left = k * step + (step - width) // 2
            canvas[:, depth * height : (depth + 1) * height, left : left + width] = image
    return canvas.movedim(0, 2)


def packed(picture: Tensor) -> dict[str, Any]:
    """Return a picture of pixels between 0 and 1 as JSON can hold it: its shape, and a byte for each number."""
    grey = (picture.clamp(0, 1) * 255).round().to(torch.uint8)
    return {"shape": list(grey.shape), "bytes": base64.b64encode(bytes(grey.flatten().tolist())).decode()}


def unpacked(record: dict[str, Any]) -> Tensor:
    """Return the picture of a record, bytes (H, W, C)."""
    return torch.tensor(list(base64.b64decode(record["bytes"])), dtype=torch.uint8).view(record["shape"])


def say(numbers: Numbers) -> list[str]:
    """Tell what the figure shows."""
    told = ", ".join(map(str, numbers["lengths"]))
    return [
        f"Left: new images, a column is one code cut to {told} dimensions. Right: test images, and what is left of "
        "them at these lengths. Below: a tree of codes, each level with two values for one dimension more."
    ]


def draw(numbers: Numbers, path: Path) -> None:
    """Draw new images beside reconstructions, equal lengths on equal heights, and the tree below them."""
    lengths = list(map(str, numbers["lengths"]))
    new, again, branches = (unpacked(numbers[key]) for key in ("new", "again", "tree"))
    figure = new_figure(WIDTH, WIDTH * again.shape[0] / again.shape[1] / 2 + TREE_HEIGHT)
    above, below = figure.subfigures(2, 1, height_ratios=(figure.get_figheight() - TREE_HEIGHT, TREE_HEIGHT))
    left, right = above.subplots(1, 2)
    empty = torch.full((again.shape[0] - new.shape[0], *new.shape[1:]), WHITE, dtype=new.dtype)
    _show(left, torch.cat([empty, new]), "new images", ["", *lengths])
    _show(right, again, "test images and their reconstructions", ["test", *lengths])
    left.set_ylabel("dimensions of the code in use")
    _show_tree(below.subplots(), branches)
    save_figure(figure, path)


def _show(axis: Any, picture: Tensor, title: str, labels: Sequence[str]) -> None:
    """Put a picture of as many rows as there are labels into axes without a frame."""
    step = picture.shape[0] / len(labels)
    named = [k for k, label in enumerate(labels) if label]
    # "none" keeps the pixels as they are: small files, and nothing is blurred
    shown = picture[..., 0] if picture.shape[2] == 1 else picture
    axis.imshow(shown.numpy(), cmap="gray", vmin=0, vmax=WHITE, interpolation="none")
    axis.set_title(title, fontsize=11)
    axis.set(xticks=[], yticks=[step * (k + 0.5) - 0.5 for k in named], yticklabels=[labels[k] for k in named])
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


def _show_tree(axis: Any, picture: Tensor) -> None:
    """Draw a tree with room between its levels, and lines from every image to the two that go on from it."""
    levels = picture.tensor_split(DEPTH)
    height, width = levels[0].shape[0], picture.shape[1]
    room = torch.full((height // 2, *picture.shape[1:]), WHITE, dtype=picture.dtype)
    spaced = torch.cat([part for level in levels for part in (level, room)])
    names = [str(depth + 1) for depth in range(DEPTH)]
    _show(axis, spaced, "a tree of codes", names)
    step = len(spaced) // DEPTH
    axis.set_yticks([depth * step + height / 2 for depth in range(DEPTH)], names)
    axis.set_ylabel("dimensions in use")
    for depth in range(1, DEPTH):
        ends = [(k + 0.5) * width / 2**depth for k in range(2**depth)]
        starts = [(k // 2 + 0.5) * width / 2 ** (depth - 1) for k in range(2**depth)]
        axis.plot([starts, ends], [(depth - 1) * step + height, depth * step], color="gray", lw=1)
