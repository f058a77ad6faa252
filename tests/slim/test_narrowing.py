"""Networks cut to a width: their remaining layers, noise that stays, statistics, and refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn, Tensor

import leanbayes as lb
from leanbayes.methods._base import StochasticLayer
from leanbayes.methods.nested.layer import NestedLayer, NestedNorm
from leanbayes.methods.nested.units import OrderingUnit

from .networks import CASES, converted, masked, parameters, unsettle

# ------------------------------------------------------------------- remaining layers


def test_an_extracted_network_is_an_ordinary_one():
    bnn, x = converted("joined")
    before = {name: tensor.clone() for name, tensor in bnn.state_dict().items()}
    small = lb.slim.extract(bnn, 0.5)
    assert type(small) is type(bnn)
    for module in small.modules():
        assert type(module).__module__.startswith(("torch.nn", "tests."))
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert torch.equal(small(x), small(x))
    assert small.first.in_channels == small.first.weight.shape[1] == small.first_norm.num_features == 5 + 4
    for name, tensor in bnn.state_dict().items():
        assert torch.equal(tensor, before[name])
    ours = {p.data_ptr() for p in bnn.parameters()}
    assert not ours & {p.data_ptr() for p in small.parameters()}


def test_hooks_modes_and_frozen_parameters_survive():
    torch.manual_seed(0)
    net = CASES["pixels"].make()
    net[2].weight.requires_grad_(False)
    net.insert(3, nn.BatchNorm2d(6))
    bnn = unsettle(lb.convert(net, lb.NestedDropout(groups=3)))
    seen = []
    for index in (2, 3):
        bnn[index].register_forward_hook(lambda layer, args, y: seen.append(y.shape[1]))
    bnn[3].train()
    small = lb.slim.extract(bnn, 1)
    small(CASES["pixels"].inputs())
    assert seen == [2, 2]
    assert [small[index].training for index in (2, 3)] == [False, True]
    assert not small[2].weight.requires_grad
    assert small[3].weight.requires_grad


def test_dtype_is_kept():
    torch.manual_seed(0)
    bnn = unsettle(lb.convert(CASES["joined"].make().double(), lb.NestedDropout(groups=3)))
    small = lb.slim.extract(bnn, 0.5)
    assert {p.dtype for p in small.parameters()} == {torch.float64}
    x = CASES["joined"].inputs().double()
    torch.testing.assert_close(small(x), masked(bnn, x, 0.5), atol=1e-12, rtol=1e-12)


def test_statistics_of_norms_are_collected_at_the_width():
    bnn, x = converted("slopes")
    x = torch.randn(64, *x.shape[1:])
    for cut in (lb.slim.extract, lb.slim.narrow):
        kept_statistics, small = cut(bnn, 0.5), cut(bnn, 0.5, data=x)
        with torch.no_grad(), lb.draws(small, mean=True):
            y = small[2](small[1](small[0](x)))
            lb.update_norm(kept_statistics, (x, torch.zeros(64)))
        if cut is lb.slim.extract:
            torch.testing.assert_close(small[3].running_mean, y.mean((0, 2, 3)))
            torch.testing.assert_close(small[3].running_var, y.var((0, 2, 3)))
            assert torch.equal(small[3].running_mean, kept_statistics[3].running_mean)
        assert not torch.allclose(small[3].running_mean, bnn[3].running_mean[: len(small[3].running_mean)])
    batches = [(x[:32], None), (x[32:], None)]
    torch.testing.assert_close(
        lb.slim.extract(bnn, 0.5, data=batches, batches=1)[3].running_mean,
        lb.slim.extract(bnn, 0.5, data=x[:32])[3].running_mean,
    )


# ------------------------------------------------------------------- still stochastic


@pytest.mark.parametrize("name", CASES)
def test_the_mean_of_a_narrow_network_is_the_extracted_one(name):
    bnn, x = converted(name)
    for width in (0.4, 1.0):
        small = lb.slim.narrow(bnn, width)
        assert any(isinstance(m, NestedLayer) for m in small.modules())
        assert not any(isinstance(m, (OrderingUnit, NestedNorm)) for m in small.modules())
        extracted = lb.slim.extract(bnn, width)
        torch.testing.assert_close(lb.mean(small)(x), extracted(x), atol=1e-6, rtol=1e-6)
        assert lb.summary(small).parameters == parameters(extracted)
        with lb.draws(small, seed=1, index=2):
            stochastic = small(x)
        torch.testing.assert_close(lb.draw(small, seed=1, index=2)(x), stochastic, atol=1e-5, rtol=1e-5)
        assert not torch.equal(lb.draw(small, seed=1, index=3)(x), stochastic)


def test_without_noise_a_narrow_network_is_plain():
    bnn, x = converted("joined", weight_noise=False)
    small = lb.slim.narrow(bnn, 0.5)
    assert not any(isinstance(m, StochasticLayer) for m in small.modules())
    assert torch.equal(small(x), lb.slim.extract(bnn, 0.5)(x))


@pytest.mark.parametrize("rescale", [True, False])
def test_noise_of_a_narrow_layer_has_the_moments_of_the_masked_one(rescale):
    """Mean and variance of one layer's output over sampled weights, and over noise on activations."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 6), nn.Linear(6, 2))
    bnn = unsettle(lb.convert(net, lb.NestedDropout(groups=3, rescale=rescale)))
    layer, x = bnn[1], torch.randn(1, 4)
    outputs = []
    for model, width in ((bnn, 2), (lb.slim.narrow(bnn, 2), None)):
        drawn = []
        for index in range(300):
            with torch.no_grad(), lb.draws(model, seed=0, index=index, width=width):
                drawn.append(model[1](x))
        with torch.no_grad(), lb.draws(model, seed=1, width=width, shared=False):
            outputs += [torch.cat(drawn), model[1](x.expand(8000, -1))]
    assert [found.shape[1] for found in outputs] == [6, 6, 4, 4]
    assert not outputs[0][:, 4:].any()
    assert not outputs[1][:, 4:].any()
    factor = layer.posterior.order.keep.repeat_interleave(2).detach() if rescale else torch.ones(6)
    mean = layer.base(x)[0].detach() * factor
    variance = (layer.scales.square() @ x[0].square()).detach() * factor.square()
    for found in outputs:
        n = len(found)
        assert ((found[:, :4].mean(0) - mean[:4]).abs() < 4.5 * (variance[:4] / n).sqrt()).all()
        assert ((found[:, :4].var(0) / variance[:4] - 1).abs() < 4.5 * math.sqrt(2 / n)).all()


