"""The made-up set: its images, and that its annotators follow the stated distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from leanbayes import data


@pytest.fixture(scope="module")
def made():
    return data.ambiguous_images(train=3000, val=50, test=70, seed=1)


def test_shapes_and_splits(made):
    assert made.images.shape == (3120, 1, 32, 32)
    assert made.images.dtype == torch.uint8
    assert made.annotations.shape == (3120, 4, 32, 32)
    assert made.modes.shape == (3120, 3, 32, 32)
    assert made.probabilities.shape == (3120, 3)
    assert (made.annotators == 4).all()
    test = made.split("test")
    assert isinstance(test, data.AmbiguousImages)
    assert torch.equal(test.modes, made.modes[3050:])
    assert torch.equal(test.probabilities, made.probabilities[3050:])
    other = data.ambiguous_images(train=2, val=1, test=1, size=48, annotators=7)
    assert other.annotations.shape == (4, 7, 48, 48)


def test_the_same_seed_gives_the_same_set():
    first, again, other = (data.ambiguous_images(train=20, val=5, test=5, seed=seed) for seed in (3, 3, 4))
    for name in ("images", "annotations", "modes", "probabilities"):
        assert torch.equal(getattr(first, name), getattr(again, name))
    assert not torch.equal(first.images, other.images)
    state = torch.random.get_rng_state()
    data.ambiguous_images(train=2, val=1, test=1)
    assert torch.equal(torch.random.get_rng_state(), state)  # torch's generator is not used


def test_probabilities_follow_from_the_pixels_as_stated(made):
    for row in range(100):
        shape = made.modes[row, 0].numpy().astype(bool)
        grey = made.images[row, 0].numpy()[shape].mean() / 255
        t = np.clip((grey - 0.45) / 0.35, 0, 1)
        np.testing.assert_allclose(made.probabilities[row], [0.1 + 0.5 * t, 0.3, 0.6 - 0.5 * t], atol=1e-5)
    torch.testing.assert_close(made.probabilities.sum(1), torch.ones(len(made)))
    assert made.probabilities[:, 0].min() < 0.12  # faint and bright shapes both occur
    assert made.probabilities[:, 0].max() > 0.58


def test_modes_are_the_shape_its_left_half_and_nothing(made):
    whole, left, nothing = made.modes.bool().unbind(1)
    assert not nothing.any()
    assert not (left & ~whole).any()
    share = left.sum((1, 2)) / whole.sum((1, 2))
    assert ((share > 0.3) & (share < 0.7)).all()
    columns = torch.arange(32)
    rightmost = torch.where(left.any(1), columns, -1).amax(1)
    leftmost_other = torch.where((whole & ~left).any(1), columns, 32).amin(1)
    assert (rightmost < leftmost_other).all()


def test_shapes_are_discs_and_squares_inside_the_image(made):
    whole = made.modes[:, 0].bool()
    rows, columns = whole.any(2), whole.any(1)
    height, width = rows.sum(1), columns.sum(1)
    filled = whole.sum((1, 2)) / (height * width)  # one for a square, about pi / 4 for a disc
    square = filled == 1
    assert 0.4 < square.float().mean() < 0.6
    assert (filled[~square] - torch.pi / 4).abs().mean() < 0.05
    assert height.min() >= 7
    assert height.max() <= 17
    brightness = made.images[:, 0].float() / 255
    ground = brightness[~whole]
    error = 0.05 / len(ground) ** 0.5
    assert abs(ground.mean() - 0.3) < 4 * error + 1 / 255 / 100
    assert ground.std().item() == pytest.approx(0.05, rel=0.01)


def test_every_annotation_is_a_mode(made):
    same = (made.annotations[:, :, None] == made.modes[:, None]).flatten(3).all(3)  # image, annotator, mode
    assert (same.sum(2) == 1).all()


def test_annotators_choose_by_the_stated_law(made):
    same = (made.annotations[:, :, None] == made.modes[:, None]).flatten(3).all(3).double()
    p = made.probabilities.double()
    for weight in (torch.ones(len(p)), p[:, 0], p[:, 2] > 0.4):  # over all, by brightness, among the faint
        weight = weight.double()[:, None]
        chosen = (weight * same.mean(1)).sum(0)
        error = (weight.square() * p * (1 - p) / same.shape[1]).sum(0).sqrt()
        assert ((chosen - (weight * p).sum(0)).abs() <= 4 * error).all()


def test_annotators_of_an_image_are_independent(made):
    same = (made.annotations[:, :, None] == made.modes[:, None]).flatten(3).all(3).double()
    p = made.probabilities.double()
    agree = (same[:, 0] * same[:, 1]).sum(1)
    expected = p.square().sum(1)
    error = (expected * (1 - expected)).sum().sqrt()
    assert (agree - expected).sum().abs() <= 4 * error


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"size": 8}, "at least 16 pixels a side, got 8"),
        ({"test": 0}, "at least one image a split"),
        ({"annotators": 0}, "one annotator, got .* and 0"),
    ],
)
def test_wrong_sizes_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        data.ambiguous_images(**wrong)
