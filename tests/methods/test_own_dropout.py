"""Draws and means of a network's own dropout layers are the user's network: its classes, its keys, its function."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import leanbayes as lb

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 3))


def classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


@pytest.mark.parametrize("take", [lb.mean, lb.draw], ids=["mean", "draw"])
def test_classes_and_keys_are_those_of_the_network(take):
    net = network()
    plain = take(lb.convert(net, lb.MCDropout()))
    assert classes(plain) == classes(net)
    net.load_state_dict(plain.state_dict())


def test_the_mean_is_the_network_in_eval_mode():
    net = network()
    mean = lb.mean(lb.convert(net, lb.MCDropout()))
    assert mean[1].p == net[1].p
    assert torch.equal(mean(X), net.eval()(X))


def test_the_mean_of_a_stacked_lstm_is_the_network_in_eval_mode():
    net = nn.LSTM(8, 5, num_layers=2, dropout=0.5)
    mean = lb.mean(lb.convert(net, lb.MCDropout()))
    assert mean.dropout == net.dropout
    assert torch.equal(mean(X[:, None])[0], net.eval()(X[:, None])[0])


def test_the_mask_of_a_draw_survives_copies_files_and_modes():
    bnn = lb.convert(network(), lb.MCDropout())
    with lb.draws(bnn, seed=0, index=2):
        expected = bnn(X)
    assert not torch.equal(expected, lb.mean(bnn)(X))
    plain = lb.draw(bnn, seed=0, index=2)
    loaded = pickle.loads(pickle.dumps(plain))  # written by this test
    traced = torch.jit.trace(plain, X)
    for twin in (plain, copy.deepcopy(plain), loaded, traced, plain.eval(), plain.train()):
        assert torch.equal(twin(X), expected)


def test_a_draw_is_loaded_where_leanbayes_is_not(tmp_path):
    bnn = lb.convert(network(), lb.MCDropout())
    torch.save((lb.draw(bnn, seed=0), X, lb.draw(bnn, seed=0)(X)), tmp_path / "draw.pt")
    code = (
        "import sys, torch; sys.modules['leanbayes'] = None; "
        "net, x, y = torch.load(sys.argv[1], weights_only=False); assert torch.equal(net(x), y)"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "draw.pt")], check=True)


def test_a_hook_of_the_user_sees_the_masked_output():
    net, seen = network(), []
    net[1].register_forward_hook(lambda layer, inputs, output: seen.append(output))
    bnn = lb.convert(net, lb.MCDropout())
    plain = lb.draw(bnn, seed=0)
    seen.clear()
    hidden = plain[2](plain[1](plain[0](X)))
    assert torch.equal(plain[2](seen[0]), hidden)
    assert (seen[0] == 0).any()


def test_a_draw_does_not_run_torchs_fused_transformer_without_its_masks():
    net = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
    bnn = lb.convert(net, lb.MCDropout()).eval()
    plain, x = lb.draw(bnn, seed=0), X[:, None]
    with lb.draws(bnn, seed=0), torch.no_grad():
        torch.testing.assert_close(plain(x), bnn(x))
