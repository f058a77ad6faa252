"""Joint-VAE and the sliced-Wasserstein autoencoder against torch's distributions, transport and closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Categorical, kl_divergence, Normal

from leanbayes.generative import fit, JointVAE, SlicedWassersteinAutoencoder
from leanbayes.generative.baselines import JointCode, sliced_wasserstein

from .problems import digits, images, SHAPE, short, small


def joint_code(rows: int = 3) -> JointCode:
    return JointCode(
        torch.randn(rows, 2), torch.rand(rows, 2) + 0.1, log_categories=torch.randn(rows, 4).log_softmax(1)
    )


def test_the_divergence_of_a_category_is_that_of_torch():
    code = joint_code()
    expected = kl_divergence(Categorical(logits=code.log_categories), Categorical(probs=torch.ones(3, 4)))
    torch.testing.assert_close(code.category_kl, expected)
    sure = JointCode(code.mean, code.std, log_categories=torch.tensor([[100.0, 0, 0, 0]]).log_softmax(1))
    assert sure.category_kl.item() == pytest.approx(math.log(4))


def test_the_bound_of_joint_vae_by_hand():
    x = images()
    model = small(JointVAE, beta=2.0, category_beta=3.0).eval()
    code = model.encode(x)
    torch.manual_seed(5)
    bound = model.bound(x)
    torch.manual_seed(5)
    reconstruction = -model.log_likelihood(x, code.rsample(0.67))
    numbers = kl_divergence(Normal(code.mean, code.std), Normal(0.0, 1.0)).sum(1)
    category = (code.log_categories.exp() * (code.log_categories.exp() * 4).log()).sum(1)
    torch.testing.assert_close(bound.reconstruction, reconstruction)
    torch.testing.assert_close(bound.divergence, numbers + category)
    torch.testing.assert_close(bound.loss, reconstruction + 2 * numbers + 3 * category)


def test_relaxed_categories_are_largest_where_they_should_and_become_hard():
    count = 100_000
    law = joint_code(1)
    code = JointCode(
        law.mean.expand(count, -1), law.std.expand(count, -1), log_categories=law.log_categories.expand(count, -1)
    )
    h = code.rsample(0.67)
    assert h.shape == (count, 6)
    torch.testing.assert_close(h[:, 2:].sum(1), torch.ones(count))
    p = law.log_categories.exp()[0]
    found = torch.bincount(h[:, 2:].argmax(1), minlength=4) / count
    assert ((found - p).abs() < 4 * (p * (1 - p) / count).sqrt()).all()
    assert ((h[:, :2].mean(0) - law.mean[0]).abs() < 4 * law.std[0] / math.sqrt(count)).all()
    hard = code.rsample(0.67, hard=True)[:, 2:]
    assert torch.equal(hard.sort(1).values, torch.tensor([0.0, 0, 0, 1]).expand(count, -1))


def test_hard_categories_have_the_gradient_of_soft_ones():
    logits, weight = torch.randn(5, 4, requires_grad=True), torch.randn(4)
    gradients = []
    for hard in (True, False):
        code = JointCode(torch.zeros(5, 2), torch.ones(5, 2), log_categories=logits.log_softmax(1))
        torch.manual_seed(0)
        gradients += torch.autograd.grad((code.rsample(hard=hard)[:, 2:] @ weight).sum(), logits)
    torch.testing.assert_close(*gradients)


def test_a_length_leaves_the_category_alone():
    model = small(JointVAE)
    assert model.code_dimensions == 10
    code = model.mean_code(images(), 2)
    assert (code[:, 2:6] == 0).all()
    assert (code[:, 6:].sum(1) == 1).all()
    assert torch.equal(code[:, 6:].argmax(1), model.encode(images()).log_categories.argmax(1))
    cut = model.encode(images()).cut(2)
    assert isinstance(cut, JointCode)
    assert (cut.rsample()[:, 2:6] == 0).all()


def test_the_prior_of_categories_is_uniform():
    count = 40_000
    categories = small(JointVAE).prior_codes(count, seed=0)[:, 6:]
    assert ((categories.mean(0) - 0.25).abs() < 4 * math.sqrt(0.25 * 0.75 / count)).all()
    assert (categories.sum(1) == 1).all()


def test_joint_vae_builds_its_own_decoder_for_both_parts():
    model = JointVAE((1, 16, 16), dimensions=3, categories=5)
    assert model.decoder.first.in_features == model.code_dimensions == 8
    assert model(torch.rand(2, 1, 16, 16)).shape == (2,)


@pytest.mark.slow
def test_categories_learn_the_clusters_of_images_that_numbers_cannot_tell():
    """Four kinds of images; a single number, which may carry few nats, is left to the noise."""
    generator = torch.Generator().manual_seed(0)
    kinds = torch.randint(4, (512,), generator=generator)
    x = (torch.rand(4, *SHAPE, generator=generator) > 0.5).float()[kinds]
    model = small(JointVAE, 1, beta=20.0)
    fit(model, x, short(epochs=12, batch_size=32, lr=5e-3), progress=False)
    found = model.eval().encode(x).log_categories.argmax(1)
    for kind in range(4):
        assert len(found[kinds == kind].unique()) == 1
    assert len(found.unique()) >= 3
    assert (model.reconstruct(x) - x).abs().mean() < 0.2


def assignment(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the cost of the optimal transport between points on a line, by a general solver."""
    from scipy.optimize import linear_sum_assignment

    cost = (a[:, None] - b).square().numpy()
    return float(cost[linear_sum_assignment(cost)].mean())


