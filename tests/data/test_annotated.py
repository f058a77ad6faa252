"""Images with several annotators: the record, its splits and moments, and one random annotator an image."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from leanbayes import data
from leanbayes.data.annotated.images import AnnotatedImages, draw_annotators
from leanbayes.training.data import batches_of, Placement
from leanbayes.training.recipe import Recipe


def toy(dtype=torch.uint8, **changes):
    """Make nine images with one to four annotators; annotator a of image i marks pixel (a, i mod 6)."""
    images = torch.randint(256, (9, 3, 5, 6), dtype=torch.uint8)
    images[:, 2] = 7  # a constant channel
    counts = torch.tensor([1, 2, 3, 4, 4, 3, 2, 1, 4])
    masks = torch.zeros(9, 4, 5, 6, dtype=torch.uint8)
    for row, count in enumerate(counts.tolist()):
        for person in range(count):
            masks[row, person, person, row % 6] = 1
    values = {
        "name": "toy",
        "images": images if dtype == torch.uint8 else images / 255,
        "annotations": masks,
        "annotators": counts,
        "classes": ("ground", "dot"),
        "splits": {"train": 4, "val": 2, "test": 3},
    }
    return AnnotatedImages(**(values | changes))


def whose(targets):
    """Return the annotator of each target of `toy`: the row of the marked pixel."""
    return targets.flatten(1).argmax(1) // 6


def test_splits_are_views_of_consecutive_rows():
    whole = toy()
    parts = [whole.split(name) for name in ("train", "val", "test")]
    assert [len(part) for part in parts] == [4, 2, 3]
    for name in ("images", "annotations", "annotators"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))
    assert parts[2].images.data_ptr() == whole.images[6:].data_ptr()
    assert dict(parts[1].splits) == {"val": 2}
    assert torch.equal(parts[1].split("val").images, parts[1].images)
    with pytest.raises(ValueError, match=r"toy has the splits train, val, test, got 'valid'\. Pick one of them"):
        whole.split("valid")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_every_split_is_normalised_by_the_training_images(dtype):
    whole = toy(dtype)
    pixels = whole.images[:4].numpy().astype(np.float64) / (255 if dtype == torch.uint8 else 1)
    mean, std = pixels.mean((0, 2, 3)), pixels.std((0, 2, 3))
    std[2] = 1
    for part in (whole, whole.split("train"), whole.split("test")):
        np.testing.assert_allclose(part.mean, mean, rtol=1e-6)
        np.testing.assert_allclose(part.std, std, rtol=1e-6)
    before = whole.images.clone()
    prepared = whole.split("test").prepared()
    assert torch.equal(whole.images, before)
    test = whole.images[6:].numpy() / (255 if dtype == torch.uint8 else 1)
    expected = (test - mean[:, None, None]) / std[:, None, None]
    np.testing.assert_allclose(prepared, expected, rtol=1e-4, atol=1e-5)
    assert prepared.dtype == torch.float32
    with pytest.raises(ValueError, match=r"expected images \(rows, 3, height, width\), got shape \(2, 1, 5, 6\)"):
        whole.inputs(torch.zeros(2, 1, 5, 6))


def test_without_a_training_split_all_images_count():
    alone = toy(splits={"test": 9})
    np.testing.assert_allclose(alone.mean, (alone.images / 255).double().mean((0, 2, 3)), rtol=1e-6)


def test_as_a_dataset_it_yields_inputs_annotations_and_counts():
    whole = toy()
    x, masks, count = whole[5]
    assert torch.equal(x, whole.prepared()[5])
    assert torch.equal(masks, whole.annotations[5])
    assert count == 3
    assert len(list(whole)) == 9
    batches = list(DataLoader(whole, batch_size=4))
    assert [tuple(part.shape) for part in batches[0]] == [(4, 3, 5, 6), (4, 4, 5, 6), (4,)]
    assert torch.equal(torch.cat([batch[2] for batch in batches]), whole.annotators)
    again = pickle.loads(pickle.dumps(whole.split("test")))  # what a loader with workers does to it
    assert torch.equal(again.prepared(), whole.split("test").prepared())


def test_it_prints_on_a_line():
    assert repr(toy()).count("\n") == 0
    assert "tensor" not in repr(toy().split("val"))


def test_targets_are_masks_of_those_who_annotated():
    whole = toy()
    drawn = whole.draw_targets(torch.Generator().manual_seed(3))
    assert drawn.dtype == torch.int64
    assert drawn.shape == (9, 5, 6)
    people = whose(drawn)
    assert (people < whole.annotators).all()
    assert torch.equal(drawn, whole.annotations[torch.arange(9), people].long())
    assert (drawn.sum((1, 2)) == 1).all()  # no padding
    assert torch.equal(drawn, whole.draw_targets(torch.Generator().manual_seed(3)))


def test_every_annotator_is_alike_likely():
    counts = torch.arange(1, 10).repeat_interleave(20_000)
    drawn = draw_annotators(counts, torch.Generator().manual_seed(0)).view(9, -1)
    for row, count in zip(drawn, range(1, 10), strict=True):
        shares = row.bincount(minlength=count) / len(row)
        assert len(shares) == count
        error = (1 / count * (1 - 1 / count) / len(row)) ** 0.5
        assert ((shares - 1 / count).abs() <= 4 * error).all()


def test_the_largest_random_number_stays_among_the_annotators(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *size, **_: torch.full(size, 1 - 2**-53, dtype=torch.float64))
    counts = torch.arange(1, 10)
    assert torch.equal(draw_annotators(counts), counts - 1)


def test_one_annotator_depends_on_seed_epoch_and_image_alone():
    whole = toy()
    pairs = data.OneAnnotator(whole, seed=5)
    assert len(pairs) == 9
    epochs = []
    for epoch in range(20):
        pairs.set_epoch(epoch)
        backwards = [pairs[index][1] for index in reversed(range(9))]
        targets = torch.stack(backwards[::-1])
        assert (whose(targets) < whole.annotators).all()
        epochs.append(targets)
    again = data.OneAnnotator(whole, seed=5)
    again.set_epoch(7)
    assert torch.equal(torch.stack([y for _, y in again]), epochs[7])
    assert torch.equal(torch.stack([x for x, _ in again]), whole.prepared())
    assert epochs[7].dtype == torch.int64
    other = data.OneAnnotator(whole, seed=6)
    other.set_epoch(7)
    assert not torch.equal(torch.stack([y for _, y in other]), epochs[7])
    seen = {(row, int(person)) for targets in epochs for row, person in enumerate(whose(targets))}
    assert len(seen) == int(whole.annotators.sum())  # everybody is heard


def test_one_annotator_is_data_to_train_on():
    pairs = data.OneAnnotator(toy())
    placement = Placement(torch.device("cpu"), 0, 1, Recipe(epochs=1, batch_size=4))
    batches = batches_of(pairs, placement)
    assert batches.rows == 9
    (x, y), *_ = list(batches.epoch(0))
    assert (x.shape, y.shape, y.dtype) == ((4, 3, 5, 6), (4, 5, 6), torch.int64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": torch.zeros(9, 5, 6)}, r"images have shape \(9, 5, 6\); expected \(rows, channels"),
        ({"images": torch.zeros(9, 3, 5, 6, dtype=torch.float64)}, "images are torch.float64; expected uint8, or"),
        ({"images": torch.full((9, 3, 5, 6), 3.0)}, "pixels from 3 to 3; expected uint8, or float32 from 0 to 1"),
        ({"images": torch.full((9, 3, 5, 6), float("nan"))}, "pixels from nan to nan"),
        ({"splits": {"train": 4, "test": 4}}, "for 9 images; expected positive sizes that add up"),
        ({"splits": {"train": 9, "test": 0}}, "for 9 images; expected positive sizes that add up"),
        ({"splits": {}}, "for 9 images; expected positive sizes that add up"),
        ({"annotations": torch.zeros(9, 5, 6, dtype=torch.uint8)}, r"annotations have shape \(9, 5, 6\); expected"),
        ({"annotations": torch.zeros(9, 4, 6, 5, dtype=torch.uint8)}, r"\(9, 4, 6, 5\).*Pad missing annotators"),
        ({"annotations": torch.zeros(9, 4, 5, 6)}, "annotations are torch.float32; expected uint8 or bool"),
        ({"classes": ("ground",)}, "have the class 1; expected numbers below 1.*Name every class"),
        ({"annotators": torch.ones(9)}, "annotators are torch.float32 of shape .*expected an int64 count"),
        ({"annotators": torch.tensor([0, 1, 2, 3, 4, 4, 4, 4, 4])}, "0 to 4 annotators an image; expected 1 to 4"),
        ({"annotators": torch.full((9,), 5)}, "5 to 5 annotators an image; expected 1 to 4"),
    ],
)
def test_what_does_not_belong_together_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        toy(**changes)


def test_boolean_masks_are_annotations_too():
    whole = toy()
    same = replace(whole, annotations=whole.annotations.bool())
    targets = [each.draw_targets(torch.Generator().manual_seed(1)) for each in (whole, same)]
    assert torch.equal(*targets)


def test_names_are_read_with_tolerance_and_unknown_ones_named(tmp_path):
    assert data.load_annotated("Ambiguous").name == "ambiguous"
    with pytest.raises(
        ValueError, match=r"'bsd500' with several annotators, did you mean bsds500\? Expected one of bs"
    ):
        data.load_annotated("bsd500", tmp_path)
    with pytest.raises(ValueError, match="load_lidc reads a folder of LIDC-IDRI crops"):
        data.load_annotated("mnist", tmp_path)
    with pytest.raises(ValueError, match=r"BSDS-500 has several annotators.*Use data.load_annotated\('BSDS-500'\)"):
        data.load("BSDS-500", tmp_path)


def test_the_table_of_annotated_sets(tmp_path):
    rows = {row.name: row for row in data.describe_annotated(tmp_path)}
    assert (rows["bsds500"].where, rows["ambiguous"].where) == ("not here", "built in")
    made = data.load_annotated("ambiguous")
    assert rows["ambiguous"][1:4] == tuple(made.splits.values())
    assert rows["ambiguous"].shape == tuple(made.images.shape[1:])
    assert rows["ambiguous"].annotators == str(made.annotations.shape[1])
    (tmp_path / "bsds500_boundaries_64x96.npz").touch()
    assert data.describe_annotated(tmp_path)[0].where == f"cached at {tmp_path}"
