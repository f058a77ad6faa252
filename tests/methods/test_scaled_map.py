"""The map between two scalings has the gradients of the naive expression, whatever surrounds it."""

from __future__ import annotations

import pytest
import torch
from torch import nn, Tensor
from torch.func import functional_call, vmap
from torch.utils.checkpoint import checkpoint

import leanbayes as lb
from leanbayes.methods import _scaled_map as scaled
from tests.contract.cases import LAYERS
from tests.methods.by_autograd import Comparison

MAPS = [layer for layer in LAYERS if layer.name.startswith(("linear", "conv"))]
METHODS = {
    "rank1": lb.Rank1(components=2),
    "input": lb.Rank1(components=2, factors="input", component_bias=False),
    "output": lb.Rank1(components=2, factors="output"),
    "points": lb.BatchEnsemble(components=2),
    "implicit": lb.ImplicitNodes(components=2),
}
PAIR = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.ReLU(inplace=True), nn.Conv2d(4, 5, 3, padding=1))

BOTH = Comparison(scaled)
gradients, assert_equal = BOTH.gradients, BOTH.assert_equal


@pytest.fixture
def calls(monkeypatch) -> list[object]:
    """Use the function for inputs of any size, and note its calls."""
    found: list[object] = []
    apply = scaled.apply

    def noted(linear: scaled.Map, *args: Tensor, safe: bool) -> Tensor:
        found.append(linear)
        return apply(linear, *args, safe=safe)

    monkeypatch.setattr(scaled, "pays", lambda x, r: True)
    monkeypatch.setattr(scaled, "apply", noted)
    return found


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("layer", MAPS, ids=lambda layer: layer.name)
def test_gradients_are_those_of_autograd(layer, method, calls):
    bnn = lb.convert(nn.Sequential(layer.make()), method).double()
    x = layer.inputs(6, torch.float64)
    assert_equal(bnn, x)
    assert calls or layer.name in ("conv2d_options", "conv2d_depthwise", "conv3d", "linear_transposed")


@pytest.mark.parametrize("many", [1, 2**62])
@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("given", ["sr", "s", "r", "srb", "rb", "sb"])
def test_gradients_and_their_gradients_by_differences(given, safe, many, monkeypatch):
    monkeypatch.setattr(scaled, "MANY", many)
    torch.manual_seed(0)
    linear = scaled.Convolution((2, 1), (1, 0), (1, 2), False, (0, 0), 2)
    x, weight = torch.randn(2, 4, 4, 4, dtype=torch.float64), torch.randn(6, 2, 3, 2, dtype=torch.float64)
    s = torch.randn(2, 4, 1, 1, dtype=torch.float64) if "s" in given else None
    r = torch.randn(2, 6, 1, 1, dtype=torch.float64) if "r" in given else None
    bias = torch.randn((1, 6, 1, 1) if "r" in given else (6,), dtype=torch.float64) if "b" in given else None
    tensors = [None if t is None else t.requires_grad_() for t in (x, weight, s, r, bias)]

    def function(*args: Tensor) -> Tensor:
        return scaled.apply(linear, *args, safe=safe)

    assert torch.autograd.gradcheck(function, tensors)
    assert torch.autograd.gradgradcheck(function, tensors)


def test_a_zero_factor_has_its_gradient(calls):
    bnn = lb.convert(nn.Sequential(nn.Conv2d(3, 4, 3, bias=False)), METHODS["points"]).double()
    with torch.no_grad():
        bnn[0].posterior.output.loc[:, 1] = 0.0
        bnn[0].posterior.input.loc[:, 2] = 0.0
    assert_equal(bnn, torch.randn(4, 3, 5, 5, dtype=torch.float64))
    assert (bnn[0].posterior.output.loc.grad[:, 1] != 0).all()
    assert calls


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_layers_may_be_recomputed(method, reentrant, calls):
    bnn = lb.convert(PAIR, method).double()
    x = torch.randn(4, 3, 6, 6, dtype=torch.float64)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = bnn

        def forward(self, x: Tensor) -> Tensor:
            return self.inner[1:](checkpoint(self.inner[0], x, use_reentrant=reentrant))

    net = Net()
    bnn[0].state.attach(net)
    assert_equal(bnn, x, call=net)
    assert calls


