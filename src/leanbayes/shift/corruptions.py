"""The fifteen common corruptions (Hendrycks & Dietterich, 2019) and the two of the implicit paper.

All severities of a corruption use the same random numbers. Above each function are its constants for five severities:
those of CIFAR-10-C for 32 pixels and of ImageNet-C for 224. With `size` the shorter side of the images,
    blend = log(size / 32) / log(224 / 32), clipped to [0, 1],     constant = (1 - blend) cifar + blend imagenet.
A few constants differ slightly, where a benchmark changes images less at a higher severity.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.shift._pixels import (
    block_matrix,
    blur,
    clouds,
    CPU,
    F32,
    ferns,
    motion,
    separable,
    Streams,
    take,
    zoom_matrix,
)

Scale = Literal["cifar", "imagenet"]
Constants = tuple[float, ...] | tuple[tuple[float, ...], ...]
Function = Callable[..., Tensor]  # of images (n, C, H, W) between 0 and 1, their streams, and the constants

SMALLEST = 28
SEVERITIES = (1, 2, 3, 4, 5)
_CIFAR_SIZE, _IMAGENET_SIZE = 32, 224
_CHUNK = 2**20  # numbers of a chunk of images: memory does not grow with the number of images


@dataclass(frozen=True)
class Corruption:
    """A function of images, and its constants: for each benchmark five entries, numbers or tuples."""

    function: Function
    cifar: Constants
    imagenet: Constants

    def constants(self, severity: int, blend: float) -> list[float]:
        """Return the constants of a severity; blend is 0 for CIFAR and 1 for ImageNet."""
        rows = torch.tensor([self.cifar, self.imagenet], dtype=torch.float64, device=CPU).reshape(
            2, len(SEVERITIES), -1
        )
        cifar, imagenet = rows[:, severity - 1]
        return [float(value) for value in cifar.lerp(imagenet, blend)]


_BY_NAME: dict[str, Corruption] = {}


def _corruption(cifar: Constants, imagenet: Constants) -> Callable[[Function], Function]:
    """Register a function under its name, with its constants; `names` keeps the order."""

    def register(function: Function) -> Function:
        _BY_NAME[function.__name__] = Corruption(function, cifar, imagenet)
        return function

    return register


def names() -> tuple[str, ...]:
    """Return the names of the fifteen common corruptions, in the order of the benchmark."""
    return all_names()[:15]


def all_names() -> tuple[str, ...]:
    """Return the fifteen names, then those of the implicit paper, "gaussian_mix" and "salt_and_pepper"."""
    return tuple(_BY_NAME)


def corrupt(images: Tensor, name: str, severity: int, *, seed: int = 0, scale: Scale | None = None) -> Tensor:
    """Return corrupted images, of the same shape, dtype and device.

    Args:
        images: (N, C, H, W), one or three channels, at least 28 pixels; uint8, or float between 0 and 1.
        name: one of `all_names()`.
        severity: 1 to 5.
        seed: the result of image i depends on (seed, name, severity, i) and itself, not on other images.
        scale: constants of "cifar" (CIFAR-10-C) or "imagenet" (ImageNet-C). None: the former for 32 pixels, the latter
            for 224, interpolated in the logarithm of the shorter side.
    """
    _check(images, name, severity)
    corruption = _BY_NAME[name]
    constants = corruption.constants(int(severity), blend_of(min(images.shape[2:]), scale))
    size = max(1, _CHUNK // images[0].numel()) if len(images) else 1
    corrupted = torch.empty_like(images)
    with CPU:  # constants are made there, whatever torch's default device is
        for start in range(0, len(images), size):
            chunk = images[start : start + size]
            streams = Streams(seed, name, range(start, start + len(chunk)), images.device)
            changed = corruption.function(as_unit(chunk), streams, *constants)
            corrupted[start : start + size] = as_dtype(changed, images.dtype)
    return corrupted


def blend_of(size: int, scale: Scale | None) -> float:
    """Return 0 for CIFAR's constants, 1 for ImageNet's; with None, by the logarithm of the size."""
    if scale not in ("cifar", "imagenet", None):
        raise ValueError(
            f"expected scale 'cifar' or 'imagenet' (or None, to go by image size), got {scale!r}. Pass one of them."
        )
    if scale is not None:
        return float(scale == "imagenet")
    way = math.log(size / _CIFAR_SIZE) / math.log(_IMAGENET_SIZE / _CIFAR_SIZE)
    return min(max(way, 0.0), 1.0)


def enlarge(images: Tensor, size: int = 32) -> Tensor:
    """Return images whose shorter side is at least `size` pixels (bilinear), of the same dtype."""
    _check_shape(images)
    factor = max(1.0, size / min(images.shape[2:]))
    height, width = (round(side * factor) for side in images.shape[2:])
    return as_dtype(F.interpolate(as_unit(images), size=(height, width), mode="bilinear"), images.dtype)


def as_unit(images: Tensor) -> Tensor:
    """Return float32 between 0 and 1."""
    return images.float() / 255 if images.dtype == torch.uint8 else images.float()


def as_dtype(images: Tensor, dtype: torch.dtype) -> Tensor:
    """Return clipped images in a dtype; uint8 takes the nearest of 256 levels."""
    clipped = images.clamp(0, 1)
    return (255 * clipped).round().to(dtype) if dtype == torch.uint8 else clipped.to(dtype)


def _check(images: Tensor, name: str, severity: int) -> None:
    if name not in _BY_NAME:
        raise ValueError(f"expected one of the corruptions {', '.join(_BY_NAME)}; got {name!r}. Choose one of them.")
    if severity not in SEVERITIES:
        raise ValueError(
            f"expected a severity from 1 (mild) to 5 (strong), got {severity!r}. Clean images need no corruption."
        )
    _check_shape(images)
    _check_values(images)
    if min(images.shape[2:]) < SMALLEST:
        height, width = images.shape[2:]
        raise ValueError(
            f"expected images of at least {SMALLEST} x {SMALLEST} pixels, got {height} x {width}. "
            "Enlarge them first: leanbayes.shift.enlarge(images)."
        )


def _check_shape(images: Tensor) -> None:
    if images.dim() != 4 or images.shape[1] not in (1, 3):
        raise ValueError(
            f"expected images (N, C, H, W) of one or three channels, got shape {tuple(images.shape)}. "
            "Put the channels in the second place, and give grey images one."
        )


def _check_values(images: Tensor) -> None:
    if images.dtype == torch.uint8 or images.numel() == 0:
        return
    if not images.is_floating_point():
        raise ValueError(f"expected uint8 or float images, got {images.dtype}. Convert them to uint8.")
    low, high = images.min().item(), images.max().item()
    if not (low >= 0 and high <= 1):
        raise ValueError(
            f"expected float images between 0 and 1, got {low:g} to {high:g}. "
            "Corrupt raw images, before they are normalised."
        )


# Noise. Constants: standard deviation; photons at full brightness; share of elements that are hit.


@_corruption(cifar=(0.04, 0.06, 0.08, 0.09, 0.10), imagenet=(0.08, 0.12, 0.18, 0.26, 0.38))
def gaussian_noise(images: Tensor, streams: Streams, sigma: float) -> Tensor:
    """Add Gaussian noise: x + sigma e,  e ~ N(0, I)."""
    return images + sigma * streams.normal(*images.shape[1:])


@_corruption(cifar=(500, 250, 100, 75, 50), imagenet=(60, 25, 12, 5, 3))
def shot_noise(images: Tensor, streams: Streams, photons: float) -> Tensor:
    """Count photons: Poisson(c x) / c."""
    return streams.poisson(photons * images) / photons


@_corruption(cifar=(0.01, 0.02, 0.03, 0.05, 0.07), imagenet=(0.03, 0.06, 0.09, 0.17, 0.27))
def impulse_noise(images: Tensor, streams: Streams, share: float) -> Tensor:
    """Set a share of all elements to black or white, with even odds."""
    hit = streams.uniform(*images.shape[1:]) < share
    return images.where(~hit, streams.uniform(*images.shape[1:]).round())


# Blur.


# Radius of the disk, sigma of its soft edge; pixels.
@_corruption(
    cifar=((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
    imagenet=((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
)
def defocus_blur(images: Tensor, streams: Streams, radius: float, edge: float) -> Tensor:
    """Average over a disk with a soft edge."""
    kernel = _disk(radius, edge).to(images)
    pad = kernel.shape[0] // 2
    channels = F.pad(images, (pad, pad, pad, pad), mode="reflect").flatten(0, 1)[:, None]
    return F.conv2d(channels, kernel[None, None]).view(images.shape)


# Sigma of the blur before and after, reach of a jump, rounds of jumps. The benchmarks' own rows are not in the order of
# their strength; these are close to them and in order.
@_corruption(
    cifar=((0.4, 1, 1), (0.33, 1, 1), (0.3, 1, 1), (0.4, 1, 2), (0.25, 1, 2)),
    imagenet=((0.9, 1, 1.6), (1.3, 2, 1), (1.1, 3, 2), (1.5, 4, 2), (1.1, 3, 3)),
)
def glass_blur(images: Tensor, streams: Streams, sigma: float, reach: float, rounds: float) -> Tensor:
    """Blur, replace each pixel by a near one, and blur again."""
    images = blur(images, sigma)
    for before in range(math.ceil(rounds)):
        images = take(images, _jumps(streams.uniform(3, *images.shape[2:]), reach, rounds - before))
    return blur(images, sigma)


# Radius and sigma of the smear; pixels. CIFAR-10-C has sigma 2 at severities 3 and 4, without a visible difference.
@_corruption(
    cifar=((6, 1), (6, 1.5), (6, 2), (8, 2.2), (9, 2.5)), imagenet=((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))
)
def motion_blur(images: Tensor, streams: Streams, radius: float, sigma: float) -> Tensor:
    """Smear along a line at most 45 degrees from the horizontal."""
    return motion(images, streams.uniform(low=-math.pi / 4, high=math.pi / 4), round(radius), sigma)


# Largest factor, step between factors.
@_corruption(
    cifar=((1.06, 0.01), (1.11, 0.01), (1.15, 0.01), (1.2, 0.01), (1.25, 0.01)),
    imagenet=((1.11, 0.01), (1.15, 0.01), (1.2, 0.02), (1.24, 0.02), (1.3, 0.03)),
)
def zoom_blur(images: Tensor, streams: Streams, largest: float, step: float) -> Tensor:
    """Average the image and its magnifications."""
    factors = [1 + step * k for k in range(round((largest - 1) / step) + 1)]
    height, width = images.shape[2:]
    total = images.clone()
    for factor in factors:
        total += separable(images, zoom_matrix(height, factor), zoom_matrix(width, factor))
    return total / (len(factors) + 1)


def _disk(radius: float, edge: float) -> Tensor:
    """Return a kernel of sum one: a disk with blurred edges."""
    reach = math.ceil(radius) + 2
    line = torch.arange(-reach, reach + 1).float()
    disk = (line[:, None] ** 2 + line**2 <= radius**2).float()
    taps = torch.arange(-1, 2).float() if radius <= 8 else torch.arange(-2, 3).float()
    soft = torch.exp(-0.5 * (taps / edge) ** 2)
    kernel = F.conv2d(disk[None, None], torch.outer(soft, soft)[None, None], padding=len(taps) // 2)[0, 0]
    return kernel / kernel.sum()


def _jumps(chance: Tensor, reach: float, share: float) -> Tensor:
    """Return the source of each pixel (n, H W), when pixels jump in turn, from the last to the first.

    A pixel takes the current value of its partner, -reach to reach rows and columns away. A partner later in the image
    has jumped already. All chains of jumps are followed at once, doubling their length each time.

    Args:
        chance: uniform numbers (n, 3, H, W): vertical and horizontal offset of the partner, and whether a pixel jumps.
        reach: largest offset, and margin of unchanged pixels. Offsets are rounded down: reach 1 goes up, left or
            nowhere.
        share: share of the pixels that jump; all of them from 1 on.
    """
    height, width = chance.shape[2:]
    margin = math.ceil(reach)
    down, right = ((2 * chance[:, :2] - 1) * reach).floor().long().unbind(1)
    here = torch.arange(height * width, device=chance.device).view(height, width)
    jumping = chance[:, 2] < share
    jumping[:, : margin + 1] = jumping[:, height - margin + 1 :] = False
    jumping[:, :, : margin + 1] = jumping[:, :, width - margin + 1 :] = False
    source = (here + down * width + right).where(jumping, here).flatten(1)
    jumping = jumping.flatten(1)
    going = jumping & jumping.gather(1, source) & (source > here.flatten())
    while going.any():
        source, going = source.gather(1, source).where(going, source), going.gather(1, source) & going
    return source


# Weather.


# Mean and std of the flakes' noise, their size, the threshold of a flake, radius and sigma of their motion, and the
# share of the image that does not turn white.
@_corruption(
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
def snow(images: Tensor, streams: Streams, *constants: float) -> Tensor:
    """Add flakes, and the same flakes turned by 180 degrees, to an image that turns white."""
    mean, std, size, least, radius, sigma, clear = constants
    height, width = images.shape[2:]
    flakes = mean + std * streams.normal(1, height, width)
    flakes = separable(flakes, zoom_matrix(height, size), zoom_matrix(width, size))
    flakes = flakes.where(flakes >= least, 0).clamp(0, 1)
    flakes = motion(flakes, streams.uniform(low=math.pi / 4, high=3 * math.pi / 4), round(radius), sigma)
    white = torch.maximum(images, 1.5 * _grey(images) + 0.5)
    return clear * images + (1 - clear) * white + flakes + flakes.flip(2, 3)


# Weights of image and ice. From severity 3 on, the benchmarks dim the image so much that it changes less.
@_corruption(
    cifar=((1, 0.2), (1, 0.3), (0.97, 0.33), (0.94, 0.355), (0.91, 0.38)),
    imagenet=((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.73), (0.6, 0.78)),
)
def frost(images: Tensor, streams: Streams, image_weight: float, ice_weight: float) -> Tensor:
    """Add ice of one of five kinds, with ferns over clouds as brightness: a x + b ice."""
    channels, height, width = images.shape[1:]
    cloudy = clouds(streams, max(height, width), 1.6)[:, :height, :width]
    light = _standardised(_standardised(cloudy) + _standardised(ferns(streams, height, width)))
    kind = (streams.uniform() * len(_FROST_KINDS)).long()
    chosen = torch.tensor(_FROST_KINDS, dtype=F32, device=images.device)[kind][..., None, None]
    colour, std = chosen[:, :3], chosen[:, 3:]
    ice = ((_grey(colour) if channels == 1 else colour) + std * light[:, None]).clamp(0, 1)
    return image_weight * images + ice_weight * ice


# Thickness of the fog, decay of its detail. ImageNet-C has thickness 2.5 at severities 3 and 4.
@_corruption(
    cifar=((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
    imagenet=((1.5, 2), (2, 2), (2.5, 1.7), (2.7, 1.5), (3, 1.4)),
)
def fog(images: Tensor, streams: Streams, thickness: float, decay: float) -> Tensor:
    """Add clouds and darken: (x + c clouds) m / (m + c), m the brightest value of the image."""
    height, width = images.shape[2:]
    haze = clouds(streams, max(height, width), decay)[:, None, :height, :width]
    brightest = images.amax((1, 2, 3), keepdim=True)
    return (images + thickness * haze) * brightest / (brightest + thickness)


# Added to the brightest channel.
@_corruption(cifar=(0.05, 0.1, 0.15, 0.2, 0.3), imagenet=(0.1, 0.2, 0.3, 0.4, 0.5))
def brightness(images: Tensor, streams: Streams, added: float) -> Tensor:
    """Raise the value in HSV; a grey image is its own value."""
    value = images.amax(1, keepdim=True)
    brighter = (value + added).clamp(max=1)
    # Hue and saturation stay if all channels grow by one factor; black has neither and becomes grey.
    return torch.where(value > 0, images * (brighter / value.clamp(min=1e-6)), brighter)


# Colour of the ice (red, green, blue) and std of its brightness in the benchmarks' five photographs: blue, white twice,
# silver and dark.
_FROST_KINDS = (
    (0.30, 0.58, 0.65, 0.07),
    (0.79, 0.81, 0.84, 0.09),
    (0.79, 0.81, 0.84, 0.09),
    (0.54, 0.60, 0.65, 0.11),
    (0.44, 0.48, 0.53, 0.17),
)
_LUMA = (0.299, 0.587, 0.114)


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


# Digital damage.


# Contrast that is left.
@_corruption(cifar=(0.75, 0.5, 0.4, 0.3, 0.15), imagenet=(0.4, 0.3, 0.2, 0.1, 0.05))
def contrast(images: Tensor, streams: Streams, left: float) -> Tensor:
    """Pull every channel towards its mean: c (x - mean) + mean."""
    return images.mean((2, 3), keepdim=True).lerp(images, left)


# Amplitude and smoothness of the warp, and displacement of three points of an affine map; shares of the image's side.
# In CIFAR-10-C the displacement falls (0.08 to 0.03): severity 5 changes half as much as severity 1. Here it stays.
@_corruption(
    cifar=((0, 0.2, 0.063), (0.05, 0.2, 0.064), (0.08, 0.06, 0.064), (0.1, 0.04, 0.064), (0.1, 0.03, 0.064)),
    imagenet=((0.0625, 0.01, 0), (0.08125, 0.01, 0), (0.10625, 0.01, 0), (0.125, 0.01, 0), (0.15, 0.01, 0)),
)
def elastic_transform(images: Tensor, streams: Streams, *shares: float) -> Tensor:
    """Displace pixels by a random affine map and by smoothed noise."""
    height, width = images.shape[2:]
    amplitude, smoothness, wander = (min(height, width) * share for share in shares)
    warp = blur(streams.uniform(2, height, width, low=-1.0, high=1.0), smoothness)
    corners = streams.uniform(2, 3, low=-1.0, high=1.0) @ _corner_weights(height, width).to(images)
    shift_x, shift_y = (amplitude * warp + wander * corners.view(warp.shape)).unbind(1)
    x = torch.arange(width, device=images.device) + shift_x
    y = torch.arange(height, device=images.device)[:, None] + shift_y
    grid = torch.stack([2 * x / (width - 1) - 1, 2 * y / (height - 1) - 1], -1)
    return F.grid_sample(images, grid, padding_mode="reflection", align_corners=True)


# Pixels that are left, as a share of the side.
@_corruption(cifar=(0.95, 0.9, 0.85, 0.75, 0.65), imagenet=(0.6, 0.5, 0.4, 0.3, 0.25))
def pixelate(images: Tensor, streams: Streams, left: float) -> Tensor:
    """Replace each pixel by the mean of its block."""
    height, width = images.shape[2:]
    return separable(images, block_matrix(height, int(height * left)), block_matrix(width, int(width * left)))


# JPEG quality.
@_corruption(cifar=(80, 65, 58, 50, 40), imagenet=(25, 18, 15, 10, 7))
def jpeg_compression(images: Tensor, streams: Streams, quality: float) -> Tensor:
    """Compress and open again, one image at a time."""
    import numpy as np
    from PIL import Image

    opened = []
    for image in (255 * images).round().byte().movedim(1, 3).cpu().numpy():
        file = io.BytesIO()
        Image.fromarray(image.squeeze(2) if image.shape[2] == 1 else image).save(file, "JPEG", quality=round(quality))
        opened.append(torch.from_numpy(np.array(Image.open(file))).view(image.shape))
    return torch.stack(opened).movedim(3, 1).to(images) / 255


def _corner_weights(height: int, width: int) -> Tensor:
    """Return the weights (3, H W) of three corners of a central square at each pixel: weighted sums are affine maps."""
    across, down = (torch.arange(size, dtype=F32) - size / 2 for size in (width, height))
    x, y = torch.meshgrid(across, down, indexing="xy")
    side = min(height, width) / 3
    corners = torch.tensor([[side, side, -side], [side, -side, -side], [1.0, 1.0, 1.0]], dtype=F32)
    pixels = torch.stack([x.flatten(), y.flatten(), torch.ones(height * width, dtype=F32)])
    weights: Tensor = torch.linalg.solve(corners, pixels)
    return weights


# The implicit paper increases both of its corruptions until only noise is left, here in five equal steps.
_SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)


@_corruption(cifar=_SHARES, imagenet=_SHARES)
def gaussian_mix(images: Tensor, streams: Streams, share: float) -> Tensor:
    """Mix with Gaussian noise, eq. 28 of the implicit paper: (1 - g) x + g e,  e ~ N(0, I)."""
    return (1 - share) * images + share * streams.normal(*images.shape[1:])


@_corruption(cifar=_SHARES, imagenet=_SHARES)
def salt_and_pepper(images: Tensor, streams: Streams, share: float) -> Tensor:
    """Set each element to 0 or 1 with probability p, section 3.5 of the implicit paper."""
    return impulse_noise(images, streams, share)
