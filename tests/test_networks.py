"""Real networks: draws equal the stochastic pass, are ordinary, and leave torch through its exporters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import leanbayes as lb

NETWORKS = {
    "lenet": (lambda: lb.models.LeNet(), (1, 28, 28)),
    "resnet18": (lambda: lb.models.resnet18(input_shape=(3, 32, 32)), (3, 32, 32)),
    "wrn-16-2": (lambda: lb.models.WideResNet(depth=16, widen=2), (3, 32, 32)),
}
METHODS = [lb.Rank1(), lb.BatchEnsemble(), lb.ImplicitNodes()]
each_method = pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)


def trained_like(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Return a network whose norms have seen data, and a batch."""
    make, shape = NETWORKS[name]
    net = make()
    x = torch.randn(4, *shape)
    with torch.no_grad():
        net(x * 2 + 1)
    return net.eval(), x


@each_method
@pytest.mark.parametrize("name", NETWORKS)
def test_draw_equals_the_stochastic_pass_and_mean_equals_the_network(name, method):
    net, x = trained_like(name)
    bnn = lb.convert(net, method)
    plain = lb.draw(bnn, seed=2, index=1)
    with torch.no_grad():
        with lb.draws(bnn, seed=2, index=1):
            torch.testing.assert_close(plain(x), bnn(x), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lb.mean(bnn)(x), net(x), atol=1e-5, rtol=1e-5)
    assert type(plain) is type(net)
    strangers = {type(m).__module__ for m in plain.modules()} - {type(m).__module__ for m in net.modules()}
    assert not strangers
    assert all(m.startswith(("torch.", "leanbayes.models")) for m in {type(m).__module__ for m in plain.modules()})
    assert plain.state_dict().keys() == net.state_dict().keys()
    assert not plain._forward_pre_hooks


@pytest.mark.filterwarnings("ignore")  # the exporters warn about themselves
@pytest.mark.parametrize("name", ["lenet", "wrn-16-2"])
def test_a_draw_exports_with_torch_export_and_onnx(name, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    net, x = trained_like(name)
    plain = lb.draw(lb.convert(net, lb.Rank1()), seed=1)
    expected = plain(x)
    torch.testing.assert_close(torch.export.export(plain, (x,)).module()(x), expected)
    if name != "lenet":  # one network for onnx; tests/integrations/test_onnx.py has others
        return
    path = tmp_path / "draw.onnx"
    torch.onnx.export(plain, (x,), path, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path)
    (out,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(out), expected.detach(), atol=1e-4, rtol=1e-4)
