"""Each corruption against an independent account of it: closed forms, loops, scipy, colorsys, PIL."""

from __future__ import annotations

import colorsys
import io
import math

import numpy as np
import pytest
import scipy.ndimage
import torch
from PIL import Image

from leanbayes import shift
from leanbayes.shift import _pixels, corruptions
from leanbayes.shift._pixels import Streams
from tests.shift.pictures import pictures

CPU = torch.device("cpu")


def streams(count: int, seed: int = 0) -> Streams:
    return Streams(seed, "test", range(count), CPU)


def constants(name: str, severity: int = 5, blend: float = 0) -> list[float]:
    return corruptions._BY_NAME[name].constants(severity, blend)


def unit(count: int, size: int, channels: int = 3) -> torch.Tensor:
    return pictures(count, size, channels).float() / 255


# Random numbers


def test_streams_belong_to_seed_name_index_and_call():
    first = streams(4)
    a, b = first.normal(5), first.normal(5)
    assert torch.equal(streams(4).normal(5), a)
    assert torch.equal(Streams(0, "test", range(2, 4), CPU).normal(5), a[2:])
    different = [a, b, streams(4, seed=1).normal(5), Streams(0, "other", range(4), CPU).normal(5)]
    assert len({round(x.item(), 6) for x in torch.cat(different).flatten()}) == 4 * 20


def test_streams_have_the_moments_of_their_laws():
    source = streams(400)
    normal, uniform = source.normal(256), source.uniform(256, low=-1.0, high=3.0)
    poisson = source.poisson(torch.full((400, 256), 20.0))
    n = normal.numel()
    for values, mean, std in ((normal, 0, 1), (uniform, 1, 4 / math.sqrt(12)), (poisson, 20, math.sqrt(20))):
        assert values.mean().item() == pytest.approx(mean, abs=4 * std / math.sqrt(n))
        assert values.std().item() == pytest.approx(std, rel=4 / math.sqrt(n))


# Noise


def test_gaussian_noise_has_its_std_and_mixing_keeps_the_rest_of_the_image():
    images = torch.full((50, 3, 32, 32), 0.5)
    error = corruptions.gaussian_noise(images, streams(50), *constants("gaussian_noise")) - images
    assert error.std().item() == pytest.approx(0.10, rel=4 / math.sqrt(2 * error.numel()))
    for severity, share in enumerate((0.2, 0.4, 0.6, 0.8, 1.0), start=1):
        mixed = corruptions.gaussian_mix(images, streams(50), *constants("gaussian_mix", severity))
        standard = (mixed - (1 - share) * images) / share
        assert standard.mean().item() == pytest.approx(0, abs=4 / math.sqrt(standard.numel()))
        assert standard.std().item() == pytest.approx(1, rel=4 / math.sqrt(2 * standard.numel()))


def test_shot_noise_keeps_the_mean_and_has_poisson_variance():
    images = torch.full((50, 1, 32, 32), 0.3)
    counted = corruptions.shot_noise(images, streams(50), *constants("shot_noise"))
    variance = 0.3 / 50
    assert counted.mean().item() == pytest.approx(0.3, abs=4 * math.sqrt(variance / counted.numel()))
    assert counted.var().item() == pytest.approx(variance, rel=5 * math.sqrt(2 / counted.numel()))
    torch.testing.assert_close((50 * counted).round(), 50 * counted)


@pytest.mark.parametrize(("name", "share"), [("impulse_noise", 0.07), ("salt_and_pepper", 1.0)])
def test_impulses_hit_their_share_half_of_it_white(name, share):
    images = torch.full((50, 3, 32, 32), 0.5)
    hit = shift.corrupt(images, name, 5)
    for value in (0.0, 1.0):
        expected, count = share / 2, images.numel()
        spread = math.sqrt(expected * (1 - expected) / count)
        assert (hit == value).float().mean().item() == pytest.approx(expected, abs=4 * spread)
    assert (hit[(hit > 0) & (hit < 1)] == 0.5).all()


# Blur


@pytest.mark.parametrize("radius", [0.3, 1.5, 3.0, 10.0])
def test_the_disk_is_symmetric_and_covers_its_area(radius):
    kernel = corruptions._disk(radius, 0.5)
    torch.testing.assert_close(kernel.sum(), torch.tensor(1.0))
    torch.testing.assert_close(kernel, kernel.T)
    torch.testing.assert_close(kernel, kernel.flip(0))
    if radius >= 3:
        assert 1 / kernel.max().item() == pytest.approx(math.pi * radius**2, rel=0.1)


@pytest.mark.parametrize("blend", [0, 1])
def test_defocus_is_a_convolution_with_a_mirrored_border(blend):
    image, disk = unit(1, 32, 1), constants("defocus_blur", blend=blend)
    kernel = corruptions._disk(*disk).numpy()
    expected = scipy.ndimage.convolve(image[0, 0].numpy(), kernel, mode="mirror")
    np.testing.assert_allclose(corruptions.defocus_blur(image, streams(1), *disk)[0, 0].numpy(), expected, atol=1e-5)


