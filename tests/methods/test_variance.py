"""Variance layers: moments in closed form, what alpha covers, the divergences, and numbers that stay finite."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import leanbayes as lb
from leanbayes.distributions.log_uniform import ard_kl, log_uniform_kl, student_kl

X = torch.randn(1, 6, generator=torch.Generator().manual_seed(1))
KINDS = ("layer", "neuron", "weight", "additive")


def linear(**fields) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5))
    return net, lb.convert(net, lb.VarianceLayers(**fields))


@pytest.mark.parametrize("parameterization", KINDS)
def test_pre_activations_have_the_moments_of_the_weights(parameterization):
    """E b = M x + c and Var b = sum_i sigma_ij^2 x_i^2 (eq. 8), by noise per row and by sampled weights."""
    net, bnn = linear(parameterization=parameterization, init_log_alpha=0.5)
    layer = bnn[0]
    mean, variance = net(X)[0], (layer.scales.square() @ X[0].square()).detach()
    torch.manual_seed(3)
    by_row = bnn(X.expand(20_000, -1)).detach()
    by_weight = lb.predict(bnn, X[:1], lb.Gaussian(), samples=3000).samples[:, 0]
    for found in (by_row, by_weight):
        n = len(found)
        assert ((found.mean(0) - mean).abs() < 4.5 * (variance / n).sqrt()).all()
        assert ((found.var(0) / variance - 1).abs() < 4.5 * math.sqrt(2 / n)).all()


def test_tied_noise_is_alpha_times_the_square_of_the_mean():
    for parameterization, shape in (("layer", ()), ("neuron", (5,)), ("weight", (5, 6))):
        net, bnn = linear(parameterization=parameterization)
        layer = bnn[0]
        assert layer.posterior.log_alpha.shape == shape
        with torch.no_grad():
            layer.posterior.log_alpha.copy_(torch.randn(shape))
        alpha = layer.posterior.log_alpha.exp()
        expected = (alpha[:, None] if parameterization == "neuron" else alpha) * net[0].weight.square()
        torch.testing.assert_close(layer.scales.square(), expected)


def test_neurons_of_grouped_transposed_convolutions_have_their_own_alpha():
    torch.manual_seed(0)
    net = nn.ConvTranspose2d(4, 6, 2, groups=2, bias=False)
    bnn = lb.convert(nn.Sequential(net), lb.VarianceLayers(parameterization="neuron"))
    layer = bnn[0]
    with torch.no_grad():
        layer.posterior.log_alpha.copy_(torch.arange(6.0))
    x = torch.randn(1, 4, 3, 3)
    # Scaling every output channel by sqrt(alpha) is scaling the weights that lead to it.
    expected = net(x) * (0.5 * torch.arange(6.0)).exp().view(1, -1, 1, 1)
    torch.testing.assert_close(layer.linear(x, layer.scales, ()), expected)


@pytest.mark.parametrize("parameterization", KINDS)
@pytest.mark.parametrize("prior", ["log_uniform", "ard"])
def test_a_divergence_counts_once_for_every_weight(parameterization, prior):
    _, bnn = linear(parameterization=parameterization, prior=prior, init_log_alpha=-1.0)
    layer = bnn[0]
    each = {"log_uniform": log_uniform_kl, "ard": ard_kl}[prior]
    log_alpha = (layer.scales.square() / layer.base.weight.square()).log()
    assert lb.kl(bnn).item() == pytest.approx(each(log_alpha).sum().item(), rel=1e-4)


def test_students_divergence_is_that_of_every_weight():
    _, bnn = linear(prior="student", student_nu=2.0, init_log_alpha=0.0)
    layer = bnn[0]
    expected = student_kl(layer.base.weight, layer.scales.abs(), 2.0).sum()
    assert lb.kl(bnn).item() == pytest.approx(expected.item(), rel=1e-5)


def zero_mean(net, **fields) -> nn.Module:
    with pytest.warns(UserWarning, match="discards the function of a trained network"):
        return lb.convert(net, lb.VarianceLayers(parameterization="zero_mean", **fields))


def test_zero_mean_layers_take_the_weights_as_deviations():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5))
    bnn = zero_mean(net)
    assert lb.summary(bnn).extra_parameters == 0
    assert lb.kl(bnn).item() == 0
    torch.testing.assert_close(lb.mean(bnn)(X), net[0].bias[None])
    found = bnn(X.expand(20_000, -1)).detach() - net[0].bias
    variance = net[0].weight.square() @ X[0].square()
    assert (found.mean(0).abs() < 4.5 * (variance / 20_000).sqrt()).all()
    assert ((found.var(0) / variance - 1).abs() < 4.5 * math.sqrt(2 / 20_000)).all()
    bnn(X).square().sum().backward()
    assert bnn[0].base.weight.grad.abs().sum() > 0
    p = lb.predict(bnn, X, samples=4)
    torch.testing.assert_close(lb.draw(bnn, index=2)(X).softmax(1), p.samples[2])


def test_zero_mean_layers_keep_the_dtype_of_autocast():
    bnn = zero_mean(nn.Sequential(nn.Linear(6, 5)))
    with torch.autocast("cpu", torch.bfloat16):
        assert bnn(X).dtype == torch.bfloat16
    assert bnn(X).dtype == torch.float32


def test_fixed_noise_is_not_trained():
    _, bnn = linear(learn=False, init_log_alpha=-1.0)
    assert lb.summary(bnn).extra_parameters == 0
    assert bnn[0].log_alpha.item() == -1.0
    state = bnn.state_dict()
    assert "0.posterior.log_alpha" in state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_noise_stays_finite(dtype):
    """log alpha at its limit of 20, forward, backward and steps."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    bnn = lb.convert(net, lb.VarianceLayers(init_log_alpha=20.0), where="0")
    optimizer = torch.optim.SGD(bnn.parameters(), lr=0.01)
    x, y = torch.randn(16, 6), torch.randint(3, (16,))
    for _ in range(200):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            outputs = bnn(x)
        loss = F.cross_entropy(outputs.float(), y) + lb.kl(bnn) / 1000
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(p.isfinite().all() for p in bnn.parameters())
    assert bnn[0].log_alpha <= 20


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ten_thousand_steps_stay_finite(dtype):
    torch.manual_seed(0)
    bnn = lb.convert(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
                     lb.VarianceLayers(init_log_alpha=20.0), where="0")  # fmt: skip
    optimizer = torch.optim.SGD(bnn.parameters(), lr=0.01)
    x, y = torch.randn(16, 6), torch.randint(3, (16,))
    for _ in range(10_000):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            outputs = bnn(x)
        optimizer.zero_grad()
        (F.cross_entropy(outputs.float(), y) + lb.kl(bnn) / 1000).backward()
        optimizer.step()
    assert all(p.isfinite().all() for p in bnn.parameters())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"parameterization": "row"}, "parameterization to be one of layer, neuron, weight, additive, zero_mean"),
        ({"prior": "normal"}, "prior to be one of log_uniform, ard, student"),
        ({"student_nu": 0.0}, "student_nu to be"),
        ({"init_log_alpha": 25.0}, "expected init_log_alpha from -20 to 20, got 25.0"),
    ],
)
def test_wrong_fields_say_what_was_expected(fields, message):
    with pytest.raises(ValueError, match=message):
        lb.VarianceLayers(**fields)


@pytest.mark.parametrize("prior", ["log_uniform", "ard", "student"])
@pytest.mark.parametrize("parameterization", ["layer", "neuron"])
def test_the_divergence_of_layers_is_the_sum_of_theirs(prior, parameterization):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3))
    bnn = lb.convert(net, lb.VarianceLayers(prior=prior, parameterization=parameterization), where="*")
    layers = [layer for _, layer in lb.stochastic_layers(bnn)]
    alphas = [layer.posterior.log_alpha for layer in layers]
    with torch.no_grad():
        for start, log_alpha in zip((-25.0, -1.0, 3.0), alphas, strict=True):
            log_alpha.copy_(start + torch.randn_like(log_alpha))
    together, alone = lb.kl(bnn), torch.stack([layer.kl() for layer in layers]).sum()
    torch.testing.assert_close(together, alone)
    torch.testing.assert_close(torch.autograd.grad(together, alphas), torch.autograd.grad(alone, alphas))
    assert len(layers) == 3
