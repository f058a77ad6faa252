"""The divergence of many normal weights in one function: torch's closed form, gradients, and where it is used."""

from __future__ import annotations

import pytest
import torch
from torch import nn, Tensor
from torch.distributions import kl_divergence, Normal

import leanbayes as lb
from leanbayes.distributions.normal_kl import normal_kl, sum_of_normal_kl
from leanbayes.distributions.positive import softplus
from leanbayes.methods import mean_field


def parameters(count: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return raw deviations from 1e-5 to 6, and means."""
    torch.manual_seed(0)
    rho = torch.linspace(-11.5, 6, count, dtype=dtype)[torch.randperm(count)]
    return rho.requires_grad_(), torch.randn(count, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("prior", [0.1, 1.0, 3.0])
def test_it_is_the_sum_of_the_closed_form(prior):
    rho, means = parameters(500)
    each = kl_divergence(Normal(means, softplus(rho)), Normal(torch.zeros(()).double(), prior))
    torch.testing.assert_close(normal_kl(softplus(rho), means, prior), each)
    torch.testing.assert_close(sum_of_normal_kl(rho, means, prior), each.sum())


@pytest.mark.parametrize("trained", [(True, True), (True, False), (False, True)])
def test_gradients_and_their_gradients_by_differences(trained):
    given = [x.detach().requires_grad_(train) for x, train in zip(parameters(20), trained, strict=True)]
    assert torch.autograd.gradcheck(lambda *args: sum_of_normal_kl(*args, 0.7), given)
    assert torch.autograd.gradgradcheck(lambda *args: sum_of_normal_kl(*args, 0.7), given)


def test_in_float32_it_is_as_exact_as_autograd():
    exact = gradients(lambda rho, means: normal_kl(softplus(rho), means, 1.0).sum(), *parameters(2**16))
    ours, plain = (
        gradients(function, *parameters(2**16, torch.float32))
        for function in (
            lambda rho, means: sum_of_normal_kl(rho, means, 1.0),
            lambda rho, means: normal_kl(softplus(rho), means, 1.0).sum(),
        )
    )
    for mine, other, true in zip(ours, plain, exact, strict=True):
        allowed = 2 * (other.double() - true).norm() + 1e-6 * true.norm()
        assert (mine.double() - true).norm() <= allowed


def gradients(function, rho: Tensor, means: Tensor) -> list[Tensor]:
    """Return the value and both gradients."""
    value = function(rho, means)
    value.backward()
    return [value.detach(), rho.grad, means.grad]


def test_layers_without_a_padding_use_it_in_eager_training(monkeypatch):
    calls: list[int] = []

    def noted(rho: Tensor, means: Tensor, prior: float) -> Tensor:
        calls.append(rho.numel())
        return sum_of_normal_kl(rho, means, prior)

    monkeypatch.setattr(mean_field, "sum_of_normal_kl", noted)
    net = nn.Sequential(nn.Embedding(300, 128, padding_idx=0), nn.Linear(128, 256), nn.Linear(256, 4))
    bnn = lb.convert(net, lb.MeanField(prior_std=0.5))
    with torch.no_grad():
        without = lb.kl(bnn)
    assert not calls
    torch.testing.assert_close(lb.kl(bnn).detach(), without)
    assert calls == [128 * 256, 256 * 4]  # not the embedding, which has a padding
    torch.testing.assert_close(lb.kl(bnn.double()).detach(), without, rtol=1e-4, atol=0.0)
    assert len(calls) == 2  # weights of another type are converted
