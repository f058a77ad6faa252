"""Last-layer Laplace against exact Bayesian linear regression, autograd's Hessian, and independent sums."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal

import leanbayes as lb
from leanbayes.methods.laplace import best_precision, information

N, D, NOISE = 60, 3, 0.4


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def table(outputs: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of a linear function, in float64."""
    x = torch.randn(N, D, generator=generator(), dtype=torch.float64)
    weights = torch.randn(D, outputs, generator=generator(1), dtype=torch.float64)
    return x, x @ weights + 0.3 + NOISE * torch.randn(N, outputs, generator=generator(2), dtype=torch.float64)


def design(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)


def ridge(x: torch.Tensor, y: torch.Tensor, precision: float) -> tuple[nn.Linear, torch.Tensor]:
    """Return the linear layer at the exact posterior mean, and the exact covariance of one output's weights."""
    phi = design(x)
    inverse = torch.linalg.inv(phi.T @ phi / NOISE**2 + precision * torch.eye(D + 1, dtype=x.dtype))
    mean = (inverse @ phi.T @ y / NOISE**2).T
    layer = nn.Linear(D, y.shape[1], dtype=x.dtype)
    with torch.no_grad():
        layer.weight.copy_(mean[:, :-1])
        layer.bias.copy_(mean[:, -1])
    return layer, inverse


def covariance(layer: nn.Module, draws: int | None = None) -> torch.Tensor:
    """Return the covariance of weights and bias that the deviations of unit noise define: F^T F."""
    size = layer.nodes
    unit = torch.eye(size, dtype=layer.posterior.prior_precision.dtype).view(size, *layer.sides)
    rows = layer.deviations(unit).flatten(1)
    return rows.T @ rows


def fitted(net: nn.Module, data: tuple, likelihood: lb.Gaussian | lb.Categorical, **fields: object) -> nn.Module:
    method = lb.LastLayerLaplace(**fields)
    bnn = lb.convert(net, method, likelihood=likelihood)
    method.after_training(bnn, data)
    return bnn


def last(bnn: nn.Module) -> nn.Module:
    return next(layer for _, layer in lb.stochastic_layers(bnn))


@pytest.mark.parametrize("full_up_to", [5000, 0], ids=["full", "kronecker"])
@pytest.mark.parametrize("outputs", [1, 2])
def test_gaussian_targets_give_exact_bayesian_linear_regression(full_up_to, outputs):
    x, y = table(outputs)
    net, exact = ridge(x, y, 2.0)
    bnn = fitted(net, (x, y), lb.Gaussian(NOISE), prior_precision=2.0, full_up_to=full_up_to)
    expected = torch.block_diag(*[exact] * outputs)
    torch.testing.assert_close(covariance(last(bnn)), expected, rtol=1e-6, atol=1e-9)
    mean = lb.mean(bnn)
    assert torch.equal(mean.weight, net.weight)
    assert torch.equal(mean.bias, net.bias)


def test_predictions_have_the_moments_of_the_exact_predictive_distribution():
    x, y = table()
    net, exact = ridge(x, y, 2.0)
    bnn = fitted(net, (x, y), lb.Gaussian(NOISE), prior_precision=2.0)
    new = torch.randn(5, D, generator=generator(4), dtype=torch.float64) * 2
    p = lb.predict(bnn, new, samples=4000)
    variance = (design(new) @ exact * design(new)).sum(1, keepdim=True)
    error = (variance / 4000).sqrt()
    assert ((p.mean - net(new)).abs() <= 5 * error).all()
    assert ((p.epistemic - variance).abs() <= 5 * variance * math.sqrt(2 / 4000)).all()
    torch.testing.assert_close(p.aleatoric, torch.full_like(p.aleatoric, NOISE**2), rtol=1e-5, atol=0)


def exact_evidence(x: torch.Tensor, y: torch.Tensor, precision: float) -> float:
    phi = design(x)
    spread = NOISE**2 * torch.eye(len(x), dtype=x.dtype) + phi @ phi.T / precision
    return float(MultivariateNormal(torch.zeros(len(x), dtype=x.dtype), spread).log_prob(y[:, 0]))


