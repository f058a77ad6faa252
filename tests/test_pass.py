"""One pass of a converted model: how deep its calls go, and that it samples all layers of a method at once."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import leanbayes as lb
from leanbayes.distributions import law as laws
from leanbayes.methods.rank1 import Rank1Layer
from leanbayes.runtime.passes import PassState

SOURCE = str(Path(lb.__file__).parent)
METHODS = {"rank1": lb.Rank1(components=2), "implicit": lb.ImplicitNodes(components=2), "points": lb.BatchEnsemble()}


def frames() -> list[tuple[str, str]]:
    """Return the frames of the library on the stack, innermost first: (file, function)."""
    found = [(frame.filename, frame.function) for frame in inspect.stack()]
    return [frame for frame in found if frame[0].startswith(SOURCE)]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4, bias=False), nn.Tanh(), nn.Linear(4, 3))


def test_a_pass_goes_through_few_functions_and_files(monkeypatch):
    bnn, x = lb.convert(network(), METHODS["rank1"]), torch.randn(8, 5)
    seen: dict[str, list[tuple[str, str]]] = {}
    sample, variables_of = laws.NormalLaw.sample, PassState.variables_of

    def sampled(*args):
        seen["sample"] = frames()
        return sample(*args)

    def read(*args):
        seen["read"] = [*frames(), (inspect.getfile(PassState), "variables_of")]
        return variables_of(*args)

    bnn(x)
    monkeypatch.setattr(laws.NormalLaw, "sample", sampled)
    monkeypatch.setattr(PassState, "variables_of", read)
    bnn(x)
    begun = [*(name for _, name in seen["sample"]), "sample"]
    assert begun == ["joint_sample", "sample_of", "begin", "sample"]
    read_by = [name for _, name in seen["read"] if name != "__call__"]  # the call of the layer itself
    assert read_by == ["forward", "variables_of"]
    files = {file for file, _ in seen["sample"] + seen["read"]} | {laws.__file__}
    assert len(files) <= 5


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_variables_of_all_layers_are_those_of_each(method, monkeypatch):
    bnn, x = lb.convert(network(), method), torch.randn(7, 5)
    bnn(x)
    torch.manual_seed(1)
    together = bnn(x)
    together.square().sum().backward()
    expected = {name: p.grad.clone() for name, p in bnn.named_parameters()}
    bnn.zero_grad()
    monkeypatch.setattr(type(bnn[0]), "sampled_together", False)
    bnn[0].state.plan = None
    torch.manual_seed(1)
    each = bnn(x)
    each.square().sum().backward()
    assert not bnn[0].state.variables
    torch.testing.assert_close(together, each, rtol=1e-6, atol=1e-6)
    for name, p in bnn.named_parameters():
        torch.testing.assert_close(expected[name], p.grad, rtol=1e-5, atol=1e-6)


def test_a_checkpointed_layer_samples_its_own_variables(monkeypatch):
    bnn, x = lb.convert(network(), METHODS["rank1"]), torch.randn(8, 5, requires_grad=True)
    calls = []
    sample = Rank1Layer.sample
    monkeypatch.setattr(Rank1Layer, "sample", lambda self, *args: (calls.append(self.path), sample(self, *args))[1])

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = bnn

        def forward(self, x, reentrant=None):
            if reentrant is None:
                return self.inner[1:](self.inner[0](x))
            return self.inner[1:](checkpoint(self.inner[0], x, use_reentrant=reentrant))

    net = Net()
    bnn[0].state.attach(net)
    for reentrant in (True, False):
        calls.clear()
        net(x, reentrant).sum().backward()
        assert calls == ["0", "0"]  # in the region, and when it is recomputed
    calls.clear()
    net(x).sum().backward()
    assert not calls


def test_a_layer_that_is_not_used_gets_no_gradient():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x):
            return self.used(x)

    bnn = lb.convert(Half(), METHODS["rank1"])
    bnn(torch.randn(4, 3)).sum().backward()
    assert all(p.grad is not None for p in bnn.used.posterior.parameters())
    assert all(p.grad is None for p in bnn.unused.posterior.parameters())


def test_the_state_keeps_no_variables_after_a_pass():
    bnn = lb.convert(network(), METHODS["rank1"])
    bnn(torch.randn(4, 5))
    assert not bnn[0].state.variables


def test_the_history_keeps_no_variables():
    bnn = lb.convert(network(), METHODS["rank1"])
    bnn(torch.randn(4, 5)).sum()
    state = bnn[0].state
    assert state.history.latest is not None
    assert not state.history.latest.state.variables


@pytest.mark.parametrize("method", [lb.MCDropout(rate=0.1), lb.ModelPatch(patch="norm")], ids=str)
def test_a_model_that_moved_draws_its_noise_on_the_new_device(method):
    bnn = lb.convert(nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Dropout(), nn.Linear(6, 2)), method)
    bnn(torch.randn(8, 5))
    assert bnn.to("meta")(torch.randn(8, 5, device="meta")).device.type == "meta"
