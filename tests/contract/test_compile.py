"""`torch.compile(fullgraph=True)` with noise on: the eager numbers, and no recompilation when the draw changes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo as dynamo
from torch import nn

import leanbayes as lb
from tests.needs import need_torch

from .cases import converted, FEW_METHODS, LAYERS, METHODS, pairs_of


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    dynamo.reset()
    yield
    dynamo.reset()


def check(bnn, x, backend):
    compiled = torch.compile(bnn, fullgraph=True, backend=backend)
    components = next(layer for _, layer in lb.stochastic_layers(bnn)).components
    for index in range(12):
        with lb.draws(bnn, seed=0, index=index), dynamo.config.patch(error_on_recompile=index > 0):
            torch.testing.assert_close(compiled(x), bnn(x), atol=1e-5, rtol=1e-5)
    for component in range(components):
        with lb.draws(bnn, seed=1, component=component), dynamo.config.patch(error_on_recompile=True):
            torch.testing.assert_close(compiled(x), bnn(x), atol=1e-5, rtol=1e-5)


class SideBySide(nn.Module):
    """Layers with an input each, in one graph."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleDict({layer.name: layer.make() for layer in layers})

    def forward(self, inputs):
        return {name: layer(inputs[name]) for name, layer in self.layers.items()}


ALL = ("rank1:default", "mean_field:default")
FEW = ("linear_tokens", "conv2d_options", "embedding", "batch_norm", "layer_norm", "dropout", "dropout2d")
"""Every layer is traced with two methods, and these with every method; named arguments below go to a transposed one."""


@pytest.mark.parametrize("method", METHODS)
def test_compiled_draws_equal_eager_ones_without_recompiling(method):
    layers = [layer for layer in pairs_of("compile")[method] if method in ALL or layer.name in FEW]
    if method.startswith("patch:"):
        need_torch("2.5", "dynamo cannot follow functional_call into a layer of torch before")
    torch.manual_seed(0)
    net = SideBySide(layers)
    bnn = lb.convert(net, METHODS[method], where=[f"layers.{layer.name}" for layer in layers])
    assert len(list(lb.stochastic_layers(bnn))) == len(layers)
    # Tracing is what differs between examples of a method; the test of named arguments lowers one of each method.
    backend = "aot_eager" if method in FEW_METHODS else "eager"
    check(bnn, {layer.name: layer.inputs(4) for layer in layers}, backend)


@pytest.mark.parametrize("method", FEW_METHODS[:3])
def test_inductor_gives_the_eager_numbers_and_fresh_noise_per_row(method):
    _, bnn = converted(method, LAYERS[3])
    x = LAYERS[3].inputs(4)
    check(bnn, x, "inductor")
    compiled = torch.compile(bnn, fullgraph=True, backend="aot_eager")
    x = x[:1].expand(8, -1, -1, -1)
    first, second = compiled(x), compiled(x)
    assert compiled(x[:6]).shape[0] == 6  # the last batch of an epoch
    assert compiled(x[:4]).shape[0] == 4
    rows_differ = next(layer for _, layer in lb.stochastic_layers(bnn)).row_noise
    assert torch.equal(first[0], first[6]) != rows_differ
    first.sum().backward()
    assert all(p.grad is not None for p in bnn.parameters())
    assert second.shape == first.shape


UP = nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1)


@pytest.mark.parametrize(
    "method",
    [
        name
        for name, method in METHODS.items()
        if name.endswith(":default") and "dropout:" not in name and isinstance(UP, method.targets)
    ],
)
def test_compiled_layers_take_named_arguments(method):
    need_torch("2.5", "dynamo steps over the __call__ of a layer before")

    class Up(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = copy.deepcopy(UP)

        def forward(self, x):
            return self.up(x, output_size=(8, 8))

    check(lb.convert(Up(), METHODS[method]), torch.randn(4, 3, 4, 4), "aot_eager")