def test_the_distance_on_a_line_is_that_of_optimal_transport():
    a, b = torch.randn(2, 40, 1, dtype=torch.float64)
    assert sliced_wasserstein(a, b, 3).item() == pytest.approx(assignment(a[:, 0], b[:, 0]))


def test_the_distance_is_a_mean_over_directions():
    a, b = torch.randn(30, 3, dtype=torch.float64), torch.randn(30, 3, dtype=torch.float64) + 1
    torch.manual_seed(1)
    found = sliced_wasserstein(a, b, 8).item()
    torch.manual_seed(1)
    directions = torch.randn(3, 8, dtype=torch.float64)
    directions /= directions.norm(dim=0)
    assert found == pytest.approx(sum(assignment(a @ d, b @ d) for d in directions.T) / 8)


def test_the_distance_of_shifted_and_scaled_gaussians_has_a_closed_form():
    """N(0, 1) and N(m, s^2 I): the mean over directions of (d m)^2 + (s - 1)^2 is |m|^2 / D + (s - 1)^2."""
    rows, projections = 20_000, 200
    shift = torch.tensor([1.0, 2.0])
    found = sliced_wasserstein(torch.randn(rows, 2), shift + 1.5 * torch.randn(rows, 2), projections).item()
    over_directions = shift.square().sum().item() / math.sqrt(8 * projections)  # (d m)^2 = |m|^2 cos^2, variance 1/8
    of_means = 2 * shift.norm().item() / math.sqrt(2) * math.sqrt((1 + 1.5**2) / rows)
    assert abs(found - (2.5 + 0.25)) < 4 * math.hypot(over_directions, of_means)


def test_equal_sets_in_any_order_have_no_distance():
    a = torch.randn(20, 5)
    assert sliced_wasserstein(a, a[torch.randperm(20)]).item() < 1e-10


def test_every_row_of_a_batch_carries_its_distance():
    x = images()
    model = small(SlicedWassersteinAutoencoder, weight=0.5, projections=7).eval()
    torch.manual_seed(2)
    bound = model.bound(x)
    code = model.encode(x).mean
    torch.manual_seed(2)
    distance = sliced_wasserstein(code, torch.randn_like(code), 7)
    torch.testing.assert_close(bound.divergence, (0.5 * 64 * distance).expand(24))
    torch.testing.assert_close(bound.reconstruction, -model.log_likelihood(x, code))
    torch.testing.assert_close(bound.loss, bound.reconstruction + bound.divergence)


def test_codes_without_noise_are_their_means():
    model = small(SlicedWassersteinAutoencoder)
    code = model.encode(images())
    assert torch.equal(code.rsample(), code.mean)


@pytest.mark.slow
def test_training_brings_the_codes_to_the_prior():
    distances = []
    for weight in (0.0, 1.0):
        model = small(SlicedWassersteinAutoencoder, 2, weight=weight)
        fit(model, digits(), short(epochs=10, batch_size=128, lr=5e-3), progress=False)
        code = model.eval().encode(digits()).mean.detach()
        distances.append(sliced_wasserstein(code, torch.randn_like(code)).item())
    assert distances[1] < 0.1 < 0.5 < distances[0]
