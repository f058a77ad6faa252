"""Captures of training steps on a stand-in for a GPU: gradients, buffers, and the state after a failed one."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import leanbayes as lb
from leanbayes.core import answer_graphs, step_graph
from leanbayes.core.step_graph import CapturedStep
from tests.fake_cuda import FakeCuda

from .problems import images, network


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    fake, fork = FakeCuda(), torch.random.fork_rng
    monkeypatch.setattr(answer_graphs, "_cuda", fake)
    monkeypatch.setattr(step_graph, "_cuda", fake)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: fork(devices=[]))
    return fake


def loss_of(model):
    return lambda x, y, beta: lb.elbo(model, x, y, lb.Categorical(), num_data=96, beta=beta)


class Fails(nn.Module):
    """Fails in a capture alone; `invalid` captures cannot be ended."""

    def __init__(self, cuda: FakeCuda, *, invalid: bool) -> None:
        super().__init__()
        self.cuda, self.invalid = [cuda], invalid

    def forward(self, x):
        (cuda,) = self.cuda
        if cuda.capturing:
            cuda.invalid = self.invalid
            raise RuntimeError("operation not permitted when stream is capturing")
        return x


def test_a_captured_step_has_the_gradients_and_the_buffers_of_one_step(cuda):
    captured, ordinary = network(), network()
    (x, y), step = images(), CapturedStep(loss_of(captured), captured)
    before = [buffer.clone() for buffer in captured.buffers()]
    terms = step(x, y, 1.0)
    wanted = loss_of(ordinary)(x, y, 1.0)
    wanted.loss.backward()
    torch.testing.assert_close(terms.loss, wanted.loss)
    for a, b in zip(captured.parameters(), ordinary.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    for buffer, old in zip(captured.buffers(), before, strict=True):  # a real replay moves them, this one does not
        assert torch.equal(buffer, old)
    (graph,) = cuda.graphs
    assert graph.replays == 1
    captured.zero_grad()
    step(x, y, 1.0)
    assert graph.replays == 2
    assert all(parameter.grad is not None for parameter in captured.parameters())
    assert step(x[:5], y[:5], 1.0) is None
    assert cuda.current is cuda.default
    assert cuda.default.waited  # for the kernels of warm-up and capture


@pytest.mark.parametrize("invalid", [False, True])
def test_a_failed_capture_leaves_nothing_behind(cuda, invalid, caplog):
    net = nn.Sequential(network(), Fails(cuda, invalid=invalid))
    (x, y), step = images(), CapturedStep(loss_of(net), net)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with caplog.at_level(logging.WARNING, "leanbayes"):
        assert step(x, y, 1.0) is None
        assert step(x, y, 1.0) is None
    (message,) = [one.message for one in caplog.records if "are not captured" in one.message]
    assert "operation not permitted" in message
    assert cuda.current is cuda.default
    assert not cuda.default_generators[0].captured
    (graph,) = cuda.graphs
    assert graph.dropped
    assert not graph.open
    assert all(parameter.grad is None for parameter in net.parameters())
    torch.testing.assert_close(dict(net.state_dict()), before)


def test_a_capture_casts_weights_itself(cuda):
    """Weights that an autocast around the training has cast before would never change again."""
    seen, net = [], network()
    (x, y), loss = images(), loss_of(net)

    def noted(x, y, beta):
        seen.append(torch.is_autocast_cache_enabled())
        return loss(x, y, beta)

    with torch.autocast("cpu", torch.bfloat16):
        assert CapturedStep(noted, net)(x, y, 1.0) is not None
        assert torch.is_autocast_cache_enabled()
    assert not any(seen)
    seen.clear()
    assert CapturedStep(noted, net)(x, y, 1.0) is not None
    assert all(seen)  # compiled code would be compiled again


@pytest.mark.parametrize("invalid", [False, True])
def test_a_failed_capture_of_an_answer_frees_the_generator(cuda, invalid):
    graph = cuda.CUDAGraph()

    def capture():
        with cuda.stream(cuda.Stream()), answer_graphs.capturing(graph, torch.device("cuda", 0)):
            cuda.invalid = invalid
            raise RuntimeError("raised by the network")

    with pytest.raises(RuntimeError, match="by the network"):
        capture()
    assert not cuda.default_generators[0].captured
    assert graph.dropped
