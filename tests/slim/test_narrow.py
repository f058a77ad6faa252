"""Networks cut to a width: the masked network's function, closed-form costs, and noise that stays."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn, Tensor
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import FlopCounterMode

import leanbayes as lb
from leanbayes.methods.base import StochasticLayer
from leanbayes.methods.nested import NestedLayer, NestedNorm
from leanbayes.methods.ordering import OrderingUnit

from .networks import Case, CASES, resnet18, unsettle

WIDTHS = (0.125, 0.25, 0.5, 0.75, 1.0)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def masked(model: nn.Module, x: Tensor, width: float | int) -> Tensor:
    with torch.no_grad(), lb.draws(model, mean=True, width=width):
        return model(x)


def assert_exact(bnn: nn.Module, x: Tensor, widths=WIDTHS) -> list[nn.Module]:
    """Compare masked and extracted networks; return the latter."""
    found = []
    for width in widths:
        small = lb.slim.extract(bnn, width)
        torch.testing.assert_close(small(x), masked(bnn, x, width), atol=1e-5, rtol=1e-5)
        found.append(small)
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


def trained(case: Case, steps: int = 50) -> nn.Module:
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


def check_reference(case: Case, maps: Callable[[float], list[Map]]) -> None:
    bnn = trained(case)
    norms = [m for m in bnn.modules() if isinstance(m, nn.BatchNorm2d)]
    assert all((norm.running_mean.abs() > 1e-4).any() and (norm.running_var - 1).abs().max() > 1e-2 for norm in norms)
    assert any((m.keep_logits != 3).any() for m in bnn.modules() if isinstance(m, OrderingUnit))
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
    check_reference(*FULL[name])


# ------------------------------------------------------------------- other networks


def converted(name: str, **fields) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    method = lb.NestedDropout(**({"groups": 3} | fields))
    return unsettle(lb.convert(CASES[name].make(), method)), CASES[name].inputs()


@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_masked_and_extracted_networks_are_equal(name, rescale):
    bnn, x = converted(name, rescale=rescale)
    assert any(isinstance(m, OrderingUnit) for m in bnn.modules())
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
    """The last of 64 groups is kept with a probability of 0.2^63, less than float32 can tell from zero by differences."""
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


# ------------------------------------------------------------------- what is left


def test_an_extracted_network_is_an_ordinary_one():
    bnn, x = converted("joined")
    before = {name: tensor.clone() for name, tensor in bnn.state_dict().items()}
    small = lb.slim.extract(bnn, 0.5)
    assert type(small) is type(bnn)
    for module in small.modules():
        assert type(module).__module__.startswith(("torch.nn", "tests."))
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert torch.equal(small(x), small(x))
    assert small.first.in_channels == small.first.weight.shape[1] == small.first_norm.num_features == 5 + 4
    for name, tensor in bnn.state_dict().items():
        assert torch.equal(tensor, before[name])
    ours = {p.data_ptr() for p in bnn.parameters()}
    assert not ours & {p.data_ptr() for p in small.parameters()}


def test_hooks_modes_and_frozen_parameters_survive():
    torch.manual_seed(0)
    net = CASES["pixels"].make()
    net[2].weight.requires_grad_(False)
    net.insert(3, nn.BatchNorm2d(6))
    bnn = unsettle(lb.convert(net, lb.NestedDropout(groups=3)))
    seen = []
    for index in (2, 3):
        bnn[index].register_forward_hook(lambda layer, args, y: seen.append(y.shape[1]))
    bnn[3].train()
    small = lb.slim.extract(bnn, 1)
    small(CASES["pixels"].inputs())
    assert seen == [2, 2]
    assert [small[index].training for index in (2, 3)] == [False, True]
    assert not small[2].weight.requires_grad
    assert small[3].weight.requires_grad


def test_dtype_is_kept():
    torch.manual_seed(0)
    bnn = unsettle(lb.convert(CASES["joined"].make().double(), lb.NestedDropout(groups=3)))
    small = lb.slim.extract(bnn, 0.5)
    assert {p.dtype for p in small.parameters()} == {torch.float64}
    x = CASES["joined"].inputs().double()
    torch.testing.assert_close(small(x), masked(bnn, x, 0.5), atol=1e-12, rtol=1e-12)


def test_statistics_of_norms_are_collected_at_the_width():
    bnn, x = converted("slopes")
    x = torch.randn(64, *x.shape[1:])
    for cut in (lb.slim.extract, lb.slim.narrow):
        kept_statistics, small = cut(bnn, 0.5), cut(bnn, 0.5, data=x)
        with torch.no_grad(), lb.draws(small, mean=True):
            y = small[2](small[1](small[0](x)))
            lb.update_norm(kept_statistics, (x, torch.zeros(64)))
        if cut is lb.slim.extract:
            torch.testing.assert_close(small[3].running_mean, y.mean((0, 2, 3)))
            torch.testing.assert_close(small[3].running_var, y.var((0, 2, 3)))
            assert torch.equal(small[3].running_mean, kept_statistics[3].running_mean)
        assert not torch.allclose(small[3].running_mean, bnn[3].running_mean[: len(small[3].running_mean)])
    batches = [(x[:32], None), (x[32:], None)]
    torch.testing.assert_close(
        lb.slim.extract(bnn, 0.5, data=batches, batches=1)[3].running_mean,
        lb.slim.extract(bnn, 0.5, data=x[:32])[3].running_mean,
    )


# ------------------------------------------------------------------- still stochastic


@pytest.mark.parametrize("name", CASES)
def test_the_mean_of_a_narrow_network_is_the_extracted_one(name):
    bnn, x = converted(name)
    for width in (0.4, 1.0):
        small = lb.slim.narrow(bnn, width)
        assert any(isinstance(m, NestedLayer) for m in small.modules())
        assert not any(isinstance(m, (OrderingUnit, NestedNorm)) for m in small.modules())
        extracted = lb.slim.extract(bnn, width)
        torch.testing.assert_close(lb.mean(small)(x), extracted(x), atol=1e-6, rtol=1e-6)
        assert lb.summary(small).parameters == parameters(extracted)
        with lb.draws(small, seed=1, index=2):
            stochastic = small(x)
        torch.testing.assert_close(lb.draw(small, seed=1, index=2)(x), stochastic, atol=1e-5, rtol=1e-5)
        assert not torch.equal(lb.draw(small, seed=1, index=3)(x), stochastic)


def test_without_noise_a_narrow_network_is_plain():
    bnn, x = converted("joined", weight_noise=False)
    small = lb.slim.narrow(bnn, 0.5)
    assert not any(isinstance(m, StochasticLayer) for m in small.modules())
    assert torch.equal(small(x), lb.slim.extract(bnn, 0.5)(x))


@pytest.mark.parametrize("rescale", [True, False])
def test_noise_of_a_narrow_layer_has_the_moments_of_the_masked_one(rescale):
    """Mean and variance of one layer's output over sampled weights, and over noise on activations."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 6), nn.Linear(6, 2))
    bnn = unsettle(lb.convert(net, lb.NestedDropout(groups=3, rescale=rescale)))
    layer, x = bnn[1], torch.randn(1, 4)
    outputs = []
    for model, width in ((bnn, 2), (lb.slim.narrow(bnn, 2), None)):
        drawn = []
        for index in range(800):
            with torch.no_grad(), lb.draws(model, seed=0, index=index, width=width):
                drawn.append(model[1](x))
        with torch.no_grad(), lb.draws(model, seed=1, width=width, shared=False):
            outputs += [torch.cat(drawn), model[1](x.expand(8000, -1))]
    assert [found.shape[1] for found in outputs] == [6, 6, 4, 4]
    assert not outputs[0][:, 4:].any()
    assert not outputs[1][:, 4:].any()
    factor = layer.posterior.order.keep.repeat_interleave(2).detach() if rescale else torch.ones(6)
    mean = layer.base(x)[0].detach() * factor
    variance = (layer.scales.square() @ x[0].square()).detach() * factor.square()
    for found in outputs:
        n = len(found)
        assert ((found[:, :4].mean(0) - mean[:4]).abs() < 4.5 * (variance[:4] / n).sqrt()).all()
        assert ((found[:, :4].var(0) / variance[:4] - 1).abs() < 4.5 * math.sqrt(2 / n)).all()


