"""Weather corruptions: snow, frost, fog and brightness, with clouds and ice made from random numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from leanbayes.shift.corruptions._random import Streams
from leanbayes.shift.corruptions.geometry import blur, motion, separable, zoom_matrix
from leanbayes.shift.corruptions.severities import Level, Table

_FERNS, _BARBS = 20, 8
# The strokes of a fern: start on the stem, angle to it, length (shares of the stem). The stem comes first, then barbs
# at 60 degrees on either side.
_STROKES = (
    (0.0, 0.0, 1.0),
    *((k / _BARBS, side * math.pi / 3, 0.45 * (1 - k / _BARBS)) for k in range(_BARBS) for side in (1, -1)),
)


def clouds(streams: Streams, size: int, decay: float) -> Tensor:
    """Return clouds (n, side, side) between 0 and 1 by the diamond-square fractal; side is a power of two >= size.

    Each round halves the grid: a new point is the mean of its four neighbours (the grid wraps around) plus noise, whose
    amplitude falls by decay^2. All noise is drawn first, so that it is the same for every decay.
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
    """Return ferns of ice (n, height, width) on black: stems with barbs that shorten to the tip.

    Positions are complex numbers x + i y; the image is the unit square. Axes: image, fern, stroke, point of a stroke.
    Points fade towards the end of a stroke.
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
    return torch.polar(torch.ones_like(angle), angle)


# Mean and std of the flakes' noise, their size, the threshold of a flake, radius and sigma of their motion, and the
# share of the image that does not turn white.
SNOW = Table(
    cifar=(
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
    imagenet=(
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.68),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ),
)
# Weights of image and ice. From severity 3 on, the benchmarks dim the image so much that it changes less.
FROST = Table(
    cifar=((1, 0.2), (1, 0.3), (0.97, 0.33), (0.94, 0.355), (0.91, 0.38)),
    imagenet=((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.73), (0.6, 0.78)),
)
# Colour of the ice (red, green, blue) and std of its brightness in the benchmarks' five photographs: blue, white twice,
# silver and dark.
FROST_KINDS = (
    (0.30, 0.58, 0.65, 0.07),
    (0.79, 0.81, 0.84, 0.09),
    (0.79, 0.81, 0.84, 0.09),
    (0.54, 0.60, 0.65, 0.11),
    (0.44, 0.48, 0.53, 0.17),
)
# Thickness of the fog, decay of its detail. ImageNet-C has thickness 2.5 at severities 3 and 4.
FOG = Table(
    cifar=((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
    imagenet=((1.5, 2), (2, 2), (2.5, 1.7), (2.7, 1.5), (3, 1.4)),
)
# Added to the brightest channel.
BRIGHTNESS = Table(cifar=(0.05, 0.1, 0.15, 0.2, 0.3), imagenet=(0.1, 0.2, 0.3, 0.4, 0.5))

_LUMA = (0.299, 0.587, 0.114)


def snow(images: Tensor, level: Level, streams: Streams) -> Tensor:
    """Add flakes, and the same flakes turned by 180 degrees, to an image that turns white."""
    mean, std, size, least, radius, sigma, clear = SNOW.at(level)
    height, width = images.shape[2:]
    flakes = mean + std * streams.normal(1, height, width)
    flakes = separable(flakes, zoom_matrix(height, size), zoom_matrix(width, size))
    flakes = flakes.where(flakes >= least, 0).clamp(0, 1)
    flakes = motion(flakes, streams.uniform(low=math.pi / 4, high=3 * math.pi / 4), round(radius), sigma)
    white = torch.maximum(images, 1.5 * _grey(images) + 0.5)
    return clear * images + (1 - clear) * white + flakes + flakes.flip(2, 3)


def frost(images: Tensor, level: Level, streams: Streams) -> Tensor:
    """Add ice of one of five kinds: a x + b ice."""
    image_weight, ice_weight = FROST.at(level)
    return image_weight * images + ice_weight * _ice(images, streams)


def fog(images: Tensor, level: Level, streams: Streams) -> Tensor:
    """Add clouds and darken: (x + c clouds) m / (m + c), m the brightest value of the image."""
    thickness, decay = FOG.at(level)
    height, width = images.shape[2:]
    haze = clouds(streams, max(height, width), decay)[:, None, :height, :width]
    brightest = images.amax((1, 2, 3), keepdim=True)
    return (images + thickness * haze) * brightest / (brightest + thickness)


def brightness(images: Tensor, level: Level, streams: Streams) -> Tensor:
    """Raise the value in HSV; a grey image is its own value."""
    (added,) = BRIGHTNESS.at(level)
    value = images.amax(1, keepdim=True)
    brighter = (value + added).clamp(max=1)
    # Hue and saturation stay if all channels grow by one factor; black has neither and becomes grey.
    return torch.where(value > 0, images * (brighter / value.clamp(min=1e-6)), brighter)


def _ice(images: Tensor, streams: Streams) -> Tensor:
    """Return ice in the shape of the images: a kind for each, with ferns over clouds as brightness."""
    channels, height, width = images.shape[1:]
    cloudy = clouds(streams, max(height, width), 1.6)[:, :height, :width]
    light = _standardised(_standardised(cloudy) + _standardised(ferns(streams, height, width)))
    kind = (streams.uniform() * len(FROST_KINDS)).long()
    chosen = torch.tensor(FROST_KINDS, device=images.device)[kind][..., None, None]
    colour, std = chosen[:, :3], chosen[:, 3:]
    return ((_grey(colour) if channels == 1 else colour) + std * light[:, None]).clamp(0, 1)


def _standardised(texture: Tensor) -> Tensor:
    """Return the texture (n, H, W) with mean zero and std one in each image."""
    std, mean = torch.std_mean(texture, (1, 2), keepdim=True)
    return (texture - mean) / std


def _grey(images: Tensor) -> Tensor:
    """Return the luminance (n, 1, H, W)."""
    if images.shape[1] == 1:
        return images
    weights = torch.tensor(_LUMA, device=images.device, dtype=images.dtype)
    return (images * weights[:, None, None]).sum(1, keepdim=True)
