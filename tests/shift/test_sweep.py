"""The sweep: what it yields, in which order, and what happens to small images."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from leanbayes import shift
from tests.shift.pictures import pictures


def half(images: torch.Tensor) -> torch.Tensor:
    """Replace a data set's inputs()."""
    return images.float() / 2


def test_the_sweep_begins_clean_and_covers_every_corruption_and_severity():
    images = pictures(3, 32)
    sweep = shift.Shift(images, torch.arange(3), half, seed=7)
    seen = [(name, severity) for name, severity, _ in sweep]
    assert seen == [("clean", 0), *product(shift.names(), range(1, 6))]
    assert len(sweep) == len(seen) == 76


def test_inputs_are_prepared_from_the_corrupted_raw_images():
    images = pictures(3, 32)
    sweep = shift.Shift(images, torch.arange(3), half, ("snow", "gaussian_mix"), (2, 5), seed=7, scale="imagenet")
    for name, severity, x in sweep:
        raw = shift.corrupt(images, name, severity, seed=7, scale="imagenet") if severity else images
        assert torch.equal(x, half(raw))


def test_small_images_keep_their_size_and_get_the_change_alone():
    images = pictures(5, 32)[:, :1, ::4, ::4]
    sweep = shift.Shift(images, torch.arange(5), lambda x: x)
    for name in shift.names():
        weak, strong = sweep.corrupted(name, 1), sweep.corrupted(name, 5)
        assert weak.shape == strong.shape == images.shape
        assert strong.dtype == torch.uint8
        change = [(x.float() - images.float()).square().mean().item() for x in (weak, strong)]
        assert change[0] < change[1]
    # Contrast is linear and keeps the mean, so its change survives the averaging exactly, but for the mean's rounding.
    small = images.float() / 255
    mean = shift.enlarge(small).mean((2, 3), keepdim=True)
    back = torch.nn.functional.avg_pool2d(shift.enlarge(small), 4)
    expected = small + (0.15 - 1) * (back - mean)
    assert (255 * expected - sweep.corrupted("contrast", 5)).abs().max() <= 0.51


def test_wrong_sweeps_are_refused_at_once():
    images, y = pictures(2, 32), torch.zeros(2)
    with pytest.raises(ValueError, match="2 images and 3 classes"):
        shift.Shift(images, torch.zeros(3), half)
    with pytest.raises(ValueError, match="rain"):
        shift.Shift(images, y, half, corruptions=("rain",))
    with pytest.raises(ValueError, match="severities from 1 to 5"):
        shift.Shift(images, y, half, severities=(0, 1))