def jump_one_by_one(chance: np.ndarray, reach: int, share: float) -> np.ndarray:
    """Let the pixels of one image jump in turn, from the last to the first; return what each holds in the end."""
    height, width = chance.shape[1:]
    holds = np.arange(height * width).reshape(height, width)
    for y in range(height - reach, reach, -1):
        for x in range(width - reach, reach, -1):
            if chance[2, y, x] < share:
                down, right = (math.floor((2 * c - 1) * reach) for c in chance[:2, y, x])
                holds[y, x] = holds[y + down, x + right]
    return holds.ravel()


@pytest.mark.parametrize(("reach", "share"), [(1, 1.0), (2, 1.0), (4, 1.0), (3, 0.4)])
def test_jumps_all_at_once_are_jumps_one_by_one(reach, share):
    chance = torch.rand(3, 3, 20, 24)
    found = corruptions._jumps(chance, reach, share)
    for image in range(3):
        assert np.array_equal(found[image].numpy(), jump_one_by_one(chance[image].double().numpy(), reach, share))


def test_motion_is_a_sum_of_shifted_images():
    images, angles = unit(2, 32), torch.tensor([0.5, -0.7])
    weights = np.exp(-0.5 * (np.arange(13) / 3.0) ** 2)
    smeared = _pixels.motion(images, angles, 6, 3.0)
    for image, angle, found in zip(images.double().numpy(), angles.tolist(), smeared, strict=True):
        expected = np.zeros_like(image)
        for step, weight in enumerate(weights / weights.sum()):
            y = np.clip(np.arange(32) + round(step * math.sin(angle)), 0, 31)
            x = np.clip(np.arange(32) + round(step * math.cos(angle)), 0, 31)
            expected += weight * image[:, y][:, :, x]
        np.testing.assert_allclose(found.numpy(), expected, atol=2e-3)  # weights below a thousandth are left out


