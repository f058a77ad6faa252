"""Rank-1 factors: the forward pass against weights written out by hand, the divergence against explicit sums."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import distributions as td
from torch import nn

import leanbayes as lb
from leanbayes.distributions.law import LIMIT
from tests.oracle.monte_carlo import kl_monte_carlo
from tests.readings import cauchy, reading_of

ROWS = 6

LAYERS = {
    "linear": (lambda: nn.Linear(4, 6), (ROWS, 4)),
    "linear without bias": (lambda: nn.Linear(4, 6, bias=False), (ROWS, 4)),
    "linear on sequences": (lambda: nn.Linear(4, 6), (ROWS, 3, 4)),
    "conv": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), (ROWS, 4, 5, 5)),
    "grouped conv": (lambda: nn.Conv2d(4, 6, (3, 2), groups=2, padding=1, padding_mode="circular"), (ROWS, 4, 5, 5)),
    "depthwise conv": (lambda: nn.Conv2d(4, 8, 3, groups=4, bias=False), (ROWS, 4, 5, 5)),
}
FINITE = [
    ("normal", "normal"),
    ("normal", "cauchy"),
    ("cauchy", "cauchy"),
    ("log_normal", "normal"),
    ("log_normal", "cauchy"),
    ("log_normal", "log_normal"),
    ("log_normal", "half_cauchy"),
    ("half_cauchy", "cauchy"),
    ("half_cauchy", "log_normal"),
    ("half_cauchy", "half_cauchy"),
]
PRIOR_OF = dict(FINITE) | {"normal": "normal", "log_normal": "log_normal", "point": "point"}


def make(kind: str, method, *, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, torch.Tensor]:
    """Convert a layer inside a container, and move every posterior parameter away from its start."""
    torch.manual_seed(0)
    build, shape = LAYERS[kind]
    model = lb.convert(nn.Sequential(build()).to(dtype), method)
    with torch.no_grad():
        for parameter in model[0].posterior.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model, torch.randn(shape, dtype=dtype)


def run(model: nn.Module, x: torch.Tensor):
    """Return the output of a pass and what its only layer was told."""
    told = []
    handle = model[0].register_forward_hook(lambda layer, args, y: told.append(reading_of(layer, len(args[0]))))
    y = model(x)
    handle.remove()
    return y, told[0]


def factor(layer, side: str, law: str, k: int, reading, row: int) -> torch.Tensor | None:
    """Write out the factors of one row from raw parameters and noise."""
    sides = [name for name in ("input", "output") if name in layer.posterior._modules]
    if side not in sides:
        return None
    parameters = dict(layer.posterior.get_submodule(side).named_parameters())
    loc = parameters["loc"][k] if "loc" in parameters else 0.0
    if law == "point" or layer.config.factors not in ("both", side):
        return loc
    noise = reading.noise[sides.index(side)]
    noise = {"cauchy": cauchy, "half_cauchy": lambda u: cauchy(u).abs()}.get(law, lambda n: n)(noise)
    z = loc + (parameters["rho"][k].exp().log1p() + 1e-7) * noise[row if len(noise) > 1 else 0].to(torch.float64)
    return {
        "normal": lambda: z,
        "cauchy": lambda: z.clip(-LIMIT, LIMIT),
        "log_normal": lambda: z.exp().clip(max=LIMIT),
        "half_cauchy": lambda: z.clip(max=LIMIT),
    }[law]()


def outer(base, s: torch.Tensor | None, r: torch.Tensor | None) -> torch.Tensor:
    """Return r s^T in the shape of the weight, entry by entry: group g's outputs see group g's inputs."""
    weight = base.weight
    groups = getattr(base, "groups", 1)
    product = torch.ones_like(weight)
    for o, i in itertools.product(range(weight.shape[0]), range(weight.shape[1])):
        group = o // (weight.shape[0] // groups)
        product[o, i] *= (1.0 if r is None else r[o]) * (1.0 if s is None else s[group * weight.shape[1] + i])
    return product


def apply(base, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if isinstance(base, nn.Linear):
        return F.linear(x, weight, bias)
    if base.padding_mode == "circular":
        x = F.pad(x, (base.padding[1], base.padding[1], base.padding[0], base.padding[0]), mode="circular")
        return F.conv2d(x, weight, bias, base.stride, 0, base.dilation, base.groups)
    return F.conv2d(x, weight, bias, base.stride, base.padding, base.dilation, base.groups)


def expected_output(layer, x: torch.Tensor, reading, law: str) -> torch.Tensor:
    """Build each row's own weight and bias, then apply the plain map to that row."""
    base, rows = layer.base, []
    for row in range(len(x)):
        component = reading.component.rows()
        k = component[row if len(component) > 1 else 0].item()
        s, r = (factor(layer, side, law, k, reading, row) for side in ("input", "output"))
        if layer.config.perturbation == "additive":
            unit = math.sqrt((base.weight**2).mean().item())
            weight = base.weight + unit * outer(base, s, r)
        else:
            weight = base.weight * outer(base, s, r)
        bias = base.bias
        if bias is not None and layer.config.component_bias:
            bias = bias + layer.posterior.bias[k]
        rows.append(apply(base, x[row : row + 1], weight, bias))
    return torch.cat(rows)


