"""LIDC-IDRI crops, from tiny trees in the layout of the release."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from leanbayes import data

PATIENTS = ("LIDC-IDRI-0001", "LIDC-IDRI-0023")
CROPS = ("z-105.0_c0", "z-107.5_c1")


def save(pixels, path, mode="L"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).convert(mode).save(path)


def write_split(place, seed, first_grader=0):
    """Write two crops of two patients; return the pixels and masks in the order of their names."""
    random = np.random.default_rng(seed)
    images, masks = [], []
    for patient in PATIENTS:
        for crop in CROPS:
            images.append(random.integers(0, 256, (6, 5), np.uint8))
            masks.append(random.integers(0, 2, (4, 6, 5), np.uint8))
            masks[-1][random.integers(4)] = 0  # a grader who saw nothing
            save(images[-1], place / "images" / patient / f"{crop}.png")
            for grader, mask in enumerate(masks[-1], first_grader):
                save(mask * 255, place / "gt" / patient / f"{crop}_l{grader}.png")
    return np.stack(images), np.stack(masks)


@pytest.fixture
def release(tmp_path):
    return tmp_path, {name: write_split(tmp_path / name, seed) for seed, name in enumerate(("train", "val", "test"))}


def test_images_masks_and_splits(release):
    folder, written = release
    loaded = data.load_lidc(folder)
    assert dict(loaded.splits) == {"train": 4, "val": 4, "test": 4}
    assert (loaded.annotators == 4).all()
    assert loaded.classes == ("background", "abnormality")
    for name, (images, masks) in written.items():
        part = loaded.split(name)
        assert np.array_equal(part.images[:, 0], images)
        assert np.array_equal(part.annotations, masks)
    assert loaded.prepared().shape == (12, 1, 6, 5)
    assert len(loaded.sha256) == 64
    save(255 - written["val"][0][0], folder / "val" / "images" / PATIENTS[0] / f"{CROPS[0]}.png")
    assert data.load_lidc(folder).sha256 != loaded.sha256


@pytest.mark.parametrize("layout", ["lidc_crops_{}/{}", "lidc_crops_{}", "{0}/{0}"])
def test_archives_as_they_unpack(tmp_path, layout):
    write_split(tmp_path / layout.format("train", "train"), 0)
    write_split(tmp_path / layout.format("test", "test"), 1)
    assert dict(data.load_lidc(str(tmp_path)).splits) == {"train": 4, "test": 4}


def test_graders_may_be_numbered_from_one_and_masks_be_of_one_bit(tmp_path):
    images, masks = write_split(tmp_path / "train", 0, first_grader=1)
    for path in (tmp_path / "train" / "gt").rglob("*.png"):
        with Image.open(path) as mask:
            pixels = np.asarray(mask)
        save(pixels, path, mode="1")
    loaded = data.load_lidc(tmp_path)
    assert np.array_equal(loaded.annotations, masks)
    assert np.array_equal(loaded.images[:, 0], images)


def test_crops_may_lie_in_a_folder_for_each_nodule(tmp_path):
    image, masks = np.full((4, 4), 9, np.uint8), np.eye(4, dtype=np.uint8)
    save(image, tmp_path / "test" / "images" / "p" / "nodule-1" / "z-1.0_c0.png")
    for grader, mask in enumerate(masks):
        save(np.tile(mask, (4, 1)), tmp_path / "test" / "gt" / "p" / "nodule-1" / f"z-1.0_c0_l{grader}.png")
    loaded = data.load_lidc(tmp_path)
    assert torch.equal(loaded.annotations[0, :, 0], torch.eye(4, dtype=torch.uint8))


def test_a_pickle_is_not_read(tmp_path):
    class Trap:
        def __reduce__(self):
            return (shutil.rmtree, (str(tmp_path),))

    import pickle

    path = tmp_path / "data_lidc.pickle"
    path.write_bytes(pickle.dumps(Trap()))
    for given in (path, tmp_path):
        with pytest.raises(ValueError, match=r"data_lidc\.pickle: a pickle is not read.*use the PNG release.*https://"):
            data.load_lidc(given)
    assert path.is_file()


def test_an_empty_or_missing_folder_says_what_is_expected(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match=r"has no crops of LIDC-IDRI: expected <split>/images/<patient>/"):
            data.load_lidc(folder)
    for name in ("images", "gt"):
        (tmp_path / "train" / name).mkdir(parents=True)
    with pytest.raises(ValueError, match="images has no PNG files"):
        data.load_lidc(tmp_path)


def test_missing_and_unknown_masks_are_named(release):
    folder, _ = release
    gone = folder / "val" / "gt" / PATIENTS[1] / f"{CROPS[0]}_l2.png"
    kept = gone.rename(folder / "kept.png")
    with pytest.raises(ValueError, match=r"LIDC-IDRI-0023.z-105\.0_c0\.png has 3 masks .*expected 4"):
        data.load_lidc(folder)
    kept.rename(gone)
    shutil.copy(gone, gone.with_name("z-9.0_c0_l0.png"))
    with pytest.raises(ValueError, match=r"z-9\.0_c0_l0\.png belongs to no image"):
        data.load_lidc(folder)
    gone.with_name("z-9.0_c0_l0.png").rename(gone.with_name("z-9.0_c0.png"))
    with pytest.raises(ValueError, match=r"z-9\.0_c0\.png belongs to no image"):
        data.load_lidc(folder)


def test_broken_files_and_other_sizes_are_named(release):
    folder, _ = release
    image = folder / "test" / "images" / PATIENTS[0] / f"{CROPS[1]}.png"
    whole = image.read_bytes()
    save(np.zeros((7, 5), np.uint8), image)
    with pytest.raises(ValueError, match=r"z-107\.5_c1\.png has 7 x 5 pixels; expected 6 x 5"):
        data.load_lidc(folder)
    image.write_bytes(whole[:40])
    with pytest.raises(ValueError, match=r"z-107\.5_c1\.png cannot be read as an image"):
        data.load_lidc(folder)
    Image.fromarray(np.full((6, 5), 40_000, np.uint16)).save(image)
    with pytest.raises(ValueError, match="has more than 8 bits a pixel"):
        data.load_lidc(folder)
