"""Training the posterior alone: the converted network stays unchanged to the last bit, a small file has the rest."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import leanbayes as lb
from leanbayes.cli.compare import comparison_options, parse
from leanbayes.compare.job import recipe_for
from leanbayes.core.plain import strip
from leanbayes.training import Recipe
from leanbayes.training.fit import fit
from leanbayes.training.objective import to_train_mode
from tests.distributed.together import one_worker, together

from .problems import images, line, network, rank1, same, short

METHODS = (lb.Rank1(components=2), lb.ImplicitNodes(components=3), lb.ModelPatch(components=2), lb.VarianceLayers())


def frozen(net: nn.Module) -> nn.Module:
    """Return the network with nothing left to train, as its owner would write it."""
    return net.requires_grad_(False)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_only_the_posterior_moves_and_the_network_comes_back_trainable(method):
    net = network()
    bnn = lb.convert(net, method)
    before = copy.deepcopy(bnn.state_dict())
    fit(bnn, images(), short(freeze=True, posterior_lr=0.2))
    moved = {name for name, tensor in bnn.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved
    assert all(".posterior." in name for name in moved)
    assert same(strip(bnn), net), "running statistics and all"
    assert all(parameter.requires_grad for parameter in bnn.parameters())
    assert all(module.training for module in bnn.modules()), "in the modes it came with"


def test_a_network_that_its_owner_froze_has_a_posterior_to_train_and_weights_that_rest():
    net = frozen(network())
    bnn = lb.convert(net, lb.Rank1(components=2))
    (group,) = lb.parameter_groups(bnn, lr=0.1, posterior_lr=0.2)
    assert (group["name"], group["lr"]) == ("posterior", 0.2)
    fit(bnn, images(), short())
    for ours, theirs in zip(strip(bnn).parameters(), net.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(bnn[1].running_mean, net[1].running_mean), "torch's habit; freeze=True is for that"
    assert [name for name, p in bnn.named_parameters() if p.requires_grad] == [
        name for name, _ in bnn.named_parameters() if "posterior" in name
    ]


def test_both_ways_to_freeze_are_one():
    """Without statistics to keep, resting parameters are the whole difference."""
    one, other = rank1(norm=False), lb.convert(frozen(network(norm=False)), lb.Rank1(components=2))
    fit(one, images(), short(freeze=True))
    fit(other, images(), short())
    assert same(one, other)


def test_a_learned_likelihood_is_trained_and_kept_with_the_posterior(tmp_path):
    torch.manual_seed(0)
    net = nn.Linear(1, 1)
    given = lb.Gaussian(learn=True)
    fit(lb.convert(net, lb.Rank1()), line(), short(freeze=True), likelihood=given)
    assert given.log_std != 0
    bnn = lb.convert(net, lb.Rank1(), likelihood=lb.Gaussian(learn=True))
    fit(bnn, line(), short(freeze=True))
    assert bnn.likelihood.log_std != 0
    lb.save(bnn, tmp_path / "posterior.safetensors", only="posterior")
    again = lb.load(tmp_path / "posterior.safetensors", net)
    assert same(again, bnn)


def test_a_frozen_training_is_resumed_exactly(tmp_path):
    whole, half = rank1(), rank1()
    fit(whole, images(), short(epochs=4, freeze=True), folder=tmp_path / "whole")

    class Stop(Exception):
        pass

    def stop(state):
        if state.epoch == 2:
            raise Stop

    with pytest.raises(Stop):
        fit(half, images(), short(epochs=4, freeze=True), folder=tmp_path / "half", callbacks=[stop])
    assert all(parameter.requires_grad for parameter in half.parameters())
    again = rank1()
    fit(again, images(), short(epochs=4, freeze=True), folder=tmp_path / "half", resume=True)
    assert same(again, whole)
    with pytest.raises(ValueError, match="belongs to another recipe: freeze was True and is nothing"):
        fit(rank1(), images(), short(epochs=4), folder=tmp_path / "half", resume=True)


def test_the_optimiser_keeps_nothing_of_resting_weights(tmp_path):
    from safetensors.torch import load_file

    fit(rank1(), images(), short(freeze=True), folder=tmp_path)
    names = [name for name in load_file(tmp_path / "checkpoint" / "last.safetensors") if name.startswith("optimizer/")]
    assert names
    assert all(".posterior." in name for name in names)


def test_buffers_rest_and_dropout_goes_on():
    torch.manual_seed(0)
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    net = nn.Sequential(spectral, nn.BatchNorm1d(4), nn.Dropout(), nn.Tanh(), nn.Linear(4, 3))
    to_train_mode(net, freeze=True)
    assert not net[1].training
    assert not spectral.parametrizations.weight[0].training
    assert all(module.training for module in (net, net[2], net[3], net[4]))
    before = copy.deepcopy(net.state_dict())
    net(torch.randn(8, 4))
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    to_train_mode(net, freeze=False)
    assert all(module.training for module in net.modules())


@pytest.mark.parametrize("method", [None, lb.MCDropout(rate=0.1)], ids=["plain", "mc_dropout"])
def test_without_a_posterior_there_is_nothing_to_train(method):
    net = network() if method is None else lb.convert(network(), method)
    with pytest.raises(ValueError, match="freeze=True trains the posterior alone, and this model has none; convert it"):
        fit(net, images(), short(freeze=True))


@pytest.mark.parametrize("field", ["convert_at_epoch", "alternate_epochs"])
def test_a_recipe_that_trains_weights_cannot_freeze_them(field):
    with pytest.raises(ValueError, match="expected convert_at_epoch and alternate_epochs to be 0 where freeze fixes"):
        Recipe(freeze=True, **{field: 1})


def test_the_command_line_converts_frozen_networks_from_the_start():
    recipe = Recipe(freeze=True)
    assert recipe.fields()["freeze"] is True
    assert "freeze" not in Recipe().fields(), "older results keep their identity"
    assert parse(comparison_options(), ["--recipe.freeze", "True"], "train").recipe.freeze
    assert recipe_for(lb.Rank1(), recipe).convert_at_epoch == 0
    assert not recipe_for(None, recipe).freeze


def two_steps(rank: int, world: int) -> dict[str, torch.Tensor]:
    """Train with frozen weights in one of several processes; return the state."""
    bnn = rank1()
    fit(bnn, images(32), short(epochs=1, freeze=True, posterior_lr=0.2), progress=False)
    return dict(bnn.state_dict())


@one_worker
def test_two_processes_freeze_as_one(tmp_path):
    one = two_steps(0, 1)
    for state in together(2, two_steps, tmp_path):
        for name, tensor in one.items():
            torch.testing.assert_close(state[name], tensor, atol=1e-5, rtol=1e-4)
