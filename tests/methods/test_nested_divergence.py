"""The divergence of nested dropout: equations (17), (18) and (13) by brute force."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn, Tensor

import leanbayes as lb
from leanbayes.core.conversion import stochastic_layers
from leanbayes.distributions.log_uniform import exact_log_uniform_kl, peaked_log_uniform_kl
from leanbayes.layers.streams import Stream
from leanbayes.methods.nested.layer import NestedLayer
from leanbayes.methods.nested.units import OrderingUnit
from tests.slim.networks import converted, residual, units_of, unsettle


def weight_kl(log_alpha: float, constant: float) -> float:
    """Equation (17), with the sign of a divergence."""
    bump = 0.7294 * math.exp(-math.exp(0.5387) * (-0.2041 + 0.3492 * log_alpha) ** 2)
    return -(bump - 0.5 * math.log(1 + math.exp(-log_alpha)) + constant)


def chain(keep: list[float]) -> tuple[list[float], list[float]]:
    """Return P(element is kept) and P(element is the last kept), from conditional keep probabilities."""
    kept = [math.prod(keep[: j + 1]) for j in range(len(keep))]
    tails = [p * (1 - nxt) for p, nxt in zip(kept, [*keep[1:], 0.0], strict=True)]
    assert sum(tails) == pytest.approx(1)
    return kept, tails


def phi_1(logits: list[float], always_on: int) -> float:
    """The divergence of the tails, by the definition of the chains; half of the prior's draws keep everything."""
    on, prior_keep = [1.0] * always_on, 0.5 ** (1 / len(logits))
    _, q = chain(on + [1 / (1 + math.exp(-logit)) for logit in logits])
    _, p = chain(on + [prior_keep] * len(logits))
    return sum(a * math.log(a / b) for a, b in zip(q, p, strict=True) if a > 0)


def phi_2(log_alpha: Tensor, kept: list[float], constant: float, over: str = "sum") -> float:
    """The divergence of weights (out, ...), as often as their output is kept; of a filter all, or the mean."""
    rows = log_alpha.flatten(1).tolist()
    filters = [sum(weight_kl(value, constant) for value in row) / (len(row) if over == "mean" else 1) for row in rows]
    return sum(p * one for p, one in zip(kept, filters, strict=True))


@pytest.mark.parametrize("over", ["sum", "mean"])
@pytest.mark.parametrize(("always_on", "constant"), [(1, -0.5471), (2, 0.2)])
def test_the_divergence_is_equation_18(always_on, constant, over):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    method = lb.NestedDropout(min_cut=0, groups=4, always_on=always_on, kl_constant=constant, kl_over=over)
    bnn = unsettle(lb.convert(net, method))
    (order,) = units_of(bnn)
    logits = order.keep_logits.tolist()
    kept, _ = chain([1.0] * always_on + [1 / (1 + math.exp(-logit)) for logit in logits])
    expected = phi_1(logits, always_on)
    for index, keep in ((0, [1.0] * 3), (2, kept), (4, [1.0] * 2)):
        expected += phi_2(bnn[index].posterior.log_alpha, keep, constant, over)
    assert lb.kl(bnn).item() == pytest.approx(expected, rel=1e-5)


def test_a_stream_of_several_layers_counts_its_tails_once():
    bnn = unsettle(residual(groups=3, kl_over="sum"))
    expected = 0.0
    for order in units_of(bnn):
        expected += phi_1(order.keep_logits.tolist(), 1)
    for name in ("stem", "skip", "inner", "outer", "head"):
        layer = bnn.get_submodule(name)
        unit = layer.posterior.order
        kept = [1.0] * layer.base.weight.shape[0]
        if unit is not None:
            by_group, _ = chain([1.0] + [1 / (1 + math.exp(-v)) for v in unit.keep_logits.tolist()])
            kept = [by_group[group] for group in unit.group_of.tolist()]
        expected += phi_2(layer.posterior.log_alpha, kept, -0.5471)
    assert lb.kl(bnn).item() == pytest.approx(expected, rel=1e-5)
    assert bnn.norm.kl().item() == bnn.last.kl().item() == 0
    without = unsettle(residual(groups=3, kl_over="sum", order_prior=False))
    tails = sum(phi_1(order.keep_logits.tolist(), 1) for order in units_of(bnn))
    assert (lb.kl(bnn) - lb.kl(without)).item() == pytest.approx(tails, rel=1e-4)


