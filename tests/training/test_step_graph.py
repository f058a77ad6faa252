"""Training steps as CUDA graphs: the numbers of ordinary steps, fresh noise, and ordinary steps as the way back."""

from __future__ import annotations

import logging
import random
import statistics

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import leanbayes as lb
from leanbayes.core.step_graph import CapturedStep, python_state, refusal
from leanbayes.training.fit import fit
from tests.contract.cases import METHODS

from .problems import images, network, rank1, short

gpu = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::UserWarning"),  # inductor comments on its own choices
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
]
KINDS = ["rank1:default", "implicit:default", "patch:default", "batch_ensemble:default", "mean_field:default"]


def loss_of(model):
    return lambda x, y, beta: lb.elbo(model, x, y, lb.Categorical(), num_data=96, beta=beta)


def test_hooks_of_the_user_are_a_reason_not_to_captured_for():
    bnn = rank1()
    assert refusal(bnn) is None
    handle = bnn[2].register_forward_hook(lambda *_: None)
    assert "module '2' has a hook" in str(refusal(bnn))
    handle.remove()
    assert refusal(bnn) is None
    bnn[4].base.weight.register_hook(lambda gradient: None)
    assert "parameter '4.base.weight' has a hook" in str(refusal(bnn))


class Sometimes(nn.Module):
    """Leaves itself out at random, as transformers do with whole layers."""

    def forward(self, x):
        return x if torch.rand([]) < 0.5 else -x


class Counts(nn.Module):
    """Counts its passes, as a temperature that falls does."""

    passes = 0

    def forward(self, x):
        self.passes += 1
        return x / self.passes


class Shuffles(nn.Module):
    """Draws from Python's generator."""

    def forward(self, x):
        return x * random.random()


class Draws(nn.Module):
    """Draws from NumPy's generator."""

    def forward(self, x):
        return x * float(np.random.rand())  # noqa: NPY002, what old networks call


@pytest.mark.parametrize("kind", [Sometimes, Counts, Shuffles, Draws])
def test_changes_in_python_that_a_graph_would_not_repeat_are_noticed(kind):
    net = network()
    before = python_state(net)
    net(images()[0])
    assert python_state(net) == before
    net = nn.Sequential(net, kind())
    before = python_state(net)
    net(images()[0])
    assert python_state(net) != before


def test_a_cpu_captures_nothing(monkeypatch):
    def never(*args):
        raise AssertionError

    monkeypatch.setattr(CapturedStep, "__call__", never)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    assert len(fit(rank1(), images(), short(compile=True))) == 3


class TestOnAGpu:
    """Captured steps."""

    pytestmark = gpu

    @pytest.mark.parametrize("norm", [False, True])
    def test_gradients_and_statistics_are_those_of_an_ordinary_step(self, norm):
        x, y = (tensor.cuda() for tensor in images())
        captured, ordinary = network(norm).cuda(), network(norm).cuda()
        step = CapturedStep(loss_of(captured), captured)
        for first in range(0, 96, 32):
            part = slice(first, first + 32)
            terms, wanted = step(x[part], y[part], 1.0), loss_of(ordinary)(x[part], y[part], 1.0)
            ordinary.zero_grad()
            wanted.loss.backward()
            torch.testing.assert_close(terms.loss, wanted.loss)
            torch.testing.assert_close(terms.outputs, wanted.outputs)
            for a, b in zip(captured.parameters(), ordinary.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)
        for a, b in zip(captured.buffers(), ordinary.buffers(), strict=True):
            torch.testing.assert_close(a, b)
        assert step(x[:5], y[:5], 1.0) is None  # another size: an ordinary step

    @pytest.mark.parametrize("method", KINDS)
    def test_replays_have_fresh_noise_with_the_moments_of_ordinary_steps(self, method):
        torch.manual_seed(0)
        bnn = lb.convert(network(norm=False), METHODS[method]).cuda()
        x, y = (tensor.cuda() for tensor in images(32))
        step = CapturedStep(loss_of(bnn), bnn)
        replays = [step(x, y, 1.0).nll.item() for _ in range(400)]
        passes = [loss_of(bnn)(x, y, 1.0).nll.item() for _ in range(400)]
        few = {"batch_ensemble:default": 1, "patch:default": 10}  # different draws: 4, and 5 for each of two layers
        assert len(set(replays)) > few.get(method, 100)
        error = (statistics.variance(replays) / 400 + statistics.variance(passes) / 400) ** 0.5
        assert abs(statistics.mean(replays) - statistics.mean(passes)) < 4 * error
        if not method.startswith("batch_ensemble"):  # its four losses are not normal
            assert statistics.stdev(replays) == pytest.approx(statistics.stdev(passes), rel=0.25)

    def test_the_weight_of_the_kl_is_read_at_every_replay(self):
        bnn = rank1().cuda()
        x, y = (tensor.cuda() for tensor in images())
        step = CapturedStep(loss_of(bnn), bnn)
        for beta in (0.0, 1.0, 3.0):
            terms = step(x, y, beta)
            torch.testing.assert_close(terms.loss, terms.nll + beta * terms.kl / 96)

    def test_a_step_that_cannot_be_captured_is_an_ordinary_one_and_the_log_says_so_once(self, caplog):
        class Reads(nn.Module):
            def forward(self, x):
                return x if x.sum().item() < 1e9 else -x  # waits for the GPU

        net = nn.Sequential(network(), Reads())
        x, y = images()
        with caplog.at_level(logging.WARNING, "leanbayes"):
            step = CapturedStep(loss_of(net.cuda()), net)
            before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
            assert step(x.cuda(), y.cuda(), 1.0) is None
            assert step(x.cuda(), y.cuda(), 1.0) is None
        assert len([one for one in caplog.records if "are not captured as a CUDA graph" in one.message]) == 1
        torch.testing.assert_close(dict(net.state_dict()), before)
        assert all(parameter.grad is None for parameter in net.parameters())
        F.cross_entropy(net(x.cuda()), y.cuda()).backward()  # torch's generator and streams are unharmed
        assert torch.randn(3, device="cuda").isfinite().all()

    @pytest.mark.parametrize("kind", [Sometimes, Counts])
    def test_a_network_that_changes_in_python_is_not_captured(self, kind):
        net = nn.Sequential(network(), kind()).cuda()
        x, y = (tensor.cuda() for tensor in images())
        step = CapturedStep(loss_of(net), net)
        assert step(x, y, 1.0) is None
        assert step.failed

    def test_a_changed_network_is_captured_again(self):
        net = network().cuda()
        x, y = (tensor.cuda() for tensor in images())
        step = CapturedStep(loss_of(net), net)
        step(x, y, 1.0)
        step.look()
        assert step.graph is not None
        net[0].weight.requires_grad_(False)
        step.look()
        assert step.graph is None
        net.zero_grad()
        step(x, y, 1.0)
        assert net[0].weight.grad is None
        assert net[4].weight.grad is not None

    def test_a_compiled_training_is_captured_before_and_after_a_late_conversion(self, monkeypatch):
        captured = []
        own = CapturedStep._capture
        monkeypatch.setattr(CapturedStep, "_capture", lambda *args: captured.append(1) or own(*args))
        bnn = rank1()
        fit(bnn, images(90), short(compile=True, accelerator="cuda", epochs=4, convert_at_epoch=2))
        assert len(captured) == 2
        assert all(parameter.isfinite().all() for parameter in bnn.parameters())
