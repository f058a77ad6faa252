"""Invariants of every corruption: shape, dtype, range, its seed, and the order of severities."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from leanbayes import shift
from leanbayes.shift import corruptions
from leanbayes.shift.corruptions import blend_of, Corruption
from tests.shift.pictures import change, pictures

# Only these draw random numbers.
RANDOM = set(shift.all_names()) - {
    "defocus_blur",
    "zoom_blur",
    "brightness",
    "contrast",
    "pixelate",
    "jpeg_compression",
}


def test_names_are_the_fifteen_in_order_and_then_the_two_of_the_implicit_paper():
    assert shift.names() == (
        *("gaussian_noise", "shot_noise", "impulse_noise"),
        *("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
        *("snow", "frost", "fog", "brightness"),
        *("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
    )
    assert shift.all_names() == (*shift.names(), "gaussian_mix", "salt_and_pepper")


@pytest.mark.parametrize("name", shift.all_names())
@pytest.mark.parametrize(("size", "channels"), [(28, 1), (32, 3), (48, 3), (64, 1)])
def test_higher_severities_change_pictures_more(name, size, channels):
    images = pictures(24, size, channels)
    strengths = [change(images, shift.corrupt(images, name, severity)) for severity in range(1, 6)]
    assert strengths[0] > 0
    assert all(low < high for low, high in pairwise(strengths)), strengths


@pytest.mark.parametrize("name", shift.all_names())
@pytest.mark.parametrize("shape", [(2, 1, 28, 28), (2, 3, 32, 32), (1, 3, 40, 56), (1, 1, 224, 224), (1, 3, 224, 224)])
def test_shape_dtype_and_range_stay_and_uint8_agrees_with_float(name, shape):
    images = pictures(shape[0], max(shape[2:]), shape[1])[..., : shape[2], : shape[3]]
    corrupted = shift.corrupt(images, name, 3)
    assert corrupted.shape == shape
    assert corrupted.dtype == torch.uint8
    for dtype in (torch.float32, torch.float64):
        as_float = shift.corrupt(images.to(dtype) / 255, name, 3)
        assert as_float.shape == shape
        assert as_float.dtype == dtype
        assert as_float.min() >= 0
        assert as_float.max() <= 1
        assert (255 * as_float - corrupted).abs().max() <= 0.5 + 1e-3


@pytest.mark.parametrize("name", shift.all_names())
def test_the_seed_fixes_the_result_and_leaves_the_global_generator_alone(name):
    images = pictures(4, 32)
    state = torch.random.get_rng_state()
    once, twice = shift.corrupt(images, name, 2, seed=1), shift.corrupt(images, name, 2, seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(once, twice)
    other = shift.corrupt(images, name, 2, seed=2)
    assert torch.equal(once, other) == (name not in RANDOM)


@pytest.mark.parametrize("name", shift.all_names())
def test_an_image_does_not_depend_on_the_others(name, monkeypatch):
    images = pictures(6, 32).float() / 255
    whole = shift.corrupt(images, name, 4)
    strangers = images.flip(0).clone()
    strangers[4] = images[4]
    torch.testing.assert_close(shift.corrupt(strangers, name, 4)[4], whole[4], atol=1e-5, rtol=0)
    torch.testing.assert_close(shift.corrupt(images[:5], name, 4), whole[:5], atol=1e-5, rtol=0)
    monkeypatch.setattr(corruptions, "_CHUNK", 2 * images[0].numel())  # three chunks of two
    torch.testing.assert_close(shift.corrupt(images, name, 4), whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", sorted(RANDOM))
def test_equal_images_are_not_corrupted_alike(name):
    images = pictures(1, 32).expand(2, -1, -1, -1)
    first, second = shift.corrupt(images, name, 5)
    assert not torch.equal(first, second)


def test_images_are_left_as_they_were():
    images = pictures(2, 32)
    before = images.clone()
    for name in shift.all_names():
        shift.corrupt(images, name, 5)
    assert torch.equal(images, before)


@pytest.mark.parametrize("name", shift.all_names())
@pytest.mark.parametrize("value", [0, 255])
def test_black_and_white_images_survive(name, value):
    images = torch.full((1, 3, 32, 32), value / 255)
    assert shift.corrupt(images, name, 5).isfinite().all()


def test_no_images_give_no_images():
    assert shift.corrupt(torch.zeros(0, 3, 32, 32, dtype=torch.uint8), "snow", 1).shape == (0, 3, 32, 32)


def test_scale_chooses_the_constants_and_size_goes_between_them():
    images = pictures(8, 32)
    small, large = (change(images, shift.corrupt(images, "gaussian_noise", 5, scale=s)) for s in ("cifar", "imagenet"))
    assert small == change(images, shift.corrupt(images, "gaussian_noise", 5))
    assert small < 0.02 < 0.07 < large
    assert (blend_of(28, None), blend_of(32, None), blend_of(224, None), blend_of(500, None)) == (0, 0, 1, 1)
    assert 0 < blend_of(64, None) < blend_of(128, None) < 1
    table = Corruption(corruptions.snow, cifar=((1, 10), *[(0, 0)] * 4), imagenet=((2, 30), *[(0, 0)] * 4))
    assert table.constants(1, 0) == [1, 10]
    assert table.constants(1, 0.25) == [1.25, 15]
    assert table.constants(1, 1) == [2, 30]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_enlarging_is_bilinear_and_never_shrinks(dtype):
    images = torch.tensor([[[[0, 1], [0, 1]]]]).to(dtype) * (255 if dtype == torch.uint8 else 1)
    large = shift.enlarge(images, 4).float() / (255 if dtype == torch.uint8 else 1)
    torch.testing.assert_close(large[0, 0], torch.tensor([0, 0.25, 0.75, 1]).expand(4, 4), atol=0.002, rtol=0)
    assert shift.enlarge(pictures(1, 16)[:, :, :8]).shape == (1, 3, 32, 64)
    assert torch.equal(shift.enlarge(pictures(1, 40)), pictures(1, 40))


@pytest.mark.parametrize(
    ("images", "name", "severity", "message"),
    [
        (torch.zeros(1, 3, 32, 32), "rain", 1, "got 'rain'"),
        (torch.zeros(1, 3, 32, 32), "snow", 0, "from 1 .* got 0"),
        (torch.zeros(1, 3, 32, 32), "snow", 6, "got 6"),
        (torch.zeros(3, 32, 32), "snow", 1, r"shape \(3, 32, 32\)"),
        (torch.zeros(1, 4, 32, 32), "snow", 1, "one or three channels"),
        (torch.zeros(1, 1, 8, 8), "snow", 1, r"28 x 28 pixels, got 8 x 8. Enlarge them first: leanbayes.shift.enlarge"),
        (torch.zeros(1, 3, 32, 32, dtype=torch.long), "snow", 1, "uint8 or float"),
        (torch.full((1, 3, 32, 32), 1.5), "snow", 1, "between 0 and 1, got 1.5"),
        (torch.full((1, 3, 32, 32), torch.nan), "snow", 1, "between 0 and 1, got nan"),
    ],
)
def test_wrong_input_is_named(images, name, severity, message):
    with pytest.raises(ValueError, match=message):
        shift.corrupt(images, name, severity)


def test_only_images_are_enlarged():
    with pytest.raises(ValueError, match="one or three channels"):
        shift.enlarge(torch.zeros(8, 8))


def test_an_unknown_scale_is_named():
    with pytest.raises(ValueError, match=r"'cifar' or 'imagenet'.* got 'mnist'"):
        shift.corrupt(torch.zeros(1, 3, 32, 32), "snow", 1, scale="mnist")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("name", shift.all_names())
def test_images_on_an_accelerator_stay_there_and_change_alike(name):
    images = pictures(4, 32)
    there = shift.corrupt(images.cuda(), name, 3)
    assert there.is_cuda
    difference = (there.cpu().float() - shift.corrupt(images, name, 3).float()).abs()
    assert (difference <= 1).float().mean() > 0.999  # another order of sums may tip a rounding, or a pixel's place
