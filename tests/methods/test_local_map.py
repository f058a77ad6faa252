"""Sampled pre-activations in one function have the values and gradients of autograd, whatever surrounds them."""

from __future__ import annotations

import pytest
import torch
from torch import nn, Tensor
from torch.func import functional_call, vmap
from torch.utils.checkpoint import checkpoint

import leanbayes as lb
from leanbayes.methods import _gaussian as gaussian
from leanbayes.methods import _local_map as local
from leanbayes.methods._scaled_map import Convolution
from tests.contract.cases import LAYERS
from tests.methods.by_autograd import Comparison

MAPS = [layer for layer in LAYERS if layer.name.startswith(("linear", "conv"))]
METHODS = {
    "mean_field": lb.MeanField(init_std=0.1),
    "variance": lb.VarianceLayers(init_log_alpha=-1.0),
    "neuron": lb.VarianceLayers(parameterization="neuron", init_log_alpha=-1.0),
}
PAIR = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.ReLU(inplace=True), nn.Conv2d(4, 5, 3, padding=1))

BOTH = Comparison(gaussian)
gradients, assert_equal = BOTH.gradients, BOTH.assert_equal


@pytest.fixture
def calls(monkeypatch) -> list[object]:
    """Use the function for inputs of any size, in pieces of 16 numbers, and note its calls."""
    found: list[object] = []
    apply = local.apply

    def noted(linear: object, *args: object) -> Tensor:
        found.append(linear)
        return apply(linear, *args)

    monkeypatch.setattr(local, "PIECE", 16)
    monkeypatch.setattr(gaussian, "pays", lambda x, weight: True)
    monkeypatch.setattr(gaussian, "apply", noted)
    return found


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("layer", MAPS, ids=lambda layer: layer.name)
def test_gradients_are_those_of_autograd(layer, method, calls):
    bnn = lb.convert(nn.Sequential(layer.make()), method).double()
    assert_equal(bnn, layer.inputs(6, torch.float64))
    assert calls or layer.name in ("conv2d_options", "conv2d_depthwise", "conv3d", "linear_transposed")


@pytest.mark.parametrize("biased", [True, False])
def test_gradients_and_their_gradients_by_differences(biased):
    torch.manual_seed(0)
    linear = Convolution((2, 1), (1, 0), (1, 2), False, (0, 0), 2)
    x, means = torch.randn(2, 4, 4, 4, dtype=torch.float64), torch.randn(6, 2, 3, 2, dtype=torch.float64)
    bias = torch.randn(6, dtype=torch.float64).requires_grad_() if biased else None
    variances = torch.rand_like(means) + 0.1

    def function(*args: Tensor) -> Tensor:
        return local.apply(linear, *args, lambda z: torch.Generator().manual_seed(z.numel()))

    given = (x.requires_grad_(), means.requires_grad_(), variances.requires_grad_(), bias)
    assert torch.autograd.gradcheck(function, given)
    assert torch.autograd.gradgradcheck(function, given)


