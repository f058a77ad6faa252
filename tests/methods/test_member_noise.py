"""Every member of an ensemble learns noise of its own, and the ensemble is the mixture of their Gaussians."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributions import Normal

import leanbayes as lb
from leanbayes.core.conversion import own_likelihood
from leanbayes.runtime._files import read_tensors, write_tensors

RECIPE = lb.Recipe(epochs=6, batch_size=16, optimizer="adam", lr=0.02, accelerator="cpu")
X = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
Y = X[:, :2] + 0.2 * torch.randn(64, 2, generator=torch.Generator().manual_seed(2))


def network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))


def noise() -> lb.Gaussian:
    return lb.Gaussian(std=0.5, learn=True)


def plain_ensemble(likelihood: lb.Gaussian | None = None) -> lb.Ensemble:
    torch.manual_seed(3)
    return lb.convert(network(), lb.DeepEnsemble(components=3), likelihood=likelihood)


def stochastic_ensemble() -> lb.Ensemble:
    torch.manual_seed(3)
    inner = lb.convert(network(), lb.Rank1(components=2))
    return lb.convert(inner, lb.DeepEnsemble(components=3), likelihood=noise())


def apart(ensemble: lb.Ensemble) -> list[tuple[nn.Module, lb.Gaussian]]:
    """Train each member alone, from the initial noise, with the seed that `fit` gives it."""
    found = []
    for k, member in enumerate(copy.deepcopy(ensemble).members):
        likelihood = own_likelihood(member) or noise()
        lb.fit(member, (X, Y), replace(RECIPE, seed=1000 * k), likelihood=likelihood, progress=False)
        found.append((member.eval(), likelihood))
    return found


def same(one: nn.Module, other: nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def trained(ensemble: lb.Ensemble, likelihood: lb.Gaussian | None = None) -> lb.Ensemble:
    lb.fit(ensemble, (X, Y), RECIPE, likelihood=likelihood, progress=False)
    return ensemble.eval()


@pytest.mark.parametrize("given", [False, True], ids=["the ensemble's own", "given to fit"])
def test_the_training_of_each_member_begins_with_the_initial_noise(given):
    likelihood = noise()
    ensemble = plain_ensemble(None if given else likelihood)
    twins = apart(ensemble)
    trained(ensemble, likelihood if given else None)
    assert all(same(member, twin) for member, (twin, _) in zip(ensemble.members, twins, strict=True))
    learned = torch.stack([own.log_std for _, own in twins])
    assert torch.equal(likelihood.log_std, learned)
    assert len(set(learned.tolist())) == 3
    assert ((learned - math.log(0.5)).abs() > 0.01).all()


@pytest.mark.parametrize("stochastic", [False, True], ids=["plain", "rank1"])
def test_a_prediction_is_the_mixture_of_the_members_own_gaussians(stochastic):
    ensemble = stochastic_ensemble() if stochastic else plain_ensemble(noise())
    twins = apart(ensemble)
    trained(ensemble)
    draws = 6
    p = lb.predict(ensemble, X, samples=draws)
    with torch.no_grad():
        means = torch.stack([lb.draw(ensemble, seed=0, index=index)(X) for index in range(draws)])
    variances = torch.stack([(2 * twins[index % 3][1].log_std.detach()).exp() for index in range(draws)])
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(p.variances, variances[:, None, None].expand_as(means), **close)
    torch.testing.assert_close(p.aleatoric, variances.mean().expand_as(Y), **close)
    torch.testing.assert_close(p.total, p.aleatoric + means.var(0, correction=0), **close)
    density = Normal(means, variances.sqrt()[:, None, None]).log_prob(Y).sum(2).logsumexp(0) - math.log(draws)
    torch.testing.assert_close(p.log_prob(Y), density, **close)
    one = lb.predict(ensemble, X, samples=2, component=1)
    torch.testing.assert_close(one.aleatoric, variances[1].expand_as(Y), **close)
    slim = lb.predict(ensemble, X, samples=draws, keep_samples=False)
    torch.testing.assert_close(slim.total, p.total, **close)
    stopped = lb.predict(ensemble, X, samples=draws, tolerance=0.0)
    torch.testing.assert_close(stopped.total, p.total, **close)
    result = lb.evaluate(ensemble, (X, Y), samples=draws)
    assert result.metrics["test"]["lpd"] == pytest.approx(float(density.mean()), rel=1e-3)


def test_a_predictor_notices_that_the_noise_has_changed():
    ensemble = trained(plain_ensemble(noise()))
    predictor = lb.Predictor(ensemble, samples=3)
    before = predictor(X).aleatoric
    with torch.no_grad():
        ensemble.likelihood.log_std.add_(math.log(2))
    torch.testing.assert_close(predictor(X).aleatoric, 4 * before)


def test_a_second_training_continues_with_the_noise_of_each_member():
    ensemble = trained(plain_ensemble(noise()))
    before = ensemble.likelihood.log_std.detach().clone()
    lb.fit(ensemble, (X, Y), replace(RECIPE, lr=1e-9), progress=False)
    torch.testing.assert_close(ensemble.likelihood.log_std.detach(), before, rtol=0, atol=1e-6)


def test_ensembles_of_ensembles_have_the_noise_of_every_network():
    torch.manual_seed(3)
    inner = [lb.Ensemble([network(2 * k), network(2 * k + 1)]) for k in range(2)]
    likelihood = noise()
    outer = trained(lb.Ensemble(inner), likelihood)
    alone = [network(seed) for seed in range(4)]
    stds = []
    for number, net in enumerate(alone):
        own = noise()
        seed = 1000 * (number // 2) + 1000 * (number % 2)
        lb.fit(net, (X, Y), replace(RECIPE, seed=seed), likelihood=own, progress=False)
        stds.append(own.log_std.detach())
    assert torch.equal(likelihood.log_std, torch.stack(stds))
    order = [0, 2, 1, 3]  # draw i is draw i // 2 of member i mod 2
    p = lb.predict(outer, X, likelihood, samples=4)
    expected = (2 * torch.stack(stds)[order]).exp()
    torch.testing.assert_close(p.variances[:, 0, 0], expected)


def test_a_training_that_was_stopped_has_the_noise_of_an_undisturbed_one(tmp_path):
    class Killed(BaseException):
        pass

    def kill(state: lb.EpochState) -> None:
        if len(seen) == 8:  # in the second member
            raise Killed
        seen.append(state.epoch)

    seen: list[int] = []
    whole = trained(plain_ensemble(noise()))
    how = {"folder": tmp_path, "resume": True, "progress": False}
    with pytest.raises(Killed):
        lb.fit(plain_ensemble(noise()), (X, Y), RECIPE, callbacks=[kill], **how)
    again = plain_ensemble(noise())
    lb.fit(again, (X, Y), RECIPE, **how)
    assert same(again, whole)


def test_the_noise_of_every_member_is_saved(tmp_path):
    ensemble = trained(plain_ensemble(noise()))
    lb.save(ensemble, tmp_path / "e.safetensors")
    loaded = lb.load(tmp_path / "e.safetensors", network())
    assert same(loaded, ensemble)
    p, q = (lb.predict(model, X, samples=3) for model in (loaded, ensemble))
    assert torch.equal(p.total, q.total)
    assert torch.equal(p.log_prob(Y), q.log_prob(Y))


def test_a_file_with_one_noise_for_all_members_means_the_same_as_before(tmp_path):
    """Earlier versions trained one Gaussian with the members in turn, and stored one number."""
    ensemble = plain_ensemble(noise())  # before a training there is one number, too
    lb.save(ensemble, tmp_path / "old.safetensors")
    loaded = lb.load(tmp_path / "old.safetensors", network())
    assert loaded.likelihood.log_std.shape == ()
    p = lb.predict(loaded, X, samples=3)
    torch.testing.assert_close(p.variances, torch.full((3, 64, 2), 0.25))


@pytest.mark.parametrize("members", [2, 10**12, 0, -1, 2.5])
def test_a_header_with_another_number_of_noises_is_damaged(members, tmp_path):
    path = tmp_path / "e.safetensors"
    lb.save(trained(plain_ensemble(noise())), path)
    metadata, tensors = read_tensors(path)
    assert '"members": 3' in metadata["leanbayes"]
    metadata["leanbayes"] = metadata["leanbayes"].replace('"members": 3', f'"members": {members}')
    write_tensors(tensors, path, metadata)
    with pytest.raises(ValueError, match=r"e\.safetensors' "):
        lb.load(path, network())


def test_noise_of_other_members_is_refused():
    likelihood = noise()
    trained(plain_ensemble(), likelihood)
    torch.manual_seed(3)
    pair = lb.convert(network(), lb.DeepEnsemble(components=2))
    with pytest.raises(ValueError, match="noise of 2 members, or one for all, got that of 3"):
        lb.predict(pair, X, likelihood)
    with pytest.raises(ValueError, match="members to be a whole number of at least 1, got 0"):
        lb.Gaussian(learn=True, members=0)
    with pytest.raises(ValueError, match="learn=True"):
        lb.Gaussian(members=2)


def test_an_ensemble_trained_by_rows_has_the_mean_of_the_variances():
    """In a loop of your own, the rows of a batch belong to different members."""
    ensemble = trained(plain_ensemble(noise()))
    likelihood = ensemble.likelihood
    pooled = lb.Gaussian(std=float((2 * likelihood.log_std.detach().double()).exp().mean().sqrt()))
    torch.testing.assert_close(likelihood.log_prob(X[:, :2], Y), pooled.log_prob(X[:, :2], Y))
    lb.elbo(ensemble, X, Y, num_data=64).loss.backward()
    assert likelihood.log_std.grad.shape == (3,)


def test_fixed_noise_stays_one(tmp_path):
    likelihood = lb.Gaussian(std=0.3)
    trained(plain_ensemble(likelihood))
    assert likelihood.log_std.shape == ()
    assert "members" not in likelihood.options
