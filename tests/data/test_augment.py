"""Crops and flips against a loop over the images, and their statistics."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from leanbayes.data.augment import augment, names


def windows(image, crop, flip):
    """Return every image that augmentation may make of one, by padding and slicing."""
    _, height, width = image.shape
    tall, wide = (height // 8, width // 8) if crop else (0, 0)
    padded = F.pad(image, (wide, wide, tall, tall))
    cuts = [padded[:, i : i + height, j : j + width] for i in range(2 * tall + 1) for j in range(2 * wide + 1)]
    return cuts + [cut.flip(2) for cut in cuts] * flip


@pytest.mark.parametrize("shape", [(40, 3, 32, 32), (40, 1, 8, 8), (40, 2, 40, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("name", ["flip", "crop", "crop_flip"])
def test_every_image_is_a_window_of_its_padded_self(name, dtype, shape):
    x = torch.randint(1, 256, shape).to(dtype)
    y = augment(x, name)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    choices = set()
    for image, moved in zip(x, y, strict=True):
        possible = windows(image, crop="crop" in name, flip="flip" in name)
        matches = [k for k, window in enumerate(possible) if torch.equal(window, moved)]
        assert matches
        choices.add(matches[0])
    assert len(choices) > 1  # not all alike


def test_offsets_and_flips_are_uniform():
    n = 30_000
    x = torch.arange(1, 65).view(1, 1, 8, 8).expand(n, 1, 8, 8).float()
    possible = windows(x[0], crop=True, flip=True)
    assert len(possible) == 18
    y = augment(x, "crop_flip")
    counts = torch.tensor([int((y == window).flatten(1).all(1).sum()) for window in possible])
    assert counts.sum() == n
    error = 5 * math.sqrt(n * (1 / 18) * (17 / 18))
    assert (counts - n / 18).abs().max() < error


def test_channels_last_stays_so_with_the_same_values():
    x = torch.randn(16, 3, 32, 32)
    torch.manual_seed(1)
    plain = augment(x, "crop_flip")
    torch.manual_seed(1)
    last = augment(x.to(memory_format=torch.channels_last), "crop_flip")
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert plain.is_contiguous()
    assert torch.equal(plain, last)


def test_randomness_is_the_global_generator_or_the_given_one():
    x = torch.randn(16, 3, 16, 16)
    a, b = (augment(x, "crop_flip", torch.Generator().manual_seed(3)) for _ in range(2))
    state = torch.get_rng_state()
    augment(x, "crop_flip", torch.Generator().manual_seed(3))
    assert torch.equal(state, torch.get_rng_state())
    c = augment(x, "crop_flip")
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert not torch.equal(state, torch.get_rng_state())


def test_none_does_nothing_and_names_are_known():
    x = torch.randn(4, 7)
    assert augment(x, "none") is x
    assert names() == ["none", "flip", "crop", "crop_flip"]


def test_an_image_and_its_input_are_moved_alike():
    x = torch.randint(256, (8, 3, 16, 16), dtype=torch.uint8)
    moved = augment(x, "crop_flip", torch.Generator().manual_seed(0)).float()
    assert torch.equal(moved, augment(x.float(), "crop_flip", torch.Generator().manual_seed(0)))


def test_wrong_input_is_one_sentence():
    with pytest.raises(ValueError, match="none, flip, crop, crop_flip, got 'rotate'"):
        augment(torch.zeros(1, 1, 8, 8), "rotate")
    with pytest.raises(ValueError, match=r"'crop' needs images .*got shape \(4, 7\)"):
        augment(torch.zeros(4, 7), "crop")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_batches_on_an_accelerator_stay_there():
    x = torch.rand(64, 3, 32, 32, device="cuda")
    y = augment(x, "crop_flip")
    assert y.device == x.device
    for image, moved in zip(x.cpu(), y.cpu(), strict=True):
        assert any(torch.equal(window, moved) for window in windows(image, crop=True, flip=True))
