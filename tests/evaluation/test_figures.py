"""The numbers to plot against the same numbers computed row by row."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import leanbayes as lb
from leanbayes.evaluation import figures
from leanbayes.evaluation.evaluate import in_units


@pytest.fixture(scope="module")
def classes():
    torch.manual_seed(0)
    bnn = lb.convert(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 7)), lb.Rank1(init_std=0.3))
    x, y = torch.randn(90, 4), torch.randint(7, (90,))
    return bnn, x, y, lb.predict(bnn, x, samples=6, seed=3)


@pytest.fixture(scope="module")
def targets():
    torch.manual_seed(0)
    bnn = lb.convert(nn.Linear(3, 1), lb.ImplicitNodes(), likelihood=lb.Gaussian(std=0.5))
    x = torch.randn(250, 3)
    y = x.sum(1, keepdim=True)
    return lb.predict(bnn, x, samples=6, seed=1), y


def test_the_kept_answers_are_the_most_confident(classes):
    _, _, y, p = classes
    found = figures.selective_accuracy(p.mean, y)
    right = (p.mean.argmax(1) == y)[p.mean.amax(1).argsort(descending=True)].double()
    assert len(found["coverage"]) == 20
    for share, accuracy in zip(found["coverage"], found["accuracy"], strict=True):
        count = round(share * 90)
        assert accuracy == pytest.approx(right[:count].mean().item(), abs=1e-5)
    assert found["coverage"][-1] == 1
    assert found["accuracy"][-1] == pytest.approx(lb.metrics.accuracy(p.mean, y).item(), abs=1e-5)


def test_few_rows_give_each_share_once(classes):
    _, _, y, p = classes
    found = figures.selective_accuracy(p.mean[:7], y[:7])
    assert found["coverage"] == pytest.approx([(i + 1) / 7 for i in range(7)], abs=1e-6)


def test_the_error_of_kept_rows_grows_from_the_smallest_variance(targets):
    p, y = targets
    found = figures.selective_error(p, y)
    errors = (p.mean - y).square().flatten()[p.total.flatten().argsort(stable=True)].double()
    for share, rmse in zip(found["coverage"], found["rmse"], strict=True):
        assert rmse == pytest.approx(errors[: round(share * 250)].mean().sqrt().item(), rel=1e-4)
    assert found["rmse"][-1] == pytest.approx(lb.metrics.rmse(p.mean, y).item(), rel=1e-5)


@pytest.mark.parametrize("unit", [1e-9, 1e9])
def test_histograms_do_not_depend_on_the_unit_of_the_target(targets, unit):
    p, _ = targets
    scaled = in_units(p, torch.zeros(1), torch.tensor([unit]))
    for plain, found in zip(figures.histograms(p, {}).values(), figures.histograms(scaled, {}).values(), strict=True):
        np.testing.assert_allclose(found["edges"], np.multiply(plain["edges"], unit**2), rtol=1e-4)
        assert found["counts"] == plain["counts"]
    logarithmic = figures.log_histograms(p, {}), figures.log_histograms(scaled, {})
    for plain, found in zip(*(each.values() for each in logarithmic), strict=True):
        assert found["below"] == plain["below"]
        assert len(found["edges"]) == pytest.approx(len(plain["edges"]), abs=1)


def test_confusions_are_counted_by_true_and_predicted_class(classes):
    _, _, y, p = classes
    found = np.zeros((7, 7), int)
    for true, predicted in zip(y.tolist(), p.mean.argmax(1).tolist(), strict=True):
        found[true, predicted] += 1
    assert figures.confusion(p.mean, y) == found.tolist()


@pytest.mark.parametrize(("outputs", "there"), [(20, True), (21, False)])
def test_many_classes_have_no_confusion_matrix(outputs, there):
    torch.manual_seed(0)
    result = lb.evaluate(nn.Linear(3, outputs), (torch.randn(30, 3), torch.randint(outputs, (30,))))
    assert ("confusion" in result.figures) == there


def test_logarithmic_bins_have_the_edges_of_all_runs_and_all_rows(classes):
    bnn, x, _, p = classes
    found = figures.log_histograms(p, {"far": lb.predict(bnn, 5 * x, samples=6)})
    for measure in ("total", "epistemic"):
        edges = np.array(found[measure]["edges"])
        powers = 5 * np.log10(edges)
        np.testing.assert_allclose(powers, np.round(powers), atol=1e-4)
        np.testing.assert_allclose(np.diff(powers), 1, atol=1e-4)
        values = getattr(p, measure).double().numpy()
        counts, _ = np.histogram(values, edges)
        np.testing.assert_allclose(found[measure]["counts"]["test"], counts / 90, atol=1e-6)
        for name, shares in found[measure]["counts"].items():
            assert sum(shares) + found[measure]["below"][name] == pytest.approx(1, abs=1e-4)


def test_an_uncertainty_of_zero_is_below_every_edge():
    p = lb.predict(nn.Linear(3, 4), torch.randn(20, 3))
    found = figures.log_histograms(p, {})["epistemic"]
    assert found == {"edges": [], "counts": {"test": []}, "below": {"test": 1.0}}


def test_plotted_targets_are_evenly_spaced_with_their_intervals(targets):
    p, y = targets
    found = figures.predicted_rows(p, y)
    rows = [row["row"] for row in found["rows"]]
    assert (rows[0], rows[-1], len(rows)) == (0, 249, 200)
    assert set(np.diff(rows)) == {1, 2}
    low, high = p.interval(0.95)
    for row in found["rows"][::20]:
        i = row["row"]
        exact = y[i], p.mean[i], low[i], high[i], p.total[i].sqrt(), p.epistemic[i].sqrt()
        names = ("target", "predicted", "low", "high", "std", "epistemic_std")
        assert [row[name] for name in names] == pytest.approx([float(value) for value in exact], rel=1e-4, abs=1e-5)


def test_the_least_certain_rows_have_the_largest_variance(targets):
    p, y = targets
    found = figures.target_examples(p, y)
    order = p.total.flatten().argsort(descending=True, stable=True).tolist()
    assert {row["row"] for row in found["uncertain"]} == set(order[:6])
    assert {row["row"] for row in found["certain"]} == set(order[-6:])
    epistemic = p.epistemic.flatten().argsort(descending=True, stable=True).tolist()
    assert [row["row"] for row in found["epistemic"]] == epistemic[:6]


def test_all_figures_are_json(classes, targets):
    bnn, x, y, p = classes
    for found in (lb.evaluate(bnn, (x, y), samples=4).figures, figures.figures_of(targets[0], *targets, {})):
        assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert math.isfinite(sum(map(sum, figures.confusion(p.mean, y))))
