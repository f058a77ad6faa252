"""Prediction: the same numbers however the rows are cut, frozen draws, memory, and work done once."""

from __future__ import annotations

import resource
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence, PackedSequence
from torch.utils.data import DataLoader, TensorDataset

import leanbayes as lb
from leanbayes.core import batched
from leanbayes.core.predictor import distinct_draws

from .networks import Nested, small_net

METHODS = [lb.Rank1(components=3), lb.BatchEnsemble(components=3), lb.ImplicitNodes(components=3)]
each_method = pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
X = torch.randn(11, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@each_method
@pytest.mark.parametrize("chunk", [1, 7, 11, None])
def test_chunks_do_not_change_the_prediction(method, chunk):
    bnn = lb.convert(small_net(), method)
    whole = lb.predict(bnn, X, samples=5, chunk_size=100)
    other = lb.predict(bnn, X, samples=5, chunk_size=chunk)
    torch.testing.assert_close(other.samples, whole.samples, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(other.total, whole.total, atol=1e-6, rtol=1e-5)


@each_method
def test_rows_may_be_permuted_cut_and_loaded(method):
    bnn = lb.convert(small_net(), method)
    whole = lb.predict(bnn, X, samples=4)
    order = torch.randperm(len(X))
    torch.testing.assert_close(lb.predict(bnn, X[order], samples=4).samples, whole.samples[:, order])
    torch.testing.assert_close(lb.predict(bnn, X[:2], samples=4).mean, whole.mean[:2])  # fewer rows than components
    loader = DataLoader(TensorDataset(X, torch.zeros(11)), batch_size=4)
    torch.testing.assert_close(lb.predict(bnn, loader, samples=4).samples, whole.samples)


@each_method
def test_sample_i_is_draw_i(method):
    bnn = lb.convert(small_net(), method)
    p = lb.predict(bnn, X, samples=5, seed=3)
    for index in range(5):
        plain = lb.draw(bnn, seed=3, index=index).eval()
        torch.testing.assert_close(p.samples[index], plain(X).softmax(1), atol=1e-6, rtol=1e-5)


def test_modes_parameters_and_state_are_left_as_they_were():
    bnn = lb.convert(small_net(), lb.Rank1())
    bnn[1].eval()
    modes = [module.training for module in bnn.modules()]
    before = {name: tensor.clone() for name, tensor in bnn.state_dict().items()}
    lb.predict(bnn, X)
    assert [module.training for module in bnn.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in bnn.state_dict().items())
    assert all(p.grad is None for p in bnn.parameters())
    assert not bnn[0].state.fixed


def test_samples_are_spread_over_components_and_one_can_be_chosen():
    bnn = lb.convert(small_net(), lb.BatchEnsemble(components=3, init_spread=0.5))
    p = lb.predict(bnn, X, samples=6)
    torch.testing.assert_close(p.samples[:3], p.samples[3:])
    one = lb.predict(bnn, X, samples=2, component=1)
    torch.testing.assert_close(one.samples, p.samples[1:2].expand(2, -1, -1))
    assert one.epistemic.max() < 1e-6


@each_method
def test_autocast_does_not_confuse_the_weights_of_different_draws(method):
    bnn = lb.convert(small_net(), method)
    with torch.autocast("cpu", torch.bfloat16):
        p = lb.predict(bnn, X, samples=5)
    torch.testing.assert_close(p.samples, lb.predict(bnn, X, samples=5).samples, atol=0.02, rtol=0.05)
    assert not torch.allclose(p.samples[0], p.samples[1], atol=1e-3)


def test_many_draws_are_the_same_draws_in_any_number():
    bnn = lb.convert(small_net(), lb.Rank1(components=3))
    many = lb.predict(bnn, X, samples=35).samples
    torch.testing.assert_close(lb.predict(bnn, X, samples=3).samples, many[:3])
    torch.testing.assert_close(lb.draw(bnn, index=34).eval()(X).softmax(1), many[34])


def test_dropping_the_samples_changes_nothing_else():
    bnn = lb.convert(small_net(), lb.Rank1())
    kept, dropped = lb.predict(bnn, X), lb.predict(bnn, X, keep_samples=False)
    assert dropped.samples is None
    for name in ("mean", "total", "aleatoric", "epistemic"):
        assert torch.equal(getattr(kept, name), getattr(dropped, name))


def test_a_plain_network_predicts_without_epistemic_uncertainty():
    net = small_net().eval()
    p = lb.predict(net, X, samples=4)
    torch.testing.assert_close(p.mean, net(X).softmax(1))
    assert p.samples.shape == (4, 11, 4)
    assert p.epistemic.max() < 1e-6


def test_activation_noise_differs_from_row_to_row():
    bnn = lb.convert(small_net(), lb.ImplicitNodes())
    x = X[:1].expand(70, -1, -1, -1)
    function = lb.predict(bnn, x, samples=3)
    fresh = lb.predict(bnn, x, samples=3, noise="activation", chunk_size=35)
    torch.testing.assert_close(function.samples[0], function.samples[0, :1].expand(70, -1))
    assert len({tuple(row.tolist()) for row in fresh.samples[0]}) == 70
    assert torch.equal(fresh.samples, lb.predict(bnn, x, samples=3, noise="activation", chunk_size=35).samples)
    assert bnn.training


def test_activation_noise_does_not_begin_again_with_every_batch():
    """Rows count through the blocks: an iterator over chunks is the same as the chunks of one batch."""
    bnn, same = lb.convert(nn.Linear(8, 3), lb.Rank1()), torch.ones(10, 8)
    p = lb.predict(bnn, iter(same.split(5)), samples=3, noise="activation")
    assert not torch.equal(p.samples[:, :5], p.samples[:, 5:])
    assert torch.equal(p.samples, lb.predict(bnn, same, samples=3, noise="activation", chunk_size=5).samples)
    loader = DataLoader(TensorDataset(same), batch_size=5)
    assert torch.equal(p.samples, lb.predict(bnn, loader, samples=3, noise="activation").samples)


STILL = lb.Rank1(init_std=1e-6, init_spread=0.0)


class ChangesItsInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x):
        x = x.data if isinstance(x, PackedSequence) else x
        return self.layer(x.sub_(0.5).div_(2.0))


@pytest.mark.parametrize("noise", ["function", "activation"])
@pytest.mark.parametrize("way", ["tensor", "tuple", "mapping", "packed", "iterator", "loader"])
def test_all_draws_see_the_same_inputs_and_the_caller_keeps_them(way, noise):
    net, x = ChangesItsInputs(), torch.randn(9, 8, generator=torch.Generator().manual_seed(0))
    before, expected = x.clone(), net(x.clone()).softmax(1)
    given = {
        "tensor": x,
        "tuple": (x,),
        "mapping": {"x": x},
        "packed": pack_sequence(list(x[:, None])),
        "iterator": iter(x.split(4)),
        "loader": DataLoader([(x[:4], 0), (x[4:], 0)], batch_size=None),
    }[way]
    p = lb.predict(lb.convert(net, STILL), given, samples=4, noise=noise)
    assert torch.equal(x, before)
    torch.testing.assert_close(p.samples, expected.expand(4, -1, -1), atol=1e-4, rtol=1e-4)


def test_a_member_that_changes_its_inputs_does_not_change_those_of_the_others():
    gentle, rude, x = nn.Linear(8, 3), ChangesItsInputs(), torch.randn(9, 8)
    expected = torch.stack([gentle(x), rude(x.clone())] * 2).softmax(2)
    p = lb.predict(lb.Ensemble([lb.convert(gentle, STILL), lb.convert(rude, STILL)]), x, samples=4)
    torch.testing.assert_close(p.samples, expected, atol=1e-4, rtol=1e-4)


class Backbone(nn.Module):
    """Counts its calls; the in-place activation changes what it returned."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        Backbone.calls += 1
        return self.layer(x)


class LastLayer(nn.Module):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.backbone, self.act, self.head = Backbone(), nn.ReLU(inplace=in_place), nn.Linear(6, 3)

    def forward(self, x):
        hidden = self.act(self.backbone(x))
        if self.act.inplace:
            hidden += 1
        return self.head(hidden) + self.head(self.backbone(x))


@pytest.mark.parametrize("in_place", [False, True])
def test_what_precedes_the_first_stochastic_layer_runs_once(in_place, monkeypatch):
    monkeypatch.setitem(batched.SMALL, "cpu", 0)  # draw by draw
    bnn = lb.convert(LastLayer(in_place), lb.Rank1(), where="head")
    x = torch.randn(5, 6)
    Backbone.calls = 0
    p = lb.predict(bnn, x, samples=8)
    # the first call precedes the head and is kept, unless it was overwritten; the second follows it
    assert Backbone.calls == (16 if in_place else 9)
    for index in (0, 7):
        torch.testing.assert_close(p.samples[index], lb.draw(bnn, index=index)(x).softmax(1), atol=1e-6, rtol=1e-5)


def test_draws_of_a_small_batch_share_one_pass():
    bnn = lb.convert(LastLayer(in_place=True), lb.Rank1(), where="head")
    x = torch.randn(5, 6)
    Backbone.calls = 0
    p = lb.predict(bnn, x, samples=8)
    assert Backbone.calls == 2  # both calls of the backbone in one pass
    torch.testing.assert_close(p.samples[7], lb.draw(bnn, index=7)(x).softmax(1), atol=1e-6, rtol=1e-5)


def test_compiled_and_averaged_models_can_be_predicted_with():
    bnn = lb.convert(Nested(), lb.Rank1())
    x = torch.randn(4, 6)
    compiled = torch.compile(bnn, backend="eager")
    torch.testing.assert_close(lb.predict(compiled, x).mean, lb.predict(bnn, x).mean)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": 0}, "expected samples to be a whole number of at least 1, got 0"),
        ({"samples": 4.0}, "expected samples to be a whole number of at least 1, got 4.0"),
        ({"chunk_size": 0}, "expected chunk_size to be a whole number of at least 1 or None, got 0"),
        ({"noise": "row"}, "expected noise to be one of function, activation, got 'row'"),
        ({"component": 4}, "expected a component from 0 to 3, got 4"),
        ({"seed": 1.5}, "expected seed to be a whole number, got 1.5"),
        ({"seed": None}, "expected seed to be a whole number, got None"),
    ],
)
def test_wrong_arguments_give_one_clear_sentence(change, message):
    bnn = lb.convert(small_net(), lb.Rank1())
    with pytest.raises(ValueError, match=message):
        lb.predict(bnn, X, **change)


def test_whole_numbers_of_numpy_count():
    bnn = lb.convert(small_net(), lb.Rank1())
    p = lb.predict(bnn, X, samples=np.int64(4), chunk_size=np.int32(5), seed=np.int64(0))
    torch.testing.assert_close(p.samples, lb.predict(bnn, X, samples=4).samples)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (X.tolist(), r"got list without one; make a tensor of a list \(torch.as_tensor\)"),
        (TensorDataset(X), "got TensorDataset without one; .* a DataLoader of a Dataset"),
        ((None, None), "got tuple without one"),
        (X[:0], "expected inputs with at least one row on the first axis of their first tensor, got none"),
        (iter([]), "expected at least one batch of inputs"),
    ],
    ids=["list", "dataset", "tuple", "empty", "nothing"],
)
def test_wrong_inputs_give_one_clear_sentence(x, message):
    with pytest.raises(ValueError, match=message):
        lb.predict(lb.convert(small_net(), lb.Rank1()), x)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda y: {"scores": y, "hidden": y}, "got dict with the keys scores, hidden; pass output= to pick one"),
        (lambda y: {"logits": None}, "got NoneType; pass output="),
        (lambda y: None, "got NoneType; pass output="),
        (lambda y: (), "got tuple; pass output="),
    ],
    ids=["mapping", "no logits", "nothing", "empty"],
)
def test_outputs_without_a_tensor_by_custom_are_named(returned, message):
    class Returns(nn.Linear):
        def forward(self, x):
            return returned(super().forward(x))

    with pytest.raises(TypeError, match=message):
        lb.predict(Returns(3, 2), torch.ones(4, 3))


def test_regression_outputs_need_a_gaussian():
    bnn = lb.convert(nn.Linear(3, 1), lb.Rank1())
    with pytest.raises(ValueError, match=r"at least two classes on axis 1, got outputs of shape \(4, 1\)"):
        lb.predict(bnn, torch.randn(4, 3))
    assert lb.predict(bnn, torch.randn(4, 3), lb.Gaussian(0.1)).total.shape == (4, 1)


def test_dense_outputs_are_decomposed_per_pixel():
    bnn = lb.convert(nn.Sequential(nn.Conv2d(1, 3, 3, padding=1)), lb.Rank1())
    p = lb.predict(bnn, X)
    assert p.mean.shape == (11, 3, 8, 8)
    assert p.epistemic.shape == (11, 8, 8)
    assert p.log_prob(torch.zeros(11, 8, 8, dtype=torch.long)).shape == (11, 8, 8)
    assert p.reject(0.5).sum() == 5


PEAK = """
import resource, sys, torch, leanbayes as lb
torch.set_num_threads(1)
net = torch.nn.Sequential(torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 200))
bnn = lb.convert(net, lb.Rank1())
x = torch.randn(2000, 1, 8, 8)
for samples in (2, 16, 144):
    lb.predict(bnn, x, samples=samples, keep_samples=False)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.skipif(resource is None, reason="needs getrusage")
