"""`update_norm` on inputs that are no single tensor."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import leanbayes as lb

A, B = torch.randn(2, 32, 4, generator=torch.Generator().manual_seed(0)) + 3


class Sum(nn.Module):
    """Adds two inputs up, then normalises and maps them."""

    def __init__(self):
        super().__init__()
        self.first, self.hidden = nn.Linear(4, 8), nn.Linear(8, 8)
        self.norm, self.last = nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, a, b):
        return self.last(self.norm(self.hidden(self.first(a + b).relu())).relu())


def network():
    torch.manual_seed(1)
    return Sum()


@pytest.mark.parametrize(
    "data",
    [
        {"a": A, "b": B},
        ({"a": A, "b": B}, torch.zeros(32)),
        [{"a": A, "b": B}],
        ((A, B), torch.zeros(32)),
        DataLoader([((a, b), 0) for a, b in zip(A, B, strict=True)], batch_size=32),
    ],
    ids=["mapping", "pair", "mappings", "tuple", "loader"],
)
def test_several_inputs_are_one_batch(data):
    net = network()
    lb.update_norm(net, data)
    torch.testing.assert_close(net.norm.running_mean, net.hidden(net.first(A + B).relu()).mean(0))


def test_narrow_networks_take_a_mapping():
    bnn, inputs = lb.convert(network(), lb.NestedDropout(groups=4)), {"a": A, "b": B}
    for cut in (lb.slim.extract, lb.slim.narrow):
        torch.manual_seed(2)
        found = cut(bnn, 0.5, data=inputs)
        torch.manual_seed(2)
        assert torch.equal(found.norm.running_mean, cut(bnn, 0.5, data=[(inputs, None)]).norm.running_mean)


@pytest.mark.parametrize("data", [[], iter([]), DataLoader(TensorDataset(A, B), batch_size=64, drop_last=True)])
def test_without_a_batch_the_statistics_stay(data):
    net = network()
    lb.update_norm(net, {"a": A, "b": B})
    before = net.norm.running_mean.clone()
    for options in ({"data": data}, {"data": [{"a": A, "b": B}], "batches": 0}):
        with pytest.raises(ValueError, match="expected at least one batch to take statistics of, got none"):
            lb.update_norm(net, **options)
    assert torch.equal(net.norm.running_mean, before)
