"""Textures of the weather, made from random numbers: clouds of fog, and ferns of ice."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from leanbayes.shift.maps import blur
from leanbayes.shift.streams import Streams

_FERNS, _BARBS = 20, 8
# The strokes of a fern: where on the stem they start, their turn from it, how far they reach (shares of its length).
# The stem comes first, then barbs at 60 degrees on either side.
_STROKES = (
    (0.0, 0.0, 1.0),
    *((k / _BARBS, side * math.pi / 3, 0.45 * (1 - k / _BARBS)) for k in range(_BARBS) for side in (1, -1)),
)


def clouds(streams: Streams, size: int, decay: float) -> Tensor:
    """Return clouds (n, side, side) between 0 and 1, side the power of two that holds size: a diamond-square fractal.

    Each round halves the grid: a new point is the mean of its four neighbours (the grid wraps around) plus noise, whose
    amplitude falls by decay^2. All noise is drawn beforehand, so that one draw serves every decay.
    """
    side = 2 ** math.ceil(math.log2(size))
    noise = streams.uniform(side, side, low=-1.0, high=1.0)
    height = torch.zeros_like(noise)
    step, amplitude = side, 1.0
    while step >= 2:
        old, new = slice(0, None, step), slice(step // 2, None, step)
        corners = height[:, old, old]
        pairs = corners + corners.roll(-1, 2)
        centres = (pairs + pairs.roll(-1, 1)) / 4 + amplitude * noise[:, new, new]
        height[:, new, new] = centres
        height[:, old, new] = (pairs + centres + centres.roll(1, 1)) / 4 + amplitude * noise[:, old, new]
        sides = corners + corners.roll(-1, 1) + centres + centres.roll(1, 2)
        height[:, new, old] = sides / 4 + amplitude * noise[:, new, old]
        step, amplitude = step // 2, amplitude / decay**2
    height -= height.amin((1, 2), keepdim=True)
    return height / height.amax((1, 2), keepdim=True)


def ferns(streams: Streams, height: int, width: int) -> Tensor:
    """Return ferns of ice (n, height, width), dark where there is none: stems with barbs that shorten to the tip.

    Places are complex numbers, x + i y, with the image from 0 to 1 either way. Axes: image, fern, stroke, point of a
    stroke; points fade towards its end.
    """
    across, down = streams.uniform(2, _FERNS, 1, 1, low=-0.1, high=1.1).unbind(1)
    root = torch.complex(across, down)
    stem = streams.uniform(_FERNS, 1, 1, high=2 * math.pi)
    length = streams.uniform(_FERNS, 1, 1, low=0.3, high=0.7)
    light = streams.uniform(_FERNS, 1, 1, low=0.4, high=1.0)

    foot, turn, reach = torch.tensor(_STROKES, device=root.device).T[..., None]
    way = torch.linspace(0, 1, max(height, width) // 2, device=root.device)
    place = root + length * (foot * _unit(stem) + reach * way * _unit(stem + turn))

    x, y = place.real, place.imag
    inside = (y >= 0) & (y < 1) & (x >= 0) & (x < 1)
    pixel = ((y * height).long() * width + (x * width).long()).where(inside, 0)
    shine = (light * (1 - 0.6 * way)).expand(place.shape).where(inside, 0)
    drawn = torch.zeros(len(root), height * width, device=root.device)
    drawn.scatter_reduce_(1, pixel.flatten(1), shine.flatten(1), "amax")
    return blur(drawn.view(-1, 1, height, width), min(height, width) / 160)[:, 0]


def _unit(angle: Tensor) -> Tensor:
    """Return e^(i angle)."""
    return torch.polar(torch.ones_like(angle), angle)
