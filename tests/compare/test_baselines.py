"""Rows without a network: means, linear models and boosted trees, against scikit-learn and closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import cross_val_predict, KFold

from leanbayes.compare.baselines import BASELINES, Fitted
from leanbayes.compare.row_training import Held
from leanbayes.metrics import interval_coverage, nll


def line(rows=400, noise=0.3):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 3, generator=generator)
    return x, (x @ torch.tensor([[1.0], [-2.0], [0.5]])) + noise * torch.randn(rows, 1, generator=generator)


def blobs(rows=300):
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(rows) % 3
    return torch.randn(rows, 2, generator=generator) + 2.0 * torch.eye(3)[y][:, :2], y


def test_the_mean_is_the_distribution_of_the_training_targets():
    x, y = line()
    p = BASELINES["mean"](x, y, 0, 0).predict(x[:5])
    assert torch.allclose(p.mean, y.mean(0).expand(5, 1), atol=1e-6)
    assert torch.allclose(p.total, y.var(0).expand(5, 1), atol=1e-5)
    x, y = blobs()
    p = BASELINES["mean"](x, y, 4, 0).predict(x[:2])  # the fourth class was never seen
    assert torch.allclose(p.mean[0], torch.tensor([101, 101, 101, 1]) / 304)


def test_the_noise_of_a_linear_model_is_its_error_on_rows_it_was_not_fitted_on():
    x, y = line()
    p = BASELINES["linear"](x, y, 0, 0).predict(x)
    residuals = cross_val_predict(LinearRegression(), x, y, cv=KFold(5, shuffle=True, random_state=0)) - y.numpy()
    spread = np.mean(residuals**2)  # other folds: the error of a variance from 400 rows is 7 %
    assert float(p.total[0]) == pytest.approx(spread, rel=0.05)
    assert float(interval_coverage(*p.interval(0.95), y)) == pytest.approx(0.95, abs=0.03)


@pytest.mark.parametrize("name", ["linear", "boosting"])
def test_models_of_classes_beat_the_shares(name):
    x, y = blobs()
    fitted = BASELINES[name](x[:200], y[:200], 3, 0)
    probabilities = fitted.predict(x[200:]).mean
    assert torch.allclose(probabilities.sum(1), torch.ones(100), atol=1e-5)
    assert nll(probabilities, y[200:]) < nll(BASELINES["mean"](x[:200], y[:200], 3, 0).predict(x[200:]).mean, y[200:])
    assert (fitted.temperature is None) == (name == "linear")


def test_boosting_of_real_targets_has_an_interval_by_quantiles():
    x, y = line(600)
    fitted: Fitted = BASELINES["boosting"](x[:400], y[:400], 0, 0)
    assert fitted.quantiles is not None
    low, high = fitted.quantiles(x[400:])
    assert (low <= high).all()
    assert 0.8 < float(interval_coverage(low, high, y[400:])) <= 1
    assert fitted.predict(x[400:]).epistemic.abs().max() == 0


def test_a_class_with_few_rows_and_one_without_rows_are_allowed():
    x, y = blobs(60)
    y = torch.where((y == 2) & (torch.arange(60) > 6), 0, y)  # two rows of class 2
    for name in BASELINES:
        assert BASELINES[name](x, y, 4, 0).predict(x).mean.shape == (60, 4)


def test_many_rows_hold_out_a_tenth():
    x, y = line(2100)
    assert float(BASELINES["linear"](x, y, 0, 0).predict(x).total[0]) == pytest.approx(0.09, rel=0.3)


@pytest.mark.parametrize("name", list(BASELINES))
def test_the_same_seed_gives_the_same_prediction(name):
    x, y = blobs(90)
    first, again = (BASELINES[name](x, y, 3, 5).predict(x).mean for _ in range(2))
    assert torch.equal(first, again)


def patients(rows, visits=10):
    """Return inputs by which trees recognise a patient, targets that are the patient's own, and the patients."""
    generator = torch.Generator().manual_seed(2)
    who = torch.arange(rows) // visits
    level, mark = (torch.randn(len(who.unique()), generator=generator)[who] for _ in range(2))
    return torch.stack([mark, torch.randn(rows, generator=generator)], 1), level[:, None], who


@pytest.mark.parametrize("rows", [400, 2400])
def test_noise_and_temperature_come_from_whole_groups(rows):
    x, y, who = patients(2 * rows)
    train, test = slice(0, rows), slice(rows, None)
    for held, fair in ((Held(0.1), False), (Held(0.1, who[train]), True)):
        p = BASELINES["boosting"](x[train], y[train], 0, 0, held=held).predict(x[test])
        assert (float(p.total[0]) > 0.6 * float((p.mean - y[test]).square().mean())) == fair
        fitted = BASELINES["boosting"](x[train], (y[train, 0] > 0).long(), 2, 0, held=held)
        assert (fitted.temperature > 2) == fair


def test_groups_that_hold_all_rows_of_a_class_are_split():
    x, y = blobs(60)
    for name in BASELINES:
        assert BASELINES[name](x, y, 3, 0, held=Held(0.1, y)).predict(x).mean.shape == (60, 3)


@pytest.mark.parametrize("rows", [60, 2400])
def test_one_group_or_time_does_not_split_rows(rows):
    x, y = line(rows)
    one = torch.zeros(rows, dtype=torch.int64)
    for name in BASELINES:
        found = BASELINES[name](x, y, 0, 0, held=Held(0.1, one, one)).predict(x)
        assert torch.equal(found.total, BASELINES[name](x, y, 0, 0).predict(x).total)


def test_a_class_of_the_latest_rows_alone_is_fitted():
    x, y = blobs(2400)
    order = y.argsort()
    found = BASELINES["boosting"](x[order], y[order], 3, 0, held=Held(0.1, time=torch.arange(2400) // 800))
    assert found.temperature < 2


def test_the_latest_of_many_rows_give_the_noise():
    x, y = line(2400)
    y[-240:] += 3
    time = torch.arange(len(y))
    random, latest = (BASELINES["linear"](x, y, 0, 0, held=Held(0.1, time=t)).predict(x) for t in (None, time))
    assert float(latest.total[0]) > 4 * float(random.total[0])
