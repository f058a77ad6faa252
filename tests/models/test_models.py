"""Reference networks: sizes from the papers, shapes, gradients, state, and errors that teach."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from leanbayes import models
from leanbayes.models.classic import CIFAR_HEAD, Head

LIGHT = ["mlp", "regression", "small", "lenet", "lenet5", "vgg11", "resnet18", "wrn-16-2", "pyramidnet-14-20"]
LIGHT += ["lenet5-bn", "vgg-like-w0.125", "vgg-like-w0.125-dropout"]
LIGHT += ["vgg11-bn-w0.25", "vgg11-dense-w0.25", "mobilenetv2-w0.25", "resnext-11-2x4d"]
NEED_32_PIXELS = {"lenet", "lenet5", "vgg11", "vgg16"}


def shape_of(name: str) -> tuple[int, ...]:
    """Return the shape of a row: steps and variables of a series, or a small image."""
    if name == "lstm-ehr":
        return (4, 3)
    side = 32 if name in NEED_32_PIXELS or name.startswith(("vgg-like", "vgg11-bn", "vgg11-dense", "lenet5-bn")) else 8
    return (3, side, side)


def make(name: str, num_outputs: int = 10) -> nn.Module:
    torch.manual_seed(0)
    return models.build(name, num_outputs=num_outputs, input_shape=shape_of(name))


def images(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def rows_of(name: str, count: int) -> torch.Tensor:
    """Return rows that a network takes: bins of a series, or images."""
    if name == "lstm-ehr":
        return torch.randint(11, (count, *shape_of(name)), generator=torch.Generator().manual_seed(1))
    return images(count, *shape_of(name))


def count_parameters(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def count_nodes(network: nn.Module) -> int:
    """Input nodes of all convolutions and linear layers."""
    convolutions = sum(m.in_channels for m in network.modules() if isinstance(m, nn.Conv2d))
    return convolutions + sum(m.in_features for m in network.modules() if isinstance(m, nn.Linear))


def on_meta(maker, *args, **options) -> nn.Module:
    with torch.device("meta"):
        return maker(*args, **options)


# ---------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(("width", "parameters"), [(1, 41_806), (2, 165_202), (4, 656_794), (8, 2_619_178)])
def test_lenet_parameters(width, parameters):
    assert count_parameters(on_meta(models.LeNet, width=width)) == parameters


@pytest.mark.parametrize(
    ("maker", "options", "parameters"),
    [
        (models.LeNet5, {}, 431_080),
        # The weights of Caffe's LeNet-5, two numbers for each channel with a norm, and the last biases.
        (models.NormLeNet5, {}, 431_080 - 580 + 2 * 570 + 10),
        (models.NormLeNet5, {"dropout": 0.5}, 431_080 - 580 + 2 * 570 + 10),
        # Convolutions of VGG-16, then 512 x 512 and 512 x 10 with a bias, norms of 4,224 + 512 channels.
        (models.vgg_like, {}, 14_710_464 + 512 * 512 + 512 * 10 + 10 + 2 * (4224 + 512)),
        (models.vgg_like, {"dropout": True}, 14_710_464 + 512 * 512 + 512 * 10 + 10 + 2 * (4224 + 512)),
        (models.SmallConvNet, {}, 14_458),
        (models.vgg16, {"head": "cifar"}, 15_245_130),
        (models.vgg16, {"num_outputs": 1000, "head": "imagenet"}, 138_357_544),
        (models.vgg11, {"num_outputs": 1000, "head": "imagenet"}, 132_863_336),
        (models.vgg11_dense, {}, 9_217_728 + 3 * 2752 + (512 * 256 + 3 * 256) + (256 * 10 + 10)),
        (models.vgg11_dense, {"width": 1.5}, 9 * 2_304_288 + 3 * 4128 + (768 * 256 + 3 * 256) + (256 * 10 + 10)),
        (models.vgg16, {"head": "cifar", "batch_norm": True}, 15_245_130 + 2 * 4224),
        (models.resnet18, {"num_outputs": 1000, "stem": "imagenet"}, 11_689_512),
        (models.resnet50, {"num_outputs": 1000, "stem": "imagenet"}, 25_557_032),
        (models.resnet18, {"stem": "cifar"}, 11_173_962),
        (models.WideResNet, {}, 36_479_194),
        (models.PyramidNet, {"num_outputs": 100}, 28_511_307),
        (models.deep_mlp, {}, 1_009_900),
        (models.RegressionNet, {"inputs": 13}, 2 * 13 + 14 * 50 + 2 * 50 + 51),
        (models.RegressionNet, {"inputs": 8, "outputs": 2, "hidden": 100}, 2 * 8 + 9 * 100 + 2 * 100 + 2 * 101),
    ],
)
def test_parameters(maker, options, parameters):
    assert count_parameters(on_meta(maker, **options)) == parameters


@pytest.mark.parametrize(
    ("maker", "options", "nodes"),
    [
        (models.vgg16, {"head": "cifar"}, 5_251),
        (models.vgg16, {"head": "imagenet"}, 36_995),
        (models.resnet50, {"stem": "imagenet"}, 24_579),
        (models.resnet50, {"stem": "cifar"}, 24_579),
        (models.WideResNet, {}, 9_475),
    ],
)
def test_nodes(maker, options, nodes):
    assert count_nodes(on_meta(maker, **options)) == nodes


@pytest.mark.parametrize(
    ("inputs", "outputs", "options", "parameters"),
    [
        (4, 3, {}, 4 * 100 + 100 + 100 * 3 + 3),
        (4, 3, {"hidden": ()}, 4 * 3 + 3),
        ((1, 8, 8), 10, {"hidden": (5, 6), "bias": False}, 64 * 5 + 5 * 6 + 6 * 10),
    ],
)
def test_mlp_parameters(inputs, outputs, options, parameters):
    assert count_parameters(models.MLP(inputs, outputs, **options)) == parameters


# -------------------------------------------------------------------------------- forward


@pytest.mark.parametrize("name", models.names())
def test_build_trains_every_parameter(name):
    network = make(name, num_outputs=7)
    output = network(rows_of(name, 4))
    assert output.shape == (4, 7)
    output.square().sum().backward()
    for path, parameter in network.named_parameters():
        assert parameter.grad is not None, path
        assert torch.isfinite(parameter.grad).all(), path
        assert parameter.grad.any(), path


@pytest.mark.parametrize(
    ("maker", "shape"),
    [
        (models.LeNet5, (1, 16, 17)),
        (models.LeNet5, (3, 33, 30)),
        (models.NormLeNet5, (1, 16, 17)),
        (models.vgg_like, (1, 33, 65)),
        (models.LeNet, (1, 28, 28)),
        (models.LeNet, (3, 32, 37)),
        (models.SmallConvNet, (1, 8, 8)),
        (models.SmallConvNet, (2, 5, 7)),
        (models.vgg11, (1, 33, 47)),
        (models.resnet18, (1, 1, 1)),
        (models.resnet18, (2, 9, 7)),
        (models.resnet18, (3, 65, 33)),
        (lambda **options: models.WideResNet(10, 1, **options), (1, 9, 7)),
        (lambda **options: models.PyramidNet(8, 6, **options), (1, 9, 7)),
        (lambda **options: models.PyramidNet(8, 6, **options), (2, 1, 2)),
    ],
)
def test_odd_image_sizes(maker, shape):
    network = maker(num_outputs=3, input_shape=shape)
    assert network(images(2, *shape)).shape == (2, 3)


@pytest.mark.parametrize(
    "maker",
    [models.vgg16, models.resnet18, models.resnet50, models.WideResNet, models.PyramidNet],
)
def test_full_size_images_on_meta(maker):
    with torch.device("meta"):
        network = maker(num_outputs=1000, input_shape=(3, 224, 224))
        assert network(torch.empty(2, 3, 224, 224)).shape == (2, 1000)


@pytest.mark.parametrize(
    ("inputs", "shape", "expected"),
    [
        (4, (4,), (3,)),
        (4, (5, 6, 4), (5, 6, 3)),
        ((1, 8, 8), (5, 1, 8, 8), (5, 3)),
        ((1, 8, 8), (2, 5, 1, 8, 8), (2, 5, 3)),
    ],
)
def test_mlp_keeps_leading_axes(inputs, shape, expected):
    assert models.MLP(inputs, 3)(images(*shape)).shape == expected


def test_mlp_is_linear_map_activation_linear_map():
    network = models.MLP(4, 3, hidden=(5,), activation=nn.Tanh)
    first, _, last = network.layers
    x = images(6, 4)
    torch.testing.assert_close(network(x), last(torch.tanh(first(x))))


def test_mlp_norms_stand_in_front_of_the_activations():
    network = models.MLP(4, 3, hidden=(5, 6), norm=nn.LayerNorm)
    kinds = [nn.Linear, nn.LayerNorm, nn.ReLU, nn.Linear, nn.LayerNorm, nn.ReLU, nn.Linear]
    assert [type(m) for m in network.layers] == kinds
    assert network(images(2, 5, 4)).shape == (2, 5, 3)


@pytest.mark.parametrize("bottleneck", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
def test_residual_block_without_body_is_its_shortcut(bottleneck, stride):
    block = models.resnet.ResidualBlock(8, 8, stride=stride, bottleneck=bottleneck).eval()
    norm = block.body[-1]
    nn.init.zeros_(norm.weight)
    x = images(2, 8, 6, 6)
    torch.testing.assert_close(block(x), torch.relu(block.shortcut(x)))
    assert isinstance(block.shortcut, nn.Identity) == (stride == 1 and not bottleneck)


def test_bottleneck_takes_its_stride_in_the_3x3_convolution():
    block = models.resnet.ResidualBlock(8, 8, stride=2, bottleneck=True)
    convolutions = [m for m in block.body if isinstance(m, nn.Conv2d)]
    assert [(m.kernel_size[0], m.stride[0]) for m in convolutions] == [(1, 1), (3, 2), (1, 1)]


@pytest.mark.parametrize(("width", "stride"), [(8, 1), (16, 1), (8, 2)])
def test_preactivation_block_without_body_is_its_shortcut(width, stride):
    block = models.resnet.PreactBlock(8, width, stride=stride).eval()
    nn.init.zeros_(block.body[-1].weight)
    x = images(2, 8, 6, 6)
    if width == 8 and stride == 1:
        torch.testing.assert_close(block(x), x)
    else:
        torch.testing.assert_close(block(x), block.shortcut(block.activate(x)))


@pytest.mark.parametrize("name", LIGHT)
def test_evaluation_is_deterministic_and_state_round_trips(name):
    network, other = make(name).eval(), make(name).eval()
    x = images(2, *shape_of(name))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
        expected = network(x)
        assert torch.equal(network(x), expected)
        assert not torch.equal(other(x), expected)
        other.load_state_dict(network.state_dict())
        assert torch.equal(other(x), expected)


@pytest.mark.parametrize("name", ["mlp", "small", "lenet", "lenet5", "wrn-16-2"])
def test_pickle_round_trip(name):
    network = make(name).eval()
    x = images(2, *shape_of(name))
    assert torch.equal(pickle.loads(pickle.dumps(network))(x), network(x))


def test_convolutions_start_with_fan_out_variance_and_zero_bias():
    torch.manual_seed(0)
    layer = models.vgg11().features[-3]
    std = (2 / (9 * layer.out_channels)) ** 0.5
    # The relative standard error of a standard deviation is 1 / sqrt(2 n).
    tolerance = 5 / (2 * layer.weight.numel()) ** 0.5
    assert layer.weight.std().item() == pytest.approx(std, rel=tolerance)
    assert not layer.bias.any()


# -------------------------------------------------------------------------------- choices


@pytest.mark.parametrize(("side", "kernel", "hidden"), [(64, 3, 512), (65, 7, 4096)])
def test_form_follows_image_size(side, kernel, hidden):
    with torch.device("meta"):
        resnet = models.build("resnet18", num_outputs=10, input_shape=(3, 32, side))
        vgg = models.build("vgg11", num_outputs=10, input_shape=(3, 32, side))
    assert resnet.stem[0].kernel_size == (kernel, kernel)
    assert vgg.head[-1].in_features == hidden


@pytest.mark.parametrize(
    ("head", "rates"),
    [("cifar", []), ("imagenet", [0.5, 0.5]), (Head(dropout=0.3), [0.3, 0.3]), (CIFAR_HEAD, [])],
)
def test_vgg_dropout_belongs_to_the_head(head, rates):
    network = on_meta(models.vgg11, head=head)
    assert [m.p for m in network.modules() if isinstance(m, nn.Dropout)] == rates


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("vgg-like", []),
        ("vgg-like-dropout", [0.3, *[0.4] * 7, 0.5, 0.5]),
        ("lenet5-bn", []),
        ("lenet5-bn-dropout", [0.5, 0.5]),
    ],
)
def test_published_dropouts(name, rates):
    with torch.device("meta"):
        network = make(name)
    assert [m.p for m in network.modules() if isinstance(m, nn.Dropout)] == rates
    norms = sum(isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d)) for m in network.modules())
    layers = [m for m in network.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert [m.bias is None for m in layers] == [True] * norms + [False]


def test_the_first_dense_layer_of_lenet5_takes_800_features():
    network = on_meta(models.NormLeNet5)
    first = next(m for m in network.modules() if isinstance(m, nn.Linear))
    assert (first.in_features, first.out_features) == (800, 500)


def test_activations_are_separate_modules_out_of_place():
    for name in models.names():
        with torch.device("meta"):
            network = make(name)
        uses = [m for m in network.modules() if isinstance(m, nn.ReLU)]
        repeats = [m for _, m in network.named_modules(remove_duplicate=False) if m in uses]
        assert len(uses) == len(repeats)
        assert not any(m.inplace for m in uses)


def test_every_network_describes_itself_in_a_line():
    assert list(models.describe()) == models.names()
    assert all(line.endswith(".") for line in models.describe().values())


def test_names_are_unique_and_complete():
    assert len(set(models.names())) == len(models.names())
    assert set(models.names()) == {
        *("mlp", "small", "lenet", "lenet5", "vgg11", "vgg16", "resnet18", "resnet50"),
        *("wrn-16-2", "wrn-16-4", "wrn-28-10", "pyramidnet-110-270", "mlp-100-100", "regression"),
        *("lenet5-bn", "vgg-like", "vgg11-bn", "vgg11-dense", "mobilenetv2", "resnext-29-2x64d", "lstm-ehr"),
    }


@pytest.mark.parametrize(
    ("name", "widths"),
    [
        ("wrn-28-5", [16, 80, 160, 320]),
        ("wrn-10-1.9", [16, 30, 61, 122]),
        ("wrn-16-2.0", [16, 32, 64, 128]),
        ("pyramidnet-8-6", [16, 18, 20, 22]),
        ("pyramidnet-14-4", [16, 17, 17, 18, 19, 19, 20]),
        ("lenet-w2", [12, 32, 240]),
        ("lenet-w0.5", [3, 8, 60]),
        ("lenet-w0.01", [1, 1, 1]),
        ("vgg-like-w0.125", [8, 16, 32, 64]),
    ],
)
def test_networks_of_any_width(name, widths):
    with torch.device("meta"):
        network = models.build(name, num_outputs=10, input_shape=(3, 32, 32))
    found = [m.out_channels for m in network.modules() if isinstance(m, nn.Conv2d)]
    assert list(dict.fromkeys(found)) == list(dict.fromkeys(widths))


def test_mlp_of_any_depth_and_width():
    network = models.build("mlp-3-7", num_outputs=2, input_shape=(5,))
    assert [m.out_features for m in network.layers if isinstance(m, nn.Linear)] == [7, 7, 2]


@pytest.mark.parametrize(
    "name",
    [
        *("wrn-16-", "wrn-16-x", "wrn-16--1", "lenet-w", "lenet-2", "wrn-16-1.", "wrn-16-1e3"),
        *("pyramidnet-110", "pyramidnet-110-x", "mlp-3", "mlp-3-1.5", "vgg11-w0.5", "vgg11-bn-w", "vgg11-bn-0.5"),
        *("mobilenetv2-0.5", "mobilenetv2-w", "resnext-29", "resnext-29-2x64", "resnext-29-2x6.4d", "unet"),
    ],
)
def test_names_that_almost_fit_are_refused(name):
    with pytest.raises(ValueError, match="wrn-DEPTH-WIDTH, lenet-wWIDTH"):
        models.build(name, num_outputs=10, input_shape=(3, 32, 32))


# --------------------------------------------------------------------------------- errors


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"expected a network among regression, mlp, small, .*lstm-ehr, got 'vgg12'"):
        models.build("vgg12", num_outputs=10, input_shape=(3, 32, 32))


@pytest.mark.parametrize(("depth", "suggestion"), [(29, 28), (27, 22), (4, 10), (0, 10), (-3, 10)])
def test_wide_resnet_depth(depth, suggestion):
    message = rf"expected depth = 6n \+ 4 .* got {depth}\. Try depth={suggestion}\."
    with pytest.raises(ValueError, match=message):
        models.WideResNet(depth)


@pytest.mark.parametrize(
    ("maker", "options", "message"),
    [
        (models.LeNet, {"input_shape": (1, 27, 28)}, r"LeNet .*at least 28 x 28 .*got 27 x 28"),
        (models.LeNet, {"width": 0}, r"LeNet expected width > 0, got 0"),
        (models.LeNet5, {"input_shape": (1, 15, 15)}, r"LeNet5 .*at least 16 x 16"),
        (models.SmallConvNet, {"input_shape": (1, 1, 8)}, r"at least 2 x 2 .*got 1 x 8"),
        (models.vgg11, {"input_shape": (1, 28, 28)}, r"VGG .*at least 32 x 32 .*got 28 x 28"),
        (models.vgg11, {"head": "mnist"}, r"VGG expected 'cifar' or 'imagenet' .*got 'mnist'"),
        (models.resnet18, {"stem": "mnist"}, r"ResNet expected 'cifar' or .*got 'mnist'"),
        (models.resnet18, {"input_shape": (32, 32)}, r"\(channels, height, width\).*\(32, 32\)"),
        (models.WideResNet, {"input_shape": (0, 32, 32)}, r"positive sizes, got \(0, 32, 32\)"),
        (models.WideResNet, {"widen": 0}, r"WideResNet expected widen > 0, got 0"),
        (models.PyramidNet, {"alpha": 0}, r"PyramidNet expected alpha > 0, got 0"),
        (models.PyramidNet, {"input_shape": (32, 32)}, r"\(channels, height, width\).*\(32, 32\)"),
        (models.deep_mlp, {"depth": 0}, r"deep_mlp expected depth >= 1, got 0"),
        (models.deep_mlp, {"width": 0}, r"MLP expected hidden\[0\] >= 1, got 0"),
        (models.RegressionNet, {"inputs": 0}, r"RegressionNet expected inputs >= 1, got 0"),
        (models.RegressionNet, {"inputs": 3, "hidden": 0}, r"RegressionNet expected hidden >= 1, got 0"),
        (models.RegressionNet, {"inputs": 3, "scale": 0}, r"RegressionNet expected scale > 0, got 0"),
    ],
)
def test_wrong_sizes(maker, options, message):
    with pytest.raises(ValueError, match=message):
        maker(**options)


@pytest.mark.parametrize("name", models.names())
def test_outputs_must_be_positive(name):
    with pytest.raises(ValueError, match=r"outputs >= 1, got 0"):
        make(name, num_outputs=0)


@pytest.mark.parametrize(
    ("inputs", "hidden", "message"),
    [
        (0, (), r"MLP expected inputs >= 1, got 0"),
        ((), (), r"MLP expected inputs >= 1, got 0"),
        ((3, 0), (), r"MLP expected inputs >= 1, got 0"),
        (3, (5, -1), r"MLP expected hidden\[1\] >= 1, got -1"),
    ],
)
def test_mlp_wrong_sizes(inputs, hidden, message):
    with pytest.raises(ValueError, match=message):
        models.MLP(inputs, 3, hidden=hidden)
