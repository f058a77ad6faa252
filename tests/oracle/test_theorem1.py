"""Theorem 1 of the rank-1 paper (section 3.6): input factors move the score as a full-rank perturbation does.

Let l(theta) be the loss of a fully connected network over a data set, theta* a local minimum, W* = W*^(h) the
weight of layer h, and g = dl/dtheta the score. Perturb that weight in two ways:

    full rank:  W = W* + D,         Cov(D_ij, D_kl) = W*_ij Sigma_jl W*_kl
    rank 1:     W = W* diag(s),     E s = 1, Cov(s) = Sigma

(The paper prints Sigma_jk; j counts inputs and k outputs, so only Sigma_jl makes a covariance.) Write P for the
matrix d vec(W* diag(s)) / ds, P_(ij),m = W*_ij [j = m]; then Cov(D) = P Sigma P^T. To first order

    full rank:  g(W* + D) = g* + H vec(D),  H = d g / d vec(W),  so  Cov(g) = H P Sigma P^T H^T.
    rank 1:     g is taken with respect to W in l(W diag(s)), so dg/ds = H P + [the change of the chain rule's own
                factor diag(s), times dl/dW]. At the minimum dl/dW = 0, the bracket is gone, and Cov(g) is the same.

The outputs of the network are a function of the effective weight alone, so their covariances agree at any theta;
those of the score need the minimum, and a test below shows that they differ elsewhere.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import nn, Tensor
from torch.func import grad, hessian, jacfwd, vmap

import leanbayes as lb
from leanbayes.distributions.positive import inverse_softplus
from tests.readings import reading_of

LAYERS = (0, 2, 4)
MIDDLE = 2
SHAPES = {"0.weight": (3, 2), "0.bias": (3,), "2.weight": (3, 3), "2.bias": (3,), "4.weight": (1, 3), "4.bias": (1,)}
Parameters = dict[str, Tensor]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run(parameters: Parameters, x: Tensor) -> Tensor:
    """Run a tanh network, written out."""
    for h in LAYERS:
        x = x @ parameters[f"{h}.weight"].T + parameters[f"{h}.bias"]
        x = x if h == LAYERS[-1] else torch.tanh(x)
    return x


# Data of a network of the same shape, with noise: the minimum is isolated, and it is not where the data came from.
TRUE = {name: normal(*shape, seed=seed) for seed, (name, shape) in enumerate(SHAPES.items(), 480)}
X = 2 * normal(300, 2, seed=1)
Y = run(TRUE, X) + 0.05 * normal(300, 1, seed=2)


def loss(parameters: Parameters) -> Tensor:
    return (run(parameters, X) - Y).square().mean()


def flat(tensors: Parameters) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in TRUE])


def unflat(vector: Tensor) -> Parameters:
    parts = vector.split([value.numel() for value in TRUE.values()])
    return {name: part.view(value.shape) for (name, value), part in zip(TRUE.items(), parts, strict=True)}


def flat_loss(theta: Tensor) -> Tensor:
    return loss(unflat(theta))


@functools.cache
def minimum() -> Parameters:
    """Go from the true network to the local minimum of the noisy data, by damped Newton steps."""
    theta, damping, eye = flat(TRUE), 1e-2, torch.eye(flat(TRUE).numel(), dtype=torch.float64)
    for _ in range(60):
        gradient, curvature = grad(flat_loss)(theta), hessian(flat_loss)(theta)
        step = torch.linalg.solve(curvature + damping * eye, gradient)
        if flat_loss(theta - step) < flat_loss(theta) or gradient.norm() < 1e-9:
            theta, damping = theta - step, damping / 10
        else:
            damping *= 10
        if gradient.norm() < 1e-14:
            break
    return unflat(theta)


def score_under_full_rank(parameters: Parameters, h: int, perturbation: Tensor) -> Tensor:
    """Return the gradient in all parameters where layer h has the weight W + D."""
    moved = {**parameters, f"{h}.weight": parameters[f"{h}.weight"] + perturbation}
    return flat(grad(loss)(moved))


def score_under_factors(parameters: Parameters, h: int, s: Tensor) -> Tensor:
    """Return the gradient in all parameters where layer h computes W diag(s) x."""

    def perturbed(parameters: Parameters) -> Tensor:
        return loss({**parameters, f"{h}.weight": parameters[f"{h}.weight"] * s})

    return flat(grad(perturbed)(parameters))


def covariances(function_of_w, function_of_s, weight: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first-order covariances J Cov J^T under both perturbations."""
    full = torch.einsum("ij,jl,kl->ijkl", weight, sigma, weight)
    by_w = jacfwd(function_of_w)(torch.zeros_like(weight))
    by_s = jacfwd(function_of_s)(torch.ones(weight.shape[1], dtype=torch.float64))
    return torch.einsum("aij,ijkl,bkl->ab", by_w, full, by_w), by_s @ sigma @ by_s.T


def some_sigma(kind: str, size: int) -> Tensor:
    root = normal(size, size, seed=3)
    if kind == "diagonal":
        return torch.diag(root[0].square() + 0.1)
    return root @ root.T if kind == "full" else torch.outer(root[0], root[0])