# ------------------------------------------------------------------------------- the forward pass


@pytest.mark.parametrize("component_bias", [True, False], ids=["own bias", "shared bias"])
@pytest.mark.parametrize("perturbation", ["multiplicative", "additive"])
@pytest.mark.parametrize("factors", ["both", "input", "output"])
@pytest.mark.parametrize("kind", LAYERS)
def test_each_row_passes_through_the_weights_of_its_own_draw(kind, factors, perturbation, component_bias):
    method = lb.Rank1(components=3, factors=factors, perturbation=perturbation, component_bias=component_bias)
    model, x = make(kind, method)
    y, reading = run(model, x)
    assert reading.component.rows().bincount().tolist() == [2, 2, 2]
    torch.testing.assert_close(y, expected_output(model[0], x, reading, "normal"), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["linear", "grouped conv"])
@pytest.mark.parametrize("law", ["normal", "cauchy", "log_normal", "half_cauchy", "point"])
def test_factors_follow_the_law_of_the_posterior(law, kind):
    model, x = make(kind, lb.Rank1(components=2, posterior=law, prior=PRIOR_OF[law]))
    y, reading = run(model, x)
    torch.testing.assert_close(y, expected_output(model[0], x, reading, law), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("noise", ["row", "component"])
@pytest.mark.parametrize("law", ["normal", "cauchy", "log_normal", "half_cauchy"])
@pytest.mark.parametrize("factors", ["input", "output"])
def test_the_other_side_has_points_for_each_component(factors, law, noise):
    fields = {"posterior": law, "prior": PRIOR_OF[law], "noise": noise}
    model, x = make("grouped conv", lb.Rank1(components=2, factors=factors, other="point", **fields))
    layer, other = model[0], "output" if factors == "input" else "input"
    assert [name for name, _ in layer.posterior.get_submodule(other).named_parameters()] == ["loc"]
    y, reading = run(model, x)
    if noise == "row":
        torch.testing.assert_close(y, expected_output(layer, x, reading, law), rtol=1e-9, atol=1e-9)
    y.sum().backward()
    assert layer.posterior.get_submodule(other).loc.grad.abs().min() > 0
    torch.testing.assert_close(lb.draw(model, seed=1, index=1)(x), named(model, x, seed=1, index=1))


def named(model, x, **which):
    with lb.draws(model, **which):
        return model(x)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"other": "normal"}, "expected other to be one of none, point, got 'normal'"),
        ({"other": "point"}, "expected factors='input' or 'output', and .*, got 'both' and 'multiplicative'"),
        ({"other": "point", "factors": "input", "perturbation": "additive"}, "got 'input' and 'additive'"),
    ],
)
def test_points_are_for_one_side_of_multiplied_factors(fields, message):
    with pytest.raises(ValueError, match=message):
        lb.Rank1(**fields)


def test_points_of_the_other_side_are_a_field_only_where_they_are():
    assert "other" not in lb.Rank1(factors="input").fields()  # results of before keep their job ids
    assert lb.Rank1(factors="input", other="point").fields()["other"] == "point"


