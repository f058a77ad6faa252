"""The curvature criterion against torch's own Hessian."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, hessian
from torch.utils.data import DataLoader, TensorDataset

import leanbayes as lb
from leanbayes.phase import curvature, kappa

X = torch.randn(12, 5, generator=torch.Generator().manual_seed(1))
Y = torch.randint(3, (12,), generator=torch.Generator().manual_seed(2))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Softplus(), nn.Linear(6, 4), nn.Softplus(), nn.Linear(4, 3)
    ).eval()


def hessian_diagonal(net, name, x, y):
    """Return the diagonal of the Hessian of the summed loss by one tensor, by brute force."""
    state = dict(net.named_parameters()) | dict(net.named_buffers())

    def loss(tensor):
        return F.cross_entropy(functional_call(net, state | {name: tensor}, (x,)), y, reduction="sum")

    tensor = state[name].detach()
    full = hessian(loss)(tensor).reshape(tensor.numel(), tensor.numel())
    return full.diagonal().view_as(tensor).detach()


def fisher_diagonal(net, name, x, y):
    """Return the empirical Fisher diagonal, a common stand-in for the Hessian's."""
    total = 0.0
    for row, target in zip(x, y, strict=True):
        net.zero_grad()
        F.cross_entropy(net(row[None]), target[None]).backward()
        total = total + dict(net.named_parameters())[name].grad.square()
    return total


@pytest.mark.parametrize("path", ["0", "3", "5"])
def test_curvature_is_the_diagonal_of_the_hessian(path):
    net = network()
    bnn = lb.convert(net, lb.MeanField())
    found = curvature(bnn, path, (X, Y), lb.Categorical(), batch_size=5)
    expected = hessian_diagonal(net.double(), f"{path}.weight", X.double(), Y).float()
    torch.testing.assert_close(found, expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-5)
    if path == "3":
        fisher = fisher_diagonal(net.double(), "3.weight", X.double(), Y).float()
        assert (fisher - expected).norm() > 0.1 * expected.norm()


def test_chunks_of_outputs_change_nothing(monkeypatch):
    bnn = lb.convert(network(), lb.MeanField())
    whole = curvature(bnn, "0", (X, Y), lb.Categorical())
    monkeypatch.setattr("leanbayes.phase.criterion.AT_ONCE", 100)
    torch.testing.assert_close(curvature(bnn, "0", (X, Y), lb.Categorical()), whole)


def test_convolutions_take_the_long_way():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Softplus(), nn.Flatten(), nn.Linear(8, 3)).eval()
    x = torch.randn(4, 1, 4, 4)
    bnn = lb.convert(net, lb.MeanField(), where="0")
    found = curvature(bnn, "0", (x, Y[:4]), lb.Categorical())
    expected = hessian_diagonal(net.double(), "0.weight", x.double(), Y[:4]).float()
    torch.testing.assert_close(found, expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-4)


def test_kappa_weighs_the_curvature_with_the_variance():
    bnn = lb.convert(network(), lb.MeanField(init_std=0.2))
    found = kappa(bnn, (X, Y))
    assert list(found) == ["0", "3", "5"]
    for path, values in found.items():
        expected = 0.04 * curvature(bnn, path, (X, Y), lb.Categorical()).abs()
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-8)
    loader = DataLoader(TensorDataset(X, Y), batch_size=5)
    torch.testing.assert_close(kappa(bnn, loader)["0"], found["0"])


def test_modes_and_gradients_stay_as_they_were():
    bnn = lb.convert(network(), lb.MeanField()).train()
    before = {name: buffer.clone() for name, buffer in bnn.named_buffers()}
    kappa(bnn, (X, Y))
    assert all(module.training for module in bnn.modules())
    assert all(torch.equal(buffer, before[name]) for name, buffer in bnn.named_buffers())
    assert all(parameter.grad is None for parameter in bnn.parameters())


def test_models_without_gaussian_weights_are_refused():
    with pytest.raises(ValueError, match="expected a model with Gaussian weights"):
        kappa(lb.convert(network(), lb.Rank1()), (X, Y))


class Tokens(nn.Module):
    """A linear map of tokens, as rows of one matrix or not, and their mean."""

    def __init__(self, *, flat: bool) -> None:
        super().__init__()
        self.flat, self.body, self.head = flat, nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        tokens = self.body(x.flatten(0, 1)).unflatten(0, x.shape[:2]) if self.flat else self.body(x)
        return self.head(F.softplus(tokens).mean(1))


@pytest.mark.parametrize("flat", [True, False])
def test_positions_that_interact_in_the_loss_are_no_rows(flat):
    torch.manual_seed(0)
    net, x, y = Tokens(flat=flat).eval(), torch.randn(7, 3, 4), torch.arange(7) % 3
    found = curvature(lb.convert(net, lb.MeanField()), "body", (x, y), lb.Categorical(), batch_size=4)
    expected = hessian_diagonal(net.double(), "body.weight", x.double(), y).float()
    torch.testing.assert_close(found, expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-5)


def test_the_curvature_needs_rows_with_a_target_each():
    bnn = lb.convert(network(), lb.MeanField())
    with pytest.raises(ValueError, match="expected at least one row to sum the curvature over, got none"):
        kappa(bnn, (X[:0], Y[:0]))
    with pytest.raises(ValueError, match="expected one target for each of 5 rows, got 12"):
        kappa(bnn, (X[:5], Y))
