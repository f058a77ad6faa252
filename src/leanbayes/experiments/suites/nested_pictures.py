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

from leanbayes.experiments.suites.nested_coders import coder, dimensions, ORDERED, pixels, taught
from leanbayes.experiments.suites.study import Case, new_figure, Numbers, save_figure, Study
from leanbayes.experiments.suites.suite import Setting
from leanbayes.experiments.suites.trained import loaded, some
from leanbayes.generative import VNDAutoencoder

SHOWN = 8
DEPTH = 4
SPREAD = 1.5
"""How far apart the two values of a dimension of the tree are from zero; the prior's deviation is one."""


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
        f"Left: new images, a column is one code cut to {told} dimensions. Middle: test images, and what is left of "
        "them at these lengths. Right: a tree of codes, each level with two values for one dimension more."
    ]


def draw(numbers: Numbers, path: Path) -> None:
    """Draw the three pictures beside each other."""
    lengths = list(map(str, numbers["lengths"]))
    figure = new_figure(14, 4.2)
    named = {"new": ("new images", lengths), "again": ("reconstructions", ["test", *lengths]), "tree": ("a tree", None)}
    for axis, (key, (title, labels)) in zip(figure.subplots(1, 3), named.items(), strict=True):
        picture = unpacked(numbers[key])
        labels = labels or [str(level) for level in range(1, DEPTH + 1)]
        step = picture.shape[0] / len(labels)
        grey = picture.shape[2] == 1
        # "none" keeps the pixels as they are: small files, and nothing is blurred
        shown = picture[..., 0] if grey else picture
        axis.imshow(shown.numpy(), cmap="gray", vmin=0, vmax=255, interpolation="none")
        axis.set(title=title, xticks=[], yticks=[step * (k + 0.5) - 0.5 for k in range(len(labels))])
        axis.set_yticklabels(labels)
    figure.axes[0].set_ylabel("code length")
    save_figure(figure, path)