@pytest.mark.parametrize("kl_over", ["mean", "sum"])
@pytest.mark.parametrize("factors", ["input", "output"])
def test_points_of_the_other_side_have_no_prior(factors, kl_over):
    method = lb.Rank1(components=2, factors=factors, other="point", kl_over=kl_over)
    model, _ = make("linear", method)
    posterior = model[0].posterior.get_submodule(factors).distribution()
    each = td.kl_divergence(posterior, td.Normal(1.0, method.prior_std)).sum(1)
    torch.testing.assert_close(lb.kl(model), each.sum() if kl_over == "sum" else each.mean())


def test_layers_with_and_without_points_are_sampled_together():
    net = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 5), nn.Linear(5, 3))
    bnn = lb.convert(net, lb.Rank1(factors="output", other="point", embeddings=True))
    assert [name for name, _ in bnn[0].posterior.named_children()] == ["output"]
    words = torch.randint(7, (8, 6))
    with lb.draws(bnn, seed=0, index=1):
        y = bnn(words)
    torch.testing.assert_close(y, lb.draw(bnn, seed=0, index=1)(words))


@pytest.mark.parametrize("kind", ["linear", "grouped conv"])
@pytest.mark.parametrize("component", [0, 1])
@pytest.mark.parametrize("shared", [True, False])
def test_a_named_draw_is_read_by_all_rows(kind, component, shared):
    model, x = make(kind, lb.Rank1(components=2))
    with lb.draws(model, seed=3, component=component, shared=shared):
        y = model(x)
        reading = reading_of(model[0], len(x))
        again = model(x)
    assert reading.component.rows().tolist() == [component]
    assert all(len(noise) == (1 if shared else ROWS) for noise in reading.noise)
    torch.testing.assert_close(y, expected_output(model[0], x, reading, "normal"), rtol=1e-9, atol=1e-9)
    assert torch.equal(y, again)