def test_predictions_at_a_width_and_of_a_narrow_network_agree_in_distribution():
    bnn, x = converted("mlp")
    n = 500
    wide = lb.predict(bnn, x, lb.Gaussian(), samples=n, width=0.6, seed=3).samples
    slim = lb.predict(lb.slim.narrow(bnn, 0.6), x, lb.Gaussian(), samples=n, seed=4).samples
    error = ((wide.var(0) + slim.var(0)) / n).sqrt()
    assert (wide.std(0) > 0.01).all()
    assert ((wide.mean(0) - slim.mean(0)).abs() < 4.5 * error).all()
    fourth = (wide - wide.mean(0)).pow(4).mean(0) + (slim - slim.mean(0)).pow(4).mean(0)
    assert ((wide.var(0) - slim.var(0)).abs() < 4.5 * (fourth / n).sqrt()).all()


class NormFirst(nn.Module):
    """Registers a norm before the layers it follows, so that the norm is the first stochastic layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.first, self.second, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.second(self.first(x).relu())).relu())


def test_a_narrow_network_keeps_its_likelihood_and_trains():
    torch.manual_seed(0)
    bnn = lb.convert(NormFirst(), lb.NestedDropout(groups=4), likelihood=lb.Gaussian(std=0.3, learn=True))
    assert isinstance(bnn.norm, NestedNorm)
    assert bnn.norm.likelihood is not None
    small = lb.slim.narrow(bnn, 0.5).train()
    optimizer = torch.optim.SGD(lb.parameter_groups(small, lr=0.01))
    x, y = torch.randn(32, 4), torch.randn(32, 1)
    lb.elbo(small, x, y, num_data=32).loss.backward()
    assert all(p.grad is not None for p in small.parameters())
    optimizer.step()
    learned = lb.predict(small, x, samples=2).likelihood.log_std
    assert learned.item() != pytest.approx(math.log(0.3), abs=1e-6)


def test_kl_of_a_narrow_network_is_that_of_the_weights_that_are_left():
    bnn, _ = converted("pixels")
    small = lb.slim.narrow(bnn, 2)
    index = {0: (4, 2), 2: (4, 4), 6: (6, 36), 8: (3, 6)}  # two of three groups: 4 of 6, and 6 of 8 (0 0 0 1 1 1 2 2)
    for k, (outputs, inputs) in index.items():
        assert small[k].posterior.log_alpha.shape[:2] == (outputs, inputs)
        torch.testing.assert_close(small[k].posterior.log_alpha, bnn[k].posterior.log_alpha[:outputs, :inputs])
    each = [lb.slim.narrow(bnn, 2)[k].kl() for k in index]
    torch.testing.assert_close(lb.kl(small), torch.stack(each).sum())


def test_an_embedded_model_is_narrowed_inside_another_network():
    bnn, x = converted("joined")
    outer = nn.Sequential(nn.Conv2d(2, 2, 1), bnn).eval()
    small = lb.slim.extract(outer, 0.5)
    torch.testing.assert_close(small(x), masked(outer, x, 0.5), atol=1e-5, rtol=1e-5)
    assert parameters(small) < parameters(lb.mean(outer))


# ------------------------------------------------------------------- evaluation, refusals


def test_widths_are_judged_one_by_one():
    bnn, _ = converted("mlp")
    test = torch.randn(60, 4), torch.randint(3, (60,))
    train = torch.randn(100, 4)
    draws = lb.slim.widths(bnn, test, [0.4, 1.0], data=train, samples=4)
    means = lb.slim.widths(bnn, test, [0.4, 1.0], means=True)
    expected = [(lb.slim.extract(bnn, w)(test[0]).argmax(1) == test[1]).float().mean().item() for w in (0.4, 1.0)]
    assert [result.metrics["test"]["accuracy"] for result in means] == pytest.approx(expected)
    assert all(result.metrics["test"]["nll"] > 0 for result in draws)


@pytest.mark.parametrize("width", [0, 0.0, -0.5, 1.5, 9, float("nan")])
def test_a_width_that_is_none_is_refused(width):
    bnn, x = converted("mlp")
    message = r"expected a width in \(0, 1\], or a whole number of groups from 1 to 3, got"
    with pytest.raises(ValueError, match=message):
        lb.slim.narrow(bnn, width)
    with pytest.raises(ValueError, match=message):
        masked(bnn, x, width)


def test_whole_numbers_of_numpy_are_numbers_of_groups():
    bnn, x = converted("mlp")  # of three groups
    for width in (np.int64(1), np.int32(2), np.uint8(3)):
        assert parameters(lb.slim.extract(bnn, width)) == parameters(lb.slim.extract(bnn, int(width)))
        torch.testing.assert_close(masked(bnn, x, width), masked(bnn, x, int(width)), rtol=0, atol=0)


def test_models_without_order_are_refused():
    net = CASES["mlp"].make()
    for model in (
        net,
        lb.convert(net, lb.Rank1(components=2)),
        lb.convert(nn.Linear(3, 2), lb.NestedDropout(min_cut=0)),
    ):
        with pytest.raises(ValueError, match="expected a model whose channels are ordered, got one without ordering"):
            lb.slim.extract(model, 0.5)
    with pytest.raises(ValueError, match=r"no layer of this model orders its channels: expected no width, got 0\.5"):
        masked(lb.convert(net, lb.Rank1(components=2)), torch.randn(2, 4), 0.5)
    with pytest.raises(ValueError, match="no layer of this model orders its channels"):
        lb.predict(lb.slim.narrow(converted("mlp")[0], 0.5), torch.randn(2, 4), width=0.5)


def test_other_stochastic_layers_on_ordered_channels_are_refused_in_words():
    torch.manual_seed(0)
    net = CASES["mlp"].make()
    bnn = lb.convert(lb.convert(net, lb.NestedDropout(groups=3), where=["2", "4", "5"]), lb.Rank1(components=2))
    assert bnn(torch.randn(4, 4)).shape == (4, 3)
    with pytest.raises(ValueError, match="layer '7' touches channels that are dropped, but Rank1 cannot be narrowed"):
        lb.slim.narrow(bnn, 0.5)


def test_other_stochastic_layers_elsewhere_are_kept():
    torch.manual_seed(0)
    net, x = CASES["pixels"].make(), CASES["pixels"].inputs()
    bnn = lb.convert(lb.convert(net, lb.Rank1(components=2), where="0"), lb.NestedDropout(groups=3))
    small = lb.slim.narrow(unsettle(bnn), 0.5)
    assert lb.summary(small).converted == 4
    torch.testing.assert_close(lb.mean(small)(x), masked(bnn, x, 0.5), atol=1e-5, rtol=1e-5)