def test_the_prior_precision_converges_to_the_maximum_of_the_exact_evidence():
    x, y = table()
    precision = 1.0
    for _ in range(50):  # the weights are at the mean of the posterior under the last precision
        net, _ = ridge(x, y, precision)
        precision = float(last(fitted(net, (x, y), lb.Gaussian(NOISE))).posterior.prior_precision)
    at = [exact_evidence(x, y, precision * factor) for factor in (0.95, 1.0, 1.05)]
    assert at[1] > max(at[0], at[2])
    slope = (exact_evidence(x, y, precision * 1.001) - exact_evidence(x, y, precision / 1.001)) / 0.002
    assert abs(slope) < 1e-4


def test_the_precision_maximises_the_evidence_at_fixed_weights():
    values = torch.rand(40, generator=generator(), dtype=torch.float64) * 10
    theta = torch.randn(4, 10, generator=generator(1), dtype=torch.float64) * 0.7

    def evidence(log_precision: torch.Tensor) -> torch.Tensor:
        delta = log_precision.exp()
        return -0.5 * (delta * theta.square().sum() + (values + delta).log().sum() - 40 * log_precision)

    grid = torch.linspace(-6, 6, 2001, dtype=torch.float64)
    best = grid[torch.stack([evidence(point) for point in grid]).argmax()]
    assert abs(math.log(best_precision(values, theta)) - float(best)) <= 0.006
    assert best_precision(torch.zeros(3), torch.ones(3)) == pytest.approx(1e-6, rel=1e-6)
    assert best_precision(torch.ones(3), torch.zeros(3)) == pytest.approx(1e9, rel=1e-6)


def small_network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3)).double()


def classes() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(30, 4, generator=generator(), dtype=torch.float64), torch.arange(30) % 3


def hessian(net: nn.Module, x: torch.Tensor, loss) -> torch.Tensor:
    """Return autograd's Hessian in the last layer's weights and bias, ordered as a flattened (outputs, inputs + 1)."""
    features = net[:-1].eval()(x).detach()

    def of(flat: torch.Tensor) -> torch.Tensor:
        both = flat.view(3, 6)
        return loss(features @ both[:, :-1].T + both[:, -1])

    flat = torch.cat([net[-1].weight, net[-1].bias[:, None]], 1).detach().flatten()
    return torch.autograd.functional.hessian(of, flat)


def test_classes_give_the_inverse_of_autograds_hessian():
    net, (x, y) = small_network(), classes()
    found = covariance(last(fitted(net, (x, y), lb.Categorical(), prior_precision=0.7)))
    of = hessian(net, x, lambda logits: nn.functional.cross_entropy(logits, y, reduction="sum"))
    expected = torch.linalg.inv(of + 0.7 * torch.eye(18, dtype=torch.float64))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_yes_or_no_gives_the_inverse_of_autograds_hessian():
    net, (x, _) = small_network(), classes()
    y = torch.rand(30, 3, generator=generator(5), dtype=torch.float64).round()
    found = covariance(last(fitted(net, (x, y), lb.Bernoulli(), prior_precision=0.7)))
    loss = nn.functional.binary_cross_entropy_with_logits
    of = hessian(net, x, lambda logits: loss(logits, y, reduction="sum"))
    torch.testing.assert_close(found, torch.linalg.inv(of + 0.7 * torch.eye(18)), rtol=1e-6, atol=1e-9)


def test_a_predicted_variance_has_the_expected_hessian_over_targets():
    outputs = torch.tensor([[0.3, -0.5, 0.8, 1.5]], dtype=torch.float64)
    likelihood = lb.Gaussian(heteroscedastic=True)
    mean, variance = likelihood.predictive(outputs)
    noise = torch.randn(20_000, 2, generator=generator(), dtype=torch.float64)
    y = mean + variance.sqrt() * torch.cat([noise, -noise])
    total = torch.autograd.functional.hessian(
        lambda flat: -likelihood.log_prob(flat.expand(len(y), -1), y).mean(), outputs[0]
    )
    torch.testing.assert_close(information(likelihood, outputs)[0], total, atol=0.03, rtol=0.03)


