"""Uncertainties of one network at different widths: correlations, the choice of a width, the heat map."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import leanbayes as lb
from leanbayes.slim.narrowing import Correlation, pearson, TENTHS

SOME = torch.rand(3, 5)


@pytest.fixture
def bnn() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3))
    return lb.convert(net, lb.NestedDropout(groups=6)).eval()


def with_last_column(values: list[float]) -> Correlation:
    """Return a record of tenths whose correlations with the full width are given."""
    matrix = torch.eye(len(values), dtype=torch.float64)
    matrix[:, -1] = matrix[-1] = torch.tensor(values, dtype=torch.float64)
    return Correlation(TENTHS[-len(values) :], SOME, matrix)


def test_correlations_are_those_of_numpy(bnn):
    x = torch.randn(50, 4)
    found = lb.slim.correlate(bnn, x, (0.2, 0.5, 1.0), samples=3)
    assert found.widths == (0.2, 0.5, 1.0)
    assert found.uncertainty.shape == (3, 50)
    np.testing.assert_allclose(found.matrix.numpy(), np.corrcoef(found.uncertainty.numpy()), atol=1e-12)


def test_uncertainty_is_the_entropy_of_the_mean_prediction(bnn):
    x = torch.randn(20, 4)
    found = lb.slim.correlate(bnn, x, (0.5, 1.0), samples=4, seed=7)
    for width, row in zip(found.widths, found.uncertainty, strict=True):
        mean = lb.predict(lb.slim.narrow(bnn, width), x, samples=4, seed=7).samples.double().mean(0)
        torch.testing.assert_close(row, -(mean * mean.log()).sum(1), atol=1e-5, rtol=1e-5)


def test_the_default_is_all_tenths_and_the_model_stays(bnn):
    before = {name: tensor.clone() for name, tensor in bnn.state_dict().items()}
    found = lb.slim.correlate(bnn, torch.randn(10, 4), samples=2)
    assert found.matrix.shape == (10, 10)
    assert found.widths[0] == 0.1
    assert found.widths[-1] == 1.0
    assert all(torch.equal(before[name], tensor) for name, tensor in bnn.state_dict().items())


def test_a_loader_gives_what_its_rows_give(bnn):
    x = torch.randn(30, 4)
    loader = DataLoader(TensorDataset(x, torch.zeros(30)), batch_size=8)
    whole, parts = (lb.slim.correlate(bnn, given, (0.5, 1.0), samples=2) for given in (x, loader))
    torch.testing.assert_close(whole.uncertainty, parts.uncertainty, atol=1e-6, rtol=1e-6)


def test_norms_are_collected_anew_at_every_width():
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    bnn = lb.convert(net, lb.NestedDropout(groups=4)).eval()
    x = torch.randn(64, 4) * 3 + 1
    plain, anew = (lb.slim.correlate(bnn, x, (0.5, 1.0), data=data, samples=2) for data in (None, x))
    assert not torch.allclose(plain.uncertainty, anew.uncertainty)


def test_several_outputs_of_a_row_are_averaged():
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    bnn = lb.convert(net, lb.NestedDropout(groups=4), likelihood=lb.Gaussian())
    x = torch.randn(9, 4)
    found = lb.slim.correlate(bnn, x, (0.5, 1.0), samples=3)
    wanted = lb.predict(lb.slim.narrow(bnn, 1.0), x, samples=3).total.double().mean(1)
    torch.testing.assert_close(found.uncertainty[1], wanted)


def test_a_constant_uncertainty_is_correlated_with_nothing():
    rows = torch.tensor([[1.0, 2.0, 3.0], [0.5, 0.5, 0.5], [2.0, 4.0, 6.0]], dtype=torch.float64)
    wanted = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(pearson(rows), wanted)
    assert Correlation((0.1, 0.2, 1.0), rows, pearson(rows)).smallest() == 1.0


def test_one_width_is_correlated_with_itself():
    assert torch.equal(pearson(torch.rand(1, 4)), torch.ones(1, 1))


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([0.2, 0.91, 0.95, 1.0], 0.8),
        ([0.95, 0.5, 0.95, 1.0], 0.9),  # high again further down does not count
        ([0.95, 0.9, 0.95, 1.0], 0.7),  # at the threshold is enough
        ([0.0, 0.0, 0.0, 1.0], 1.0),
        ([1.0], 1.0),
    ],
)
def test_smallest_is_where_an_unbroken_run_begins(values, wanted):
    assert with_last_column(values).smallest(0.9) == wanted


def test_a_lower_threshold_takes_a_smaller_width():
    found = with_last_column([0.3, 0.6, 0.8, 1.0])
    assert [found.smallest(threshold) for threshold in (0.9, 0.7, 0.5, 0.1)] == [1.0, 0.9, 0.8, 0.7]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_heat_map_is_a_file(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"map.{suffix}"
    with_last_column([0.2, -0.5, 0.95, 1.0]).plot(path)
    assert path.stat().st_size > 1000
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("widths", [(), (0.5, 0.25), (0.5, 0.5), (0.5, 1)])
def test_widths_must_rise_and_be_of_one_kind(bnn, widths):
    with pytest.raises(ValueError, match="rising widths"):
        lb.slim.correlate(bnn, torch.randn(4, 4), widths)


def test_widths_may_be_an_array(bnn):
    x = torch.randn(10, 4)
    for widths in (np.array([0.5, 1.0]), np.arange(1, 7, 2)):
        found = lb.slim.correlate(bnn, x, widths, samples=2)
        assert torch.equal(found.matrix, lb.slim.correlate(bnn, x, widths.tolist(), samples=2).matrix)
        assert found.smallest() in widths


def test_wrong_input_says_what_was_expected(bnn):
    with pytest.raises(ValueError, match="at least two inputs"):
        lb.slim.correlate(bnn, torch.randn(1, 4), (0.5, 1.0))
    with pytest.raises(TypeError, match="iterator"):
        lb.slim.correlate(bnn, iter([torch.randn(4, 4)]), (0.5, 1.0))
    with pytest.raises(ValueError, match="threshold"):
        with_last_column([0.5, 1.0]).smallest(1.5)