@pytest.mark.parametrize("component", [None, 1])
@pytest.mark.parametrize("perturbation", ["multiplicative", "additive"])
def test_mean_draws_use_the_centres(perturbation, component):
    model, x = make("linear", lb.Rank1(components=3, perturbation=perturbation))
    layer = model[0]
    with lb.draws(model, mean=True, component=component):
        y = model(x)
    own = slice(None) if component is None else slice(component, component + 1)
    s, r = (layer.posterior.get_submodule(side).loc[own].mean(0) for side in ("input", "output"))
    bias = layer.base.bias + layer.posterior.bias[own].mean(0)
    product = torch.outer(r, s)
    unit = layer.base.weight.square().mean().sqrt()
    multiplied = perturbation == "multiplicative"
    weight = layer.base.weight * product if multiplied else layer.base.weight + unit * product
    torch.testing.assert_close(y, x @ weight.T + bias, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("component_bias", [True, False])
@pytest.mark.parametrize("perturbation", ["multiplicative", "additive"])
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_bias_is_added_after_the_output_factor_and_never_multiplied(kind, perturbation, component_bias):
    # Without weights only the bias is left, whatever the factors are.
    model, x = make(kind, lb.Rank1(components=2, component_bias=component_bias, perturbation=perturbation))
    layer = model[0]
    with torch.no_grad():
        layer.base.weight.zero_()
        if perturbation == "additive":
            layer.posterior.unit.zero_()
    y, reading = run(model, x)
    own = (
        layer.posterior.bias[reading.component.rows()] if component_bias else torch.zeros(ROWS, 6, dtype=torch.float64)
    )
    bias = (layer.base.bias + own).view(ROWS, 6, *[1] * (y.dim() - 2))
    assert torch.equal(y, bias.expand_as(y))


@pytest.mark.parametrize(("bias", "asked", "given"), [(True, True, True), (True, False, False), (False, True, False)])
def test_only_layers_with_a_bias_get_one_a_component(bias, asked, given):
    layer = lb.convert(nn.Linear(4, 6, bias=bias), lb.Rank1(components=3, component_bias=asked))
    own = dict(layer.posterior.named_parameters()).get("bias")
    assert (own is not None) == given
    if given:
        assert torch.equal(own, torch.zeros(3, 6))


def test_layers_with_fewer_components_wrap_around_those_with_more():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model = lb.convert(lb.convert(net, lb.Rank1(components=2), where="0"), lb.Rank1(components=4), where="1")
    with lb.draws(model, seed=0, component=3):
        assert [reading_of(layer, 1).component.rows().item() for layer in model] == [1, 3]
    with lb.draws(model, mean=True, component=3):
        assert [reading_of(layer, 1).component.rows().item() for layer in model] == [1, 3]


@pytest.mark.parametrize("perturbation", ["multiplicative", "additive"])
@pytest.mark.parametrize("kind", LAYERS)
def test_conversion_around_one_keeps_the_average_function(kind, perturbation):
    torch.manual_seed(0)
    build, shape = LAYERS[kind]
    net, x = nn.Sequential(build()), torch.randn(shape)
    model = lb.convert(net, lb.Rank1(components=4, init_spread=0.3, perturbation=perturbation))
    with lb.draws(model, mean=True):
        torch.testing.assert_close(model(x), net(x), rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------- where factors start


def test_random_signs_start_at_plus_and_minus_one():
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=r"random_sign' discards the function of a trained network.*component=k"):
        layer = lb.convert(nn.Linear(200, 300), lb.Rank1(components=4, init="random_sign", sign_probability=0.75))
    for side, count in (("input", 800), ("output", 1200)):
        loc = layer.posterior.get_submodule(side).loc
        assert torch.equal(loc.abs(), torch.ones_like(loc))
        assert abs((loc > 0).double().mean() - 0.75) < 4 * math.sqrt(0.75 * 0.25 / count)


def test_batch_ensemble_with_random_signs_warns_alike():
    with pytest.warns(UserWarning, match="discards the function of a trained network"):
        lb.convert(nn.Linear(2, 2), lb.BatchEnsemble(init="random_sign"))


def test_factors_start_with_the_asked_spread_and_std():
    torch.manual_seed(0)
    layer = lb.convert(nn.Linear(3000, 2), lb.Rank1(components=2, init_spread=0.3, init_std=0.02))
    loc, rho = layer.posterior.input.loc, layer.posterior.input.rho
    torch.testing.assert_close(rho.exp().log1p(), torch.full_like(rho, 0.02), rtol=1e-4, atol=0)
    # Two centred components are 1 +- a with a ~ Normal(0, 0.3^2 / 2).
    square = (loc - 1).square()[0] / (0.3**2 / 2)
    assert abs(square.mean() - 1) < 4 * math.sqrt(2 / 3000)


@pytest.mark.parametrize(("factors", "centres"), [("both", (0, 1)), ("input", (0,)), ("output", (0,))])
def test_additive_factors_lie_around_zero_on_one_side(factors, centres):
    torch.manual_seed(0)
    layer = lb.convert(nn.Linear(4, 6), lb.Rank1(components=3, factors=factors, perturbation="additive"))
    averages = [side.loc.mean(0) for side in layer.posterior.children()]
    for average, centre in zip(averages, centres, strict=True):
        torch.testing.assert_close(average, torch.full_like(average, centre), rtol=0, atol=1e-6)


def test_additive_unit_is_the_root_mean_square_of_the_weights():
    layer = lb.convert(nn.Linear(4, 6), lb.Rank1(perturbation="additive"))
    expected = math.sqrt(sum(w**2 for w in layer.base.weight.flatten().tolist()) / 24)
    assert layer.posterior.unit.item() == pytest.approx(expected, rel=1e-6)


def test_nodes_count_the_random_factors():
    assert lb.convert(nn.Linear(4, 6), lb.Rank1()).nodes == 10
    assert lb.convert(nn.Linear(4, 6), lb.Rank1(factors="input")).nodes == 4
    assert lb.convert(nn.Conv2d(4, 6, 3), lb.Rank1(factors="output")).nodes == 6


# ------------------------------------------------------------------------------- the divergence


def prior_of(law: str, around: float, std: float) -> td.Distribution:
    """Write the prior down once more: centred at `around`, which is a log-normal's mean."""
    around_, std_ = torch.tensor(around), torch.tensor(std)
    return {
        "normal": lambda: td.Normal(around_, std_),
        "cauchy": lambda: td.Cauchy(around_, std_),
        "log_normal": lambda: td.LogNormal(around_.log() - std_**2 / 2, std_),
        "half_cauchy": lambda: td.HalfCauchy(std_),
    }[law]()


def components_of(layer, side: str, law: str) -> td.Distribution:
    parameters = dict(layer.posterior.get_submodule(side).named_parameters())
    scale = (parameters["rho"].exp().log1p() + 1e-7).float()
    if law == "half_cauchy":
        return td.HalfCauchy(scale)
    kind = {"normal": td.Normal, "cauchy": td.Cauchy, "log_normal": td.LogNormal}[law]
    return kind(parameters["loc"].float(), scale)


@pytest.mark.parametrize("factors", ["both", "input", "output"])
@pytest.mark.parametrize("law", ["normal", "cauchy", "log_normal"])
def test_divergence_is_the_explicit_sum_over_factors_averaged_over_components(law, factors):
    model, _ = make("conv", lb.Rank1(components=3, posterior=law, prior=law, prior_std=0.2, factors=factors))
    total = 0.0
    for side, count in (("input", 4), ("output", 6)):
        if factors not in ("both", side):
            continue
        each = td.kl_divergence(components_of(model[0], side, law), prior_of(law, 1.0, 0.2))
        assert each.shape == (3, count)
        total += each.double().sum().item() / 3
    assert model[0].kl().item() == pytest.approx(total, rel=1e-5)
    assert lb.kl(model).item() == pytest.approx(total, rel=1e-5)


def test_model_divergence_is_the_sum_over_layers_of_any_method():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Conv1d(4, 5, 1), nn.Linear(4, 2), nn.Linear(2, 2))
    model = lb.convert(net, lb.Rank1(components=2), where=["0", "1"])
    model = lb.convert(model, lb.Rank1(components=3, prior_std=0.3, kl_over="sum"), where="2")
    model = lb.convert(model, lb.BatchEnsemble(), where="3")
    layers = [layer.kl().item() for _, layer in lb.stochastic_layers(model)]
    assert len(set(layers)) == 4
    assert lb.kl(model).item() == pytest.approx(sum(layers), rel=1e-6)