def test_predictions_at_a_width_and_of_a_narrow_network_agree_in_distribution():
    bnn, x = converted("mlp")
    n = 1500
    wide = lb.predict(bnn, x, lb.Gaussian(), samples=n, width=0.6, seed=3).samples
    slim = lb.predict(lb.slim.narrow(bnn, 0.6), x, lb.Gaussian(), samples=n, seed=4).samples
    error = ((wide.var(0) + slim.var(0)) / n).sqrt()
    assert (wide.std(0) > 0.01).all()
    assert ((wide.mean(0) - slim.mean(0)).abs() < 4.5 * error).all()
    fourth = (wide - wide.mean(0)).pow(4).mean(0) + (slim - slim.mean(0)).pow(4).mean(0)
    assert ((wide.var(0) - slim.var(0)).abs() < 4.5 * (fourth / n).sqrt()).all()


class NormFirst(nn.Module):
    """Registers a norm before the layers it follows, so that the norm is the first stochastic layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.first, self.second, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.second(self.first(x).relu())).relu())


def test_a_narrow_network_keeps_its_likelihood_and_trains():
    torch.manual_seed(0)
    bnn = lb.convert(NormFirst(), lb.NestedDropout(groups=4), likelihood=lb.Gaussian(std=0.3, learn=True))
    assert isinstance(bnn.norm, NestedNorm)
    assert bnn.norm.likelihood is not None
    small = lb.slim.narrow(bnn, 0.5).train()
    optimizer = torch.optim.SGD(lb.parameter_groups(small, lr=0.01))
    x, y = torch.randn(32, 4), torch.randn(32, 1)
    lb.elbo(small, x, y, num_data=32).loss.backward()
    assert all(p.grad is not None for p in small.parameters())
    optimizer.step()
    learned = lb.predict(small, x, samples=2).likelihood.log_std
    assert learned.item() != pytest.approx(math.log(0.3), abs=1e-6)


def test_kl_of_a_narrow_network_is_that_of_the_weights_that_are_left():
    bnn, _ = converted("pixels")
    small = lb.slim.narrow(bnn, 2)
    index = {0: (4, 2), 2: (4, 4), 6: (6, 36), 8: (3, 6)}  # two of three groups: 4 of 6, and 6 of 8 (0 0 0 1 1 1 2 2)
    for k, (outputs, inputs) in index.items():
        assert small[k].posterior.log_alpha.shape[:2] == (outputs, inputs)
        torch.testing.assert_close(small[k].posterior.log_alpha, bnn[k].posterior.log_alpha[:outputs, :inputs])
    each = [lb.slim.narrow(bnn, 2)[k].kl() for k in index]
    torch.testing.assert_close(lb.kl(small), torch.stack(each).sum())


def test_an_embedded_model_is_narrowed_inside_another_network():
    bnn, x = converted("joined")
    outer = nn.Sequential(nn.Conv2d(2, 2, 1), bnn).eval()
    small = lb.slim.extract(outer, 0.5)
    torch.testing.assert_close(small(x), masked(outer, x, 0.5), atol=1e-5, rtol=1e-5)
    assert parameters(small) < parameters(lb.mean(outer))


# ------------------------------------------------------------------- judging, refusing


def test_widths_are_judged_one_by_one():
    bnn, _ = converted("mlp")
    test = torch.randn(60, 4), torch.randint(3, (60,))
    train = torch.randn(100, 4)
    draws = lb.slim.widths(bnn, test, [0.4, 1.0], data=train, samples=4)
    means = lb.slim.widths(bnn, test, [0.4, 1.0], means=True)
    expected = [(lb.slim.extract(bnn, w)(test[0]).argmax(1) == test[1]).float().mean().item() for w in (0.4, 1.0)]
    assert [result.metrics["test"]["accuracy"] for result in means] == pytest.approx(expected)
    assert all(result.metrics["test"]["nll"] > 0 for result in draws)


@pytest.mark.parametrize("width", [0, 0.0, -0.5, 1.5, 9, float("nan")])
def test_a_width_that_is_none_is_refused(width):
    bnn, x = converted("mlp")
    message = r"expected a width in \(0, 1\], or a whole number of groups from 1 to 3, got"
    with pytest.raises(ValueError, match=message):
        lb.slim.narrow(bnn, width)
    with pytest.raises(ValueError, match=message):
        masked(bnn, x, width)


def test_models_without_order_are_refused():
    net = CASES["mlp"].make()
    for model in (net, lb.convert(net, lb.Rank1(components=2)), lb.convert(nn.Linear(3, 2), lb.NestedDropout())):
        with pytest.raises(ValueError, match="expected a model whose channels are ordered, got one without ordering"):
            lb.slim.extract(model, 0.5)
    with pytest.raises(ValueError, match=r"no layer of this model orders its channels: expected no width, got 0\.5"):
        masked(lb.convert(net, lb.Rank1(components=2)), torch.randn(2, 4), 0.5)
    with pytest.raises(ValueError, match="no layer of this model orders its channels"):
        lb.predict(lb.slim.narrow(converted("mlp")[0], 0.5), torch.randn(2, 4), width=0.5)


def test_other_stochastic_layers_on_ordered_channels_are_refused_in_words():
    torch.manual_seed(0)
    net = CASES["mlp"].make()
    bnn = lb.convert(lb.convert(net, lb.NestedDropout(groups=3), where=["2", "4", "5"]), lb.Rank1(components=2))
    assert bnn(torch.randn(4, 4)).shape == (4, 3)
    with pytest.raises(ValueError, match="layer '7' touches channels that are dropped, but Rank1 cannot be narrowed"):
        lb.slim.narrow(bnn, 0.5)


def test_other_stochastic_layers_elsewhere_are_kept():
    torch.manual_seed(0)
    net, x = CASES["pixels"].make(), CASES["pixels"].inputs()
    bnn = lb.convert(lb.convert(net, lb.Rank1(components=2), where="0"), lb.NestedDropout(groups=3))
    small = lb.slim.narrow(unsettle(bnn), 0.5)
    assert lb.summary(small).converted == 4
    torch.testing.assert_close(lb.mean(small)(x), masked(bnn, x, 0.5), atol=1e-5, rtol=1e-5)
