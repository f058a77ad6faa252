"""Networks of nested dropout: published sizes, widths, what their blocks compute, and that torch.fx can trace them."""

from __future__ import annotations

import operator
import pickle
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import symbolic_trace

import leanbayes as lb
from leanbayes import models
from leanbayes.models.resnet import GroupedBottleneck, InvertedResidual

NETWORKS = ["vgg11-bn-w0.0625", "mobilenetv2-w0.25", "resnext-11-2x4d", "unet"]


def images(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def count_parameters(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def on_meta(maker, *args, **options) -> nn.Module:
    with torch.device("meta"):
        return maker(*args, **options)


def build(name: str, num_outputs: int = 10) -> nn.Module:
    if name == "unet":
        return small_unet()
    torch.manual_seed(0)
    return models.build(name, num_outputs=num_outputs, input_shape=(3, 32, 32))


def small_unet(**options) -> nn.Module:
    torch.manual_seed(0)
    return models.UNet(3, (3, 16, 24), **{"widths": (4, 5, 6), **options})


def unsettle(network: nn.Module) -> nn.Module:
    """Give norms other statistics and weights than those at the start, which hide mistakes; then eval mode."""
    for norm in network.modules():
        if isinstance(norm, nn.BatchNorm2d):
            for values in (norm.weight.data, norm.bias.data, norm.running_mean, norm.running_var):
                nn.init.uniform_(values, 0.5, 1.5)
    return network.eval()


# --------------------------------------------------------------------------------- counts


@pytest.mark.parametrize(
    ("maker", "options", "parameters"),
    [
        # torchvision's networks for ImageNet have as many.
        (models.vgg11_bn, {"num_outputs": 1000, "head": "imagenet"}, 132_868_840),
        (models.MobileNetV2, {"num_outputs": 1000}, 3_504_872),
        # Published ports of the ResNeXts for CIFAR-10 have as many.
        (models.ResNeXt, {"cardinality": 8, "base_width": 64}, 34_426_698),
        (models.ResNeXt, {"cardinality": 16, "base_width": 64}, 68_155_210),
        (models.ResNeXt, {"cardinality": 32, "base_width": 4}, 4_775_754),
        (models.ResNeXt, {"depth": 272, "cardinality": 1, "base_width": 64}, 44_540_746),
    ],
)
def test_published_counts(maker, options, parameters):
    assert count_parameters(on_meta(maker, **options)) == parameters


@pytest.mark.parametrize("width", [1, 2, 0.25])
def test_vgg11_bn_parameters_by_arithmetic(width):
    channels = [3] + [int(width * c) for c in (64, 128, 256, 256, 512, 512, 512, 512)]
    convolutions = sum(9 * c * w + w for c, w in pairwise(channels))
    hidden = channels[-1]
    expected = convolutions + 2 * sum(channels[1:]) + 2 * (hidden + 1) * hidden + (hidden + 1) * 10
    assert count_parameters(on_meta(models.vgg11_bn, width=width)) == expected


@pytest.mark.parametrize("width", [1, 0.5])
def test_mobilenet_parameters_by_arithmetic(width):
    table = [(16, 1), (24, 2), (32, 3), (64, 4), (96, 3), (160, 3), (320, 1)]
    stem, last = int(32 * width), int(1280 * width)
    channels = [stem] + [int(w * width) for w, blocks in table for _ in range(blocks)]
    expected = 27 * stem + 2 * stem + (9 * stem + 2 * stem) + (stem * channels[1] + 2 * channels[1])
    for c, w in pairwise(channels[1:]):
        expected += (c + 2) * 6 * c + (9 + 2) * 6 * c + (6 * c + 2) * w
    expected += (channels[-1] + 2) * last + (last + 1) * 10
    assert count_parameters(on_meta(models.MobileNetV2, width=width)) == expected


@pytest.mark.parametrize(("depth", "groups", "base"), [(29, 2, 64), (29, 8, 64), (11, 3, 5)])
def test_resnext_parameters_by_arithmetic(depth, groups, base):
    expected, channels = 27 * 64 + 2 * 64, 64
    for stage in range(3):
        inner, outputs = groups * base * 2**stage, 256 * 2**stage
        expected += channels * outputs + 2 * outputs  # the projection
        for _ in range((depth - 2) // 9):
            expected += (channels + 2) * inner + (9 * base * 2**stage + 2) * inner + (inner + 2) * outputs
            channels = outputs
    network = on_meta(models.ResNeXt, depth, groups, base)
    assert count_parameters(network) == expected + 1024 * 10 + 10


@pytest.mark.parametrize("widths", [(32, 64, 128, 192), (7,), (4, 6, 5)])
def test_unet_parameters_by_arithmetic(widths):
    def level(channels, width):
        return 9 * (channels + width) * width + 4 * width

    expected = level(1, widths[0]) + 3 * (widths[0] + 1)
    for fine, coarse in pairwise(widths):
        expected += level(fine, coarse) + (9 * coarse * fine + 2 * fine) + level(2 * fine, fine)
    assert count_parameters(on_meta(models.UNet, 3, (1, 32, 32), widths=widths)) == expected


# --------------------------------------------------------------------------------- widths


@pytest.mark.parametrize("name", ["vgg11-bn", "mobilenetv2"])
def test_half_the_width_halves_every_hidden_layer(name):
    with torch.device("meta"):
        whole, half = build(name), build(f"{name}-w0.5")
    layers = [[m for m in net.modules() if isinstance(m, (nn.Conv2d, nn.Linear))] for net in (whole, half)]
    outputs = [[m.weight.shape[0] for m in found] for found in layers]
    assert [2 * width for width in outputs[1][:-1]] == outputs[0][:-1]
    assert outputs[0][-1] == outputs[1][-1] == 10


@pytest.mark.parametrize(
    ("name", "widths"),
    [
        ("vgg11-bn-w0.25", [16, 32, 64, 64, 128, 128, 128, 128]),
        ("vgg11-bn-w1.5", [96, 192, 384, 384, 768, 768, 768, 768]),
        ("resnext-11-3x4d", [64, 12, 12, 256, 256, 24, 24, 512, 512, 48, 48, 1024, 1024]),
    ],
)
def test_channels_by_name(name, widths):
    with torch.device("meta"):
        network = build(name)
    assert [m.out_channels for m in network.modules() if isinstance(m, nn.Conv2d)] == widths


def test_resnext_groups():
    with torch.device("meta"):
        network = build("resnext-29-8x64d")
    grouped = [m for m in network.modules() if isinstance(m, nn.Conv2d) and m.groups > 1]
    assert [m.groups for m in grouped] == [8] * 9
    assert [m.weight.shape[1] for m in grouped] == [64] * 3 + [128] * 3 + [256] * 3


def test_mobilenet_filters_each_channel_alone():
    network = on_meta(models.MobileNetV2)
    depthwise = [m for m in network.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)][1:]
    assert len(depthwise) == 17
    assert all(m.groups == m.in_channels == m.out_channels for m in depthwise)
    assert [m.in_channels for m in depthwise[:4]] == [32, 96, 144, 144]


def test_strides_of_small_images():
    x = torch.empty(2, 3, 32, 32, device="meta")
    mobile, grouped = on_meta(models.MobileNetV2), on_meta(models.ResNeXt)
    assert mobile.stages(mobile.stem(x)).shape == (2, 320, 4, 4)
    assert grouped.stages(grouped.stem(x)).shape == (2, 1024, 8, 8)


# --------------------------------------------------------------------------------- blocks


@pytest.mark.parametrize(("width", "stride", "same"), [(4, 1, True), (5, 1, False), (4, 2, False)])
@pytest.mark.parametrize("expansion", [1, 6])
def test_inverted_residual_by_hand(width, stride, same, expansion):
    torch.manual_seed(0)
    block = unsettle(InvertedResidual(4, width, stride=stride, expansion=expansion))
    x = images(2, 4, 6, 6)
    *widen, depthwise, norm, _, narrow, last = block.body
    inner = widen[1](widen[0](x)).clamp(0, 6) if widen else x
    channels = range(inner.shape[1])
    filtered = [F.conv2d(inner[:, [i]], depthwise.weight[[i]], stride=stride, padding=1) for i in channels]
    expected = last(narrow(norm(torch.cat(filtered, 1)).clamp(0, 6)))
    torch.testing.assert_close(block(x), x + expected if same else expected)


@pytest.mark.parametrize(("channels", "stride"), [(12, 1), (8, 1), (12, 2)])
def test_grouped_bottleneck_is_a_sum_of_small_branches(channels, stride):
    """Figure 3(a) of Xie et al.: the block equals the sum of one narrow bottleneck for each group."""
    torch.manual_seed(0)
    block = unsettle(GroupedBottleneck(channels, 6, 12, groups=3, stride=stride))
    x = images(2, channels, 6, 6)
    enter, first_norm, _, grouped, second_norm, _, leave, last_norm = block.body
    entered = torch.relu(first_norm(F.conv2d(x, enter.weight)))
    total = 0
    for rows in torch.arange(6).view(3, 2):
        branch = F.conv2d(entered[:, rows], grouped.weight[rows], stride=stride, padding=1)
        scale = second_norm.weight[rows] / (second_norm.running_var[rows] + second_norm.eps).sqrt()
        centred = branch - second_norm.running_mean[rows].view(-1, 1, 1)
        branch = torch.relu(centred * scale.view(-1, 1, 1) + second_norm.bias[rows].view(-1, 1, 1))
        total = total + F.conv2d(branch, leave.weight[:, rows])
    torch.testing.assert_close(block(x), torch.relu(last_norm(total) + block.shortcut(x)))
    assert isinstance(block.shortcut, nn.Identity) == (stride == 1 and channels == 12)


def test_unet_by_hand():
    network = unsettle(small_unet(widths=(4, 5)))
    x = images(2, 3, 16, 24)

    def level(layers, values):
        first, first_norm, _, second, second_norm, _ = layers
        return torch.relu(second_norm(second(torch.relu(first_norm(first(values))))))

    fine = level(network.encoder[0], x)
    coarse = level(network.encoder[1][1:], F.max_pool2d(fine, 2))
    _, convolution, norm, _ = network.enlarge[0]
    enlarged = F.interpolate(coarse, size=(16, 24), mode="bilinear", align_corners=False)
    joined = torch.cat([fine, torch.relu(norm(convolution(enlarged)))], 1)
    expected = F.conv2d(level(network.decoder[0], joined), network.head.weight, network.head.bias)
    torch.testing.assert_close(network(x), expected)


# -------------------------------------------------------------------------------- forward


@pytest.mark.parametrize("shape", [(3, 16, 24), (3, 8, 8), (3, 64, 4)])
def test_unet_has_outputs_for_every_pixel(shape):
    assert small_unet()(images(2, *shape)).shape == (2, 3, *shape[1:])


def test_unet_without_pooling_takes_any_size():
    assert models.UNet(1, (2, 7, 5), widths=(3,))(images(1, 2, 7, 5)).shape == (1, 1, 7, 5)


def test_standard_unet_takes_multiples_of_eight():
    network = on_meta(models.UNet, 2, (1, 24, 40))
    assert network(torch.empty(2, 1, 24, 40, device="meta")).shape == (2, 2, 24, 40)


@pytest.mark.parametrize("name", ["mobilenetv2-w0.1", "resnext-11-1x2d"])
@pytest.mark.parametrize("shape", [(1, 9, 7), (2, 1, 2), (1, 28, 28)])
def test_odd_image_sizes(name, shape):
    network = models.build(name, num_outputs=3, input_shape=shape)
    assert network(images(2, *shape)).shape == (2, 3)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_parameter_gets_a_gradient(name):
    network = unsettle(build(name))  # in eval mode: batch statistics would cancel shifts in front of a norm
    network(images(2, 3, 32, 32)).square().sum().backward()
    for path, parameter in network.named_parameters():
        assert parameter.grad is not None, path
        assert torch.isfinite(parameter.grad).all(), path
        assert parameter.grad.any(), path


@pytest.mark.parametrize("name", NETWORKS)
def test_pickle_round_trip(name):
    network, x = unsettle(build(name)), images(2, 3, 32, 32)
    assert torch.equal(pickle.loads(pickle.dumps(network))(x), network(x))


# -------------------------------------------------------------------------------- tracing


@pytest.mark.parametrize("name", NETWORKS)
def test_traced_network_computes_the_same(name):
    network = unsettle(build(name))
    traced = symbolic_trace(network)
    for batch, side in ((2, 32), (1, 40)):
        x = images(batch, 3, side, side)
        assert torch.equal(traced(x), network(x))


@pytest.mark.parametrize(
    ("name", "functions"), zip(NETWORKS, ([], [operator.add], [operator.add], [torch.cat]), strict=True)
)
def test_graph_is_modules_joined_by_sums_and_concatenations(name, functions):
    nodes = symbolic_trace(build(name)).graph.nodes
    assert {node.op for node in nodes} <= {"placeholder", "call_module", "call_function", "output"}
    assert {node.target for node in nodes if node.op == "call_function"} == set(functions)


def test_unet_inside_another_network_can_be_traced():
    outer = nn.Sequential(nn.Conv2d(1, 3, 1), small_unet()).eval()
    x = images(2, 1, 16, 24)
    assert torch.equal(symbolic_trace(outer)(x), outer(x))


# ---------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "kind"),
    [("vgg11-bn", models.VGG), ("mobilenetv2", models.MobileNetV2), ("resnext-29-2x64d", models.ResNeXt)],
)
def test_names_are_listed_and_build(name, kind):
    assert name in models.names()
    assert name in models.describe()
    with torch.device("meta"):
        network = build(name, num_outputs=7)
        assert isinstance(network, kind)
        assert network(torch.empty(2, 3, 32, 32)).shape == (2, 7)


def test_vgg11_bn_is_told_apart_from_vgg11():
    lines = models.describe()
    assert lines["vgg11"] != lines["vgg11-bn"]
    with torch.device("meta"):
        networks = build("vgg11"), build("vgg11-bn")
    norms = [sum(isinstance(m, nn.BatchNorm2d) for m in network.modules()) for network in networks]
    assert norms == [0, 8]


# --------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(("depth", "suggestion"), [(28, 20), (30, 29), (2, 11), (-3, 11)])
def test_resnext_depth(depth, suggestion):
    message = rf"expected depth = 9n \+ 2 .* got {depth}\. Try depth={suggestion}\."
    with pytest.raises(ValueError, match=message):
        models.ResNeXt(depth)


@pytest.mark.parametrize(
    ("maker", "options", "message"),
    [
        (models.vgg11_bn, {"width": 0}, r"VGG expected width > 0, got 0"),
        (models.MobileNetV2, {"width": -1}, r"MobileNetV2 expected width > 0, got -1"),
        (models.MobileNetV2, {"input_shape": (32, 32)}, r"\(channels, height, width\).*\(32, 32\)"),
        (models.ResNeXt, {"cardinality": 0}, r"ResNeXt expected cardinality >= 1, got 0"),
        (models.ResNeXt, {"base_width": 0}, r"ResNeXt expected base_width >= 1, got 0"),
        (models.ResNeXt, {"input_shape": (32, 32)}, r"\(channels, height, width\).*\(32, 32\)"),
        (models.UNet, {"num_outputs": 0}, r"UNet expected num_outputs >= 1, got 0"),
        (models.UNet, {"widths": ()}, r"UNet expected len\(widths\) >= 1, got 0"),
        (models.UNet, {"widths": (4, 0)}, r"UNet expected widths\[1\] >= 1, got 0"),
        (models.UNet, {"input_shape": (32, 32)}, r"\(channels, height, width\).*\(32, 32\)"),
        (models.UNet, {"input_shape": (1, 32, 28)}, r"UNet .* multiples of 8, got 32 x 28\. Pad or crop"),
        (models.UNet, {"input_shape": (1, 30, 32), "widths": (1, 2, 3)}, r"multiples of 4, got 30 x 32"),
    ],
)
def test_wrong_sizes(maker, options, message):
    with pytest.raises(ValueError, match=message):
        maker(**options)


def test_unet_refuses_images_of_a_wrong_size():
    with pytest.raises(ValueError, match=r"multiples of 4, got 18 x 24\. Pad or crop"):
        small_unet()(images(1, 3, 18, 24))


# ------------------------------------------------------------------------------------ VGG11 with one dense layer


def test_two_thirds_of_the_wide_vgg_are_the_papers_full_network():
    """21 of 32 groups are 504 of 768 channels; the first convolution and both linear layers are not cut."""
    net = lb.models.build("vgg11-dense-w1.5", num_outputs=10, input_shape=(3, 32, 32))
    bnn = lb.convert(net, lb.NestedDropout(groups=32, always_on=2), where="features.*")
    assert not any(path.startswith("head") for path, _ in lb.stochastic_layers(bnn))
    for width, channels in ((2 / 3, [96, 126, 252, 252, 504, 504, 504, 504]), (1 / 16, [96, 12, 24, 24, *[48] * 4])):
        small = lb.mean(lb.slim.narrow(bnn, width))
        weights = [module.weight for module in small.modules() if isinstance(module, nn.Conv2d)]
        assert [len(weight) for weight in weights] == channels
        convolutions = sum(9 * a * b for a, b in pairwise([3, *channels])) + 3 * sum(channels)
        head = channels[-1] * 256 + 3 * 256 + 256 * 10 + 10
        assert sum(p.numel() for p in small.parameters()) == convolutions + head
    assert convolutions + head == 109_982