def distance(one: Tensor, other: Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


def test_the_network_is_at_a_local_minimum():
    theta = flat(minimum())
    assert grad(flat_loss)(theta).abs().max() < 1e-12
    assert torch.linalg.eigvalsh(hessian(flat_loss)(theta)).min() > 1e-6
    assert distance(theta, flat(TRUE)) > 1e-3


@pytest.mark.parametrize("kind", ["diagonal", "full", "rank one"])
@pytest.mark.parametrize("h", LAYERS)
def test_first_order_covariance_of_the_score_is_the_same_at_the_minimum(h, kind):
    parameters = minimum()
    weight = parameters[f"{h}.weight"]
    full, factors = covariances(
        functools.partial(score_under_full_rank, parameters, h),
        functools.partial(score_under_factors, parameters, h),
        weight,
        some_sigma(kind, weight.shape[1]),
    )
    assert full.norm() > 1e-3
    assert distance(factors, full) < 1e-8


@pytest.mark.parametrize("h", LAYERS)
def test_first_order_covariance_of_the_score_differs_away_from_the_minimum(h):
    parameters = {name: value + 0.3 for name, value in minimum().items()}
    weight = parameters[f"{h}.weight"]
    full, factors = covariances(
        functools.partial(score_under_full_rank, parameters, h),
        functools.partial(score_under_factors, parameters, h),
        weight,
        some_sigma("full", weight.shape[1]),
    )
    assert distance(factors, full) > 0.01


@pytest.mark.parametrize("h", LAYERS)
def test_first_order_covariance_of_the_outputs_is_the_same_anywhere(h):
    weight = TRUE[f"{h}.weight"]
    full, factors = covariances(
        lambda d: run({**TRUE, f"{h}.weight": weight + d}, X)[:, 0],
        lambda s: run({**TRUE, f"{h}.weight": weight * s}, X)[:, 0],
        weight,
        some_sigma("full", weight.shape[1]),
    )
    assert distance(factors, full) < 1e-8


def test_the_covariance_as_printed_is_not_symmetric():
    weight = minimum()[f"{MIDDLE}.weight"]
    printed = torch.einsum("ij,jk,kl->ijkl", weight, some_sigma("full", 3), weight).reshape(9, 9)
    meant = torch.einsum("ij,jl,kl->ijkl", weight, some_sigma("full", 3), weight).reshape(9, 9)
    assert distance(printed.T, printed) > 0.1
    assert distance(meant.T, meant) < 1e-12


# ------------------------------------------------------------------------------- from samples

STDS = torch.tensor([1e-3, 2e-3, 3e-3], dtype=torch.float64)


def library_network() -> tuple[nn.Module, list[Tensor]]:
    """Return a converted network whose input factors of the middle layer have the standard deviations above."""
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    net.load_state_dict(minimum())
    method = lb.Rank1(components=1, factors="input", component_bias=False, init_spread=0.0)
    bnn = lb.convert(net, method, where=str(MIDDLE))
    with torch.no_grad():
        bnn[MIDDLE].posterior.input.rho.copy_(inverse_softplus(STDS)[None])
    return bnn, [parameter for name, parameter in bnn.named_parameters() if "posterior" not in name]


def library_score(bnn: nn.Module, weights: list[Tensor], index: int) -> Tensor:
    with lb.draws(bnn, seed=0, index=index):
        gradients = torch.autograd.grad((bnn(X) - Y).square().mean(), weights)
    return torch.cat([gradient.flatten() for gradient in gradients])


def second_moments(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the covariance of scores of mean zero, entry by entry, with its standard error."""
    products = scores[:, :, None] * scores[:, None, :]
    return products.mean(0), products.std(0) / math.sqrt(len(scores))


def test_library_draws_give_the_score_of_the_factors_they_name():
    bnn, weights = library_network()
    for index in range(5):
        with lb.draws(bnn, seed=0, index=index):
            (noise,) = reading_of(bnn[MIDDLE], 1).noise
        expected = score_under_factors(minimum(), MIDDLE, 1 + STDS * noise[0].double())
        torch.testing.assert_close(library_score(bnn, weights, index), expected, rtol=1e-7, atol=1e-11)


def test_sampled_scores_of_both_perturbations_have_the_same_covariance():
    parameters, sigma = minimum(), torch.diag(STDS.square())
    weight = parameters[f"{MIDDLE}.weight"]
    # Full rank: nine weights drawn from their own covariance, which knows of no factor.
    full = torch.einsum("ij,jl,kl->ijkl", weight, sigma, weight).reshape(9, 9)
    values, vectors = torch.linalg.eigh(full)
    white = normal(4000, 9, seed=4)
    perturbations = (white * values.clamp(min=0).sqrt()) @ vectors.T
    drawn = vmap(functools.partial(score_under_full_rank, parameters, MIDDLE))(perturbations.view(-1, 3, 3))

    bnn, weights = library_network()
    factored = torch.stack([library_score(bnn, weights, index) for index in range(2000)])

    (one, error), (other, other_error) = second_moments(drawn), second_moments(factored)
    spread = (error.square() + other_error.square()).sqrt()
    assert ((one - other).abs() < 4 * spread).all()
    exact, _ = covariances(
        functools.partial(score_under_full_rank, parameters, MIDDLE),
        functools.partial(score_under_factors, parameters, MIDDLE),
        weight,
        sigma,
    )
    assert ((other - exact).abs() < 4 * other_error).all()
    # The comparison is sharp: standard deviations a tenth off would be seen.
    assert ((1.1**2 * exact - exact).abs() > 4 * other_error).any()
