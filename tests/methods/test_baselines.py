"""MC dropout, DropConnect and mean field: moments in closed form, and where their noise goes."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import nn

import leanbayes as lb
from leanbayes.distributions.assignment import pick
from leanbayes.distributions.random import standard, uniforms

X = torch.randn(1, 6, generator=torch.Generator().manual_seed(1))


def test_uniforms_from_seeds_are_uniform_and_independent():
    seeds = standard("seed", (20_000, 1), torch.device("cpu"), torch.Generator().manual_seed(0))
    u = uniforms(seeds, torch.zeros(1, 32))
    assert stats.kstest(u.flatten().numpy(), "uniform").pvalue > 1e-3
    between_columns, between_rows = torch.corrcoef(u.T), torch.corrcoef(u[:300])
    for correlation, n in ((between_columns, 20_000), (between_rows, 32)):
        off = correlation[~torch.eye(len(correlation), dtype=torch.bool)]
        assert off.std() * n**0.5 == pytest.approx(1, abs=0.1)


def test_pick_gives_each_component_its_share():
    u = torch.rand(200_000, generator=torch.Generator().manual_seed(0))
    index = pick(u, (0.2, 0.5, 0.3))
    for k, share in enumerate((0.2, 0.5, 0.3)):
        assert (index == k).double().mean().item() == pytest.approx(share, abs=4 * math.sqrt(share / 200_000))
    assert pick(torch.tensor([0.0, 0.1, 0.999]), (0.1, 0.9)).tolist() == [0, 1, 1]


def test_channel_masks_scale_so_that_the_mean_stays():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    bnn = lb.convert(net, lb.MCDropout(rate=0.25))
    assert [path for path, _ in lb.stochastic_layers(bnn)] == ["0"]  # the output layer is left alone
    hidden = torch.stack([lb.draw(bnn, index=i)[0](X)[0] for i in range(600)])
    values = torch.stack([torch.zeros(5), net[0](X)[0] / 0.75])
    assert all(torch.isclose(hidden, value, atol=1e-6).any(0).all() for value in values)
    error = (0.25 / 0.75) ** 0.5 * net[0](X)[0].abs() / 600**0.5
    assert ((hidden.mean(0) - net[0](X)[0]).abs() < 5 * error).all()


def test_own_dropout_layers_become_stochastic_at_their_own_rate():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 3), nn.Dropout(0.0)).eval()
    bnn = lb.convert(net, lb.MCDropout(rate=0.9))
    assert [path for path, _ in lb.stochastic_layers(bnn)] == ["2"]
    assert torch.equal(lb.mean(bnn)(X), net(X))
    p = lb.predict(bnn, X, samples=64)
    assert p.epistemic.item() > 0
    plain = lb.draw(bnn, seed=0, index=5)
    torch.testing.assert_close(plain(X).softmax(1), p.samples[5], atol=1e-6, rtol=1e-5)
    assert not any(type(m).__module__.startswith("leanbayes") for m in plain.modules())
    exported = torch.export.export(plain, (X,)).module()
    torch.testing.assert_close(exported(X), plain(X))


def test_dropconnect_moments_over_draws():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5))
    bnn = lb.convert(net, lb.DropConnect(rate=0.3))
    n = 4000
    y = lb.predict(bnn, X[:1], lb.Gaussian(), samples=n).samples[:, 0].double()
    variance = (0.3 / 0.7) * (net[0].weight * X).square().sum(1).double()
    assert ((y.mean(0) - net(X)[0]).abs() < 5 * (variance / n).sqrt()).all()
    fourth = (y - y.mean(0)).pow(4).mean(0)
    assert ((y.var(0) - variance).abs() < 5 * ((fourth - variance.square()) / n).sqrt()).all()


@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_mean_field_pre_activations_have_the_closed_form_variance(estimator):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5))
    bnn = lb.convert(net, lb.MeanField(init_std=0.2, estimator=estimator))
    n = 6000
    with torch.no_grad():
        y = torch.cat([bnn(X.expand(2, -1)) for _ in range(n // 2)]).double()
    variance = 0.04 * X.square().sum().double()
    # two rows of one Flipout pass share a matrix up to signs: count passes, not rows
    count = n if estimator == "local" else n / 2
    assert ((y.mean(0) - net(X)[0]).abs() < 5 * (variance / count).sqrt()).all()
    assert ((y.var(0) - variance).abs() < 5 * variance * (2 / count) ** 0.5).all()
    pairs = y.view(-1, 2, 5) - net(X)[0]
    correlation = (pairs[:, 0] * pairs[:, 1]).mean(0) / variance  # signs decorrelate the rows
    assert (correlation.abs() < 5 * (3 / (n / 2)) ** 0.5).all()


def test_one_weight_sample_per_batch_has_the_closed_form_moments():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5))
    bnn = lb.convert(net, lb.MeanField(init_std=0.2, estimator="weights"))
    n = 4000
    with torch.no_grad():
        y = torch.stack([bnn(X.expand(2, -1)) for _ in range(n)]).double()
    torch.testing.assert_close(y[:, 0], y[:, 1], rtol=0, atol=1e-6)  # rows share the weights
    variance = 0.04 * X.square().sum().double()
    assert ((y[:, 0].mean(0) - net(X)[0]).abs() < 5 * (variance / n).sqrt()).all()
    assert ((y[:, 0].var(0) - variance).abs() < 5 * variance * (2 / n) ** 0.5).all()


def test_one_weight_sample_per_batch_has_the_gradient_of_the_others_on_average_and_more_variance():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    x, y, n = torch.randn(32, 6), torch.randint(3, (32,)), 1500
    means, variances = {}, {}
    for estimator in ("local", "weights"):
        bnn = lb.convert(net, lb.MeanField(init_std=0.3, estimator=estimator))
        found = []
        for _ in range(n):
            bnn.zero_grad()
            nn.functional.cross_entropy(bnn(x), y).backward()
            found.append(torch.cat([p.grad.flatten() for p in bnn.parameters()]).double())
        means[estimator], variances[estimator] = torch.stack(found).mean(0), torch.stack(found).var(0)
    error = ((variances["local"] + variances["weights"]) / n).sqrt()
    assert ((means["local"] - means["weights"]).abs() < 5 * error).all()  # a hundred gradients
    assert variances["weights"].sum() > 2 * variances["local"].sum()


def test_a_sample_of_weights_counts_as_one_draw_per_batch():
    bnn = lb.convert(nn.Sequential(nn.Linear(6, 5)), lb.MeanField(init_std=0.2, estimator="weights"))
    outputs = lb.elbo(bnn, X, torch.zeros(len(X), dtype=torch.long), num_data=10, samples=2).outputs
    assert not torch.equal(outputs[: len(X)], outputs[len(X) :])


def test_mean_field_kl_against_torch():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3))
    bnn = lb.convert(net, lb.MeanField(prior_std=0.7, init_std=0.1))
    q = torch.distributions.Normal(net[0].weight, torch.full_like(net[0].weight, 0.1))
    p = torch.distributions.Normal(0.0, 0.7)
    exact = torch.distributions.kl_divergence(q, p).sum().detach()
    torch.testing.assert_close(lb.kl(bnn).detach(), exact)
    torch.testing.assert_close(lb.kl(bnn.double()).detach(), exact)  # by another function


def test_variance_path_survives_bfloat16():
    net = nn.Sequential(nn.Linear(6, 5))
    bnn = lb.convert(net, lb.MeanField(init_std=1e-5))
    with torch.autocast("cpu", torch.bfloat16):
        bnn(X * 1e-3).float().sum().backward()
    assert all(p.grad.isfinite().all() for p in bnn.parameters())


@pytest.mark.parametrize("size", [1.0, 1e-4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_noise_under_autocast_has_the_size_of_float64(dtype, size):
    """Small variances neither vanish nor lose more than bfloat16 rounds; float16 computes them in float32."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32))
    with torch.no_grad():
        net[0].bias.zero_()
        net[0].weight.zero_()  # the output is noise alone
    bnn = lb.convert(net, lb.MeanField(init_std=0.1 * size)).double()
    x = torch.randn(16, 64, dtype=torch.float64)
    torch.manual_seed(1)
    exact = bnn(x)
    (exact.square().sum()).backward()
    expected = bnn[0].posterior.rho.grad.clone()
    bnn.float().zero_grad()
    torch.manual_seed(1)
    with torch.autocast("cpu", dtype):
        found = bnn(x.float())
    found.double().square().sum().backward()
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=0.02, atol=1e-3 * size)
    torch.testing.assert_close(
        bnn[0].posterior.rho.grad.double(), expected, rtol=0.02, atol=0.02 * float(expected.abs().mean())
    )


