"""Exchanging the activation after a layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import leanbayes as lb


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))


def test_the_first_activation_behind_a_layer_is_exchanged():
    net = network()
    other = lb.layers.activate(net, "0", nn.Softplus)
    assert isinstance(net[2], nn.ReLU)
    assert isinstance(other[2], nn.Softplus)
    assert isinstance(other[3][1], nn.Tanh)
    inner = lb.layers.activate(net, lb.layers.last(nn.Linear), lb.layers.Abs)
    assert isinstance(inner[3][1], lb.layers.Abs)
    x = torch.randn(5, 3)
    torch.testing.assert_close(inner[:3](x), net[:3](x))
    assert inner(x).min() >= 0


def test_converted_networks_are_taken_too():
    bnn = lb.convert(network(), lb.Rank1())
    other = lb.layers.activate(bnn, "0", lb.layers.Abs)
    assert isinstance(other[2], lb.layers.Abs)
    assert lb.predict(other, torch.randn(2, 3), samples=3).mean.shape == (2, 4)


def test_what_cannot_be_done_is_said():
    with pytest.raises(ValueError, match="no activation module follows layer '0'"):
        lb.layers.activate(nn.Sequential(nn.Linear(2, 2)), "0", nn.Softplus)
    shared = nn.ReLU()
    with pytest.raises(ValueError, match="the activation '1' after layer '0' also serves as 3"):
        lb.layers.activate(nn.Sequential(nn.Linear(2, 2), shared, nn.Linear(2, 2), shared), "0", nn.Softplus)
    with pytest.raises(ValueError, match="matches no layer"):
        lb.layers.activate(network(), "head", nn.Softplus)
    for where in (lb.layers.first(nn.Conv2d), lambda path, layer: False):
        with pytest.raises(ValueError, match=r"expected where to pick a layer .* which picks none"):
            lb.layers.activate(network(), where, nn.Softplus)
