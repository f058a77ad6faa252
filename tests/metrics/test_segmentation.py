"""Overlaps of masks against sets of pixels, distances of samples and annotations against loops over all pairs."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score, jaccard_score

from leanbayes import metrics
from leanbayes.metrics import segmentation

few = settings(deadline=None, derandomize=True, max_examples=40)
shares = st.sampled_from([0.0, 0.1, 0.5, 1.0])  # of pixels in a mask: empty and full ones are among them
seeds = st.integers(0, 1000)
numbers = st.integers(1, 5)


def boolean(seed: int, share: float, *shape: int) -> torch.Tensor:
    """Return masks, half of them emptier than the others, so that empty ones meet others."""
    generator = torch.Generator().manual_seed(seed)
    limits = share * torch.randint(2, (*shape[:-2], 1, 1), generator=generator)
    return torch.rand(shape, generator=generator) < limits


def labels(seed: int, classes: int, *shape: int) -> torch.Tensor:
    """Return labels; in half of the masks only the first two classes occur."""
    generator = torch.Generator().manual_seed(seed)
    most = torch.where(torch.rand((*shape[:-2], 1, 1), generator=generator) < 0.5, min(2, classes), classes)
    return (torch.rand(shape, generator=generator) * most).long()


def pixel_set(mask: np.ndarray, label: int = 1) -> set[tuple[int, ...]]:
    return {where for where in np.ndindex(*mask.shape) if mask[where] == label}


def set_iou(a: np.ndarray, b: np.ndarray, wanted: list[int]) -> float:
    """Return the mean over the labels that occur in either mask, one if none does."""
    found = []
    for label in wanted:
        first, second = pixel_set(a, label), pixel_set(b, label)
        if first | second:
            found.append(len(first & second) / len(first | second))
    return float(np.mean(found)) if found else 1.0


def energy_by_loop(
    samples: list[np.ndarray], annotations: list[np.ndarray], wanted: list[int], unbiased=False
) -> float:
    """Return 2 E d(s, y) - E d(s, s') - E d(y, y'), one pair of masks at a time."""

    def mean(first: list[np.ndarray], second: list[np.ndarray], others: bool) -> float:
        pairs = [(i, j) for i, j in product(range(len(first)), range(len(second))) if not others or i != j]
        return float(np.mean([1 - set_iou(first[i], second[j], wanted) for i, j in pairs]))

    return (
        2 * mean(samples, annotations, False)
        - mean(samples, samples, unbiased)
        - mean(annotations, annotations, unbiased)
    )


# ------------------------------------------------------------------------------- two masks


@few
@given(seeds, shares)
def test_overlaps_are_those_of_sets_of_pixels(seed, share):
    a, b = boolean(seed, share, 4, 3, 5), boolean(seed + 1, 0.5, 4, 3, 5)
    for i in range(4):
        first, second = pixel_set(a[i].numpy()), pixel_set(b[i].numpy())
        jaccard = len(first & second) / len(first | second) if first | second else 1
        sorensen = 2 * len(first & second) / (len(first) + len(second)) if first or second else 1
        assert metrics.iou(a, b)[i].item() == pytest.approx(jaccard, abs=1e-12)
        assert metrics.dice(a, b)[i].item() == pytest.approx(sorensen, abs=1e-12)


@few
@given(seeds, st.integers(2, 5))
def test_overlaps_of_classes_are_those_of_scikit_learn(seed, classes):
    a, b = labels(seed, classes, 4, 4), labels(seed + 1, classes, 4, 4)
    options = {"labels": range(classes), "average": None, "zero_division": 1.0}
    flat = b.flatten().numpy(), a.flatten().numpy()
    np.testing.assert_allclose(metrics.iou(a, b, classes=classes), jaccard_score(*flat, **options), atol=1e-12)
    np.testing.assert_allclose(metrics.dice(a, b, classes=classes), f1_score(*flat, **options), atol=1e-12)


def test_two_empty_masks_are_equal():
    empty, full = torch.zeros(2, 4, 4, dtype=torch.bool), torch.ones(2, 4, 4, dtype=torch.bool)
    for overlap in (metrics.iou, metrics.dice):
        assert overlap(empty, empty).tolist() == [1, 1]
        assert overlap(empty, full).tolist() == [0, 0]
        assert overlap(full, full).tolist() == [1, 1]
    for masks in (empty, full):
        assert metrics.energy_distance(masks.unsqueeze(0), masks.unsqueeze(0)).tolist() == [0, 0]
    # 2 * 1 - 0 - 0: as far apart as it goes.
    assert metrics.energy_distance(empty.unsqueeze(0), full.unsqueeze(0)).tolist() == [2, 2]


def test_leading_axes_are_broadcast_and_pixel_axes_counted():
    a, b = boolean(0, 0.5, 3, 1, 4, 5), boolean(1, 0.5, 2, 4, 5)
    table = metrics.iou(a, b)
    assert table.shape == (3, 2)
    assert table.dtype == torch.float64
    for i, j in product(range(3), range(2)):
        assert table[i, j] == metrics.iou(a[i, 0], b[j])
    volume = metrics.dice(a[:, 0], b[:1].expand(3, 4, 5), pixels=3)
    assert volume.shape == ()
    assert volume == metrics.dice(a[:, 0].flatten(), b[:1].expand(3, 4, 5).flatten(), pixels=1)
    assert metrics.iou(labels(0, 3, 2, 4, 4), labels(1, 3, 2, 4, 4), classes=3).shape == (2, 3)


def test_pixels_without_label_do_not_count():
    a, b = labels(0, 3, 4, 6), labels(1, 3, 4, 6)
    a[:2], b[:, 4:] = -100, -100
    for overlap in (metrics.iou, metrics.dice):
        expected = overlap(a[2:, :4], b[2:, :4], classes=3)
        torch.testing.assert_close(overlap(a, b, classes=3), expected)


# ------------------------------------------------------------------------------- energy distance


@few
@given(seeds, shares, numbers, numbers, st.booleans())
def test_energy_distance_is_the_loop_over_all_pairs(seed, share, samples, annotators, unbiased):
    samples, annotators = samples + unbiased, annotators + unbiased
    s, y = boolean(seed, 0.6, samples, 3, 4, 5), boolean(seed + 1, share, annotators, 3, 4, 5)
    found = metrics.energy_distance(s, y, unbiased=unbiased)
    assert found.shape == (3,)
    assert found.dtype == torch.float64
    for i in range(3):
        expected = energy_by_loop(list(s[:, i].numpy()), list(y[:, i].numpy()), [1], unbiased)
        assert found[i].item() == pytest.approx(expected, abs=1e-12)


@few
@given(seeds, st.integers(2, 4), st.booleans(), st.booleans())
def test_missing_annotations_and_classes_are_those_of_the_loop(seed, classes, background, unbiased):
    s, y = labels(seed, classes, 3, 4, 3, 4), labels(seed + 1, classes, 5, 4, 3, 4)
    generator = torch.Generator().manual_seed(seed)
    exist = torch.stack([torch.randperm(5, generator=generator) < k for k in (2, 3, 4, 5)], 1)
    wrong = y.masked_fill(~exist[..., None, None], -100 if seed % 2 else 255)  # is not looked at
    found = metrics.energy_distance(
        s, wrong, annotators=exist, classes=classes, background=background, unbiased=unbiased
    )
    for i in range(4):
        given = [mask for mask, there in zip(y[:, i].numpy(), exist[:, i], strict=True) if there]
        wanted = list(range(0 if background else 1, classes))
        expected = energy_by_loop(list(s[:, i].numpy()), given, wanted, unbiased)
        assert found[i].item() == pytest.approx(expected, abs=1e-12)


def test_numbers_of_annotators_mean_the_first_ones():
    s, y = boolean(0, 0.5, 3, 4, 5, 5), boolean(1, 0.5, 4, 4, 5, 5)
    count = torch.tensor([1, 4, 2, 3])
    for metric in (metrics.energy_distance, metrics.matched_iou):
        found = metric(s, y, annotators=count)
        assert torch.equal(found, metric(s, y, annotators=torch.arange(4).unsqueeze(1) < count))
        for i, k in enumerate(count.tolist()):
            torch.testing.assert_close(found[i : i + 1], metric(s[:, i : i + 1], y[:k, i : i + 1]))


def test_two_classes_without_background_are_boolean_masks():
    s, y = boolean(0, 0.3, 4, 5, 6, 6), boolean(1, 0.3, 3, 5, 6, 6)
    for metric in (metrics.energy_distance, metrics.matched_iou):
        torch.testing.assert_close(metric(s.long(), y.to(torch.uint8), classes=2), metric(s, y))


@few
@given(seeds, numbers, numbers)
def test_distance_is_symmetric_between_its_bounds_and_blind_to_order(seed, samples, annotators):
    s, y = boolean(seed, 0.5, samples, 3, 4, 4), boolean(seed + 1, 0.8, annotators, 3, 4, 4)
    found = metrics.energy_distance(s, y)
    assert (found >= -1e-12).all()  # 1 - IoU is of negative type (the Jaccard kernel is positive definite)
    assert (found <= 2).all()
    torch.testing.assert_close(found, metrics.energy_distance(y, s))
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(found, metrics.energy_distance(s[order], y.flip(0)))
    torch.testing.assert_close(found, metrics.energy_distance(s.flip(-1).mT, y.flip(-1).mT))


def test_the_same_collection_of_masks_has_no_distance():
    y = boolean(0, 0.5, 4, 6, 5, 5)
    for other in (y, y.flip(0), y.repeat(3, 1, 1, 1)):
        torch.testing.assert_close(metrics.energy_distance(other, y), torch.zeros(6, dtype=torch.float64))
        torch.testing.assert_close(metrics.matched_iou(other, y), torch.ones(6, dtype=torch.float64))


def test_only_the_unbiased_distance_is_centred_for_samples_of_one_law():
    # Both sides come from the same distribution: the distance of distributions is zero.
    images, small = 4000, (6, 3)
    generator = torch.Generator().manual_seed(0)
    s, y = (torch.rand(n, images, 2, 3, generator=generator) < 0.4 for n in small)
    centred = metrics.energy_distance(s, y, unbiased=True)
    assert abs(centred.mean()) < 4 * centred.std() / images**0.5
    biased = metrics.energy_distance(s, y)
    assert biased.mean() > 10 * biased.std() / images**0.5


def test_pixels_that_an_annotation_leaves_out_count_for_no_mask():
    s, y = labels(0, 3, 3, 2, 6, 4), labels(1, 3, 2, 2, 6, 4)
    y[1, :, :2] = -100
    expected = metrics.energy_distance(s[:, :, 2:], y[:, :, 2:], classes=3)
    torch.testing.assert_close(metrics.energy_distance(s, y, classes=3), expected)


@pytest.mark.parametrize("most", [1, 100, 700, 3000])
def test_chunks_change_nothing(monkeypatch, most):
    s, y = labels(0, 3, 4, 7, 8, 9), labels(1, 3, 3, 7, 8, 9)
    expected = metrics.energy_distance(s, y, classes=3), metrics.matched_iou(s, y, classes=3)
    monkeypatch.setattr(segmentation, "LARGEST_CHUNK", most)  # 504 pixels of masks an image
    torch.testing.assert_close(metrics.energy_distance(s, y, classes=3), expected[0], rtol=0, atol=1e-15)
    torch.testing.assert_close(metrics.matched_iou(s, y, classes=3), expected[1], rtol=0, atol=1e-15)


def test_autocast_rounds_no_counts():
    s, y = boolean(0, 0.5, 3, 2, 40, 40), boolean(1, 0.5, 3, 2, 40, 40)
    expected = metrics.energy_distance(s, y)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(metrics.energy_distance(s, y), expected)


# ------------------------------------------------------------------------------- matching


@few
@given(seeds, st.sampled_from([(1, 1), (1, 3), (2, 2), (3, 3), (4, 2), (2, 3), (6, 3)]))
def test_matching_is_the_best_of_all_permutations(seed, sizes):
    s, y = boolean(seed, 0.6, sizes[0], 2, 3, 4), boolean(seed + 1, 0.6, sizes[1], 2, 3, 4)
    found = metrics.matched_iou(s, y)
    assert found.dtype == torch.float64
    rows = int(np.lcm(*sizes))
    for i in range(2):
        table = [[set_iou(a, b, [1]) for b in y[:, i].numpy()] for a in s[:, i].numpy()]
        best = max(
            np.mean([table[row % sizes[0]][column % sizes[1]] for row, column in enumerate(order)])
            for order in permutations(range(rows))
        )
        assert found[i].item() == pytest.approx(best, abs=1e-12)


def test_matching_is_not_better_than_the_nearest_annotation():
    s, y = boolean(0, 0.6, 6, 20, 4, 4), boolean(1, 0.6, 4, 20, 4, 4)
    table = metrics.iou(s.unsqueeze(1), y.unsqueeze(0))
    found = metrics.matched_iou(s, y)
    assert (found <= table.amax(1).mean(0) + 1e-12).all()
    assert (found >= table.mean((0, 1)) - 1e-12).all()  # a random assignment would reach the mean


# ------------------------------------------------------------------------------- calibration


def soft(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(shape, generator=generator, dtype=torch.float64)).softmax(1)


@few
@given(seeds, st.integers(2, 4), numbers, st.integers(1, 20))
def test_every_label_of_every_annotator_is_one_target(seed, classes, annotators, bins):
    p, y = soft(seed, 3, classes, 4, 5), labels(seed + 1, classes, annotators, 3, 4, 5)
    exist = torch.rand(annotators, 3, generator=torch.Generator().manual_seed(seed)) < 0.6
    exist[0] = True
    y[0, 0, 0, :2] = -100
    found = metrics.pixel_calibration(p, y, annotators=exist, bins=bins)
    kept = y.masked_fill(~exist[..., None, None], -100).flatten(0, 1)
    expected = metrics.ece(p.repeat(annotators, 1, 1, 1), kept, bins=bins)
    assert found.ece.item() == pytest.approx(expected.item(), abs=1e-12)
    errors = []
    for b, h, w in np.ndindex(3, 4, 5):
        votes = [int(y[a, b, h, w]) for a in range(annotators) if exist[a, b] and y[a, b, h, w] != -100]
        if votes:
            errors += [abs(p[b, c, h, w].item() - votes.count(c) / len(votes)) for c in range(classes)]
    assert found.vote_error.item() == pytest.approx(np.mean(errors), abs=1e-12)


def test_shares_of_votes_as_probabilities_have_no_error():
    y = boolean(0, 0.7, 4, 6, 5, 5)
    share = y.double().mean(0)
    found = metrics.pixel_calibration(torch.stack((1 - share, share), 1), y)
    assert found.vote_error == 0
    assert found.ece.item() == pytest.approx(0, abs=1e-12)
    certain = metrics.pixel_calibration(torch.stack((share < 0.5, share >= 0.5), 1).double(), y)
    assert certain.vote_error.item() == pytest.approx(torch.minimum(share, 1 - share).mean().item())
    assert certain.ece.item() == pytest.approx(torch.minimum(share, 1 - share).mean().item())


def test_half_precision_is_measured_as_it_is():
    p, y = soft(0, 3, 3, 4, 4).half(), labels(1, 3, 2, 3, 4, 4)
    torch.testing.assert_close(metrics.pixel_calibration(p, y)[0], metrics.pixel_calibration(p.double(), y)[0])
    found, expected = metrics.pixel_calibration(p, y).vote_error, metrics.pixel_calibration(p.double(), y).vote_error
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(expected.item(), abs=1e-6)


# ------------------------------------------------------------------------------- wrong input

MASKS = torch.zeros(3, 2, 4, 4, dtype=torch.bool)


@pytest.mark.parametrize("metric", [metrics.energy_distance, metrics.matched_iou])
def test_wrong_masks_are_refused(metric):
    with pytest.raises(ValueError, match=r"of the same images and pixels, got \(3, 2, 4, 4\) and \(3, 2, 4, 5\)"):
        metric(MASKS, torch.zeros(3, 2, 4, 5, dtype=torch.bool))
    for empty in (MASKS[:0], MASKS[..., :0], MASKS[:, :0]):
        with pytest.raises(ValueError, match="of the same images and pixels"):
            metric(empty, empty)
    with pytest.raises(ValueError, match="of the same images and pixels"):
        metric(MASKS, MASKS[:0])
    with pytest.raises(ValueError, match=r"boolean masks, or class labels and classes=C, got torch.float32"):
        metric(MASKS.float(), MASKS, classes=2)
    with pytest.raises(ValueError, match=r"got torch.int64 and torch.bool with classes=None"):
        metric(MASKS.long(), MASKS)
    with pytest.raises(ValueError, match="classes to be a whole number of at least 2, got 1"):
        metric(MASKS.long(), MASKS, classes=1)
    with pytest.raises(ValueError, match="labels between 0 and 2, or -100 for pixels that do not count, got 3"):
        metric(MASKS.long(), MASKS.long() + 3, classes=3)
    with pytest.raises(ValueError, match=r"labels between 0 and 2, or -100 .* got 156"):  # not -100 in eight bits
        metric(MASKS.long(), MASKS.byte() + 156, classes=3)


def test_wrong_annotators_are_refused():
    with pytest.raises(ValueError, match=r"whole numbers \(2,\) or as a boolean \(3, 2\), got torch.float32"):
        metrics.energy_distance(MASKS, MASKS, annotators=torch.ones(2))
    with pytest.raises(ValueError, match=r"got torch.bool of shape \(2, 3\)"):
        metrics.matched_iou(MASKS, MASKS, annotators=torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="between 1 and 3 annotations of every image, got 2 to 4"):
        metrics.energy_distance(MASKS, MASKS, annotators=torch.tensor([2, 4]))
    with pytest.raises(ValueError, match="got 0 to 3; leave out images without annotations"):
        metrics.energy_distance(MASKS, MASKS, annotators=torch.tensor([[True, False]]).expand(3, 2))
    with pytest.raises(ValueError, match=r"at least two samples and two annotations .* got 3 and 1"):
        metrics.energy_distance(MASKS, MASKS, annotators=torch.tensor([1, 2]), unbiased=True)
    with pytest.raises(ValueError, match="got 1 and 3; unbiased=False needs one of each"):
        metrics.energy_distance(MASKS[:1], MASKS, unbiased=True)


def test_wrong_pairs_are_refused():
    with pytest.raises(ValueError, match=r"same pixels on the last 2 axes, got \(4, 4\) and \(4, 5\)"):
        metrics.iou(MASKS[0, 0], torch.zeros(4, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"on the last 3 axes, got \(4, 4\)"):
        metrics.dice(MASKS[0, 0], MASKS[0, 0], pixels=3)
    with pytest.raises(ValueError, match="pixels to be a whole number of at least 1, got 0"):
        metrics.iou(MASKS, MASKS, pixels=0)


def test_wrong_votes_are_refused():
    p, y = soft(0, 2, 3, 4, 4), labels(0, 3, 3, 2, 4, 4)
    with pytest.raises(
        ValueError, match=r"labels of the same pixels, got \(2, 3, 4, 4\) and torch.int64 of shape \(2,"
    ):
        metrics.pixel_calibration(p, y[0])
    with pytest.raises(ValueError, match=r"got \(2, 3\)"):
        metrics.pixel_calibration(p[..., 0, 0], y[..., 0, 0])
    with pytest.raises(ValueError, match=r"torch.float32 of shape"):
        metrics.pixel_calibration(p, y.float())
    with pytest.raises(ValueError, match="at least one target that counts, got none"):
        metrics.pixel_calibration(p, torch.full_like(y, -100))
    with pytest.raises(ValueError, match="labels between 0 and 2, or -100 for pixels that do not count, got 3"):
        metrics.pixel_calibration(p, y + 1)
    with pytest.raises(ValueError, match="of logits take the softmax first"):
        metrics.pixel_calibration(p.log(), y)
    with pytest.raises(ValueError, match="bins to be a whole number"):
        metrics.pixel_calibration(p, y, bins=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_accelerator_gives_the_same_figures():
    s, y, exist = boolean(0, 0.5, 5, 6, 8, 8), boolean(1, 0.5, 3, 6, 8, 8), torch.tensor([1, 2, 3, 1, 2, 3])
    for metric in (metrics.energy_distance, metrics.matched_iou):
        there = metric(s.cuda(), y, annotators=exist)
        assert there.is_cuda
        torch.testing.assert_close(there.cpu(), metric(s, y, annotators=exist))
    p = soft(0, 6, 2, 8, 8)
    for found, expected in zip(metrics.pixel_calibration(p.cuda(), y), metrics.pixel_calibration(p, y), strict=True):
        torch.testing.assert_close(found.cpu(), expected)