@pytest.mark.parametrize("sigma", [0.0, 0.4, 1.5, 3.0])
def test_gaussian_blur_is_scipys(sigma):
    image = unit(1, 32, 1)
    expected = scipy.ndimage.gaussian_filter(image[0, 0].numpy(), sigma, mode="nearest", truncate=4.0)
    np.testing.assert_allclose(_pixels.blur(image, sigma)[0, 0].numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("size", [28, 32, 65])
@pytest.mark.parametrize("factor", [1.0, 1.01, 1.06, 1.3, 2.25, 4.5])
def test_zooming_is_scipys_zoom_of_the_middle(size, factor):
    line = torch.rand(size)
    cut = math.ceil(size / factor)
    start = (size - cut) // 2
    stretched = scipy.ndimage.zoom(line[start : start + cut].numpy(), factor, order=1)
    trim = (len(stretched) - size) // 2
    found = _pixels.zoom_matrix(size, factor) @ line
    np.testing.assert_allclose(found.numpy(), stretched[trim : trim + size], atol=1e-5)


# Weather


def diamond_square(noise: np.ndarray, decay: float) -> np.ndarray:
    """Fill a grid that wraps around, one point at a time."""
    side = len(noise)
    height, step, amplitude = np.zeros((side, side)), side, 1.0
    while step > 1:
        half = step // 2
        for y in range(half, side, step):
            for x in range(half, side, step):
                around = [height[(y + a) % side, (x + b) % side] for a in (-half, half) for b in (-half, half)]
                height[y, x] = np.mean(around) + amplitude * noise[y, x]
        for y in range(0, side, half):
            for x in range((y + half) % step, side, step):
                around = [
                    height[(y + a) % side, (x + b) % side] for a, b in ((-half, 0), (half, 0), (0, half), (0, -half))
                ]
                height[y, x] = np.mean(around) + amplitude * noise[y, x]
        step, amplitude = half, amplitude / decay**2
    return (height - height.min()) / np.ptp(height)


@pytest.mark.parametrize("decay", [1.5, 3.0])
def test_clouds_are_a_diamond_square_fractal(decay):
    found = _pixels.clouds(streams(2), 13, decay)
    given = streams(2).uniform(16, 16, low=-1.0, high=1.0)
    for cloud, numbers in zip(found, given, strict=True):
        np.testing.assert_allclose(cloud.numpy(), diamond_square(numbers.double().numpy(), decay), atol=1e-5)


@pytest.mark.parametrize("channels", [1, 3])
def test_frost_is_the_image_and_the_same_ice_at_every_brightness(channels):
    images = unit(6, 32, channels)
    ice = shift.corrupt(torch.zeros_like(images), "frost", 4) / 0.355
    expected = (0.94 * images + 0.355 * ice).clamp(0, 1)
    torch.testing.assert_close(shift.corrupt(images, "frost", 4), expected, atol=1e-5, rtol=0)
    assert 0.4 < ice.mean() < 0.85
    assert ice.std((2, 3)).min() > 0.05


def test_fog_hides_everything_alike_and_keeps_the_brightest_value_as_limit():
    images = 0.8 * unit(6, 32)
    foggy, haze = shift.corrupt(images, "fog", 5), shift.corrupt(torch.full_like(images, 1e-3), "fog", 5)
    assert (foggy.amax((1, 2, 3)) <= images.amax((1, 2, 3)) + 1e-5).all()
    most = images.amax((1, 2, 3), keepdim=True)
    cloud = (haze * (1e-3 + 1.5) / 1e-3 - 1e-3) / 1.5  # undo the fog over an almost black image
    expected = (images + 1.5 * cloud) * most / (most + 1.5)
    torch.testing.assert_close(foggy, expected, atol=1e-3, rtol=0)


def test_snow_only_brightens_and_falls_in_streaks():
    images = 0.5 * unit(20, 32)
    snowy = shift.corrupt(images, "snow", 3)
    assert (snowy >= images - 1e-6).all()
    flakes = shift.corrupt(torch.zeros(20, 1, 32, 32), "snow", 1)[:, 0]
    down, across = (flakes.diff(dim=axis).square().mean() for axis in (1, 2))
    assert down < across  # snow falls: it changes less from row to row than from column to column


def test_brightness_raises_the_value_of_hsv():
    image = torch.rand(1, 3, 28, 28)
    image[0, :, 0, 0] = 0  # black
    found = shift.corrupt(image, "brightness", 4, scale="cifar")
    for y, x in ((0, 0), (3, 5), (20, 11), (27, 27)):
        hue, saturation, value = colorsys.rgb_to_hsv(*image[0, :, y, x].tolist())
        expected = colorsys.hsv_to_rgb(hue, saturation, min(value + 0.2, 1.0))
        assert found[0, :, y, x].tolist() == pytest.approx(expected, abs=1e-5)
    grey = torch.rand(1, 1, 28, 28)
    torch.testing.assert_close(shift.corrupt(grey, "brightness", 4, scale="cifar"), (grey + 0.2).clamp(max=1))


# Digital damage


def test_contrast_shrinks_the_distance_to_the_mean():
    images = unit(3, 32)
    found = shift.corrupt(images, "contrast", 2)
    torch.testing.assert_close(found.mean((2, 3)), images.mean((2, 3)))
    torch.testing.assert_close(found.std((2, 3)), 0.5 * images.std((2, 3)))


def test_corner_weights_carry_affine_maps():
    weights = corruptions._corner_weights(30, 36).view(3, 30, 36)
    torch.testing.assert_close(weights.sum(0), torch.ones(30, 36))
    # The corners lie ten pixels from the middle, at (15, 18): each has its own weight only.
    at_corners = torch.stack([weights[:, 25, 28], weights[:, 5, 28], weights[:, 5, 8]])
    torch.testing.assert_close(at_corners, torch.eye(3), atol=1e-5, rtol=0)


def test_elastic_warps_read_the_image_where_the_displacement_says():
    # Warped ramps tell where each pixel was read from; scipy then reads another image there.
    image, level = unit(1, 32, 1), constants("elastic_transform")
    across = torch.arange(32.0).expand(1, 1, 32, 32)
    x, y = (corruptions.elastic_transform(ramp, streams(1), *level)[0, 0].double() for ramp in (across, across.mT))
    found = corruptions.elastic_transform(image, streams(1), *level)[0, 0].numpy()
    expected = scipy.ndimage.map_coordinates(image[0, 0].double().numpy(), [y.numpy(), x.numpy()], order=1)
    inside = slice(4, -4)  # near the border a ramp is mirrored and no longer tells the place
    np.testing.assert_allclose(found[inside, inside], expected[inside, inside], atol=1e-4)
    squares = (x - across[0, 0]).square() + (y - across[0, 0].mT).square()
    assert 0.5 < squares[inside, inside].mean().sqrt() < 4


@pytest.mark.parametrize(("size", "left"), [(32, 0.95), (32, 0.65), (28, 0.75), (64, 0.25)])
def test_blocks_are_those_of_a_box_filter(size, left):
    blocks = int(size * left)
    image = pictures(1, size, 1)[0, 0]
    small = Image.fromarray(image.numpy()).resize((blocks, blocks), Image.Resampling.BOX)
    expected = np.array(small.resize((size, size), Image.Resampling.NEAREST), dtype=float)
    matrix = _pixels.block_matrix(size, blocks)
    found = _pixels.separable(image[None, None].float(), matrix, matrix)[0, 0]
    assert np.abs(found.numpy() - expected).max() <= 1.01  # PIL rounds twice


@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_is_pils(channels):
    images = pictures(2, 32, channels)
    found = shift.corrupt(images, "jpeg_compression", 3)
    for image, compressed in zip(images, found, strict=True):
        file = io.BytesIO()
        Image.fromarray(image.movedim(0, 2).squeeze(2).numpy()).save(file, "JPEG", quality=58)
        assert np.array_equal(np.array(Image.open(file)), compressed.movedim(0, 2).squeeze(2).numpy())
