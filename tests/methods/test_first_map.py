"""The first convolution has the gradients of the naive expression, without a gradient of the images."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import leanbayes as lb
from leanbayes.methods import _first_map as first

LAYERS = {
    "plain": nn.Conv2d(3, 4, 3, bias=False),
    "options": nn.Conv2d(3, 5, (3, 2), stride=2, padding=(1, 2), dilation=(1, 2), bias=False),
    "large": nn.Conv2d(3, 4, 7, stride=2, padding=3, bias=False),
}


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_gradients_are_those_of_autograd(layer, rows, order):
    torch.manual_seed(0)
    x = torch.randn(6, 3, 11, 9, dtype=torch.float64).contiguous(memory_format=order)
    s = torch.randn(rows, 3, 1, 1, dtype=torch.float64, requires_grad=True)
    weight = layer.weight.detach().double().requires_grad_()
    settings = layer.stride, layer.padding, layer.dilation
    expected = nn.functional.conv2d(x * s, weight, None, *settings)
    y = first.apply(x, s, weight, layer)
    torch.testing.assert_close(y, expected)
    along = torch.randn_like(y)
    wanted = torch.autograd.grad((expected * along).sum(), (s, weight))
    torch.testing.assert_close(torch.autograd.grad((y * along).sum(), (s, weight)), wanted, rtol=1e-6, atol=1e-6)
    assert torch.autograd.gradgradcheck(lambda s, w: first.apply(x[:2, :, :7, :6], s[:2], w, layer), (s, weight))


@pytest.mark.parametrize("method", [lb.Rank1(), lb.Rank1(factors="input"), lb.ImplicitNodes()], ids=str)
def test_networks_train_the_same_with_it(method, monkeypatch):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)).double()
    bnn, x = lb.convert(net, method), torch.randn(8, 3, 9, 9, dtype=torch.float64)
    found, calls = [], []
    own = first.apply
    monkeypatch.setattr(first, "apply", lambda *args: calls.append(1) or own(*args))
    for kind in ("cpu", "meta"):  # as if it were on a GPU, then not
        monkeypatch.setattr(first, "DEVICE", kind)
        bnn.zero_grad()
        torch.manual_seed(1)
        bnn(x).square().sum().backward()
        found.append({name: p.grad.clone() for name, p in bnn.named_parameters()})
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-8)
    assert len(calls) == 1  # the first layer alone
    bnn(x.requires_grad_()).sum().backward()
    assert len(calls) == 1
    assert x.grad is not None
