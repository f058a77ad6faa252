"""Networks of ensemble model patching: the printed parameter counts, and what their layers compute."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from leanbayes import models


def images(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def count_parameters(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def on_meta(maker, **options) -> nn.Module:
    with torch.device("meta"):
        return maker(**options)


# --------------------------------------------------------------------------------- counts


@pytest.mark.parametrize(
    ("maker", "options", "norms", "output", "patched"),
    [
        (models.resnet18, {"num_outputs": 1000, "stem": "imagenet"}, 9_600, 513_000, 13_779_912),
        (models.PyramidNet, {"num_outputs": 100}, 49_798, 28_700, 28_825_299),
        (models.deep_mlp, {}, 99 * 200, 100 * 100, 1_129_100),
    ],
)
def test_five_copies_of_norms_and_output_layer(maker, options, norms, output, patched):
    """Table 3 of Chang et al. (2019): the parameters after ensemble model patching with K = 5."""
    network = on_meta(maker, **options)
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d)
    *_, last = (m for m in network.modules() if isinstance(m, nn.Linear))
    assert sum(count_parameters(m) for m in network.modules() if isinstance(m, kinds)) == norms
    assert count_parameters(last) == output
    assert count_parameters(network) + 4 * (norms + output) == patched


def test_patched_norms_of_resnet18_cost_a_third_of_a_percent():
    network = on_meta(models.resnet18, num_outputs=1000, stem="imagenet")
    extra = 4 * sum(count_parameters(m) for m in network.modules() if isinstance(m, nn.BatchNorm2d))
    assert extra == 38_400
    assert round(100 * extra / count_parameters(network), 3) == 0.328


def test_pyramidnet_parameters_by_arithmetic():
    widths = range(16, 287, 5)
    pairs = list(pairwise(widths))
    assert len(pairs) == 54
    convolutions = 3 * 16 * 9 + sum(9 * (c * w + w * w) for c, w in pairs)
    norms = 2 * (16 + sum(c + 2 * w for c, w in pairs) + 286)
    output = 286 * 100 + 100
    assert convolutions + norms + output == 28_511_307
    assert convolutions + 5 * (norms + output) == 28_825_299


# --------------------------------------------------------------------------------- layers


def test_deep_mlp_is_the_one_of_the_paper():
    network = on_meta(models.deep_mlp)
    linear = [m for m in network.layers if isinstance(m, nn.Linear)]
    assert [tuple(m.weight.shape) for m in linear] == [(100, 1)] + 99 * [(100, 100)]
    assert all(m.bias is None for m in linear)
    assert sum(isinstance(m, nn.BatchNorm1d) for m in network.layers) == 99


def test_regression_net_is_norm_linear_relu_norm_linear():
    torch.manual_seed(0)
    network = models.RegressionNet(4, 2, hidden=5).double()
    x = images(20, 4).double()

    def norm(values):
        return 0.2 * (values - values.mean(0)) / (values.var(0, unbiased=False) + 1e-5).sqrt()

    _, first, _, _, last = network.layers
    torch.testing.assert_close(network(x), last(norm(torch.relu(first(norm(x))))))


@pytest.mark.parametrize("stride", [1, 2])
def test_pyramid_block_without_body_averages_and_adds_zeros(stride):
    block = models.resnet.PyramidBlock(8, 11, stride=stride).eval()
    nn.init.zeros_(block.body[-1].weight)
    x = images(2, 8, 6, 6)
    output = block(x)
    coarse = x if stride == 1 else x.reshape(2, 8, 3, 2, 3, 2).mean((3, 5))
    torch.testing.assert_close(output[:, :8], coarse)
    assert output.shape[1] == 11
    assert not output[:, 8:].any()


def test_pyramid_block_order():
    block = models.resnet.PyramidBlock(8, 11, stride=2)
    kinds = [nn.BatchNorm2d, nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.Conv2d, nn.BatchNorm2d]
    assert [type(m) for m in block.body] == kinds
    assert [m.stride[0] for m in block.body if isinstance(m, nn.Conv2d)] == [2, 1]


@pytest.mark.parametrize(("depth", "suggestion"), [(111, 110), (28, 26), (2, 8), (-3, 8)])
def test_pyramidnet_depth(depth, suggestion):
    message = rf"expected depth = 6n \+ 2 .* got {depth}\. Try depth={suggestion}\."
    with pytest.raises(ValueError, match=message):
        models.PyramidNet(depth)
