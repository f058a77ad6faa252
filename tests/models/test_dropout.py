"""Dropout before every norm: where it is, what it computes, and that plain states and Bayesian conversions fit."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import leanbayes as lb
from leanbayes import models
from leanbayes.models._blocks import DropoutNorm

KINDS = {
    "batch": (nn.BatchNorm1d(6), (4, 6)),
    "batch2d": (nn.BatchNorm2d(6), (4, 6, 3, 3)),
    "instance": (nn.InstanceNorm2d(6, affine=True), (4, 6, 3, 3)),
    "group": (nn.GroupNorm(2, 6), (4, 6, 3)),
    "layer": (nn.LayerNorm(6), (4, 5, 6)),
    "rms": (nn.RMSNorm(6), (4, 6)),
}
NETS = ["wrn-10-1", "small", "pyramidnet-8-6", "mlp-3-7", "regression"]


def images(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return models.build(name, num_outputs=3, input_shape=(1, 6, 6))


def norms(net: nn.Module) -> list[nn.Module]:
    return [m for m in net.modules() if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d))]


def exercised(net: nn.Module) -> nn.Module:
    """Give the norms statistics that differ from those at the start."""
    net.train()(images(8, 1, 6, 6))
    return net.eval()


# ------------------------------------------------------------------------------- what it computes


@pytest.mark.parametrize("kind", KINDS)
def test_entries_are_dropped_and_scaled_before_the_norm(kind):
    norm, shape = KINDS[kind]
    x = images(*shape)
    dropped = models.dropout_before_norms(nn.Sequential(norm), rate=0.3).train()
    torch.manual_seed(3)
    output = dropped(x)
    torch.manual_seed(3)
    mask = nn.functional.dropout(torch.ones_like(x), 0.3)
    torch.testing.assert_close(output, copy.deepcopy(norm).train()(x * mask))
    assert not torch.allclose(output, copy.deepcopy(norm).train()(x))


@pytest.mark.parametrize("name", NETS)
def test_in_eval_mode_it_is_the_plain_network(name):
    net = exercised(make(name))
    dropped = models.dropout_before_norms(net)
    assert not dropped.training
    assert torch.equal(dropped(images(4, 1, 6, 6)), net(images(4, 1, 6, 6)))
    assert not any(isinstance(m, DropoutNorm) for m in net.modules())


@pytest.mark.parametrize("name", NETS)
def test_every_norm_has_one_dropout_of_the_rate(name):
    dropped = models.dropout_before_norms(make(name), rate=0.01)
    inside = [m for m in dropped.modules() if isinstance(m, DropoutNorm)]
    assert [m.norm for m in inside] == norms(dropped)
    assert [m.p for m in dropped.modules() if isinstance(m, nn.Dropout)] == [0.01] * len(inside)
    assert len(inside) == len(norms(make(name)))


def test_the_rate_of_the_paper_is_the_default():
    dropped = models.dropout_before_norms(make("regression"))
    assert {m.p for m in dropped.modules() if isinstance(m, nn.Dropout)} == {0.005}


def test_a_norm_may_be_the_whole_network():
    assert isinstance(models.dropout_before_norms(nn.LayerNorm(4)), DropoutNorm)


def test_a_shared_norm_stays_shared():
    norm = nn.LayerNorm(4)
    net = models.dropout_before_norms(nn.ModuleDict({"a": nn.Sequential(norm, norm), "b": norm}))
    assert net["a"][0] is net["a"][1]
    assert net["a"][0] is net["b"]
    assert sum(p.numel() for p in net.parameters()) == 8


def test_a_transformer_layer_that_reads_its_norms_is_left_alone():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    net = models.dropout_before_norms(nn.Sequential(layer, nn.LayerNorm(8))).eval()
    assert [type(m) for m in (net[0].norm1, net[1])] == [nn.LayerNorm, DropoutNorm]
    with torch.no_grad():
        assert net(images(2, 3, 8)).shape == (2, 3, 8)


def test_it_reads_like_the_norm():
    net = models.dropout_before_norms(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, eps=0.5)))
    assert net[1].eps == 0.5
    assert net[1].weight is net[1].norm.weight
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        _ = net[1].absent


# ------------------------------------------------------------------------------- states


@pytest.mark.parametrize("name", NETS)
def test_a_plain_state_loads(name):
    net = exercised(make(name))
    other = models.dropout_before_norms(make(name)).eval()
    other.load_state_dict(net.state_dict())
    x = images(4, 1, 6, 6)
    assert torch.equal(other(x), net(x))
    again = models.dropout_before_norms(make(name)).eval()
    again.load_state_dict(other.state_dict())
    assert torch.equal(again(x), net(x))


def test_a_plain_state_loads_where_the_norm_is_all():
    norm = nn.BatchNorm1d(3)
    norm(images(5, 3))
    dropped = models.dropout_before_norms(nn.BatchNorm1d(3))
    dropped.load_state_dict(norm.state_dict())
    assert torch.equal(dropped.norm.running_mean, norm.running_mean)


def test_strange_keys_are_still_strange():
    net = make("regression")
    state = net.state_dict() | {"layers.0.scale": torch.ones(1)}
    with pytest.raises(RuntimeError, match=r"Unexpected key.*layers\.0\.norm\.scale"):
        models.dropout_before_norms(net).load_state_dict(state)


def test_pickle_round_trip():
    net = exercised(models.dropout_before_norms(make("wrn-10-1")))
    x = images(2, 1, 6, 6)
    assert torch.equal(pickle.loads(pickle.dumps(net))(x), net(x))


# ------------------------------------------------------------------------------- Bayes


@pytest.mark.parametrize("name", NETS)
def test_mc_dropout_makes_exactly_these_layers_stochastic(name):
    net = exercised(models.dropout_before_norms(make(name), rate=0.2))
    bnn = lb.convert(net, lb.MCDropout(rate=0.9))
    paths = {path for path, m in net.named_modules() if isinstance(m, nn.Dropout)}
    assert {path for path, _ in lb.stochastic_layers(bnn)} == paths
    assert lb.summary(bnn).converted == len(norms(net))
    x = images(4, 1, 6, 6)
    p = lb.predict(bnn, x, samples=6)
    assert p.epistemic.mean() > 0
    torch.testing.assert_close(lb.draw(bnn, index=2)(x).softmax(1), p.samples[2])
    torch.testing.assert_close(lb.mean(bnn)(x), net(x))


@pytest.mark.parametrize("methods", [(lb.MCDropout(), lb.ModelPatch()), (lb.ModelPatch(), lb.MCDropout())])
def test_dropouts_and_patched_norms_may_be_chained(methods):
    net = exercised(models.dropout_before_norms(make("wrn-10-1"), rate=0.2))
    bnn = lb.convert(lb.convert(net, methods[0]), methods[1])
    dropouts = [layer for _, layer in lb.stochastic_layers(bnn) if isinstance(layer.base, nn.Dropout)]
    assert len(dropouts) == len(norms(net))
    x = images(4, 1, 6, 6)
    torch.testing.assert_close(lb.draw(bnn, index=1)(x).softmax(1), lb.predict(bnn, x, samples=2).samples[1])


def test_a_plain_state_loads_into_the_converted_network():
    net = exercised(make("wrn-10-1"))
    bnn = lb.convert(models.dropout_before_norms(make("wrn-10-1")), lb.MCDropout()).eval()
    bnn.load_state_dict(net.state_dict())
    x = images(4, 1, 6, 6)
    torch.testing.assert_close(lb.mean(bnn)(x), net(x))


def test_a_saved_model_comes_back(tmp_path):
    bnn = lb.convert(exercised(models.dropout_before_norms(make("wrn-10-1"), rate=0.2)), lb.MCDropout())
    lb.save(bnn, tmp_path / "model.safetensors")
    other = lb.load(tmp_path / "model.safetensors", models.dropout_before_norms(make("wrn-10-1"), rate=0.2))
    x = images(4, 1, 6, 6)
    assert torch.equal(lb.predict(other, x, samples=3).samples, lb.predict(bnn, x, samples=3).samples)


def test_it_trains():
    bnn = lb.convert(models.dropout_before_norms(make("regression")), lb.MCDropout())
    terms = lb.elbo(bnn, images(8, 1, 6, 6), images(8, 3), lb.Gaussian(), num_data=8)
    terms.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in bnn.parameters())


# ------------------------------------------------------------------------------- by name, and wrong use


@pytest.mark.parametrize(("suffix", "rate"), [("+dropout", 0.005), ("+dropout0.02", 0.02), ("+dropout0.5", 0.5)])
@pytest.mark.parametrize("name", NETS)
def test_build_by_name(name, suffix, rate):
    net = make(name + suffix)
    assert {m.p for m in net.modules() if isinstance(m, nn.Dropout)} == {rate}
    x = images(4, 1, 6, 6)
    assert torch.equal(net.eval()(x), make(name).eval()(x))


@pytest.mark.parametrize("name", ["mlp", "lenet-w0.5", "vgg11", "mlp-1-5"])
def test_networks_without_norms_are_refused(name):
    with pytest.raises(
        ValueError, match=r"expected a network with norms that have no dropout .*got \w+ without any. Choose another"
    ):
        models.build(f"{name}+dropout", num_outputs=3, input_shape=(1, 32, 32))


@pytest.mark.parametrize("name", ["vgg12+dropout", "regression+drop", "regression+dropout-0.1", "regression+"])
def test_other_suffixes_are_refused(name):
    with pytest.raises(ValueError, match=r"expected a network among .*add \+dropout or \+dropoutRATE to the name"):
        make(name)


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, 50])
def test_a_rate_that_is_no_share_is_refused(rate):
    with pytest.raises(ValueError, match=rf"expected a dropout rate between 0 and 1, got {rate}"):
        models.dropout_before_norms(make("regression"), rate)


def test_norms_that_have_dropout_already_do_not_get_another():
    with pytest.raises(ValueError, match="without any"):
        models.dropout_before_norms(make("regression+dropout"))
