"""Nested dropout: which streams are ordered, what a draw keeps of them, and what a width means."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn, Tensor

import leanbayes as lb
from leanbayes.distributions.assignment import Assignment
from leanbayes.layers.streams import Stream
from leanbayes.methods.nested.units import OrderingUnit
from leanbayes.runtime.passes import Fixed, many_draws
from tests.slim.networks import CASES, Residual, residual, set_keep_logits, units_of, unsettle, X


def masks(model: nn.Module, count: int) -> list[Tensor]:
    """Return many draws (count, channels) of the mask of every stream."""
    with torch.no_grad(), many_draws(model, 0, range(count)):
        return [unit.factors() for unit in units_of(model)]


# ------------------------------------------------------------------------- which streams


def test_layers_of_a_stream_share_a_unit():
    bnn = residual()
    assert len(units_of(bnn)) == 2
    assert bnn.skip.posterior.order is bnn.outer.posterior.order is bnn.last.posterior.orders["0"]
    assert bnn.inner.posterior.order is bnn.norm.posterior.orders["0"]
    assert bnn.stem.posterior.order is bnn.head.posterior.order is None
    assert [bnn.inner.masked, bnn.skip.masked, bnn.outer.masked] == [False, True, True]
    assert bnn.stem.posterior.log_alpha.eq(-8).all()
    assert bnn.skip.posterior.log_alpha.eq(-5).all()


def test_the_first_stream_is_ordered_on_demand():
    assert len(units_of(residual(first=True))) == 3
    assert residual(first=True).stem.posterior.order is not None


@pytest.mark.parametrize(
    ("where", "count"),
    [
        (["inner", "norm", "outer", "skip", "last"], 2),
        (["inner", "norm"], 1),
        (["inner", "norm", "outer", "last"], 1),  # the other branch of the sum is missing
        (["inner", "norm", "outer", "skip"], 1),
    ],
)
def test_streams_are_ordered_whose_layers_are_all_named(where, count):
    torch.manual_seed(0)
    bnn = unsettle(lb.convert(Residual(), lb.NestedDropout(groups=4), where=where))
    assert len(units_of(bnn)) == count
    if count:
        with torch.no_grad(), lb.draws(bnn, mean=True, width=0.5):
            torch.testing.assert_close(lb.slim.extract(bnn, 0.5)(X), bnn(X), atol=1e-5, rtol=1e-5)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))


class Chunked(nn.Module):
    """A network whose one hidden stream is split."""

    def __init__(self):
        super().__init__()
        self.read, self.gate, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(4, 3)

    def forward(self, x):
        a, b = self.gate(self.read(x).tanh()).chunk(2, 1)
        return self.head(a * b)


@pytest.mark.parametrize(
    ("net", "options", "why"),
    [
        (mlp(), {}, "not that of '0', since .* first linear map, which NestedDropout.first=True. orders; not"),
        (nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 2)), {}, "a norm over several channels reads it"),
        (Chunked(), {}, "not that of 'gate', since the function chunk reads it"),
        (Residual(), {"where": ["inner"]}, "not that of 'inner', since 'norm' is not converted"),
    ],
)
def test_a_network_that_cannot_be_ordered_says_why_when_converted_and_when_cut(net, options, why):
    with pytest.warns(UserWarning, match="adds only noise here: no stream of channels .*" + why):
        bnn = lb.convert(net, lb.NestedDropout(groups=4, min_cut=0), **options)
    assert not units_of(bnn)
    with pytest.raises(ValueError, match="without ordering units; " + ("if it was" if options else f".*{why}")):
        lb.slim.extract(bnn, 0.5)


def test_a_network_that_was_narrowed_is_not_narrowed_again():
    small = lb.slim.narrow(lb.convert(mlp(), lb.NestedDropout(groups=4, first=True)), 0.5)
    with pytest.raises(ValueError, match="if it was narrowed already, narrow the original network"):
        lb.slim.narrow(small, 0.5)


def test_inner_streams_are_those_that_no_sum_passes_through():
    bnn = residual(streams="inner")
    (unit,) = units_of(bnn)
    assert unit is bnn.inner.posterior.order
    assert bnn.outer.posterior.order is None


def test_inner_streams_of_mobilenet_are_the_expanded_channels():
    net = lb.models.build("mobilenetv2-w0.25", num_outputs=5, input_shape=(3, 32, 32))
    bnn = lb.convert(net, lb.NestedDropout(groups=4, streams="inner"))
    expanded = {
        f"stages.{i}.{j}.body.{k}"
        for i, stage in enumerate(net.stages) for j, block in enumerate(stage) for k in (0, 1, 3, 4)
        if len(block.body) > 5
    }  # fmt: skip
    ordered = {path for path, layer in lb.stochastic_layers(bnn) if layer.ordered}
    assert ordered == expanded
    assert len(units_of(bnn)) == 16
    assert len(units_of(lb.convert(net, lb.NestedDropout(groups=4)))) == 16 + 7 + 1


def test_without_noise_only_ordered_layers_are_wrapped():
    bnn = residual(weight_noise=False)
    assert [path for path, _ in lb.stochastic_layers(bnn)] == ["skip", "inner", "norm", "outer", "last"]
    assert lb.summary(bnn).ensemble == "an ensemble of 16 networks"
    assert lb.summary(residual(weight_noise=False, hard=False)).ensemble == ""


def test_streams_of_other_stochastic_layers_are_left_alone():
    torch.manual_seed(0)
    bnn = lb.convert(lb.convert(Residual(), lb.Rank1(components=2), where="inner"), lb.NestedDropout(groups=4))
    assert units_of(bnn) == [bnn.skip.posterior.order]
    bnn.eval()
    with lb.draws(bnn, seed=2, index=1):
        expected = bnn(X)
    torch.testing.assert_close(lb.draw(bnn, seed=2, index=1)(X), expected, atol=1e-5, rtol=1e-5)


def test_two_orders_in_one_network():
    torch.manual_seed(0)
    bnn = lb.convert(Residual(), lb.NestedDropout(groups=2), where=["inner", "norm"])
    bnn = unsettle(lb.convert(bnn, lb.NestedDropout(groups=3)))
    assert [unit.groups for unit in units_of(bnn)] == [3, 2]
    with torch.no_grad(), lb.draws(bnn, mean=True, width=0.5):
        torch.testing.assert_close(lb.slim.extract(bnn, 0.5)(X), bnn(X), atol=1e-5, rtol=1e-5)


# ------------------------------------------------------------------------- draws


@pytest.mark.parametrize("fields", [{}, {"hard": False, "temperature": 0.5}, {"weight_noise": False}], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_frozen_draw_equals_the_stochastic_pass_of_that_draw(name, fields):
    torch.manual_seed(0)
    bnn = unsettle(lb.convert(CASES[name].make(), lb.NestedDropout(groups=3, **fields)))
    x = CASES[name].inputs()
    for index in range(3):
        with lb.draws(bnn, seed=3, index=index):
            stochastic = bnn(x)
            assert torch.equal(bnn(x), stochastic)
        torch.testing.assert_close(lb.draw(bnn, seed=3, index=index)(x), stochastic, atol=1e-5, rtol=1e-5)
    samples = lb.predict(bnn, x, lb.Gaussian(), samples=3, seed=3).samples
    torch.testing.assert_close(samples[2].flatten(), stochastic.flatten(), atol=1e-5, rtol=1e-5)


def test_a_pass_has_one_mask_for_a_stream_and_the_next_pass_another():
    bnn = residual()
    set_keep_logits(bnn, 0.0, 1.0)
    seen: dict[str, list[Tensor]] = {name: [] for name in ("skip", "outer", "last", "inner", "norm")}

    def watch(name: str):
        return lambda layer, args, y: seen[name].append(layer.factors().detach())

    for name in seen:
        bnn.get_submodule(name).register_forward_hook(watch(name))
    for _ in range(60):
        bnn(X)
    passes = {name: torch.cat(found) for name, found in seen.items()}
    assert torch.equal(passes["skip"], passes["outer"])
    assert torch.equal(passes["skip"], passes["last"])
    assert torch.equal(passes["inner"], passes["norm"])
    assert len(passes["skip"].unique(dim=0)) == len(passes["inner"].unique(dim=0)) == 4
    assert not torch.equal(passes["skip"].sum(1), passes["inner"].sum(1))


def test_masks_are_ordered_and_kept_as_often_as_the_unit_says():
    bnn = residual(always_on=2, groups=6)
    set_keep_logits(bnn)
    n = 2000
    for unit, z in zip(units_of(bnn), masks(bnn, n), strict=True):
        assert set(z.unique().tolist()) <= {0.0, 1.0}
        by_group = torch.stack([z[:, unit.group_of == group].amax(1) for group in range(unit.groups)], 1)
        torch.testing.assert_close(by_group[:, unit.group_of], z)
        assert (by_group.diff(dim=1) <= 0).all()
        assert by_group[:, :2].eq(1).all()
        keep = unit.keep.detach()
        logits = unit.keep_logits.detach()
        torch.testing.assert_close(keep, torch.cat([torch.ones(2), logits.sigmoid().cumprod(0)]))
        error = (keep * (1 - keep) / n).sqrt()
        assert ((by_group.mean(0) - keep).abs() <= 4 * error).all()


def test_coupled_streams_are_narrow_or_wide_together():
    bnn = residual()
    set_keep_logits(bnn, 0.0, 0.0)
    first, second = ((z * unit.group_of).amax(1) for unit, z in zip(units_of(bnn), masks(bnn, 300), strict=True))
    assert len(first.unique()) == 4
    assert torch.equal(first, second)


def groups_kept(one: OrderingUnit, uniform: Tensor) -> Tensor:
    """Return how many groups a unit keeps in the passes of uniform numbers (R, groups of the order)."""
    one.state.noise, one.state.mode = {one.path: (uniform,)}, Fixed(seed=0, indices=(0,))
    one.state.component = Assignment(torch.zeros(1, dtype=torch.int64))
    return (one.factors().detach() * (one.group_of + 1)).amax(1)


@pytest.mark.parametrize("always_on", [1, 3])
def test_a_coupled_unit_of_fewer_groups_keeps_its_own_law(always_on):
    narrow, n = unit(size=5, groups=12, always_on=always_on), 20_000
    kept = groups_kept(narrow, torch.rand(n, 12, generator=torch.Generator().manual_seed(0)))
    for group, keep in enumerate(narrow.keep.tolist()):
        assert abs((kept > group).float().mean() - keep) <= 4.5 * math.sqrt(keep * (1 - keep) / n)


def test_a_coupled_unit_of_fewer_groups_keeps_the_same_share():
    wide, narrow = (unit(size=size, groups=12, tail="categorical") for size in (12, 6))
    uniform = torch.rand(500, 12, generator=torch.Generator().manual_seed(0))
    assert torch.equal(groups_kept(narrow, uniform), (groups_kept(wide, uniform) / 2).ceil())


@pytest.mark.parametrize("size", [1, 5, 24])
def test_by_default_half_of_the_passes_keep_all_channels_whatever_their_number(size):
    made = OrderingUnit(
        Stream(size, 1), lb.NestedDropout(**ORDER | {"groups": 12, "prior_keep": None, "init_keep": None})
    )
    assert made.keep[-1].item() == pytest.approx(0.5 if size > 1 else 1.0, rel=1e-5)
    assert made.kl().item() == pytest.approx(0, abs=1e-6)
    own = OrderingUnit(
        Stream(size, 1), lb.NestedDropout(**ORDER | {"groups": 12, "prior_keep": None, "init_keep": 0.9})
    )
    assert own.keep[-1].item() == pytest.approx(0.9 ** (own.groups - 1), rel=1e-5)


@pytest.mark.parametrize("fields", [{"groups": 256}, {"init_keep": 0.9999}, {"init_keep": 1e-4}], ids=str)
def test_keep_probabilities_start_where_they_can_learn(fields):
    bnn = lb.convert(
        nn.Sequential(nn.Linear(4, 256), nn.ReLU(), nn.Linear(256, 2)), lb.NestedDropout(first=True, **fields)
    )
    (order,) = units_of(bnn)
    lb.kl(bnn).backward()
    assert order.keep_logits.grad[0] != 0  # later ones may be kept too seldom for float32


def test_a_compiled_pass_pools_noise_as_an_eager_one():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    bnn = lb.convert(net, lb.NestedDropout(groups=7, first=True))
    set_keep_logits(bnn, 0.0, 1.0)
    compiled = torch.compile(bnn, backend="aot_eager", fullgraph=True)
    x = torch.randn(6, 3)
    for index in range(3):
        with lb.draws(bnn, seed=0, index=index):
            torch.testing.assert_close(compiled(x), bnn(x))


def test_masks_of_streams_that_are_not_coupled_are_independent():
    bnn = residual(coupled=False)
    set_keep_logits(bnn)
    n = 1000
    first, second = (z.sum(1) for z in masks(bnn, n))
    correlation = torch.corrcoef(torch.stack([first, second]))[0, 1]
    assert first.std() > 0.5
    assert correlation.abs() < 4 / math.sqrt(n)


def test_soft_masks_fall_from_one():
    bnn = residual(hard=False, temperature=1.0)
    set_keep_logits(bnn)
    for unit, z in zip(units_of(bnn), masks(bnn, 50), strict=True):
        assert ((z > 0) & (z <= 1)).all()
        assert z[:, unit.group_of == 0].eq(1).all()
        assert len(z.unique(dim=0)) == 50
        assert (z[:, :-1] - z[:, 1:] >= 0).all()


def test_a_temperature_can_fall_during_training():
    bnn = residual(hard=False)
    set_keep_logits(bnn)
    for unit in units_of(bnn):
        unit.temperature.fill_(1e-4)
    for z in masks(bnn, 50):
        assert torch.minimum(z, 1 - z).max() < 1e-3
    again = residual(hard=False)
    again.load_state_dict(bnn.state_dict())
    assert units_of(again)[0].temperature.item() == pytest.approx(1e-4)


def test_noise_on_activations_has_the_masks_of_its_seed():
    bnn = unsettle(residual())
    one, same, other = (lb.predict(bnn, X, samples=4, noise="activation", seed=seed).samples for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


# ------------------------------------------------------------------------- widths


ORDER = {"groups": 4, "always_on": 1, "tail": "learned", "coupled": True, "prior_keep": 0.95, "init_keep": 0.95}
ORDER |= {"temperature": 2.0, "hard": True, "rescale": True}


def order(**fields) -> lb.NestedDropout:
    return lb.NestedDropout(**ORDER | fields)


def unit(size: int = 8, lanes: int = 1, **fields) -> OrderingUnit:
    made = OrderingUnit(Stream(size, lanes), order(**fields))
    if made.learned:
        with torch.no_grad():
            made.keep_logits.copy_(torch.linspace(1.0, -1.0, len(made.keep_logits)))
    return made


def test_a_share_or_a_number_of_groups():
    made = unit(rescale=False)
    for width, kept in ((0.25, 2), (0.3, 2), (0.375, 4), (0.5, 4), (1.0, 8), (1, 2), (3, 6), (4, 8), (0.01, 2)):
        assert made.at_width(width).tolist() == [1.0] * kept + [0.0] * (8 - kept)


def test_narrow_streams_have_fewer_groups_and_keep_the_same_share():
    made = unit(size=5, groups=10, always_on=4, rescale=False)
    assert (made.groups, made.always_on) == (5, 2)
    assert [made.at_width(width).sum().item() for width in (0.1, 0.5, 0.6, 1.0, 1, 6, 10)] == [2, 3, 3, 5, 2, 3, 5]
    single = unit(size=1)
    assert single.keep_logits.shape == (0,)
    assert single.at_width(0.1).tolist() == [1.0]
    assert single.kl().item() == 0


def test_groups_that_are_always_on_are_the_narrowest_width():
    made = unit(always_on=3, rescale=False)
    assert [made.at_width(width).sum().item() for width in (1, 2, 3, 4)] == [6, 6, 6, 8]


def test_lanes_are_ordered_alike():
    made = unit(size=12, lanes=3, rescale=False)
    assert made.at_width(0.5).tolist() == [1.0, 1.0, 0.0, 0.0] * 3


def test_rescaling_multiplies_what_is_kept_by_its_keep_probability():
    """B.2: at width 3, channels are multiplied by 1, mu_2 and mu_2 mu_3."""
    made = unit()
    mu = made.keep_logits.detach().sigmoid()
    expected = torch.stack([torch.ones(()), mu[0], mu[0] * mu[1], torch.zeros(())]).repeat_interleave(2)
    torch.testing.assert_close(made.at_width(3).detach(), expected)
    torch.testing.assert_close(unit(rescale=False).at_width(3), (expected > 0).float())


def test_keep_probabilities_are_exact_down_to_the_smallest():
    made = unit(size=64, groups=64, tail="geometric", prior_keep=0.5)
    torch.testing.assert_close(made.keep, 0.5 ** torch.arange(64.0), rtol=1e-5, atol=0)
    steep = unit(size=40, groups=40)
    with torch.no_grad():
        steep.keep_logits.fill_(-9.0)  # used as -5, as the paper clamps them
    assert (steep.keep > 0)[:17].all()
    assert (steep.keep.diff() <= 0).all()
    torch.testing.assert_close(steep.keep[1].detach(), torch.tensor(-5.0).sigmoid())


def test_the_mean_is_full_width_without_rescaling():
    bnn = unsettle(residual())
    plain = Residual().eval()
    plain.load_state_dict(
        {name.replace("base.", ""): tensor for name, tensor in bnn.state_dict().items() if "posterior" not in name}
    )
    torch.testing.assert_close(lb.mean(bnn)(X), plain(X), atol=1e-5, rtol=1e-5)