@pytest.mark.parametrize(("posterior", "prior"), FINITE)
def test_divergence_of_every_pair_lies_within_four_standard_errors_of_samples(posterior, prior):
    model, _ = make("linear", lb.Rank1(components=2, posterior=posterior, prior=prior, prior_std=0.4, init_std=0.1))
    value, variance = 0.0, 0.0
    for side in ("input", "output"):
        components = components_of(model[0], side, posterior)
        estimate = kl_monte_carlo(components, prior_of(prior, 1.0, 0.4), 20_000)
        value += estimate.value.sum().item() / 2
        variance += estimate.standard_error.square().sum().item() / 4
    assert math.sqrt(variance) < 0.02 * value
    assert abs(model[0].kl().item() - value) < 4 * math.sqrt(variance)


@pytest.mark.parametrize("perturbation", ["multiplicative", "additive"])
def test_divergence_is_taken_from_where_the_factors_lie(perturbation):
    model, _ = make("linear", lb.Rank1(components=3, prior_std=0.2, perturbation=perturbation))
    centre = {"input": 0.0 if perturbation == "additive" else 1.0, "output": 1.0}
    total = sum(
        td.kl_divergence(components_of(model[0], side, "normal"), prior_of("normal", around, 0.2)).sum().item() / 3
        for side, around in centre.items()
    )
    assert model[0].kl().item() == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize(("posterior", "prior"), [*FINITE, ("point", "normal")])
def test_sum_over_components_is_exactly_k_times_their_mean(posterior, prior):
    options = {"components": 4, "posterior": posterior, "prior": prior}
    mean, total = (make("linear", lb.Rank1(kl_over=over, **options))[0][0].kl() for over in ("mean", "sum"))
    assert mean > 0
    assert total == 4 * mean


