"""BSDS500: the packed masks of the cache, the file made from published ones, and the real set."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from leanbayes import data
from leanbayes.data.annotated.published import BSDS_FILE as FILE


def write_cache(path, **changes):
    """Write five images in shuffled splits with random masks of two annotators and room for three."""
    random = np.random.default_rng(0)
    arrays = {
        "x": random.integers(0, 256, (5, 3, 64, 96), np.uint8),
        "masks_packed": random.integers(0, 256, (5, 3, 64, 12), np.uint8),
        "n_annotators": np.full(5, 2, np.uint8),
        "split": np.array([2, 0, 1, 0, 2], np.uint8),
    } | changes
    arrays["masks_packed"][:, 2:] = 0
    np.savez(path / FILE, **arrays)
    return arrays


def bits(packed):
    """Unpack by hand: the first pixel is the highest bit."""
    shifts = np.arange(7, -1, -1, dtype=np.uint8)
    return ((packed[..., None] >> shifts) & 1).reshape(*packed.shape[:-1], -1)


def test_bits_become_masks_and_rows_are_sorted_by_split(tmp_path):
    arrays = write_cache(tmp_path)
    loaded = data.load_annotated("bsds500", tmp_path)
    order = [1, 3, 2, 0, 4]
    assert dict(loaded.splits) == {"train": 2, "val": 1, "test": 2}
    assert np.array_equal(loaded.images, arrays["x"][order])
    assert np.array_equal(loaded.annotations, bits(arrays["masks_packed"])[order])
    assert loaded.annotations.shape == (5, 3, 64, 96)
    assert loaded.annotators.tolist() == [2] * 5
    assert loaded.classes == ("inside", "boundary")


def test_a_missing_file_says_where_to_get_it(tmp_path):
    expected = rf"bsds500 is not in .*{FILE} missing. Get the folder BSDS500 from https://.*prepare_bsds500\(folder\)"
    with pytest.raises(FileNotFoundError, match=expected):
        data.load_annotated("bsds500", tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"x": np.zeros((5, 3, 32, 96), np.uint8)},
        {"x": np.zeros((5, 3, 64, 96), np.float32)},
        {"n_annotators": np.zeros(4, np.uint8)},
        {"split": np.zeros(5, np.uint8)},
        {"split": np.array([0, 1, 2, 3, 0], np.uint8)},
    ],
)
def test_another_file_of_that_name_is_refused(tmp_path, changes):
    write_cache(tmp_path, **changes)
    with pytest.raises(ValueError, match=r"is not the cache of BSDS500.*Delete it"):
        data.load_annotated("bsds500", tmp_path)


def write_published(folder):
    """Write a landscape for training and test, a portrait for validation; return what people drew in each."""
    from scipy.io import savemat

    drawn = {}
    for number, (split, size) in enumerate({"train": (321, 481), "val": (481, 321), "test": (321, 481)}.items()):
        pixels = np.zeros((*size, 3), np.uint8)
        pixels[:, :, 0] = np.linspace(0, 250, size[0])[:, None]  # red grows downwards, green to the right
        pixels[:, :, 1] = np.linspace(0, 250, size[1])
        for kind in ("images", "groundTruth"):
            (folder / kind / split).mkdir(parents=True)
        Image.fromarray(pixels).save(folder / "images" / split / f"100{number}.jpg", quality=100, subsampling=0)
        people = np.empty((1, number + 2), object)
        drawn[split] = np.zeros((number + 2, *size), np.uint8)
        for person, mask in enumerate(drawn[split]):
            mask[7 * person, 10 + person] = 1
            mask[-1] = 1  # the row that is cut
            people[0, person] = {"Segmentation": mask.astype(np.uint16), "Boundaries": mask}
        savemat(folder / "groundTruth" / split / f"100{number}.mat", {"groundTruth": people})
    return drawn


@pytest.mark.parametrize("below", ["data", "."])
def test_the_cache_is_made_from_the_published_files(tmp_path, below):
    drawn = write_published(tmp_path / "BSDS500" / below)
    path = data.prepare_bsds500(tmp_path / "BSDS500", tmp_path / "cache")
    assert path == tmp_path / "cache" / FILE
    loaded = data.load_annotated("bsds500", tmp_path / "cache")
    assert dict(loaded.splits) == {"train": 1, "val": 1, "test": 1}
    assert loaded.annotators.tolist() == [2, 3, 4]
    for row, masks in enumerate(drawn.values()):
        expected = np.zeros((len(masks), 64, 96), np.uint8)
        for person in range(len(masks)):
            down, right = 7 * person // 5, (10 + person) // 5
            expected[(person, 63 - right, down) if row == 1 else (person, down, right)] = 1  # turned to the left
        assert np.array_equal(loaded.annotations[row, : len(masks)], expected)
        assert not loaded.annotations[row, len(masks) :].any()
    landscape, portrait = loaded.images[0].float(), loaded.images[1].float()
    down = torch.arange(64) * 5 + 2.0
    torch.testing.assert_close(landscape[0].mean(1), down * 250 / 320, atol=2.0, rtol=0)
    assert (portrait[0].diff(dim=1) > 0).all()  # what grew downwards grows to the right
    assert (portrait[1].diff(dim=0) < 0).all()


def test_published_files_that_are_missing_or_wrong_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"train has no \.jpg files; expected images/<split>/\*\.jpg"):
        data.prepare_bsds500(tmp_path / "nowhere", tmp_path)
    write_published(tmp_path)
    Image.new("RGB", (100, 100)).save(tmp_path / "images" / "val" / "1001.jpg")
    with pytest.raises(ValueError, match=r"1001\.jpg has 100 x 100 pixels .*expected 321 x 481"):
        data.prepare_bsds500(tmp_path, tmp_path)
    (tmp_path / "groundTruth" / "val" / "1001.mat").write_bytes(b"no Matlab file")
    with pytest.raises(ValueError, match=r"1001\.mat cannot be read"):
        data.prepare_bsds500(tmp_path, tmp_path)
    (tmp_path / "groundTruth" / "val" / "1001.mat").unlink()
    with pytest.raises(FileNotFoundError, match=r"1001\.mat is missing"):
        data.prepare_bsds500(tmp_path, tmp_path)
    assert not (tmp_path / FILE).exists()


@pytest.fixture
def real(data_root):
    if not (data_root / FILE).is_file():
        pytest.skip(f"needs {FILE} in the data folder")
    return data.load_annotated("bsds500", data_root)


def test_the_real_set(real, data_root):
    assert dict(real.splits) == {"train": 200, "val": 100, "test": 200}
    assert real.images.shape == (500, 3, 64, 96)
    assert real.annotations.shape == (500, 9, 64, 96)
    assert int(real.annotators.sum()) == 2696
    assert (real.annotators.min(), real.annotators.max()) == (4, 9)
    used = torch.arange(9) < real.annotators[:, None]
    assert real.annotations[used].flatten(1).any(1).all()  # everybody drew something
    assert not real.annotations[~used].any()
    assert real.annotations[used].float().mean().item() == pytest.approx(0.107, abs=5e-4)
    with np.load(data_root / FILE, allow_pickle=False) as arrays:
        packed, split = arrays["masks_packed"], arrays["split"]
    assert np.array_equal(real.annotations, bits(packed[np.argsort(split, kind="stable")]))
    row = next(row for row in data.describe_annotated(data_root) if row.name == "bsds500")
    assert row[1:5] == (200, 100, 200, (3, 64, 96))


def test_the_real_set_can_be_trained_on(real):
    train = real.split("train")
    torch.testing.assert_close(train.prepared().mean((0, 2, 3)), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(train.prepared().std((0, 2, 3)), torch.ones(3), atol=1e-4, rtol=0)
    x, y = data.OneAnnotator(train)[17]
    assert (x.shape, y.shape) == ((3, 64, 96), (64, 96))
    assert set(y.unique().tolist()) == {0, 1}
