"""Inputs that every metric accepts or refuses: shapes, ignored targets, devices, dtypes, NaN, logits, empty input."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from leanbayes import metrics

OF_CLASSES = {
    "accuracy": metrics.accuracy,
    "top_k_accuracy": metrics.top_k_accuracy,
    "nll": metrics.nll,
    "brier": metrics.brier,
    "ece": metrics.ece,
    "ece of paper 002": lambda p, y: metrics.ece(p, y, bins=20, smallest=5),
    "mce": metrics.mce,
    "adaptive_ece": metrics.adaptive_ece,
    "classwise_ece": metrics.classwise_ece,
    "best_temperature": metrics.best_temperature,
    "calibrated_nll": metrics.calibrated_nll,
    "aurc": metrics.aurc,
    "disagreement": lambda p, y: metrics.disagreement(torch.stack((p, p.roll(1, 1))), y),
}
OF_REALS = {
    "rmse": lambda m, v, y: metrics.rmse(m[0], y),
    "lpd": metrics.lpd,
    "crps": metrics.crps,
    "crps_gaussian": lambda m, v, y: metrics.crps_gaussian(m[0], v[0], y),
    "interval_coverage": lambda m, v, y: metrics.interval_coverage(m[0] - v[0], m[0] + v[0], y),
}
of_classes = pytest.mark.parametrize("metric", OF_CLASSES.values(), ids=OF_CLASSES.keys())
# The calibrated likelihood splits its rows by their position: other rows, other halves.
SEPARATE = {name: metric for name, metric in OF_CLASSES.items() if name != "calibrated_nll"}
row_by_row = pytest.mark.parametrize("metric", SEPARATE.values(), ids=SEPARATE.keys())
of_reals = pytest.mark.parametrize("metric", OF_REALS.values(), ids=OF_REALS.keys())


def classes(rows: int = 60, *space: int, dtype: torch.dtype = torch.float64, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    p = (2 * torch.randn(rows, 7, *space, generator=generator, dtype=torch.float64)).softmax(1)
    return p.to(dtype), torch.randint(7, (rows, *space), generator=generator)


def reals(rows: int = 12, seed: int = 0, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(seed)
    means, variances = (torch.randn(5, rows, 2, generator=generator, dtype=torch.float64) for _ in range(2))
    return means.to(dtype), variances.exp().to(dtype), torch.randn(rows, 2, generator=generator).to(dtype)


# ------------------------------------------------------------------------------- what comes back


@of_classes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_classes_give_a_float64_scalar(metric, dtype):
    result = metric(*classes(dtype=dtype))
    assert result.shape == ()
    assert result.dtype == torch.float64
    assert result.item() == pytest.approx(metric(*classes()).item(), abs=1e-5)


@of_reals
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reals_give_a_float64_scalar(metric, dtype):
    result = metric(*reals(dtype=dtype))
    assert result.shape == ()
    assert result.dtype == torch.float64
    assert result.item() == pytest.approx(metric(*reals()).item(), abs=1e-5)


@of_classes
def test_half_precision_probabilities_are_accepted(metric):
    assert metric(*classes(dtype=torch.bfloat16)).isfinite()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@of_classes
def test_an_accelerator_gives_the_same_figures(metric):
    p, y = classes()
    there = metric(p.cuda(), y.cuda())
    assert there.is_cuda
    torch.testing.assert_close(there.cpu(), metric(p, y))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@of_reals
def test_an_accelerator_gives_the_same_figures_of_reals(metric):
    there = metric(*(each.cuda() for each in reals()))
    assert there.is_cuda
    torch.testing.assert_close(there.cpu(), metric(*reals()))


# ------------------------------------------------------------------------------- shapes


@row_by_row
def test_the_order_of_rows_does_not_matter(metric):
    p, y = classes()
    p = (8 * p).round().softmax(1)  # many rows are tied
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(metric(p[order], y[order]), metric(p, y))


@row_by_row
def test_dense_predictions_count_pixels(metric):
    p, y = classes(4, 3, 5)
    rows = torch.stack([p[b, :, i, j] for b in range(4) for i in range(3) for j in range(5)])
    torch.testing.assert_close(metric(p, y), metric(rows, y.flatten()))


@row_by_row
def test_ignored_targets_count_for_nothing(metric):
    p, y = classes()
    hidden = y.clone()
    hidden[::3] = -100
    kept = torch.arange(len(y)) % 3 != 0
    torch.testing.assert_close(metric(p, hidden), metric(p[kept], y[kept]))


def test_flatten_leaves_out_another_value_too():
    p, _ = classes(5)
    rows, targets = metrics.flatten(p, torch.tensor([0, 255, 2, 255, 4]), ignore_index=255)
    assert torch.equal(rows, p[[0, 2, 4]])
    assert targets.tolist() == [0, 2, 4]


# ------------------------------------------------------------------------------- refusals


@of_classes
def test_targets_of_another_shape_are_refused(metric):
    p, y = classes()
    with pytest.raises(ValueError, match=r"class numbers of shape \(60,\).*got torch.int64 of shape \(59,\)"):
        metric(p, y[:-1])
    with pytest.raises(ValueError, match=r"class numbers of shape \(60,\).*got torch.float32"):
        metric(p, y.float())


@of_classes
def test_no_rows_are_refused(metric):
    p, y = classes()
    with pytest.raises(ValueError, match="at least one target that counts, got none"):
        metric(p[:0], y[:0])


@of_classes
def test_only_ignored_targets_are_refused(metric):
    p, y = classes()
    with pytest.raises(ValueError, match="at least one target that counts, got none"):
        metric(p, torch.full_like(y, -100))


@of_classes
def test_nan_is_refused(metric):
    p, y = classes()
    p[3, 2] = math.nan
    with pytest.raises(ValueError, match="expected probabilities, got NaN"):
        metric(p, y)


@of_classes
def test_logits_are_refused(metric):
    p, y = classes()
    with pytest.raises(ValueError, match="of logits take the softmax first"):
        metric(p.log(), y)


@of_classes
def test_targets_outside_the_classes_are_refused(metric):
    p, y = classes()
    with pytest.raises(ValueError, match="expected targets between 0 and 6, got 7"):
        metric(p, y + (y == 6))
    with pytest.raises(ValueError, match="expected targets between 0 and 6, got -1"):
        metric(p, y - 1 * (y == 0))


def test_a_single_class_is_refused():
    with pytest.raises(ValueError, match=r"at least two classes on axis 1.*shape \(4, 1\).*torch.stack"):
        metrics.nll(torch.ones(4, 1), torch.zeros(4, dtype=torch.long))


@of_reals
@pytest.mark.parametrize("place", [0, 2])
def test_nan_among_reals_is_refused(metric, place):
    inputs = reals()
    inputs[place].view(-1)[0] = math.nan
    with pytest.raises(ValueError, match=r"expected finite .*, got 1 of"):
        metric(*inputs)


@pytest.mark.parametrize("metric", [metrics.lpd, metrics.crps])
def test_nan_among_variances_is_refused(metric):
    means, variances, y = reals()
    variances[0, 0, 0] = math.nan
    with pytest.raises(ValueError, match="expected finite variances, got 1 of"):
        metric(means, variances, y)


@of_reals
def test_no_reals_are_refused(metric):
    means, variances, y = reals()
    with pytest.raises(ValueError, match="expected at least one number"):
        metric(means[:, :0], variances[:, :0], y[:0])


@of_reals
def test_real_targets_never_broadcast(metric):
    means, variances, y = reals()
    with pytest.raises(ValueError, match=r"expected targets of shape \(12, 2\), got \(12,\)"):
        metric(means, variances, y[:, 0])
    one = metric(means[..., :1], variances[..., :1], y[:, :1])
    assert metric(means[..., :1], variances[..., :1], y[:, 0]) == one


@pytest.mark.parametrize("number", [0, -1, 2.0])
def test_numbers_of_bins_and_classes_are_whole(number):
    p, y = classes()
    for metric in (metrics.ece, metrics.mce, metrics.adaptive_ece, metrics.classwise_ece, metrics.reliability):
        with pytest.raises(ValueError, match=rf"bins to be a whole number of at least 1, got {number}"):
            metric(p, y, bins=number)
    with pytest.raises(ValueError, match=rf"k to be a whole number of at least 1, got {number}"):
        metrics.top_k_accuracy(p, y, k=number)


def test_a_byte_is_not_taken_for_a_negative_number():
    """In uint8, -100 is 156: a class like others."""
    y = torch.tensor([156, 3])
    p, kept = metrics.flatten(torch.full((2, 200), 1 / 200), y.byte())
    assert torch.equal(kept, y)
    assert len(p) == 2


@pytest.mark.parametrize("wrong", [lambda values: values.numpy(), lambda values: values.tolist()])
def test_arrays_and_lists_are_refused_in_words(wrong):
    p, y = classes()
    means, _, targets = reals()
    scores = torch.arange(4.0)
    calls = [
        *(partial(metric, p, wrong(y)) for name, metric in OF_CLASSES.items() if name not in ("aurc", "disagreement")),
        partial(metrics.accuracy, wrong(p), y),
        partial(metrics.rmse, wrong(means[0]), targets),
        partial(metrics.rmse, means[0], wrong(targets)),
        partial(metrics.auroc, wrong(scores), scores),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"expected tensors, got (ndarray|list); torch\.as_tensor makes one"):
            call()