@pytest.mark.parametrize("act", [nn.ReLU(inplace=True), nn.LeakyReLU(0.3, inplace=True)], ids=["relu", "leaky"])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_the_next_layer_may_overwrite_the_output(method, act, calls):
    """Where a ReLU writes zeros the gradient is zero, too; a leaky one shows whether the old values are computed."""
    net = nn.Sequential(PAIR[0], act, PAIR[2])
    assert_equal(lb.convert(net, method).double(), torch.randn(4, 3, 6, 6, dtype=torch.float64))
    assert len(calls) == 2


def test_a_graph_may_be_used_twice(calls):
    bnn = lb.convert(PAIR, METHODS["rank1"]).double()
    loss = bnn(torch.randn(4, 3, 6, 6, dtype=torch.float64)).square().sum()
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in bnn.named_parameters()}
    loss.backward()
    torch.testing.assert_close(
        {name: p.grad for name, p in bnn.named_parameters()}, {n: 2 * g for n, g in once.items()}
    )


def test_frozen_weights_get_no_gradient(calls):
    bnn = lb.convert(PAIR, METHODS["rank1"])
    for name, p in bnn.named_parameters():
        p.requires_grad_("posterior.output" in name)
    found = gradients(bnn, torch.randn(4, 3, 6, 6), used=True)
    assert {name for name in found if "." in name} == {n for n, _ in bnn.named_parameters() if "posterior.output" in n}
    assert calls


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_bfloat16_is_about_as_close_to_float64_as_autograd(method, calls):
    smooth = nn.Sequential(PAIR[0], nn.Tanh(), PAIR[2])  # a ReLU would turn rounding into other gradients
    bnn, x = lb.convert(smooth, method), torch.randn(8, 3, 8, 8)
    exact = {name: g.clone() for name, g in gradients(bnn.double(), x.double(), used=False).items()}
    bnn.float()

    def half(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return bnn(x)

    def error(found: dict[str, Tensor]) -> dict[str, float]:
        return {name: float((g.double() - exact[name]).norm() / exact[name].norm()) for name, g in found.items()}

    ours, plain = (error(gradients(bnn, x, used=used, call=half)) for used in (True, False))
    assert calls
    for name in exact:
        assert ours[name] <= max(2 * plain[name], 0.03), (name, ours[name], plain[name])


def test_transforms_use_autograd(calls):
    net = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.Tanh(), nn.Conv2d(4, 5, 3, padding=1))
    bnn, x = lb.convert(net, METHODS["rank1"]), torch.randn(2, 4, 3, 6, 6)
    parameters = {name: p.detach() for name, p in bnn.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(bnn, parameters, (x,)).square().mean()

    with lb.draws(bnn, seed=0):
        each = vmap(torch.func.grad(loss), (None, 0))(parameters, x)
        alone = torch.func.grad(loss)(parameters, x[0])
    assert not calls
    for name, gradient in alone.items():
        torch.testing.assert_close(each[name][0], gradient, rtol=1e-4, atol=1e-5)


def test_small_inputs_use_autograd(monkeypatch):
    monkeypatch.setattr(scaled, "apply", lambda *args, **kwargs: pytest.fail("called"))
    lb.convert(PAIR, METHODS["rank1"])(torch.randn(4, 3, 6, 6)).sum().backward()


def test_the_function_is_for_large_inputs():
    small, large, r = torch.empty(2**18, 2), torch.empty(2**18, 4), torch.empty(2**18, 1)
    assert scaled.pays(large, r)
    assert not scaled.pays(small, r)
    assert not scaled.pays(large, None)  # on a CPU
    assert scaled.pays(large.to("meta"), None)


def test_nothing_is_kept_but_the_scaled_input(calls):
    """The unscaled output is no tensor of the graph; the output is kept by the layer after it."""
    bnn = lb.convert(nn.Sequential(nn.Conv2d(8, 8, 3, bias=False, padding=1)), METHODS["points"])
    x = torch.randn(16, 8, 32, 32, requires_grad=True)
    y = bnn(x)
    node = y.grad_fn
    assert type(node).__name__ == "_ScaledMapBackward"
    large = [t for t in node.saved_tensors if t is not None and t.numel() == x.numel()]
    assert len(large) == 2
    assert any(t.data_ptr() == x.data_ptr() for t in large)
    assert node.after.data_ptr() == y.data_ptr()