def test_weights_of_transposed_and_grouped_convolutions_go_with_their_output_channel():
    """Each weight is counted by the channel it leads to, found by its gradient instead of its place."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 1), nn.ConvTranspose2d(4, 6, 2, groups=2), nn.ReLU(), nn.Conv2d(6, 8, 1, groups=2), nn.ReLU(),
        nn.Conv2d(8, 2, 1),
    )  # fmt: skip
    bnn = unsettle(lb.convert(net, lb.NestedDropout(groups=2, order_prior=False, kl_over="sum")))
    for index in (1, 3):
        layer = bnn[index]
        unit = layer.posterior.order
        each = layer.posterior.log_alpha.detach()
        kept = torch.zeros_like(each)
        y = layer.base(torch.ones(1, layer.base.in_channels, 3, 3))
        for channel in range(y.shape[1]):
            (touched,) = torch.autograd.grad(y[:, channel].sum(), layer.base.weight, retain_graph=True)
            kept += (touched != 0) * unit.keep[unit.group_of[channel]].detach()
        expected = sum(
            p * weight_kl(v, -0.5471) for p, v in zip(kept.flatten().tolist(), each.flatten().tolist(), strict=True)
        )
        assert layer.kl().item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("fields", [{}, {"always_on": 3}, {"kl_over": "sum"}, {"tail": "geometric"}], ids=str)
@pytest.mark.parametrize("name", ["residual", "transposed", "depthwise", "gated", "conv1d"])
def test_layers_at_once_cost_what_they_cost_weight_by_weight(name, fields):
    """The reference multiplies every weight's divergence by the keep probability of its output, in float64."""
    bnn, _ = converted(name, groups=4, min_cut=0, **fields)
    expected = sum(unit.kl().double() for unit in units_of(bnn))
    layers = [layer for _, layer in stochastic_layers(bnn) if isinstance(layer, NestedLayer)]
    for layer in layers:
        unit, outputs = layer.posterior.order, layer.family.outputs(layer.base)
        each = peaked_log_uniform_kl(layer.posterior.log_alpha.double())
        keep = torch.ones(outputs).double() if unit is None else unit.keep.double()[unit.group_of]
        kept = layer.family.scale(layer.base, each, each.new_ones(layer.family.inputs(layer.base)), keep).sum()
        expected = expected + (kept if layer.method.kl_over == "sum" else kept * outputs / each.numel())
    assert lb.kl(bnn).item() == pytest.approx(expected.item(), rel=1e-6)
    assert sum(layer.kl().item() for layer in layers) == pytest.approx(expected.item(), rel=1e-6)
    found, wanted = (
        torch.autograd.grad(value, list(bnn.parameters()), allow_unused=True) for value in (lb.kl(bnn), expected)
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tail", ["geometric", "categorical"])
def test_fixed_tails_cost_nothing_and_have_nothing_to_learn(tail):
    bnn = unsettle(residual(tail=tail, prior_keep=0.7, groups=3, kl_over="sum"))
    kept = {"geometric": [1.0, 0.7, 0.49], "categorical": [1.0, 2 / 3, 1 / 3]}[tail]
    expected = 0.0
    for name in ("stem", "skip", "inner", "outer", "head"):
        layer = bnn.get_submodule(name)
        order = layer.posterior.order
        per_channel = (
            [1.0] * layer.base.weight.shape[0] if order is None else [kept[g] for g in order.group_of.tolist()]
        )
        expected += phi_2(layer.posterior.log_alpha, per_channel, -0.5471)
    assert lb.kl(bnn).item() == pytest.approx(expected, rel=1e-5)
    assert not any("keep_logits" in name for name, _ in bnn.named_parameters())
    assert all(order.kl().item() == 0 for order in units_of(bnn))


def test_the_cost_of_weights_is_that_of_the_expected_number_kept():
    """Equation (13): chi times the mean number of kept weights, by enumerating the tails of both streams."""
    chi = 0.03
    bnn = unsettle(residual(groups=3, weight_noise=False, weight_cost=chi, order_prior=False))
    expected = 0.0
    for names in (("inner",), ("skip", "outer")):
        unit = bnn.get_submodule(names[0]).posterior.order
        _, tails = chain([1.0] + [1 / (1 + math.exp(-v)) for v in unit.keep_logits.tolist()])
        for tail, probability in enumerate(tails):
            channels = sum(group <= tail for group in unit.group_of.tolist())
            weights = sum(channels * bnn.get_submodule(name).base.weight[0].numel() for name in names)
            expected += chi * probability * weights
    assert lb.kl(bnn).item() == pytest.approx(expected, rel=1e-5)
    assert lb.kl(unsettle(residual(weight_noise=False, order_prior=False))).item() == 0


@pytest.mark.parametrize("fields", [{"order_prior": False}, {"weight_noise": False, "weight_cost": 1.0}], ids=str)
def test_following_the_divergence_lowers_keep_probabilities(fields):
    bnn = unsettle(residual(**fields))
    lb.kl(bnn).backward()
    for order in units_of(bnn):
        assert (order.keep_logits.grad > 0).all()


def test_the_divergence_of_a_weight_is_equation_17_with_a_minimum_of_zero():
    log_alpha = torch.linspace(-10, 10, 4001, dtype=torch.float64)
    for constant in (0.0, -0.5471, 1.5):
        expected = torch.tensor([weight_kl(v, constant) for v in log_alpha.tolist()], dtype=torch.float64)
        torch.testing.assert_close(peaked_log_uniform_kl(log_alpha, constant), expected, rtol=1e-10, atol=1e-10)
    found = peaked_log_uniform_kl(log_alpha)
    assert found.min().abs() < 1e-4
    assert log_alpha[found.argmin()].item() == pytest.approx(1.0, abs=0.15)
    falling, rising = found[: found.argmin()], found[found.argmin() : (log_alpha < 4).sum()]
    assert (falling.diff() < 0).all()
    assert (rising.diff() > 0).all()


def test_the_divergence_of_a_weight_follows_the_exact_one_up_to_a_constant():
    log_alpha = torch.linspace(-5, 0.5, 200, dtype=torch.float64)
    gap = peaked_log_uniform_kl(log_alpha) - exact_log_uniform_kl(log_alpha)
    assert (gap.max() - gap.min()) / 2 < 0.15


# ------------------------------------------------------------------------------------ a prior with uniform tails


def uniform_unit(groups: int, always_on: int = 1, **fields) -> OrderingUnit:
    method = lb.NestedDropout(groups=groups, always_on=always_on, prior="uniform", **fields)
    return OrderingUnit(Stream(2 * groups, 1), method)


@pytest.mark.parametrize(("groups", "always_on"), [(1, 1), (2, 1), (5, 1), (32, 2), (128, 1)])
def test_the_tails_of_the_uniform_prior_have_equal_probabilities(groups, always_on):
    made, count = uniform_unit(groups, always_on), groups - always_on + 1
    assert made.prior_log_tails.exp().tolist() == pytest.approx([1 / count] * count, rel=2e-5)
    assert made.log_tails.exp().tolist() == pytest.approx([0.0] * (always_on - 1) + [1 / count] * count, rel=2e-5)
    assert made.kl().item() == pytest.approx(0, abs=2e-5)
    given = [(count - j) / (count - j + 1) for j in range(1, count)]  # all tails that are left but one are later ones
    assert torch.sigmoid(made.keep_logits).tolist() == pytest.approx(given, rel=1e-5)


@pytest.mark.parametrize("groups", [2, 3, 6])
def test_the_divergence_from_the_uniform_prior_is_that_of_all_masks(groups):
    """A sum over all binary masks of q log q / p, with the probabilities of both chains element by element."""
    made = uniform_unit(groups)
    with torch.no_grad():
        made.keep_logits.copy_(torch.linspace(1.5, -0.7, groups - 1))
    posterior = [1.0, *torch.sigmoid(made.keep_logits.double()).tolist()]
    total = 0.0
    for mask in itertools.product((0, 1), repeat=groups):
        q = 1.0
        for j, (before, now) in enumerate(zip((1, *mask), mask, strict=False)):
            keep = posterior[j] if before else 0.0
            q *= keep if now else 1 - keep
        if q > 0:
            total += q * math.log(q * groups)  # p is 1 / groups for each mask that is possible
    assert made.kl().item() == pytest.approx(total, rel=1e-5)


def test_the_uniform_prior_has_its_own_first_keep_probabilities_and_no_prior_keep():
    assert torch.sigmoid(uniform_unit(4, init_keep=0.9).keep_logits).tolist() == pytest.approx([0.9] * 3)
    with pytest.raises(ValueError, match=r"expected no prior_keep with prior='uniform', got 0\.9"):
        lb.NestedDropout(prior="uniform", prior_keep=0.9)
    with pytest.raises(ValueError, match="prior"):
        lb.NestedDropout(prior="flat")


def test_results_of_before_know_no_choice_of_the_prior():
    assert "prior" not in lb.NestedDropout().fields()
    assert lb.NestedDropout(prior="uniform").fields()["prior"] == "uniform"
