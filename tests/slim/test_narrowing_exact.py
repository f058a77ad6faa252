"""Masked and extracted networks are the same function, and the latter have the size that arithmetic says."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn, Tensor
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import FlopCounterMode

import leanbayes as lb

from .networks import Case, CASES, converted, masked, parameters, resnet18, units_of, unsettle

WIDTHS = (0.125, 0.25, 0.5, 0.75, 1.0)


def assert_exact(bnn: nn.Module, x: Tensor, widths=WIDTHS) -> list[nn.Module]:
    """Compare masked and extracted networks, without rounding that deep networks magnify; return the latter."""
    found = []
    bnn, x = copy.deepcopy(bnn).double(), x.double()
    for width in widths:
        small = lb.slim.extract(bnn, width)
        torch.testing.assert_close(small(x), masked(bnn, x, width), atol=1e-5, rtol=1e-5)
        found.append(small.float())
    return found


# ------------------------------------------------------------------- reference networks, closed forms

GROUPS = 8


def kept(channels: int, width: float, lanes: int = 1) -> int:
    """Count the channels that a width keeps, group by group."""
    length = channels // lanes
    groups = min(GROUPS, length)
    first = max(1, math.floor(width * groups + 0.5))
    return lanes * sum(position * groups // length < first for position in range(length))


@dataclass
class Map:
    """A linear map: kernel taps, channels, pixels of its output, and what else it has for every output channel."""

    taps: int
    inputs: int
    outputs: int
    pixels: int
    extra: int  # 1 for a bias, 2 for a norm, 3 for both
    groups: int = 1

    @property
    def weights(self) -> int:
        return self.taps * self.inputs // self.groups * self.outputs

    @property
    def parameters(self) -> int:
        return self.weights + self.extra * self.outputs

    @property
    def multiply_adds(self) -> int:
        return self.weights * self.pixels


def vgg_maps(width: float) -> list[Map]:
    channels = [8, *(kept(n, width) for n in (16, 32, 32, 64, 64, 64, 64))]  # the first layer keeps all of its channels
    sides = (32, 16, 8, 8, 4, 4, 2, 2)
    maps = [Map(9, c, n, side**2, 3) for c, n, side in zip([3, *channels], channels, sides, strict=False)]
    hidden = kept(64, width)
    return [*maps, Map(1, channels[-1], hidden, 1, 1), Map(1, hidden, hidden, 1, 1), Map(1, hidden, 5, 1, 1)]


def mobilenet_maps(width: float, side: int = 8) -> list[Map]:
    plain = channels = 8
    maps = [Map(9, 3, 8, side**2, 2)]
    table = ((1, 4, 1, 1), (6, 6, 2, 1), (6, 8, 3, 2), (6, 16, 4, 2), (6, 24, 3, 1), (6, 40, 3, 2), (6, 80, 1, 1))
    for expansion, outputs, blocks, stride in table:
        for block in range(blocks):
            inner = kept(expansion * plain, width) if expansion > 1 else plain  # there, the stream of the stem
            if expansion > 1:
                maps.append(Map(1, channels, inner, side**2, 2))
            side = math.ceil(side / (stride if block == 0 else 1))
            plain, channels = outputs, kept(outputs, width)
            maps += [Map(9, inner, inner, side**2, 2, inner), Map(1, inner, channels, side**2, 2)]
    last = kept(320, width)
    return [*maps, Map(1, channels, last, side**2, 2), Map(1, last, 5, 1, 1)]


def resnext_maps(width: float, blocks: int = 1, side: int = 4) -> list[Map]:
    maps, channels = [Map(9, 3, 64, side**2, 2)], 64
    for stage in range(3):
        inner, outputs = kept(16 * 2**stage, width, lanes=2), kept(256 * 2**stage, width)
        for block in range(blocks):
            before, side = side, side // (2 if stage and block == 0 else 1)
            maps += [Map(1, channels, inner, before**2, 2), Map(9, inner, inner, side**2, 2, 2)]
            maps += [Map(1, inner, outputs, side**2, 2)]
            if block == 0:
                maps.append(Map(1, channels, outputs, side**2, 2))
            channels = outputs
    return [*maps, Map(1, channels, 5, 1, 1)]


def resnet_maps(width: float, first: int = 8, side: int = 8) -> list[Map]:
    maps, channels = [Map(9, 3, first, side**2, 2)], first
    for stage in range(4):
        plain = first * 2**stage
        outputs = plain if stage == 0 else kept(plain, width)  # the sums of the first stage hold the stem's channels
        for block in range(2):
            side //= 2 if stage and block == 0 else 1
            inner = kept(plain, width)
            maps += [Map(9, channels, inner, side**2, 2), Map(9, inner, outputs, side**2, 2)]
            if stage and block == 0:
                maps.append(Map(1, channels, outputs, side**2, 2))
            channels = outputs
    return [*maps, Map(1, channels, 5, 1, 1)]


def unet_maps(width: float, widths: tuple[int, ...] = (8, 12, 16), side: int = 16) -> list[Map]:
    few = [kept(n, width) for n in widths]
    maps = [Map(9, 3, widths[0], side**2, 2), Map(9, widths[0], few[0], side**2, 2)]
    for level in (1, 2):
        pixels = (side >> level) ** 2
        maps += [Map(9, few[level - 1], few[level], pixels, 2), Map(9, few[level], few[level], pixels, 2)]
    for level in (1, 0):
        pixels, n = (side >> level) ** 2, few[level]
        maps += [Map(9, few[level + 1], n, pixels, 2), Map(9, 2 * n, n, pixels, 2), Map(9, n, n, pixels, 2)]
    return [*maps, Map(1, few[0], 3, side**2, 1)]


def build(name: str) -> nn.Module:
    return lb.models.build(name, num_outputs=5, input_shape=(3, 32, 32))


REFERENCE: dict[str, tuple[Case, Callable[[float], list[Map]]]] = {
    "vgg11": (Case(lambda: build("vgg11-bn-w0.125"), (3, 32, 32)), vgg_maps),
    "mobilenetv2": (Case(lambda: build("mobilenetv2-w0.25"), (3, 8, 8)), mobilenet_maps),
    "resnext": (Case(lambda: build("resnext-11-2x8d"), (3, 4, 4)), resnext_maps),
    "resnet18": (Case(resnet18, (3, 8, 8)), resnet_maps),
    "unet": (Case(lambda: lb.models.UNet(3, (3, 16, 16), widths=(8, 12, 16)), (3, 16, 16)), unet_maps),
}
FULL: dict[str, tuple[Case, Callable[[float], list[Map]]]] = {
    "resnext-29": (Case(lambda: build("resnext-29-2x8d"), (3, 8, 8)), lambda width: resnext_maps(width, 3, 8)),
    "resnet18": (Case(lambda: build("resnet18"), (3, 8, 8)), lambda width: resnet_maps(width, 64)),
}


def trained(case: Case, steps: int) -> nn.Module:
    """Convert a network, train it for some steps on noise, and return it in eval mode."""
    torch.manual_seed(0)
    bnn = lb.convert(case.make(), lb.NestedDropout(groups=GROUPS))
    optimizer = torch.optim.SGD(lb.parameter_groups(bnn, lr=0.02), momentum=0.9)
    x = case.inputs(4)
    classes = bnn(x).shape[1]
    y = torch.randint(classes, (4, *bnn(x).shape[2:]))
    for _ in range(steps):
        optimizer.zero_grad()
        lb.elbo(bnn, x + 0.1 * torch.randn_like(x), y, num_data=1000, beta=1e-3).loss.backward()
        optimizer.step()
    return bnn.eval()


def check_reference(case: Case, maps: Callable[[float], list[Map]], steps: int = 4) -> None:
    bnn = trained(case, steps)
    norms = [m for m in bnn.modules() if isinstance(m, nn.BatchNorm2d)]
    assert all((norm.running_mean.abs() > 1e-4).any() and (norm.running_var - 1).abs().max() > 1e-2 for norm in norms)
    assert any((unit.keep_logits != 3).any() for unit in units_of(bnn))
    for width, small in zip(WIDTHS, assert_exact(bnn, case.inputs(4)), strict=True):
        assert parameters(small) == sum(one.parameters for one in maps(width))
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            small(case.inputs(1))
        assert counter.get_total_flops() == 2 * sum(one.multiply_adds for one in maps(width))


@pytest.mark.parametrize("name", REFERENCE)
def test_after_training_a_masked_network_equals_the_extracted_one_of_closed_form_size(name):
    check_reference(*REFERENCE[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", FULL)
def test_larger_networks_are_exact_too(name):
    check_reference(*FULL[name], steps=50)


# ------------------------------------------------------------------- other networks


@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_masked_and_extracted_networks_are_equal(name, rescale):
    bnn, x = converted(name, rescale=rescale)
    assert units_of(bnn)
    found = assert_exact(bnn, x, (0.3, 0.5, 1.0, 1, 2, 3))
    assert parameters(found[0]) < parameters(found[1]) < parameters(found[2])
    assert [parameters(found[k]) for k in (3, 4, 5)] == [parameters(found[k]) for k in (0, 1, 2)]
    assert parameters(found[2]) == parameters(CASES[name].make())
    lowest, highest = masked(bnn, x, 1), masked(bnn, x, 3)
    assert not torch.allclose(lowest, highest, atol=1e-3)


def test_preactivated_residual_networks_are_exact():
    torch.manual_seed(0)
    bnn = unsettle(lb.convert(build("wrn-16-2"), lb.NestedDropout(groups=8)))
    assert_exact(bnn, torch.randn(2, 3, 8, 8), (0.25, 0.6, 1.0))


@pytest.mark.parametrize(
    "fields",
    [
        {"weight_noise": False},
        {"tail": "geometric", "prior_keep": 0.3, "groups": 40},
        {"tail": "categorical", "always_on": 2},
        {"streams": "inner"},
        {"first": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
@pytest.mark.parametrize("name", ["joined", "depthwise", "mlp"])
def test_other_orders_are_exact(name, fields):
    bnn, x = converted(name, **fields)
    small, *_, full = assert_exact(bnn, x, (0.3, 0.5, 1.0))
    assert parameters(small) < parameters(full) == parameters(CASES[name].make())


def test_channels_that_are_hardly_ever_kept_are_there_at_full_width():
    """The last of 64 groups is kept with a probability of 0.2^63: a difference of float32 numbers would be zero."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3))
    bnn = lb.convert(net, lb.NestedDropout(groups=64, tail="geometric", prior_keep=0.2)).eval()
    for small, count in zip(assert_exact(bnn, torch.randn(3, 4), (1.0, 0.75, 5)), (64, 48, 5), strict=True):
        assert small[2].out_features == count


