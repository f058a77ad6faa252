"""Implicit nodes: the forward pass by hand, and the divergence of eq. 22-24 by hand and from samples."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn

import leanbayes as lb
from leanbayes.distributions.positive import inverse_softplus
from tests.readings import reading_of

ROWS = 6
LAYERS = {
    "linear": (lambda: nn.Linear(4, 6), (ROWS, 4)),
    "linear without bias": (lambda: nn.Linear(4, 6, bias=False), (ROWS, 4)),
    "linear on sequences": (lambda: nn.Linear(4, 6), (ROWS, 3, 4)),
    "conv": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), (ROWS, 4, 5, 5)),
    "grouped conv": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), (ROWS, 4, 5, 5)),
}


def make(kind: str, method) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    build, shape = LAYERS[kind]
    model = lb.convert(nn.Sequential(build()).double(), method)
    return model, torch.randn(shape, dtype=torch.float64)


def stds_of(layer) -> torch.Tensor:
    return layer.posterior.rho.exp().log1p() + 1e-7


def set_stds(layer, stds: torch.Tensor) -> None:
    with torch.no_grad():
        layer.posterior.rho.copy_(inverse_softplus(stds.expand_as(layer.posterior.rho)))


def nodes(layer, reading, rows: int) -> torch.Tensor:
    """Write out the node variables (rows, nodes) from raw parameters and noise."""
    component = reading.component.rows().expand(rows)
    z = layer.posterior.loc[component] + stds_of(layer)[component] * reading.noise[0].double()
    return z.expand(rows, -1)


def expected_output(layer, x: torch.Tensor, reading) -> torch.Tensor:
    """Give every row its own weight, and with a bias node its own bias."""
    base, rows = layer.base, []
    for row, z in enumerate(nodes(layer, reading, len(x))):
        bias, one = base.bias, x[row : row + 1]
        if layer.bias_node:
            bias = bias * z[4]
        if isinstance(base, nn.Linear):
            rows.append(F.linear(one, base.weight * z[:4], bias))
            continue
        width = 4 // base.groups
        weight = torch.stack(
            [
                base.weight[o] * z[o // (6 // base.groups) * width :][:width, None, None]
                for o in range(base.out_channels)
            ]
        )
        rows.append(F.conv2d(one, weight, bias, base.stride, base.padding, base.dilation, base.groups))
    return torch.cat(rows)


# ------------------------------------------------------------------------------- the forward pass


@pytest.mark.parametrize("bias_node", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_each_row_passes_through_the_weights_of_its_own_nodes(kind, bias_node):
    model, x = make(kind, lb.ImplicitNodes(components=3, bias_node=bias_node))
    told = []
    model[0].register_forward_hook(lambda layer, args, y: told.append(reading_of(layer, len(args[0]))))
    y = model(x)
    assert told[0].component.rows().bincount().tolist() == [2, 2, 2]
    torch.testing.assert_close(y, expected_output(model[0], x, told[0]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bias_node", [False, True])
@pytest.mark.parametrize("kind", ["linear", "grouped conv"])
@pytest.mark.parametrize("shared", [True, False])
def test_a_named_draw_is_read_by_all_rows(kind, shared, bias_node):
    model, x = make(kind, lb.ImplicitNodes(components=3, bias_node=bias_node))
    with lb.draws(model, seed=1, index=2, shared=shared):
        y = model(x)
        reading = reading_of(model[0], len(x))
        assert torch.equal(model(x), y)
    assert reading.component.rows().tolist() == [2]
    assert len(reading.noise[0]) == (1 if shared else ROWS)
    torch.testing.assert_close(y, expected_output(model[0], x, reading), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("component", [None, 1])
@pytest.mark.parametrize("bias_node", [False, True])
def test_mean_draws_use_the_component_means(component, bias_node):
    model, x = make("linear", lb.ImplicitNodes(components=3, bias_node=bias_node))
    layer = model[0]
    with lb.draws(model, mean=True, component=component):
        y = model(x)
    z = layer.posterior.loc.mean(0) if component is None else layer.posterior.loc[component]
    bias = layer.base.bias * (z[4] if bias_node else 1.0)
    torch.testing.assert_close(y, x @ (layer.base.weight * z[:4]).T + bias, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bias_node", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_conversion_keeps_the_average_function(kind, bias_node):
    torch.manual_seed(0)
    build, shape = LAYERS[kind]
    net, x = nn.Sequential(build()), torch.randn(shape)
    model = lb.convert(net, lb.ImplicitNodes(components=4, bias_node=bias_node))
    with lb.draws(model, mean=True):
        torch.testing.assert_close(model(x), net(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "bias_node", "count"),
    [("linear", False, 4), ("linear", True, 5), ("linear without bias", True, 4), ("grouped conv", True, 5)],
)
def test_nodes_are_input_channels_and_one_more_for_a_bias(kind, bias_node, count):
    model, _ = make(kind, lb.ImplicitNodes(components=3, bias_node=bias_node))
    assert model[0].nodes == count
    assert model[0].posterior.loc.shape == (3, count)


def test_nodes_start_as_the_paper_starts_them():
    # Means Normal(1, init_spread), standard deviations |Normal(init_std, 0.4 init_std)|.
    torch.manual_seed(0)
    count = 4000
    layer = lb.convert(nn.Linear(count, 2), lb.ImplicitNodes(components=2, init_spread=0.75, init_std=0.05))
    stds = stds_of(layer)
    twin = stats.foldnorm(c=1 / 0.4, scale=0.4 * 0.05)
    assert stds.min() > 0
    assert stats.kstest(stds.detach().flatten().numpy(), twin.cdf).pvalue > 1e-3
    # Two centred components are 1 +- a with a ~ Normal(0, 0.75^2 / 2).
    square = (layer.posterior.loc[0] - 1).square() / (0.75**2 / 2)
    assert abs(square.mean() - 1) < 4 * math.sqrt(2 / count)
    torch.testing.assert_close(layer.posterior.loc.mean(0), torch.ones(count), rtol=0, atol=1e-6)


@pytest.mark.parametrize("components", [1, 2, 4])
def test_means_that_are_not_centred_start_with_the_whole_spread(components):
    # Trinh et al., section 5: mu ~ Normal(1, 0.75^2), for each component alone.
    torch.manual_seed(0)
    method = lb.ImplicitNodes(components=components, init_spread=0.75, centre=False)
    layer = lb.convert(nn.Linear(4000, 2), method)
    means = (layer.posterior.loc.detach() - 1) / 0.75
    assert stats.kstest(means.flatten().numpy(), "norm").pvalue > 1e-3
    assert abs(means.mean(0).std() - components**-0.5) < 4 * (2 * components * 4000) ** -0.5


def test_centring_is_a_field_only_where_it_is_off():
    assert "centre" not in lb.ImplicitNodes().fields()  # results of before keep their job ids
    assert lb.ImplicitNodes(centre=False).fields()["centre"] is False


# ------------------------------------------------------------------------------- the divergence


def by_hand(means: list[list[float]], stds: list[list[float]], prior_std: float) -> float:
    """Write eq. 22-24 out over components k and nodes n."""
    total, count = 0.0, len(means)
    for n in range(len(means[0])):
        mean = sum(means[k][n] for k in range(count)) / count
        std = math.sqrt(sum(stds[k][n] ** 2 for k in range(count))) / count
        total += math.log(prior_std / std) + (std**2 + (mean - 1) ** 2) / (2 * prior_std**2) - 0.5
    return total


@settings(deadline=None, derandomize=True, max_examples=25)
@given(components=st.integers(1, 6), inputs=st.integers(1, 5), prior_std=st.floats(0.05, 1.0), seed=st.integers(0, 99))
def test_divergence_is_that_of_equations_22_to_24(components, inputs, prior_std, seed):
    torch.manual_seed(seed)
    layer = lb.convert(nn.Linear(inputs, 2).double(), lb.ImplicitNodes(components=components, prior_std=prior_std))
    with torch.no_grad():
        layer.posterior.loc += 0.3 * torch.randn_like(layer.posterior.loc)
    expected = by_hand(layer.posterior.loc.tolist(), stds_of(layer).tolist(), prior_std)
    assert layer.kl().item() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert layer.kl().dtype == torch.float32


def test_divergence_is_that_of_the_average_of_one_draw_per_component():
    # Draw z_k for every component, average them, and estimate the divergence of the average from its own samples.
    torch.manual_seed(0)
    draws, prior_std = 200_000, 0.3
    layer = lb.convert(nn.Linear(3, 2).double(), lb.ImplicitNodes(components=4, prior_std=prior_std, init_std=0.2))
    with torch.no_grad():
        layer.posterior.loc += 0.3 * torch.randn_like(layer.posterior.loc)
    z = layer.posterior.loc + stds_of(layer) * torch.randn(draws, 4, 3, dtype=torch.float64)
    average = z.mean(1).detach()
    mean, std = average.mean(0), average.std(0)
    ratio = torch.distributions.Normal(mean, std).log_prob(average)
    ratio = (ratio - torch.distributions.Normal(1.0, prior_std).log_prob(average)).sum(1)
    error = ratio.std().item() / math.sqrt(draws)
    assert error < 0.01 * layer.kl().item()
    assert abs(layer.kl().item() - ratio.mean().item()) < 4 * error
    # And the average is normal, as the formula supposes.
    assert stats.kstest(((average - mean) / std)[:, 0].numpy(), "norm").pvalue > 1e-3


def test_divergence_does_not_see_how_far_component_means_spread():
    values = []
    for spread in (0.0, 0.5, 5.0):
        torch.manual_seed(0)
        layer = lb.convert(nn.Linear(4, 2).double(), lb.ImplicitNodes(components=4, init_spread=spread))
        set_stds(layer, torch.full((4, 1), 0.1, dtype=torch.float64))
        values.append(layer.kl().item())
    assert values == pytest.approx([values[0]] * 3, rel=1e-5)


def test_divergence_sees_where_the_average_of_the_means_lies():
    layer = lb.convert(nn.Linear(4, 2).double(), lb.ImplicitNodes(components=4, prior_std=0.1))
    before = layer.kl().item()
    with torch.no_grad():
        layer.posterior.loc += 0.2
    assert layer.kl().item() - before == pytest.approx(4 * 0.2**2 / (2 * 0.1**2), rel=1e-4)


@pytest.mark.parametrize("components", [1, 3, 4])
def test_divergence_pulls_standard_deviations_to_the_prior_times_the_root_of_the_components(components):
    method = lb.ImplicitNodes(components=components, prior_std=0.1)
    torch.manual_seed(0)
    layer = lb.convert(nn.Linear(4, 2).double(), method)

    def pull(std: float) -> torch.Tensor:
        set_stds(layer, torch.tensor(std, dtype=torch.float64))
        layer.zero_grad()
        layer.kl().backward()
        return layer.posterior.rho.grad

    best = 0.1 * math.sqrt(components)
    torch.testing.assert_close(pull(best), torch.zeros(components, 4).double(), rtol=0, atol=1e-5)
    assert layer.kl().item() == pytest.approx(0, abs=1e-5)
    assert (pull(0.9 * best) < -1e-3).all()
    assert (pull(1.1 * best) > 1e-3).all()


@pytest.mark.parametrize("bias_node", [False, True])
def test_divergence_counts_the_bias_node(bias_node):
    torch.manual_seed(0)
    layer = lb.convert(nn.Linear(4, 2).double(), lb.ImplicitNodes(components=2, bias_node=bias_node))
    set_stds(layer, torch.tensor(0.05, dtype=torch.float64))
    one = by_hand([[1.0], [1.0]], [[0.05], [0.05]], 0.1)
    assert layer.kl().item() == pytest.approx((4 + bias_node) * one, rel=1e-4)


def test_model_divergence_is_the_sum_over_layers():
    torch.manual_seed(0)
    model = lb.convert(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), lb.ImplicitNodes())
    assert lb.kl(model).item() == pytest.approx(model[0].kl().item() + model[1].kl().item(), rel=1e-6)


# ------------------------------------------------------------------------------- fields


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("components", 0, "components to be a whole number of at least 1, got 0"),
        ("components", 1.5, r"components to be a whole number of at least 1, got 1\.5"),
        ("prior_std", -0.1, r"prior_std to be a positive number, got -0\.1"),
        ("prior_std", math.nan, "prior_std to be a positive number, got nan"),
        ("init_std", 0, "init_std to be a positive number, got 0"),
        ("init_spread", -1.0, r"init_spread to be a number of at least zero, got -1\.0"),
    ],
)
def test_wrong_fields_say_what_was_expected(field, value, message):
    with pytest.raises(ValueError, match=f"expected {message}"):
        lb.ImplicitNodes(**{field: value})


def test_a_std_below_what_can_be_stored_is_refused():
    # Scales are softplus(rho) + 1e-7: a smaller one has no rho, and must not become nan.
    with pytest.raises(ValueError, match="init_std"):
        lb.ImplicitNodes(init_std=1e-8)
