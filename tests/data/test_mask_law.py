"""Consequences of a known distribution of masks, against brute force, Monte Carlo and hand-made cases."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from leanbayes import data, metrics
from leanbayes.data.annotated.ambiguous import overlap


@pytest.fixture(scope="module")
def law():
    made = data.ambiguous_images(train=40, val=1, test=1, seed=2)
    return made.modes, made.probabilities


def iou(a, b):
    a, b = (set(zip(*np.nonzero(np.asarray(mask)), strict=True)) for mask in (a, b))
    return len(a & b) / len(a | b) if a | b else 1.0


def test_pixel_probabilities_are_the_mean_over_modes(law):
    modes, p = law
    truth = data.true_pixel_probabilities(modes, p)
    by_hand = np.zeros((42, 32, 32))
    for n in range(42):
        for m in range(3):
            by_hand[n] += float(p[n, m]) * modes[n, m].numpy()
    np.testing.assert_allclose(truth, by_hand, atol=1e-6)


def test_pixel_probabilities_are_what_annotators_agree_to_in_the_end():
    made = data.ambiguous_images(train=5, val=1, test=1, annotators=5000, seed=4)
    truth = data.true_pixel_probabilities(made.modes, made.probabilities)
    error = (truth * (1 - truth) / 5000).sqrt()
    assert ((made.annotations.float().mean(1) - truth).abs() <= 4.5 * error).all()  # few independent cases an image


def test_overlap_is_intersection_over_union():
    masks = (torch.rand(4, 5, 6, 7) < 0.4).byte()
    masks[0, 0] = 0
    masks[0, 1] = 0
    masks[1, 0] = 1
    found = overlap(masks[:, :2], masks)
    for n in range(4):
        for s in range(2):
            for m in range(5):
                assert found[n, s, m].item() == pytest.approx(iou(masks[n, s], masks[n, m]))
    assert found[0, 0, 1] == 1  # two empty masks agree


def test_distances_of_modes(law):
    modes, _ = law
    distances = 1 - overlap(modes, modes)
    halves = modes[:, 1].sum((1, 2)) / modes[:, 0].sum((1, 2))
    torch.testing.assert_close(distances[:, 0, 1], 1 - halves)
    assert (distances[:, :2, 2] == 1).all()
    assert (distances.diagonal(dim1=1, dim2=2) == 0).all()
    assert torch.equal(distances, distances.mT)


def test_modes_are_found_in_samples(law):
    modes, p = law
    rows = torch.arange(42)
    chosen = torch.multinomial(p, 50, replacement=True).T
    shares = data.mode_frequencies(modes[rows, chosen], modes)
    expected = torch.stack([(chosen == m).float().mean(0) for m in range(3)], 1)
    torch.testing.assert_close(shares, expected)


def test_samples_with_errors_go_to_the_mode_they_mean(law):
    modes, _ = law
    stray = modes.clone()
    stray[:, :, 0, 0] ^= 1  # one pixel in a corner
    stray[:, :, 31, 5] ^= 1
    for m in range(3):
        shares = data.mode_frequencies(stray[None, :, m], modes)
        assert (shares[:, m] == 1).all()
    everything = data.mode_frequencies(torch.ones(1, 42, 32, 32), modes)
    assert (everything[:, 0] == 1).all()


def test_nearest_is_by_the_overlap_of_both_classes():
    modes = torch.zeros(1, 3, 4, 4)
    modes[0, 0, :2], modes[0, 1, :1] = 1, 1
    sample = torch.zeros(1, 1, 4, 4)
    sample[0, 0, 0, :3] = 1
    both = [iou(sample[0, 0], mode) + iou(1 - sample[0, 0], 1 - mode) for mode in modes[0]]
    assert data.mode_frequencies(sample, modes)[0].tolist() == [float(value == max(both)) for value in both]


def test_the_best_energy_distance_is_reached_by_the_law_itself(law):
    modes, p = (values[:1].double() for values in law)
    distances, rounds = (1 - overlap(modes, modes))[0].double(), 20_000
    generator = torch.Generator().manual_seed(0)

    def shares(count):
        drawn = torch.multinomial(p.expand(rounds, -1), count, replacement=True, generator=generator)
        return torch.nn.functional.one_hot(drawn, 3).double().mean(1)

    def energy(s, q):
        each = [torch.einsum("rm,mk,rk->r", a, distances, b) for a, b in ((s, q), (s, s), (q, q))]
        return 2 * each[0] - each[1] - each[2]

    for samples in (1, 16):
        found = energy(shares(samples), shares(4))
        best = data.optimal_energy_distance(modes, p, annotators=4, samples=samples)
        assert (found.mean() - best).abs() <= 4 * found.std() / rounds**0.5
    q = shares(4)
    best = data.optimal_energy_distance(modes, p, annotators=4)
    for other in torch.cat([torch.eye(3), torch.rand(20, 3)]).double():
        law_of_another = (other / other.sum()).expand(rounds, -1)
        found = energy(law_of_another, q)
        assert found.mean() >= best - 4 * found.std() / rounds**0.5
    found = energy(p.expand(rounds, -1), q)
    assert (found.mean() - best).abs() <= 4 * found.std() / rounds**0.5


def test_nothing_but_the_whole_law_is_best():
    """One mask, or single pixels, are far from the annotators of the set; draws from its distribution are not."""
    made = data.ambiguous_images(train=1, val=1, test=300).split("test")
    annotations = made.annotations.transpose(0, 1).bool()
    truth = data.true_pixel_probabilities(made.modes, made.probabilities)
    best = data.optimal_energy_distance(made.modes, made.probabilities, annotators=4, samples=16)
    chosen = torch.multinomial(made.probabilities, 16, replacement=True).T
    draws = metrics.energy_distance(made.modes[torch.arange(300), chosen].bool(), annotations)
    difference = draws - best
    assert difference.mean().abs() <= 4 * difference.std() / 300**0.5
    one_mask, pixels = truth[None] > 0.5, torch.rand(16, *truth.shape) < truth
    assert metrics.energy_distance(one_mask, annotations).mean() > 3 * best.mean()
    assert metrics.energy_distance(pixels, annotations).mean() > 2 * best.mean()


def test_wrong_shapes_and_values_are_refused(law):
    modes, p = law
    with pytest.raises(ValueError, match=r"expected samples \(S, N, H, W\) of modes \(N, M, H, W\), got shapes"):
        data.mode_frequencies(torch.zeros(5, 3, 32, 32), modes)
    with pytest.raises(ValueError, match=r"samples of zeros and ones, got the value 0\.5. Sample masks, or cut"):
        data.mode_frequencies(torch.full((5, 42, 32, 32), 0.5), modes)
    with pytest.raises(ValueError, match=r"modes \(N, M, H, W\) with probabilities \(N, M\), got shapes .*\(42, 2\)"):
        data.true_pixel_probabilities(modes, p[:, :2])
    with pytest.raises(ValueError, match="modes of zeros and ones, got the value 255"):
        data.true_pixel_probabilities(modes * 255, p)
    with pytest.raises(ValueError, match="at least one annotator and one sample, got 4 and 0"):
        data.optimal_energy_distance(modes, p, annotators=4, samples=0)
