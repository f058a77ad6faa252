"""Out-of-distribution inputs in the shape of a data set: another set, noise, shuffled or inverted images."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.data.checks import check_inputs
from leanbayes.data.dataset import DataSet
from leanbayes.data.files.npz import channel_axis_like, channels_first, tensor
from leanbayes.data.loading import is_table, read_own_table, read_test_inputs, resolve

# N rows, C channels, H height, W width, d columns

MADE_UP = ("noise", "shuffled", "inverted")
_LUMA = (0.299, 0.587, 0.114)  # weights of red, green and blue in grey, ITU-R BT.601
_CHUNK = 1024


def ood(name: str, like: DataSet, root: str | Path | None = None) -> Tensor:
    """Return raw inputs of another set in the shape of `like`.

    Images become uint8 with the channels and size of `like`: grey is repeated, colour becomes luma, sizes are changed
    bilinearly with antialiasing. Features must agree in number; if `like` is a table with text or gaps, all rows of
    another table are prepared as its rows were. Three sets are made from `like` with a fixed seed:

    - "noise": uniform pixels; features uniform over the range of each column;
    - "shuffled": the pixels of each test image in random order; each column shuffled over the test rows;
    - "inverted": dark and light, or low and high, exchanged.

    A further split of `like` is taken by its name ("left-out" of fashion-demo). Else `name` is a known set, or the path
    of the user's own; `root` is the cache, as in ``load``.
    """
    if like.kind not in ("image", "table"):
        raise ValueError(
            f"{like.name} is a {like.kind} of tokens; out-of-distribution inputs are for images and features. Leave "
            "them out (--ood none)."
        )
    if name in MADE_UP:
        return _made_up(name, like)
    if name in like.further:
        return like.further[name].x
    known = resolve(name)
    own = isinstance(known, Path)
    if isinstance(known, Path) and is_table(known) and like.table is not None and not like.table.plain:
        return tensor(like.table.read(read_own_table(known, names=like.table.header))[0])
    raw, channels = read_test_inputs(name, root)
    channels = channels or channel_axis_like(raw.shape[1:], like.input_shape, like.channels if own else None)
    ask = "Save them as (rows, channels, height, width) of one size."
    raw = channels_first(raw, f"{name}: x_test", channels, ask)
    check_inputs(raw, f"{name}: x_test")
    x = tensor(raw)
    if like.kind == "image":
        return _like_images(x, like, name)
    if tuple(x.shape[1:]) != like.input_shape:
        raise ValueError(
            f"{name} has rows of shape {tuple(x.shape[1:])}, {like.name} of {like.input_shape}. "
            f"Pick a table with as many columns, or one of {', '.join(MADE_UP)}."
        )
    return x


def _like_images(x: Tensor, like: DataSet, name: str) -> Tensor:
    if x.dim() != 4:
        raise ValueError(
            f"{name} has features, {like.name} images. Pick a set of images for out-of-distribution inputs."
        )
    channels, *size = like.input_shape
    if x.shape[1] != channels and {x.shape[1], channels} != {1, 3}:
        raise ValueError(
            f"{name} has images of {x.shape[1]} channels, {like.name} of {channels}; only grey and colour turn into "
            "each other. Pick a set with as many channels."
        )
    return torch.cat([_fit(chunk, channels, size) for chunk in torch.split(x, _CHUNK)])


def _fit(x: Tensor, channels: int, size: list[int]) -> Tensor:
    """Convert a chunk of images in float, to round only once."""
    pixels = x.float() * (1.0 if x.dtype == torch.uint8 else 255.0)
    if channels < x.shape[1]:
        pixels = torch.einsum("nchw,c->nhw", pixels, torch.tensor(_LUMA))[:, None]
    if list(x.shape[2:]) != size:
        pixels = F.interpolate(pixels, size=size, mode="bilinear", antialias=True, align_corners=False)
    return pixels.round().clamp(0, 255).to(torch.uint8).expand(-1, channels, -1, -1).contiguous()


def _made_up(name: str, like: DataSet) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = like.test.x if like.kind == "table" or like.test.x.dtype == torch.uint8 else (like.test.x * 255).round().byte()
    if like.kind == "image":
        return _made_up_images(name, x, generator)
    low, high = like.train.x.amin(0), like.train.x.amax(0)
    if name == "noise":
        return low + (high - low) * torch.rand(x.shape, generator=generator, device=generator.device)
    if name == "shuffled":
        return x.gather(0, torch.rand(x.shape, generator=generator, device=generator.device).argsort(0))
    return low + high - x


def _made_up_images(name: str, x: Tensor, generator: torch.Generator) -> Tensor:
    if name == "noise":
        return torch.randint(256, x.shape, generator=generator, dtype=torch.uint8, device=generator.device)
    if name == "shuffled":
        flat = x.flatten(2)
        order = torch.rand(len(flat), 1, flat.shape[2], generator=generator, device=generator.device).argsort(2)
        return flat.gather(2, order.expand_as(flat)).view(x.shape)
    return 255 - x
