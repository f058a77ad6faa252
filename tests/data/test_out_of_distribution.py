"""Out-of-distribution sets: brought to the shape of another, or made up of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from leanbayes import data
from leanbayes.data.dataset import DataSet, Split


def like(*shape, dtype=torch.uint8, task="classification"):
    generator = torch.Generator().manual_seed(0)
    if len(shape) == 1:
        x = torch.randn(60, *shape, generator=generator) * 3 + 1
    else:
        x = torch.randint(256, (60, *shape), generator=generator, dtype=torch.uint8)
        x = x if dtype == torch.uint8 else x / 255
    y = torch.arange(60) % 2
    return DataSet("like", task, Split(x[:40], y[:40]), Split(x[40:], y[40:]), ("a", "b"), "")


def save(tmp_path, *shape):
    x = np.random.default_rng(1).integers(0, 256, (9, *shape), np.uint8)
    np.savez(tmp_path / "other.npz", x_test=x)  # nothing else is needed
    return str(tmp_path / "other.npz"), x


def test_the_same_shape_comes_through_unchanged(tmp_path):
    name, x = save(tmp_path, 3, 16, 12)
    assert torch.equal(data.ood(name, like(3, 16, 12)), torch.from_numpy(x))


def test_grey_is_repeated_and_colour_weighed(tmp_path):
    name, grey = save(tmp_path, 16, 12)
    assert torch.equal(data.ood(name, like(3, 16, 12)), torch.from_numpy(grey)[:, None].expand(-1, 3, -1, -1))
    name, colour = save(tmp_path, 16, 12, 3)
    seen = data.ood(name, like(1, 16, 12))
    luma = np.stack([np.asarray(Image.fromarray(image).convert("L")) for image in colour])
    assert np.abs(seen[:, 0].numpy().astype(int) - luma).max() <= 1


@pytest.mark.parametrize("size", [(8, 6), (32, 30), (16, 24)])
def test_sizes_change_as_in_pillow(tmp_path, size):
    name, x = save(tmp_path, 3, 16, 12)
    seen = data.ood(name, like(3, *size))
    assert (seen.shape, seen.dtype) == ((9, 3, *size), torch.uint8)
    for image, resized in zip(x, seen, strict=True):
        picture = Image.fromarray(image.transpose(1, 2, 0))
        expected = np.asarray(picture.resize((size[1], size[0]), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
        assert np.abs(resized.numpy().astype(int) - expected).max() <= 1


def test_a_folder_of_images_needs_no_classes(tmp_path):
    """Images of any size, brought to the form of the set as new images are."""
    (tmp_path / "others").mkdir()
    x = np.random.default_rng(1).integers(0, 256, (3, 16, 12, 3), np.uint8)
    for number, image in enumerate(x):
        Image.fromarray(image).save(tmp_path / "others" / f"{number}.png")
    Image.fromarray(x[0]).resize((40, 20)).save(tmp_path / "others" / "3.png")
    seen = data.ood(str(tmp_path / "others"), like(3, 16, 12))
    assert torch.equal(seen[:3], torch.from_numpy(x).permute(0, 3, 1, 2))
    assert (seen.shape, seen.dtype) == ((4, 3, 16, 12), torch.uint8)
    assert data.ood(str(tmp_path / "others"), like(1, 16, 12, dtype=torch.float32)).shape == (4, 1, 16, 12)
    (tmp_path / "none").mkdir()
    with pytest.raises(FileNotFoundError, match="has no images"):
        data.ood(str(tmp_path / "none"), like(3, 16, 12))


def test_float_images_become_bytes(tmp_path):
    x = np.random.default_rng(1).integers(0, 256, (9, 8, 8), np.uint8)
    np.savez(tmp_path / "other.npz", x_test=x / 255)
    assert torch.equal(data.ood(str(tmp_path / "other.npz"), like(1, 8, 8))[:, 0], torch.from_numpy(x))


def test_digits_are_an_out_of_distribution_set(tmp_path):
    assert data.ood("digits", like(3, 16, 16), tmp_path).shape == (797, 3, 16, 16)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_made_up_images(dtype):
    base = like(3, 16, 12, dtype=dtype)
    own = base.test.x if dtype == torch.uint8 else (base.test.x * 255).round().byte()
    noise, shuffled, inverted = (data.ood(name, base) for name in ("noise", "shuffled", "inverted"))
    assert all(x.shape == own.shape and x.dtype == torch.uint8 for x in (noise, shuffled, inverted))
    n = noise.numel()
    assert abs(noise.double().mean() - 127.5) < 5 * np.sqrt((256**2 - 1) / 12 / n)
    assert torch.equal(255 - inverted, own)
    assert not torch.equal(shuffled, own)

    def pixels(x):
        codes = (x.long() * torch.tensor([1, 256, 65536]).view(3, 1, 1)).sum(1)
        return codes.flatten(1).sort(1).values

    assert torch.equal(pixels(shuffled), pixels(own))  # colours move as a whole, within their image
    assert torch.equal(data.ood("shuffled", base), shuffled)
    assert torch.equal(data.ood("noise", base), noise)


def test_made_up_features():
    base = like(4)
    low, high = base.train.x.amin(0), base.train.x.amax(0)
    noise, shuffled, inverted = (data.ood(name, base) for name in ("noise", "shuffled", "inverted"))
    assert ((noise >= low) & (noise <= high)).all()
    assert torch.equal(shuffled.sort(0).values, base.test.x.sort(0).values)
    assert not torch.equal(shuffled, base.test.x)
    torch.testing.assert_close(inverted + base.test.x, (low + high).expand_as(inverted))


def test_what_does_not_fit_is_refused(tmp_path):
    name, _ = save(tmp_path, 3, 16, 12)
    with pytest.raises(ValueError, match=r"rows of shape \(3, 16, 12\), like of \(4,\)\. Pick a table"):
        data.ood(name, like(4))
    with pytest.raises(ValueError, match="images of 3 channels, like of 4; only grey and colour"):
        data.ood(name, like(4, 16, 12))
    name, _ = save(tmp_path, 4)
    with pytest.raises(ValueError, match="has features, like images"):
        data.ood(name, like(3, 16, 12))
    assert data.ood(name, like(4)).shape == (9, 4)
    np.savez(tmp_path / "none.npz", x=np.zeros(3))
    with pytest.raises(ValueError, match=r"none\.npz lacks an array: .*x_test"):
        data.ood(str(tmp_path / "none.npz"), like(4))
    with pytest.raises(ValueError, match="unknown data set 'noises'"):
        data.ood("noises", like(4))
