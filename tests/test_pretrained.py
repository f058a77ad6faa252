"""Pretrained networks: converted whole or in part they keep their function, and a small file holds the learned part."""

from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import leanbayes as lb
from leanbayes.core.plain import strip

METHODS = (lb.Rank1(), lb.BatchEnsemble(), lb.ImplicitNodes(), lb.ModelPatch(), lb.MeanField(), lb.VarianceLayers())
CHOICES = {
    "all": None,
    "a glob": "stages.3.*",
    "globs": ["stem.0", "stages.?.0.body.*"],
    "the last layer": lb.layers.last(nn.Linear),
    "by name": "head",
}


@pytest.fixture(scope="module")
def net() -> nn.Module:
    """Return a residual network with statistics that are not those of a fresh one."""
    torch.manual_seed(0)
    made = lb.models.ResNet((1, 1, 1, 1), bottleneck=True, input_shape=(3, 16, 16))
    with torch.no_grad():
        made(torch.randn(16, 3, 16, 16))
    return made.eval()


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("chosen", CHOICES)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_conversion_keeps_the_function_whatever_is_converted(net, x, method, chosen):
    bnn = lb.convert(net, method, where=CHOICES[chosen])
    with torch.no_grad():
        torch.testing.assert_close(lb.mean(bnn)(x), net(x), atol=1e-5, rtol=1e-5)


def test_the_last_layer_alone_is_stochastic_and_the_rest_runs_once(net, x):
    bnn = lb.convert(net, lb.Rank1(components=4), where=lb.layers.last(nn.Linear))
    assert [path for path, _ in lb.stochastic_layers(bnn)] == ["head"]
    passes = []
    bnn.stages[3].register_forward_hook(lambda module, args, result: passes.append(len(result)))
    p = lb.predict(bnn, x, samples=8)
    assert sum(passes) == len(x)
    assert p.epistemic.min() > 0


@pytest.fixture(scope="module")
def resnet50() -> nn.Module:
    """Return ResNet-50 as on ImageNet, with statistics of some images."""
    torch.manual_seed(0)
    made = lb.models.build("resnet50", num_outputs=1000, input_shape=(3, 224, 224))
    with torch.no_grad():
        made(torch.randn(8, 3, 64, 64))
    return made


def test_a_posterior_on_the_checkpoint_of_resnet50_predicts_what_the_saved_whole_does(resnet50, tmp_path):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 3, 64, 64, generator=generator), torch.randint(1000, (8,), generator=generator)
    bnn = lb.convert(resnet50, lb.Rank1(components=4))
    start = lb.predict(bnn, x[:2], samples=4).mean
    recipe = lb.Recipe(epochs=2, batch_size=8, lr=1e-4, posterior_lr=0.2, freeze=True, accelerator="cpu")
    lb.fit(bnn, (x, y), recipe, progress=False)  # two steps
    whole, posterior = tmp_path / "whole.safetensors", tmp_path / "posterior.safetensors"
    lb.save(bnn, whole)
    lb.save(bnn, posterior, only="posterior")
    assert posterior.stat().st_size < 2e6
    assert whole.stat().st_size > 100e6
    one, other = (lb.predict(lb.load(path, resnet50), x[:2], samples=4).mean for path in (whole, posterior))
    assert torch.equal(one, other)
    assert not torch.allclose(one, start)
    theirs = resnet50.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in strip(bnn).state_dict().items())


def test_the_spread_for_fine_tuning_keeps_the_likelihood_of_a_trained_network():
    digits = load_digits()
    torch.manual_seed(0)
    order = torch.randperm(len(digits.data))
    x, y = torch.tensor(digits.data / 16 - 0.3).float()[order], torch.tensor(digits.target)[order]
    layers = [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()]
    trained = nn.Sequential(*layers, nn.Linear(64, 10))
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.05, momentum=0.9)
    for _ in range(12):
        for rows in torch.randperm(300).split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(trained(x[rows]), y[rows]).backward()
            optimizer.step()

    def surprise(model: nn.Module) -> float:
        return -lb.predict(model, x[300:], samples=40).log_prob(y[300:]).mean().item()

    before = surprise(trained)
    for method in (lb.BatchEnsemble(init_spread=0.05), lb.ModelPatch(init_spread=0.05)):
        assert surprise(lb.convert(trained, method)) < 1.05 * before < 0.4
    assert surprise(lb.convert(trained, lb.BatchEnsemble())) > 1.3 * before  # why the docstring says so