@pytest.mark.parametrize("size", [1, 15, 16, 17, 47, 48, 49, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_of_pieces_is_that_of_the_whole(size, dtype, monkeypatch):
    monkeypatch.setattr(local, "PIECE", 32)
    drawn, generator = torch.empty(size, dtype=dtype), torch.Generator().manual_seed(1)
    for piece in local._pieces(drawn):
        local._draw(piece, generator)
    assert torch.equal(drawn, torch.randn(size, generator=torch.Generator().manual_seed(1)).to(dtype))


@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_may_be_recomputed(reentrant, calls):
    bnn = lb.convert(PAIR, METHODS["mean_field"]).double()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = bnn

        def forward(self, x: Tensor) -> Tensor:
            return self.inner[1:](checkpoint(self.inner[0], x, use_reentrant=reentrant))

    net = Net()
    bnn[0].state.attach(net)
    assert_equal(bnn, torch.randn(4, 3, 6, 6, dtype=torch.float64), call=net)
    assert len(calls) == (2 if reentrant else 3)  # the first pass of a reentrant region has no gradients


def test_a_graph_may_be_used_twice(calls):
    bnn = lb.convert(PAIR, METHODS["mean_field"]).double()
    loss = bnn(torch.randn(4, 3, 6, 6, dtype=torch.float64)).square().sum()
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in bnn.named_parameters()}
    loss.backward()
    torch.testing.assert_close(
        {name: p.grad for name, p in bnn.named_parameters()}, {n: 2 * g for n, g in once.items()}
    )
    assert len(calls) == 2


@pytest.mark.parametrize("trained", ["base.weight", "posterior.rho", "base.bias"])
def test_frozen_parameters_get_no_gradient(trained, calls):
    bnn = lb.convert(PAIR, METHODS["mean_field"]).double()
    for name, p in bnn.named_parameters():
        p.requires_grad_(trained in name)
    x = torch.randn(4, 3, 6, 6, dtype=torch.float64)
    assert {n for n in gradients(bnn, x, used=True) if "." in n} == {
        n for n, _ in bnn.named_parameters() if trained in n
    }
    assert_equal(bnn, x)
    assert calls


def test_large_inputs_keep_their_values_within_rounding(monkeypatch):
    bnn, x = lb.convert(PAIR[:1], METHODS["mean_field"]), torch.randn(32, 3, 34, 34)
    found = []
    for few in (local.FEW, 2**62):
        monkeypatch.setattr(local, "FEW", few)
        torch.manual_seed(5)
        found.append(bnn(x))
    assert [type(z.grad_fn).__name__ for z in found] == ["_LocalMapBackward", "AddcmulBackward0"]
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-7)


def test_a_named_pass_has_the_noise_of_its_name(calls):
    bnn = lb.convert(PAIR, METHODS["mean_field"])
    x = torch.randn(4, 3, 6, 6)
    with lb.draws(bnn, seed=1, index=2, shared=False):
        once, again = bnn(x), bnn(x)
        with torch.no_grad():
            plain = bnn(x)  # autograd's expression
    assert torch.equal(once, again)
    torch.testing.assert_close(once, plain)
    assert len(calls) == 4


def test_other_passes_use_autograd(calls, monkeypatch):
    bnn, x = lb.convert(PAIR, METHODS["mean_field"]), torch.randn(4, 3, 6, 6)
    with torch.no_grad():
        bnn(x)
    with torch.autocast("cpu", torch.bfloat16):
        bnn(x).sum().backward()
    parameters = {name: p.detach() for name, p in bnn.named_parameters()}
    with lb.draws(bnn, seed=0, shared=False):
        vmap(lambda x: functional_call(bnn, parameters, (x,)), randomness="same")(x[None])
    assert not calls
    monkeypatch.setattr(gaussian, "pays", local.pays)
    bnn(x).sum().backward()
    assert not calls


def test_the_function_is_for_large_dense_inputs_on_a_cpu():
    weight, large = torch.empty(4, 3, 2, 2), torch.empty(2**8, 4, 8, 8)
    assert local.pays(large, weight)
    assert not local.pays(large[:-1], weight)
    assert not local.pays(large.to(memory_format=torch.channels_last), weight)
    assert not local.pays(large, weight.to(memory_format=torch.channels_last))
    assert not local.pays(large.to("meta"), weight)


def test_three_activations_are_kept(calls):
    bnn = lb.convert(nn.Sequential(nn.Conv2d(8, 8, 3, bias=False, padding=1)), METHODS["mean_field"])
    x = torch.randn(16, 8, 32, 32, requires_grad=True)
    y = bnn(x)
    large = [t for t in y.grad_fn.saved_tensors if t is not None and t.numel() == x.numel()]
    assert len(large) == 3
    assert any(t.data_ptr() == x.data_ptr() for t in large)
    assert calls