def test_lanes_stay_equal():
    bnn, _ = converted("conv1d")
    small = lb.slim.extract(bnn, 2)
    assert (small[2].groups, small[2].in_channels, small[2].out_channels) == (2, 4, 6)  # 4 of a lane in groups 0 0 1 2
    plain = lb.mean(bnn)[2].weight
    factors = bnn[2].posterior.order
    assert factors.group_of.tolist() == [0, 0, 1, 2, 0, 0, 1, 2]
    torch.testing.assert_close(small[2].weight, plain[[0, 1, 2, 4, 5, 6]])


def test_plain_layers_that_read_ordered_channels_are_cut_too():
    torch.manual_seed(0)
    case = CASES["pixels"]
    bnn = unsettle(lb.convert(case.make(), lb.NestedDropout(groups=3), where="2"))
    small = assert_exact(bnn, case.inputs(), (1, 2, 3))[0]
    assert small[6].in_features == 2 * 9
    assert small[6].out_features == 8


@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, parametrizations.spectral_norm])
@pytest.mark.parametrize("where", [None, ["2", "3"]])
def test_parametrised_layers_are_cut_and_become_plain(wrap, where):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), wrap(nn.Conv2d(4, 8, 3)), nn.BatchNorm2d(8), nn.ReLU(), wrap(nn.Conv2d(8, 4, 1)),
        nn.ReLU(), nn.Conv2d(4, 3, 1),
    ).eval()  # fmt: skip
    bnn = unsettle(lb.convert(net, lb.NestedDropout(groups=4), where=where))
    x = torch.randn(2, 2, 6, 6)
    small = assert_exact(bnn, x, (0.5, 1.0))[0]
    assert small[5].weight.shape[1] == 4
    assert not any(nn.utils.parametrize.is_parametrized(m) for m in small.modules())
    assert nn.utils.parametrize.is_parametrized(bnn[5] if where else bnn[5].base)  # the model itself is as it was
    assert bnn(x).isfinite().all()