def test_kronecker_is_the_product_of_mean_curvature_and_features_in_any_network():
    net, (x, y) = small_network(), classes()
    found = covariance(last(fitted(net, (x, y), lb.Categorical(), prior_precision=0.7, full_up_to=0)))
    features = design(net[:-1].eval()(x).detach())
    p = net.eval()(x).softmax(1).detach()
    curvature = sum(torch.diag(row) - torch.outer(row, row) for row in p)
    product = torch.kron(curvature, features.T @ features / len(x))
    expected = torch.linalg.inv(product + 0.7 * torch.eye(18, dtype=torch.float64))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_without_a_posterior_it_is_the_plain_network():
    net, (x, y) = small_network().eval(), classes()
    bnn = lb.convert(net, "laplace")
    assert torch.equal(lb.predict(bnn, x, samples=3).epistemic, torch.zeros(30, dtype=torch.float64))
    assert torch.equal(bnn(x), net(x))
    assert lb.kl(bnn) == 0
    assert [path for path, _ in lb.stochastic_layers(bnn)] == ["3"]
    state = torch.get_rng_state()
    torch.manual_seed(0)
    terms = lb.elbo(bnn, x, y, num_data=30)
    assert terms.loss == nn.functional.cross_entropy(net(x), y)
    torch.set_rng_state(state)


def test_ignored_targets_and_empty_data():
    net, (x, y) = small_network(), classes()
    bnn = fitted(net, (x[:20], y[:20]), lb.Categorical())
    some = torch.where(torch.arange(30) < 20, y, -100)
    torch.testing.assert_close(covariance(last(fitted(net, (x, some), lb.Categorical()))), covariance(last(bnn)))
    with pytest.raises(ValueError, match="got no batch"):
        lb.LastLayerLaplace().after_training(lb.convert(net, lb.LastLayerLaplace()), [])


def test_batches_tokens_and_a_squeezed_output():
    net, (x, y) = small_network(), classes()
    whole = covariance(last(fitted(net, (x, y), lb.Categorical())))
    torch.testing.assert_close(covariance(last(fitted(net, [(x[:7], y[:7]), [x[7:], y[7:]]], lb.Categorical()))), whole)
    tokens, answers = x.view(10, 3, 4), y.view(10, 3)
    found = fitted(net, (tokens, answers), lb.Categorical(axis=-1))
    torch.testing.assert_close(covariance(last(found)), whole)
    with pytest.raises(ValueError, match="classes on the last axis, got them on axis 1"):
        fitted(nn.Linear(4, 3).double(), (tokens, answers), lb.Categorical())
    head = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)).double()
    one = fitted(head, (x, x[:, 0]), lb.Gaussian(), prior_precision=1.0)
    phi = design(x)
    torch.testing.assert_close(covariance(last(one)), torch.linalg.inv(phi.T @ phi + torch.eye(5)))


def test_a_layer_that_is_not_the_last_is_refused_before_training():
    net, data = small_network(), classes()
    bnn = lb.convert(net, lb.LastLayerLaplace(), where="0")
    with pytest.raises(ValueError, match=r"layer '0' to be those of the network.*name the last layer with where="):
        lb.fit(bnn, data, lb.Recipe(epochs=1, accelerator="cpu"), progress=False)
    with pytest.raises(ValueError, match="expected one layer, the last, got 2: 0, 3"):
        lb.convert(net, lb.LastLayerLaplace(), where=["0", "3"])
    bnn = lb.convert(net, lb.LastLayerLaplace())
    with pytest.raises(TypeError, match=r"curvature of a likelihood.*got CrossEntropyLoss"):
        lb.fit(bnn, data, lb.Recipe(epochs=1, accelerator="cpu"), likelihood=nn.CrossEntropyLoss(), progress=False)
    with pytest.raises(ValueError, match="at most 10,000 rows, got 12,000"):
        lb.convert(nn.Linear(3, 12_000), lb.LastLayerLaplace())


