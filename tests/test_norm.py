"""`update_norm` on inputs that are no single tensor."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

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


@pytest.mark.parametrize("data", [[], iter([]), (A[:0], B[:0])], ids=["list", "iterator", "rows"])
def test_data_without_rows_are_refused_and_the_statistics_stay(data):
    net = network()
    lb.update_norm(net, {"a": A, "b": B})
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    with pytest.raises(ValueError, match="expected rows to collect the statistics of norms over, got none"):
        lb.update_norm(net, [(data, None)] if isinstance(data, tuple) else data)
    with pytest.raises(ValueError, match="expected rows"):
        lb.update_norm(net, [((A, B), None)], batches=0)
    with pytest.raises(ValueError, match="4 features"):
        lb.update_norm(net, [((A, B), None), ((A[:, :2], B[:, :2]), None)])
    assert all(torch.equal(buffer, before[name]) for name, buffer in net.named_buffers())


def test_an_iterator_serves_one_width():
    bnn, batches = lb.convert(network(), lb.NestedDropout(groups=4)), iter([((A, B), None)])
    with pytest.raises(ValueError, match="an iterator can be read only once"):
        lb.slim.widths(bnn, ((A, B), torch.zeros(32).long()), [0.5, 1.0], data=batches)
