"""A late conversion: first the plain network of the shared weights, then the converted model, one optimiser."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import leanbayes as lb
from leanbayes.core.plain import plain_view, strip
from leanbayes.methods._base import StochasticLayer
from leanbayes.training.fit import fit

from .problems import images, network, rank1, same, short


def test_the_plain_view_is_the_stripped_network_with_the_same_tensors():
    bnn = rank1()
    view = plain_view(bnn)
    x = images(8)[0]
    assert not any(isinstance(module, StochasticLayer) for module in view.modules())
    assert torch.equal(view(x), strip(bnn)(x))
    ours, theirs = dict(view.named_parameters()), dict(bnn.named_parameters())
    assert ours["0.weight"] is theirs["0.base.weight"]
    assert ours["1.bias"] is theirs["1.bias"]
    assert view[1].running_mean is bnn[1].running_mean
    root = lb.convert(nn.Linear(3, 2), lb.Rank1())
    assert plain_view(root).weight is root.base.weight
    assert lb.kl(view) == 0


def test_before_the_conversion_it_is_a_plain_training_and_the_posterior_waits():
    plain = network()
    fit(plain, images(), short(epochs=2, schedule="constant"))
    bnn, seen = rank1(), []
    before = copy.deepcopy([layer.posterior.state_dict() for _, layer in lb.stochastic_layers(bnn)])

    def watch(state):
        if state.epoch == 2:
            posteriors = [layer.posterior.state_dict() for _, layer in lb.stochastic_layers(bnn)]
            untouched = all(torch.equal(a[n], b[n]) for a, b in zip(before, posteriors, strict=True) for n in a)
            seen.append((same(state.model, plain), same(strip(bnn), plain), untouched))
        seen.append(type(state.model[0]).__name__)

    history = fit(bnn, images(), short(epochs=4, schedule="constant", convert_at_epoch=2), callbacks=[watch])
    assert seen == ["Conv2d", (True, True, True), "Conv2d", "Rank1Layer", "Rank1Layer"]
    assert [row["beta"] for row in history] == [0, 0, 1, 1]
    assert [row["kl"] > 0 for row in history] == [False, False, True, True]
    after = [layer.posterior.state_dict() for _, layer in lb.stochastic_layers(bnn)]
    assert not any(torch.equal(a[n], b[n]) for a, b in zip(before, after, strict=True) for n in a)


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrised_layers_convert_late(kind):
    def parametrised():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), getattr(parametrizations, kind)(nn.Linear(64, 10)))

    plain, bnn, seen = parametrised(), lb.convert(parametrised(), lb.Rank1()), []
    data = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)), torch.arange(32) % 10
    fit(plain, data, short(epochs=2, schedule="constant"))

    def watch(state):
        if state.epoch == 2:
            seen.append(same(state.model, plain))

    fit(bnn, data, short(epochs=4, schedule="constant", convert_at_epoch=2), callbacks=[watch])
    assert seen == [kind != "spectral_norm"]  # whose vectors take a step more in `convert`
    assert lb.predict(bnn, data[0]).mean.isfinite().all()


def test_the_last_epochs_give_every_row_to_every_component():
    bnn, rows = rank1(), []
    bnn[0].register_forward_hook(lambda module, args, result: rows.append(len(result)))
    fit(bnn, images(32), short(epochs=3, tile_last_epochs=1))
    assert rows == [16] * 4 + [32] * 2
    rows.clear()
    fit(bnn, images(32), short(epochs=1, samples=3))
    assert rows == [48, 48]


def test_a_recipe_deals_the_draws_of_a_row_to_consecutive_components():
    bnn, seen = rank1(), []
    bnn[0].register_forward_hook(lambda layer, args, result: seen.append(layer.state.component.rows().view(2, -1)))
    fit(bnn, images(32), short(epochs=1, samples=2, deal="draws"))
    assert len(seen) == 2
    for first, second in seen:
        assert torch.equal(second, (first + 1) % bnn[0].components)


def test_a_plain_network_ignores_the_conversion():
    nets = [network(), network()]
    fit(nets[0], images(), short())
    fit(nets[1], images(), short(convert_at_epoch=2))
    assert same(*nets)


def test_the_rate_starts_again_at_the_conversion():
    recipe = short(epochs=4, convert_at_epoch=2, restart_at_conversion=0.5, lr=0.04)
    begun, bnn = [], rank1()
    bnn.register_forward_pre_hook(lambda *_: begun.append(True))
    rates = [row["lr"] for row in fit(bnn, images(), recipe)]
    plain = [row["lr"] for row in fit(rank1(), images(), short(epochs=4, convert_at_epoch=2, lr=0.04))]
    assert rates[:2] == plain[:2]
    assert rates[2] > plain[2]
    assert max(rates[2:]) <= 0.5 * 0.04