@pytest.mark.parametrize("prior", ["normal", "cauchy", "log_normal", "half_cauchy"])
def test_point_factors_pay_the_negative_log_prior(prior):
    model, _ = make("linear", lb.Rank1(components=2, posterior="point", prior=prior, prior_std=0.3))
    law = prior_of(prior, 1.0, 0.3)
    mode = torch.tensor({"log_normal": math.exp(-1.5 * 0.09), "half_cauchy": 0.0}.get(prior, 1.0))
    total = 0.0
    for side in ("input", "output"):
        loc = model[0].posterior.get_submodule(side).loc.float()
        total += (law.log_prob(mode) - law.log_prob(loc)).sum().item() / 2
    assert model[0].kl().item() == pytest.approx(total, rel=1e-4)


@settings(deadline=None, derandomize=True, max_examples=25)
@given(
    components=st.integers(1, 5),
    prior_std=st.floats(0.02, 2.0),
    init_std=st.floats(0.005, 1.0),
    init_spread=st.floats(0.0, 0.5),
    posterior=st.sampled_from(["normal", "cauchy"]),
)
def test_divergence_is_finite_and_not_negative_for_any_fields(components, prior_std, init_std, init_spread, posterior):
    torch.manual_seed(0)
    method = lb.Rank1(
        components=components,
        posterior=posterior,
        prior=posterior,
        prior_std=prior_std,
        init_std=init_std,
        init_spread=init_spread,
    )
    value = lb.convert(nn.Linear(3, 2), method).kl()
    assert value.dtype == torch.float32
    assert math.isfinite(value.item())
    assert value >= -1e-5


def test_divergence_pulls_factors_to_the_prior():
    # At loc = 1 and scale = prior_std of both distributions the divergence is zero and so is its gradient.
    layer = lb.convert(nn.Linear(4, 3), lb.Rank1(init_spread=0.0, init_std=0.1, prior_std=0.1))
    value = layer.kl()
    value.backward()
    assert value.item() == pytest.approx(0, abs=1e-5)
    for parameter in layer.posterior.input.parameters():
        torch.testing.assert_close(parameter.grad, torch.zeros_like(parameter), rtol=0, atol=1e-4)


def test_half_cauchy_factors_under_a_narrow_cauchy_prior_have_a_finite_divergence():
    layer = lb.convert(nn.Linear(4, 3), lb.Rank1(posterior="half_cauchy", prior="cauchy", prior_std=0.01))
    assert math.isfinite(layer.kl().item())


@pytest.mark.parametrize("perturbation", ["multiplicative", "additive"])
@pytest.mark.parametrize("components", [1, 4])
def test_centres_that_are_not_centred_have_the_whole_spread(components, perturbation):
    torch.manual_seed(0)
    method = lb.Rank1(components=components, init_spread=0.3, perturbation=perturbation, centre=False)
    layer = lb.convert(nn.Linear(3000, 3000), method)
    for side, middle in method.centres().items():
        centres = (getattr(layer.posterior, side).loc.detach() - middle) / 0.3
        assert stats.kstest(centres.flatten().numpy(), "norm").pvalue > 1e-3


def test_members_of_a_batch_ensemble_start_uncentred_on_request():
    torch.manual_seed(0)
    layer = lb.convert(nn.Linear(3000, 2), lb.BatchEnsemble(components=1, init_spread=0.4, centre=False))
    centres = (layer.posterior.input.loc.detach() - 1) / 0.4
    assert stats.kstest(centres.flatten().numpy(), "norm").pvalue > 1e-3


@pytest.mark.parametrize("method", [lb.Rank1, lb.BatchEnsemble])
def test_centring_is_a_field_only_where_it_is_off(method):
    assert "centre" not in method().fields()  # results of before keep their job ids
    assert method(centre=False).fields()["centre"] is False


# ------------------------------------------------------------------------------- BatchEnsemble


