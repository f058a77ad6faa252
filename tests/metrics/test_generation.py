"""Scores of generated images against matrix roots, closed forms for Gaussians, and loops over rows and pairs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import sqrtm

from leanbayes import metrics
from leanbayes.metrics import generation

few = settings(deadline=None, derandomize=True, max_examples=40)
seeds = st.integers(0, 1000)


def rows(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_moments(mean: torch.Tensor, covariance: torch.Tensor) -> torch.Tensor:
    """Return 2 D rows whose mean and covariance (N - 1 in the denominator) are exactly these."""
    size = len(mean)
    root = torch.linalg.cholesky(covariance) * math.sqrt((2 * size - 1) / 2)
    return mean + torch.cat((root.mT, -root.mT))


# ------------------------------------------------------------------------------- reconstruction


def test_reconstruction_error_is_the_mean_over_pixels_or_over_sums():
    x, y = rows(0, 5, 2, 3, 4), rows(1, 5, 2, 3, 4)
    squares = [(a - b) ** 2 for a, b in zip(x.flatten().tolist(), y.flatten().tolist(), strict=True)]
    assert metrics.reconstruction_error(x, y).item() == pytest.approx(np.mean(squares))
    assert metrics.reconstruction_error(x, y, per="image").item() == pytest.approx(np.sum(squares) / 5)
    assert metrics.reconstruction_error(x, x) == 0
    whole = torch.tensor([[0, 255], [3, 2]], dtype=torch.uint8)
    assert metrics.reconstruction_error(whole, whole.flip(1)) == (2 * 255**2 + 2) / 4  # bytes do not wrap around


def test_wrong_reconstructions_are_refused():
    x = rows(0, 5, 3)
    with pytest.raises(ValueError, match=r"of the same shape, got \(5, 3\) and \(5, 1\)"):
        metrics.reconstruction_error(x, x[:, :1])
    with pytest.raises(ValueError, match="per to be pixel or image, got 'row'"):
        metrics.reconstruction_error(x, x, per="row")
    with pytest.raises(ValueError, match="finite reconstructions, got 15 of 15"):
        metrics.reconstruction_error(x, x * math.nan)


# ------------------------------------------------------------------------------- Fréchet distance


@few
@given(seeds, st.integers(1, 6), st.integers(0, 30), st.integers(0, 30))
def test_frechet_distance_is_that_of_matrix_roots(seed, size, more_a, more_b):
    a = rows(seed, size + 2 + more_a, size) @ rows(seed + 1, size, size)
    b = rows(seed + 2, size + 2 + more_b, size) @ rows(seed + 3, size, size) + rows(seed + 4, size)
    ca, cb = (np.atleast_2d(np.cov(each.numpy(), rowvar=False)) for each in (a, b))
    gap = ((a.mean(0) - b.mean(0)) ** 2).sum().item()
    expected = gap + np.trace(ca + cb - 2 * np.real(sqrtm(ca @ cb)))
    found = metrics.frechet_distance(a, b)
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(expected, rel=1e-6, abs=1e-6)


@few
@given(seeds, st.integers(1, 8))
def test_frechet_distance_of_diagonal_gaussians_is_that_of_their_deviations(seed, size):
    means, deviations = rows(seed, 2, size), rows(seed + 1, 2, size).exp()
    a, b = (with_moments(m, torch.diag(s.square())) for m, s in zip(means, deviations, strict=True))
    expected = (means[0] - means[1]).square().sum() + (deviations[0] - deviations[1]).square().sum()
    torch.testing.assert_close(metrics.frechet_distance(a, b), expected, rtol=1e-10, atol=1e-10)


@few
@given(seeds, st.integers(2, 30), st.integers(1, 30), st.sampled_from([1e-3, 1.0, 1e3]))
def test_equal_sets_have_no_distance_and_a_shift_is_its_length(seed, count, size, scale):
    a = scale * rows(seed, count, size)  # with fewer rows than features, covariances have no full rank
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    assert metrics.frechet_distance(a, a[order]).item() == pytest.approx(0, abs=1e-9 * scale**2)
    shift = scale * rows(seed + 1, size)
    assert metrics.frechet_distance(a, a + shift).item() == pytest.approx(shift.square().sum().item(), rel=1e-9)


def test_frechet_distance_is_accurate_without_full_rank():
    # Rows on two lines through the origin at 60 degrees: with unit variances, 1 + 1 - 2 |cos 60| = 1.
    along = torch.tensor([-1.0, 1.0], dtype=torch.float64).unsqueeze(1) / math.sqrt(2)
    first, second = torch.tensor([[1.0, 0, 0, 0]]), torch.tensor([[0.5, math.sqrt(0.75), 0, 0]])
    assert metrics.frechet_distance(along * first, along * second).item() == pytest.approx(1, abs=1e-7)
    # Orthogonal ones: nothing in common.
    assert metrics.frechet_distance(along * first, along * first.roll(1)).item() == pytest.approx(2, abs=1e-12)
    constant = torch.ones(5, 3)
    assert metrics.frechet_distance(constant, constant) == 0


@few
@given(seeds)
def test_frechet_distance_is_symmetric_and_blind_to_rotations(seed):
    a, b = rows(seed, 20, 4), rows(seed + 1, 15, 4) * torch.tensor([1.0, 2, 3, 4]) + 1
    found = metrics.frechet_distance(a, b)
    turn = torch.linalg.qr(rows(seed + 2, 4, 4)).Q
    torch.testing.assert_close(metrics.frechet_distance(b, a), found)
    torch.testing.assert_close(metrics.frechet_distance(a @ turn, b @ turn), found)
    torch.testing.assert_close(metrics.frechet_distance(3 * a, 3 * b), 9 * found)


def test_wrong_features_are_refused():
    with pytest.raises(ValueError, match=r"at least two rows each, for a covariance, got \(1, 3\) and \(5, 3\)"):
        metrics.frechet_distance(rows(0, 1, 3), rows(0, 5, 3))
    with pytest.raises(ValueError, match=r"got \(5, 3\) and \(5, 4\)"):
        metrics.frechet_distance(rows(0, 5, 3), rows(0, 5, 4))
    with pytest.raises(ValueError, match=r"got \(5, 3, 2\)"):
        metrics.frechet_distance(rows(0, 5, 3, 2), rows(0, 5, 3))
    with pytest.raises(ValueError, match="finite features"):
        metrics.frechet_distance(rows(0, 5, 3), torch.full((5, 3), math.inf))


# ------------------------------------------------------------------------------- inception score


@few
@given(seeds, st.integers(2, 6), st.integers(1, 4), st.integers(0, 20))
def test_inception_score_is_the_loop_over_rows(seed, classes, splits, more):
    p = (2 * rows(seed, splits + more, classes)).softmax(1)
    scores = []
    for part in np.array_split(p.numpy(), splits):
        marginal = part.mean(0)
        divergences = [sum(q * math.log(q / m) for q, m in zip(row, marginal, strict=True)) for row in part]
        scores.append(math.exp(np.mean(divergences)))
    found = metrics.inception_score(p, splits)
    assert found.mean.item() == pytest.approx(np.mean(scores))
    assert found.std.item() == pytest.approx(np.std(scores), abs=1e-9)
    assert 1 - 1e-12 <= found.mean <= classes + 1e-12


def test_inception_score_reaches_its_bounds():
    constant = torch.tensor([[0.7, 0.2, 0.1]]).expand(20, 3)
    assert metrics.inception_score(constant).mean.item() == pytest.approx(1)
    clear = torch.eye(5).repeat(20, 1)  # certain, and every class as often in every part
    assert metrics.inception_score(clear, splits=10).mean.item() == pytest.approx(5)
    assert metrics.inception_score(clear, splits=10).std.item() == pytest.approx(0, abs=1e-12)
    sorted_by_class = torch.eye(5).repeat_interleave(20, 0)
    assert metrics.inception_score(sorted_by_class, splits=5).mean.item() == pytest.approx(1)
    assert metrics.inception_score(sorted_by_class, splits=1).mean.item() == pytest.approx(5)


def test_wrong_probabilities_are_refused():
    p = torch.full((8, 4), 0.25)
    with pytest.raises(ValueError, match=r"one row for each of 10 splits, got \(8, 4\)"):
        metrics.inception_score(p)
    with pytest.raises(ValueError, match=r"expected probabilities \(N, C\)"):
        metrics.inception_score(p.view(2, 4, 4), splits=1)
    with pytest.raises(ValueError, match="of logits take the softmax first"):
        metrics.inception_score(p.log(), splits=1)
    with pytest.raises(ValueError, match="splits to be a whole number of at least 1, got 0"):
        metrics.inception_score(p, splits=0)


# ------------------------------------------------------------------------------- diversity


@few
@given(seeds, st.integers(2, 40), st.integers(1, 5), st.sampled_from([0.0, 1e3]))
def test_diversity_is_the_loop_over_pairs(seed, count, size, offset):
    x = rows(seed, count, size) + offset
    table = [[math.dist(a, b) for j, b in enumerate(x.tolist()) if i != j] for i, a in enumerate(x.tolist())]
    found = metrics.sample_diversity(x)
    assert found.pairwise.item() == pytest.approx(np.mean(table), rel=1e-6)
    assert found.nearest.item() == pytest.approx(np.mean([min(row) for row in table]), rel=1e-6)


def test_equal_rows_have_no_diversity():
    assert metrics.sample_diversity(torch.full((60, 3), 0.1)) == (0, 0)
    doubled = rows(0, 30, 4).repeat(2, 1)
    found = metrics.sample_diversity(doubled)
    assert found.nearest.item() == pytest.approx(0, abs=1e-6)
    assert found.pairwise > 1


def test_large_sets_are_thinned_out_by_the_seed():
    x = rows(0, 500, 3)
    found = metrics.sample_diversity(x, most=100)
    assert found == metrics.sample_diversity(x, most=100)
    assert found != metrics.sample_diversity(x, most=100, seed=1)
    chosen = torch.randperm(500, generator=torch.Generator().manual_seed(0))[:100]
    assert found == metrics.sample_diversity(x[chosen])
    assert found.pairwise.item() == pytest.approx(metrics.sample_diversity(x).pairwise.item(), rel=0.2)


@pytest.mark.parametrize("most", [1, 100, 1000])
def test_chunks_change_nothing(monkeypatch, most):
    images = rows(0, 40, 2, 3, 3)
    expected = metrics.sample_diversity(images)
    monkeypatch.setattr(generation, "LARGEST_CHUNK", most)
    found = metrics.sample_diversity(images)
    torch.testing.assert_close(found.pairwise, expected.pairwise, rtol=1e-9, atol=0)
    torch.testing.assert_close(found.nearest, expected.nearest, rtol=1e-9, atol=0)


def test_one_row_is_refused():
    with pytest.raises(ValueError, match=r"at least two rows, \(N, ...\), got shape \(1, 3\)"):
        metrics.sample_diversity(rows(0, 1, 3))
    with pytest.raises(ValueError, match="most to be a whole number of at least 2, got 1"):
        metrics.sample_diversity(rows(0, 4, 3), most=1)


# ------------------------------------------------------------------------------- all together


def test_a_comparison_names_its_network():
    def look(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return images.flatten(1)[:, :4], images.flatten(1)[:, :3].softmax(1)

    network = metrics.Features("first pixels", look, batch_size=7)
    real, generated = rows(0, 40, 1, 3, 3), rows(1, 30, 1, 3, 3)
    found = metrics.compare_images(real, generated, network, splits=3)
    assert found.network == "first pixels"
    features, probabilities = look(generated)
    torch.testing.assert_close(found.frechet, metrics.frechet_distance(look(real)[0], features))
    assert found.inception == metrics.inception_score(probabilities, 3)
    assert found.diversity == metrics.sample_diversity(features)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_accelerator_gives_the_same_figures():
    a, b = rows(0, 50, 6), rows(1, 60, 6)
    assert metrics.frechet_distance(a.cuda(), b).is_cuda
    torch.testing.assert_close(metrics.frechet_distance(a.cuda(), b).cpu(), metrics.frechet_distance(a, b))
    for metric in (metrics.sample_diversity, lambda x: metrics.inception_score(x.softmax(1))):
        for found, expected in zip(metric(a.cuda()), metric(a), strict=True):
            torch.testing.assert_close(found.cpu(), expected)
