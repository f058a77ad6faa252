"""Designs of draws: mirrored noise in pairs, the same marginal draws, and one name for one draw."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import leanbayes as lb
from leanbayes.core import batched
from leanbayes.methods import all_methods
from leanbayes.runtime.noise import designed_noise, function_noise, NoiseSpec

from .networks import small_net

X = torch.randn(9, 1, 8, 8, generator=torch.Generator().manual_seed(0))


class Layer:
    """Asks for every kind of noise."""

    path, device = "a.b", torch.device("cpu")

    def noise_specs(self, shared: bool) -> tuple[NoiseSpec, ...]:
        return (
            NoiseSpec("normal", (30,)),
            NoiseSpec("uniform", (4, 5)),
            NoiseSpec("seed", (1,)),
            NoiseSpec("normal", (7, 3), counted=True),
            NoiseSpec("uniform", (9,), counted=True),
            NoiseSpec("uniform", (8,), choices=3),
        )


def test_pairs_have_mirrored_noise_of_the_even_draw():
    names = [(3, index, 0) for index in range(6)]
    plain, paired = function_noise(Layer(), names), designed_noise(Layer(), names, "paired")
    mirrors = [torch.neg, lambda u: 1 - u, None, torch.neg, lambda u: 1 - u]
    for spec, mirror, theirs, ours in zip(Layer().noise_specs(True)[:5], mirrors, plain[:5], paired[:5], strict=True):
        assert torch.equal(ours[::2], theirs[::2]), spec
        if mirror is None:
            assert torch.equal(ours, theirs)  # integer seeds stay independent
        else:
            torch.testing.assert_close(ours[1::2], mirror(theirs[::2]), atol=1e-7, rtol=0)
            assert spec.kind == "normal" or 0 <= ours.min() <= ours.max() < 1
    turned = plain[5][[0, 0, 0, 3, 3, 3]] + torch.tensor([0, 1 / 3, 2 / 3] * 2)[:, None]
    torch.testing.assert_close(paired[5], turned.frac(), atol=1e-6, rtol=0)
    assert all(map(torch.equal, designed_noise(Layer(), names, "independent"), plain))
    alone = designed_noise(Layer(), names[3:4], "paired")
    assert all(torch.equal(one[0], many[3]) for one, many in zip(alone, paired, strict=True))


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("small", [0, batched.SMALL["cpu"]], ids=["draw by draw", "together"])
@pytest.mark.parametrize("name", sorted(all_methods()))
def test_draw_i_is_sample_i_and_does_not_depend_on_the_number_of_draws(name, small, monkeypatch):
    monkeypatch.setitem(batched.SMALL, "cpu", small)
    torch.manual_seed(0)
    model = lb.convert(small_net(), all_methods()[name](**({"min_cut": 0} if name == "nested" else {})))
    p = lb.predict(model, X, samples=7, seed=4, design="paired")
    for index in range(7):
        plain = lb.draw(model, seed=4, index=index, design="paired").eval()
        torch.testing.assert_close(p.samples[index], plain(X).softmax(1), atol=2e-6, rtol=1e-5)
    with lb.draws(model.eval(), seed=4, index=3, design="paired"), torch.no_grad():
        torch.testing.assert_close(model(X).softmax(1), p.samples[3], atol=2e-6, rtol=1e-5)
    fewer = lb.predict(model, X, samples=3, seed=4, design="paired").samples
    torch.testing.assert_close(fewer, p.samples[:3], atol=2e-6, rtol=1e-5)
    same = lb.predict(model, X, samples=7, seed=4).samples
    first = slice(None, None, 5 if name == "patch" else 2)  # of each block of draws that share their noise
    torch.testing.assert_close(p.samples[first], same[first], atol=2e-6, rtol=1e-5)


def test_components_stay_stratified_over_the_first_draws():
    model = lb.convert(nn.Linear(3, 2), lb.Rank1(components=4, init_spread=1.0, init_std=1e-6))
    x = torch.randn(5, 3)
    p = lb.predict(model, x, samples=8, design="paired")
    for k in range(4):
        alone = lb.predict(model, x, samples=1, component=k).samples[0]
        torch.testing.assert_close(p.samples[k], alone, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(p.samples[k + 4], alone, atol=1e-4, rtol=1e-4)


def test_the_mean_of_a_pair_has_no_error_of_the_first_order():
    """A linear network is linear in the nodes of its only layer: a pair of one component averages to its mean."""
    model = lb.convert(nn.Linear(6, 1), lb.ImplicitNodes(components=1, init_std=0.5))
    x = torch.randn(5, 6)
    p = lb.predict(model, x, lb.Gaussian(), samples=2, design="paired")
    torch.testing.assert_close(p.mean, lb.mean(model)(x), atol=1e-5, rtol=1e-5)
    independent = lb.predict(model, x, lb.Gaussian(), samples=2)
    assert (independent.mean - lb.mean(model)(x)).abs().max() > 0.01


@pytest.mark.parametrize("crossed", [False, True], ids=["a layer chooses", "an element chooses"])
def test_every_block_of_draws_takes_every_patch_once(crossed):
    """The mean over the patches of a layer is its centre, so the draws of a block average to it, for linear layers."""
    model = lb.convert(
        nn.Linear(3, 2), lb.ModelPatch(components=5, crossed=crossed, init_spread=1.0, patch=("output",))
    )
    chosen = [lb.draw(model, seed=3, index=i, design="paired").weight for i in range(10)]
    for block in (chosen[:5], chosen[5:]):
        assert len({weight[0, 0].item() for weight in block}) == 5
        torch.testing.assert_close(torch.stack(block).mean(0), lb.mean(model).weight)
    independent = torch.stack([lb.draw(model, seed=3, index=i).weight for i in range(5)]).mean(0)
    assert (independent - lb.mean(model).weight).abs().max() > 0.01


def test_a_stratified_choice_alone_is_uniform():
    """Counts of four parts over the third draw of 2,000 blocks, each within five standard errors."""
    layer = Layer()
    layer.noise_specs = lambda shared: (NoiseSpec("uniform", (2,), choices=4),)
    (u,) = designed_noise(layer, [(0, 4 * block + 2, 0) for block in range(2000)], "paired")
    counts = torch.bincount((4 * u).long().flatten(), minlength=4)
    assert (counts - 1000).abs().max() < 5 * (4000 * 0.25 * 0.75) ** 0.5
    assert u.min() >= 0
    assert u.max() < 1


@pytest.mark.parametrize("change", [{"design": "latin"}, {"design": "paired", "noise": "activation"}])
def test_wrong_designs_give_one_clear_sentence(change):
    model = lb.convert(nn.Linear(3, 2), lb.Rank1())
    with pytest.raises(ValueError, match="expected design"):
        lb.predict(model, torch.ones(2, 3), **change)
    with pytest.raises(ValueError, match="expected design"), lb.draws(model, seed=0, design="paired", shared=False):
        pass


def test_evaluate_uses_the_design():
    model, x, y = lb.convert(small_net(), lb.Rank1()), X, torch.zeros(9, dtype=torch.long)
    result = lb.evaluate(model, (x, y), samples=4, design="paired")
    torch.testing.assert_close(result.prediction.samples, lb.predict(model, x, samples=4, design="paired").samples)
    assert not torch.equal(result.prediction.samples, lb.predict(model, x, samples=4).samples)