@pytest.mark.parametrize("component_bias", [True, False])
@pytest.mark.parametrize("kind", ["linear", "grouped conv"])
def test_batch_ensemble_is_rank1_with_point_factors_and_pays_nothing(kind, component_bias):
    options = {"components": 3, "init_spread": 0.4, "component_bias": component_bias}
    ensemble, x = make(kind, lb.BatchEnsemble(**options))
    factors, _ = make(kind, lb.Rank1(posterior="point", prior="point", **options))
    ours, theirs = ensemble.state_dict(), factors.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    torch.manual_seed(1)
    y, reading = run(ensemble, x)
    torch.manual_seed(1)
    assert torch.equal(y, factors(x))
    assert ensemble[0].kl() == 0
    torch.testing.assert_close(y, expected_output(ensemble[0], x, reading, "point"), rtol=1e-9, atol=1e-9)


def test_members_of_a_batch_ensemble_have_no_noise():
    model, x = make("linear", lb.BatchEnsemble(components=3))
    outputs = []
    for seed in (0, 1):
        with lb.draws(model, seed=seed, component=1):
            outputs.append(model(x))
    assert torch.equal(*outputs)


# ------------------------------------------------------------------------------- fields


@pytest.mark.parametrize("method", [lb.Rank1, lb.BatchEnsemble])
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("components", 0, "components to be a whole number of at least 1, got 0"),
        ("components", -2, "components to be a whole number of at least 1, got -2"),
        ("components", 2.0, r"components to be a whole number of at least 1, got 2\.0"),
        ("init_spread", -0.1, r"init_spread to be a number of at least zero, got -0\.1"),
        ("init_spread", math.nan, "init_spread to be a number of at least zero, got nan"),
        ("sign_probability", 1.5, r"sign_probability to lie between 0 and 1, got 1\.5"),
        ("init", "zeros", "init to be one of around_one, random_sign, got 'zeros'"),
    ],
)
def test_wrong_fields_say_what_was_expected(method, field, value, message):
    with pytest.raises(ValueError, match=f"expected {message}"):
        method(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("prior_std", -0.1, r"prior_std to be a positive number, got -0\.1"),
        ("prior_std", 0, "prior_std to be a positive number, got 0"),
        ("prior_std", math.inf, "prior_std to be a positive number, got inf"),
        ("prior_std", "0.1", "prior_std to be a positive number, got '0.1'"),
        ("init_std", -1, "init_std to be a positive number, got -1"),
        ("init_std", 0.0, r"init_std to be a positive number, got 0\.0"),
        ("posterior", "laplace", "posterior to be one of normal, .*point, got 'laplace'"),
        ("prior", "laplace", "prior to be one of normal, .*point, got 'laplace'"),
        ("factors", "inputs", "factors to be one of both, input, output, got 'inputs'"),
        ("kl_over", "max", "kl_over to be one of mean, sum, got 'max'"),
        ("perturbation", "add", "perturbation to be one of multiplicative, additive, got 'add'"),
    ],
)
def test_wrong_rank1_fields_say_what_was_expected(field, value, message):
    with pytest.raises(ValueError, match=f"expected {message}"):
        lb.Rank1(**{field: value})


def test_a_std_below_what_can_be_stored_is_refused():
    # Scales are softplus(rho) + 1e-7: a smaller one has no rho, and must not become nan.
    with pytest.raises(ValueError, match="init_std"):
        lb.Rank1(init_std=1e-8)


@pytest.mark.parametrize(
    ("posterior", "prior", "allowed"),
    [
        ("normal", "half_cauchy", "normal, cauchy"),
        ("normal", "log_normal", "normal, cauchy"),
        ("normal", "point", "normal, cauchy"),
        ("cauchy", "normal", "cauchy"),
        ("half_cauchy", "normal", "cauchy, log_normal, half_cauchy"),
    ],
)
def test_pairs_with_an_infinite_divergence_are_refused_when_the_method_is_made(posterior, prior, allowed):
    with pytest.raises(ValueError, match=f"a {posterior} posterior and a {prior} prior .*out of {allowed}$"):
        lb.Rank1(posterior=posterior, prior=prior)