@pytest.mark.parametrize("method", [lb.MCDropout, lb.DropConnect])
def test_rates_are_checked(method):
    with pytest.raises(ValueError, match="at least 0 and below 1, got 1"):
        method(rate=1)


def test_channels_are_dropped_whole_where_the_layer_drops_channels():
    bnn = lb.convert(nn.Sequential(nn.Dropout2d(0.5)), lb.MCDropout())
    x = torch.ones(4, 8, 3, 3)
    for y in (bnn(x), lb.draw(bnn)(x)):
        assert torch.equal(y, y[:, :, :1, :1].expand_as(y))
        assert set(y.unique().tolist()) == {0.0, 2.0}


def test_flipout_turns_the_signs_of_inputs_and_of_outputs_in_every_row():
    """One weight matrix for all rows: with one input the noise has the same size in all rows, and signs of its own."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5))
    bnn = lb.convert(net, lb.MeanField(estimator="flipout", init_std=0.1))
    x = torch.zeros(64, 6)
    x[:, 2] = 1.0
    noise = (bnn(x) - lb.mean(bnn)(x)).detach()
    torch.testing.assert_close(noise.abs(), noise[:1].abs().expand_as(noise), atol=1e-6, rtol=1e-4)
    assert noise.abs().min() > 0
    turns = noise.sign() * noise[:1].sign()
    agreement = (turns.T @ turns) / len(turns)  # of two outputs, over rows: 1 on the diagonal, 0 +- 1/8 elsewhere
    assert (agreement - torch.eye(5)).abs().max() < 0.5
