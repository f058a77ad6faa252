"""Explicit ensembles: the contract that layer methods pass in tests/contract, for whole networks."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import leanbayes as lb


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@pytest.fixture
def ensemble() -> lb.Ensemble:
    torch.manual_seed(0)
    return lb.convert(network(), lb.DeepEnsemble(components=3))


X = torch.randn(7, 4, generator=torch.Generator().manual_seed(1))


def test_members_start_apart_and_the_first_is_the_given_network():
    torch.manual_seed(0)
    net = network()
    ensemble = lb.convert(net, lb.DeepEnsemble(components=3)).eval()
    net.eval()
    assert torch.equal(ensemble.members[0](X), net(X))
    assert not torch.allclose(ensemble.members[1](X), ensemble.members[2](X))
    same = lb.convert(net, lb.DeepEnsemble(components=3, init="copy")).eval()
    assert all(torch.equal(member(X), net(X)) for member in same.members)
    assert same.members[0][0].weight is not net[0].weight


def test_each_row_goes_through_its_member_and_comes_back_in_its_place(ensemble):
    ensemble.eval()
    every = torch.stack([member(X) for member in ensemble.members])
    torch.manual_seed(3)
    out = ensemble(X)
    served = [[torch.allclose(out[row], every[k, row]) for k in range(3)] for row in range(7)]
    assert all(sum(row) == 1 for row in served)
    counts = torch.tensor(served).sum(0)
    assert counts.max() - counts.min() <= 1


def test_prediction_is_the_mixture_of_members_and_runs_each_once(ensemble):
    ensemble.eval()
    calls = []
    for member in ensemble.members:
        member[0].register_forward_hook(lambda *_: calls.append(1))
    expected = torch.stack([member(X).softmax(1) for member in ensemble.members])
    calls.clear()
    p = lb.predict(ensemble, X, samples=6, chunk_size=7)
    assert len(calls) == 3
    torch.testing.assert_close(p.mean, expected.mean(0))
    torch.testing.assert_close(p.samples, expected.repeat(2, 1, 1))
    assert (p.epistemic >= 0).all()
    slim = lb.predict(ensemble, X, samples=6, keep_samples=False)
    torch.testing.assert_close(slim.mean, p.mean)
    torch.testing.assert_close(lb.predict(ensemble, X, samples=2, component=1).mean, expected[1])


def test_draw_is_a_plain_member_and_equals_the_pass_under_draws(ensemble):
    ensemble.eval()
    for index in range(4):
        plain = lb.draw(ensemble, index=index)
        assert type(plain) is nn.Sequential
        with lb.draws(ensemble, seed=0, index=index):
            assert torch.equal(ensemble(X), plain(X))
    with pytest.raises(ValueError, match="component=k"):
        lb.mean(ensemble)
    assert torch.equal(lb.mean(ensemble, component=2)(X), ensemble.members[2](X))
    with pytest.raises(ValueError, match="from 0 to 2"):
        lb.draw(ensemble, component=3)


def test_ensembles_of_stochastic_members_visit_every_component():
    torch.manual_seed(0)
    inner = lb.convert(network(), lb.Rank1(components=2))
    ensemble = lb.convert(inner, lb.DeepEnsemble(components=2)).eval()
    p = lb.predict(ensemble, X, samples=8)
    for index in range(8):
        with lb.draws(ensemble, seed=0, index=index):
            torch.testing.assert_close(ensemble(X).softmax(1), p.samples[index], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(
            lb.draw(ensemble, seed=0, index=index)(X).softmax(1), p.samples[index], atol=1e-6, rtol=1e-5
        )
    assert len({tuple(sample.flatten().tolist()) for sample in p.samples}) == 8
    torch.testing.assert_close(lb.kl(ensemble), (lb.kl(ensemble.members[0]) + lb.kl(ensemble.members[1])) / 2)


def test_every_member_learns_from_a_split_and_from_a_tiled_batch(ensemble):
    y = torch.arange(7) % 3
    for tile in (False, True):
        ensemble.zero_grad()
        lb.elbo(ensemble, X, y, num_data=7, tile=tile).loss.backward()
        assert all(p.grad is not None for p in ensemble.parameters())


def test_round_trips_and_summary(ensemble, tmp_path):
    expected = lb.predict(ensemble, X, samples=3).mean
    lb.save(ensemble, tmp_path / "e.safetensors")
    loaded = lb.load(tmp_path / "e.safetensors", network())
    for twin in (loaded, copy.deepcopy(ensemble), pickle.loads(pickle.dumps(ensemble))):
        assert torch.equal(lb.predict(twin, X, samples=3).mean, expected)
    said = lb.summary(ensemble)
    assert said.extra_percent == pytest.approx(200)
    assert said.parameters == sum(p.numel() for p in network().parameters())


class Bare(nn.Module):
    """A network whose matrix cannot be initialised again; its shift starts at zero in every network."""

    def __init__(self):
        super().__init__()
        self.shift, self.norm = nn.Parameter(torch.zeros(3)), nn.LayerNorm(3)
        self.matrix = nn.Parameter(torch.randn(4, 3))

    def forward(self, x):
        return self.norm(x @ self.matrix + self.shift)


@pytest.mark.parametrize("first", [None, lb.Rank1(components=2)], ids=["plain", "rank1"])
def test_the_likelihood_given_with_an_ensemble_is_its_own(first, tmp_path):
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    member = net if first is None else lb.convert(net, first)
    many = lb.convert(member, lb.DeepEnsemble(components=2), likelihood=lb.Gaussian(std=0.5))
    assert lb.predict(many, X, samples=4).likelihood.options["std"] == 0.5
    lb.fit(many, (X, torch.randn(7, 2)), lb.Recipe(epochs=1), progress=False)
    lb.save(many, tmp_path / "many.safetensors")
    loaded = lb.load(tmp_path / "many.safetensors", net)
    assert torch.equal(lb.predict(loaded, X, samples=4).mean, lb.predict(many, X, samples=4).mean)
    assert loaded.state_dict().keys() == many.state_dict().keys()


def test_members_that_stay_equal_are_a_warning_that_names_the_parameter():
    net = nn.Sequential(nn.Linear(4, 4), Bare())
    with pytest.warns(UserWarning, match=r"parameter '1\.matrix' is the same in all members.*lb\.Ensemble\(\[") as told:
        lb.convert(net, lb.DeepEnsemble(components=3))
    assert [warning.filename for warning in told] == [__file__]
    lb.convert(net, lb.DeepEnsemble(components=1))
    lb.convert(net, lb.DeepEnsemble(init="copy"))
    lb.Ensemble([Bare(), Bare()])


def test_wrong_use_says_what_to_do():
    with pytest.raises(ValueError, match="at least one member"):
        lb.Ensemble([])
    with pytest.raises(ValueError, match="components"):
        lb.DeepEnsemble(components=0)
    with pytest.raises(ValueError, match="no layer"):
        lb.convert(network(), lb.DeepEnsemble(), where="0")