@pytest.mark.parametrize("options", [{"init": "random_sign"}, {"perturbation": "additive"}])
@pytest.mark.parametrize("law", ["log_normal", "half_cauchy"])
def test_positive_factors_refuse_signs_and_sums(law, options):
    with pytest.raises(ValueError, match=f"under a {law} posterior .* is positive: expected init='around_one'"):
        lb.Rank1(posterior=law, prior=law, **options)


@pytest.mark.parametrize("options", [{"init": "random_sign"}, {"perturbation": "additive"}])
@pytest.mark.parametrize("prior", ["log_normal", "half_cauchy"])
def test_a_positive_prior_refuses_point_factors_that_start_at_or_below_zero(prior, options):
    # log p(-1) is not a number: the penalty would be nan or inf from the first step on.
    with pytest.raises(ValueError, match="positive"):
        lb.Rank1(posterior="point", prior=prior, **options)


def test_additive_factors_refuse_signs():
    with pytest.raises(ValueError, match=r"additive factors lie around zero.*'random_sign'"):
        lb.Rank1(init="random_sign", perturbation="additive")


def test_positive_factors_refuse_a_spread_that_makes_them_negative():
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r"is positive.*smaller init_spread"):
        lb.convert(nn.Linear(20, 20), lb.Rank1(posterior="log_normal", prior="log_normal", init_spread=2.0))


def shared_factors(n: int) -> tuple[torch.Tensor, nn.Module]:
    """Return the input factors of n passes (n, rows, inputs) under noise of components, and the network."""
    torch.manual_seed(0)
    bnn = lb.convert(nn.Sequential(nn.Linear(4, 3)), lb.Rank1(components=2, init_std=0.2, noise="component"))
    layer, found = bnn[0], []
    layer.register_forward_pre_hook(lambda module, args: found.append(module.variables(len(args[0]))["input"]))
    with torch.no_grad():
        for _ in range(n):
            bnn(torch.randn(6, 4))
    return torch.stack(found).double(), bnn


def test_rows_of_a_component_share_noise_in_a_pass_and_follow_the_posterior():
    n = 3000
    factors, bnn = shared_factors(n)
    first = factors[:, :1].expand(-1, 3, -1)
    assert torch.equal(factors[:, :3], first)  # six rows in two blocks
    assert not torch.equal(factors[:, 3:], first)
    posterior = bnn[0].posterior.input
    one, other = factors[:, 0], factors[:, 3]
    # Blocks change their component from pass to pass: a pair of rows has both, in either order.
    means, variance = posterior.loc.detach().double(), 0.2**2
    error = 5 * (2 * variance / n) ** 0.5
    assert (((one + other).mean(0) - means.sum(0)).abs() < error).all()
    squares = (one - other).square().mean(0) - (means[0] - means[1]).square()
    assert ((squares - 2 * variance).abs() < 5 * (8 * variance**2 + 8 * variance * 0.1).__pow__(0.5) / n**0.5).all()
    noise = (one - one.mean(0)) * (other - other.mean(0)) + (means[0] - means[1]).square() / 4
    assert (noise.mean(0).abs() < 5 * (variance + 0.01) / n**0.5).all()  # components have their own noise


def test_noise_of_components_is_fresh_in_every_pass():
    factors, _ = shared_factors(2)
    assert not torch.equal(factors[0], factors[1])


def test_noise_of_rows_keeps_the_fields_of_earlier_results():
    assert "noise" not in lb.Rank1().fields()
    assert lb.Rank1(noise="component").fields()["noise"] == "component"
    with pytest.raises(ValueError, match="noise"):
        lb.Rank1(noise="batch")  # type: ignore[arg-type]


def test_named_draws_do_not_depend_on_the_noise_of_training():
    torch.manual_seed(0)
    bnn = lb.convert(nn.Sequential(nn.Linear(4, 3)), lb.Rank1(components=2))
    other = lb.convert(nn.Sequential(nn.Linear(4, 3)), lb.Rank1(components=2, noise="component"))
    other.load_state_dict(bnn.state_dict())
    assert torch.equal(lb.draw(bnn, seed=1, index=3)[0].weight, lb.draw(other, seed=1, index=3)[0].weight)