@pytest.mark.parametrize("full_up_to", [5000, 0], ids=["full", "kronecker"])
def test_a_fitted_posterior_survives_files_copies_and_refitting(tmp_path, full_up_to):
    net, (x, y) = small_network().float(), classes()
    x = x.float()
    bnn = fitted(net, (x, y), lb.Categorical(), full_up_to=full_up_to)
    expected = lb.predict(bnn, x, samples=5)
    assert expected.epistemic.min() > 0
    lb.save(bnn, tmp_path / "model.safetensors")
    loaded = lb.load(tmp_path / "model.safetensors", net)
    again = copy.deepcopy(bnn)
    last(again).method.after_training(again, (x, y))
    for twin in (loaded, again):
        assert torch.equal(lb.predict(twin, x, samples=5).mean, expected.mean)
    posterior = tmp_path / "posterior.safetensors"
    lb.save(bnn, posterior, only="posterior")
    assert torch.equal(lb.predict(lb.load(posterior, net), x, samples=5).mean, expected.mean)
    unfitted = lb.convert(net, last(bnn).method)
    bnn.load_state_dict(unfitted.state_dict())
    assert lb.predict(bnn, x, samples=5).epistemic.max() == 0


def test_stored_numbers_count_in_the_summary():
    net = small_network()
    assert lb.summary(lb.convert(net, lb.LastLayerLaplace())).extra_parameters == 18 * 18 + 1
    found = lb.summary(lb.convert(net, lb.LastLayerLaplace(full_up_to=17)))
    assert found.extra_parameters == 3 * 3 + 6 * 6 + 18 + 1
    assert found.parameters == sum(p.numel() for p in net.parameters())


def test_fields_are_checked():
    with pytest.raises(ValueError, match="expected prior_precision to be a positive number, got 0"):
        lb.LastLayerLaplace(prior_precision=0)
    with pytest.raises(ValueError, match="expected full_up_to to be at least 0, got -1"):
        lb.LastLayerLaplace(full_up_to=-1)


def trained(method: lb.LastLayerLaplace | None, **fields: object) -> nn.Module:
    net = small_network().float()
    model = net if method is None else lb.convert(net, method, likelihood=lb.Categorical())
    x, y = classes()
    recipe = lb.Recipe(epochs=3, batch_size=8, accelerator="cpu")
    lb.fit(model, (x.float(), y), recipe, likelihood=lb.Categorical(), progress=False, **fields)
    return model


def test_fit_trains_the_weights_of_the_plain_network_to_the_bit_and_fills_the_posterior():
    plain, bnn = trained(None), trained(lb.LastLayerLaplace())
    assert torch.equal(bnn[3].base.weight, plain[3].weight)
    assert torch.equal(bnn[0].weight, plain[0].weight)
    assert last(bnn).fitted
    x, y = classes()
    expected = covariance(last(fitted(plain, (x.float(), y), lb.Categorical())))
    torch.testing.assert_close(covariance(last(bnn)), expected)


def test_a_resumed_training_fills_the_posterior_again(tmp_path):
    expected = trained(lb.LastLayerLaplace(), folder=tmp_path)
    again = trained(lb.LastLayerLaplace(), folder=tmp_path, resume=True)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_members_of_an_ensemble_have_posteriors_of_their_own():
    x, y = classes()
    members = [lb.convert(small_network().float(), lb.LastLayerLaplace(), likelihood=lb.Categorical()) for _ in "ab"]
    ensemble = lb.Ensemble(members)
    lb.fit(ensemble, (x.float(), y), lb.Recipe(epochs=2, batch_size=8, accelerator="cpu"), progress=False)
    one, other = (covariance(last(member)) for member in members)
    assert not torch.allclose(one, other)
    assert lb.predict(ensemble, x.float(), samples=6).epistemic.min() > 0
