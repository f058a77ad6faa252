"""Random crops and flips of a batch of images, on the device of the batch."""

from __future__ import annotations

import torch
from torch import Tensor

# B images, C channels, H height, W width

_STEPS: dict[str, tuple[str, ...]] = {"none": (), "flip": ("flip",), "crop": ("crop",), "crop_flip": ("crop", "flip")}


def names() -> list[str]:
    """Return the names of the augmentations."""
    return list(_STEPS)


def augment(x: Tensor, name: str, generator: torch.Generator | None = None) -> Tensor:
    """Shift and mirror every image of a batch at random.

    "crop" pads each side with zeros, an eighth of the size wide (4 pixels for 32), and cuts a random window of the
    old size. "flip" mirrors left and right with probability one half. "crop_flip" does both, "none" neither.

    Images (B, C, H, W) are raw or normalised; the padding is zero in both cases. Shape, dtype and memory format stay.
    Without a generator, the numbers come from torch's global one of the device of `x`.
    """
    if name not in _STEPS:
        raise ValueError(f"expected an augmentation among {', '.join(_STEPS)}, got {name!r}. Pick one of them.")
    if name == "none":
        return x
    if x.dim() != 4:
        raise ValueError(f"'{name}' needs images (B, C, H, W), got shape {tuple(x.shape)}. Use 'none' for features.")
    batch, channels, height, width = x.shape
    rows = torch.arange(height, device=x.device).expand(batch, -1)
    columns = torch.arange(width, device=x.device).expand(batch, -1)
    if "flip" in _STEPS[name]:
        mirrored = torch.randint(2, (batch, 1), device=x.device, generator=generator, dtype=torch.bool)
        columns = torch.where(mirrored, columns.flip(1), columns)
    if "crop" in _STEPS[name]:
        rows = rows + _offset(x, height, generator)
        columns = columns + _offset(x, width, generator)
    # One gather for all steps: the source pixel of each pixel of the result, and whether it is inside the image.
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    source = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None, :]
    pixels = x.flatten(2).gather(2, source.view(batch, 1, -1).expand(-1, channels, -1)).view(x.shape)
    moved = torch.where(inside[:, None], pixels, torch.zeros((), dtype=x.dtype, device=x.device))
    channels_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return moved.contiguous(memory_format=torch.channels_last) if channels_last else moved


def _offset(x: Tensor, size: int, generator: torch.Generator | None) -> Tensor:
    """Draw the offset of each window from the edge of its image, (B, 1)."""
    pad = size // 8
    return torch.randint(-pad, pad + 1, (len(x), 1), device=x.device, generator=generator)