def test_memory_does_not_grow_with_the_number_of_samples():
    run = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    _, few, many = map(int, run.stdout.split())
    # keeping 128 more samples of (2000, 200) floats would take 200 MB
    assert many <= 1.1 * few


def test_few_networks_run_once_each_however_many_samples_are_asked_for():
    """Members of a BatchEnsemble have no noise: draw i is member i mod K, and K passes are all there is to do."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(6, 5)
    bnn = lb.convert(net, lb.BatchEnsemble(components=4))
    runs = []
    seen = nn.modules.module.register_module_forward_hook(
        lambda module, args, y: runs.append(1) if type(module) is nn.Sequential else None
    )
    p = lb.predict(bnn, x, samples=8)
    seen.remove()
    assert len(runs) == 4
    for index in range(8):
        torch.testing.assert_close(lb.draw(bnn, index=index)(x).softmax(1), p.samples[index])
    assert distinct_draws(bnn) == 4
    assert distinct_draws(lb.convert(net, lb.Rank1(components=4))) is None
    assert distinct_draws(net) == 1


def test_members_of_ensembles_may_be_ensembles():
    torch.manual_seed(0)
    nets, x = [nn.Linear(4, 3) for _ in range(4)], torch.randn(5, 4)
    whole = lb.Ensemble([lb.Ensemble(nets[:2]), lb.Ensemble(nets[2:])])
    assert distinct_draws(whole) == 4
    order = [nets[0], nets[2], nets[1], nets[3]]  # draw i is draw i // 2 of member i mod 2
    expected = torch.stack([order[i % 4](x).softmax(1) for i in range(6)]).detach()
    torch.testing.assert_close(lb.predict(whole, x, samples=6).samples, expected)
    alone = lb.Ensemble([lb.convert(nn.Linear(4, 3), lb.Rank1(components=2))])
    torch.testing.assert_close(lb.predict(alone, x, samples=3).mean, lb.predict(alone.members[0], x, samples=3).mean)


def test_spectral_norms_in_training_stay_unchanged():
    """Torch updates their vectors whenever a weight is read in train mode."""
    torch.manual_seed(0)
    norm = nn.utils.parametrizations.spectral_norm
    net = nn.Sequential(norm(nn.Linear(6, 8), n_power_iterations=1), nn.ReLU(), norm(nn.Linear(8, 3)))
    model, x = lb.convert(net, lb.Rank1(), where="0").train(), torch.randn(5, 6)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    predictor, first = lb.Predictor(model), lb.predict(model, x)
    kept = predictor.changes
    for again in (lb.predict(model, x), predictor(x), predictor(x)):
        assert torch.equal(again.samples, first.samples)
    plain = lb.draw(model, index=3)
    assert all(module.training for module in plain.modules())
    torch.testing.assert_close(plain.eval()(x).softmax(1), first.samples[3])
    assert not lb.mean(model.eval()).training
    model.train()
    assert predictor.changes is kept
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model(x)
    assert not torch.equal(model[0].base.parametrizations.weight[0]._u, before["0.base.parametrizations.weight.0._u"])
