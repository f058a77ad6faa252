"""The probabilistic U-Net: its loss by hand, its opinions by seed, and a distribution with two modes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn, Tensor
from torch.distributions import kl_divergence, Normal

from leanbayes.generative import fit, ProbabilisticUNet
from leanbayes.generative.probabilistic_unet import opinions

from .problems import short

ordered_or_not = pytest.mark.parametrize("ordered", [True, False])


def tiny(ordered: bool = True, classes: int = 3, **options: object) -> ProbabilisticUNet:
    torch.manual_seed(0)
    model = ProbabilisticUNet(classes, (1, 8, 8), dimensions=4, ordered=ordered, widths=(4, 6), **options)
    for layer in (model.prior.mean, model.posterior.mean):
        nn.init.normal_(layer.bias, std=3.0)  # codes that matter
    nn.init.constant_(model.prior.log_std.bias, 3.0)
    return model


def scans(rows: int = 5) -> Tensor:
    return torch.randn(rows, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def masks(rows: int = 5, classes: int = 3) -> Tensor:
    return torch.randint(classes, (rows, 8, 8), generator=torch.Generator().manual_seed(2))


@ordered_or_not
def test_shapes(ordered):
    model, x = tiny(ordered), scans()
    assert model(x, masks()).shape == (5,)
    samples = model.sample(x, 7)
    assert samples.shape == (7, 5, 3, 8, 8)
    torch.testing.assert_close(samples.sum(2), torch.ones(7, 5, 8, 8))
    p = model.predict(x, samples=6)
    assert p.mean.shape == (5, 3, 8, 8)
    assert p.total.shape == p.aleatoric.shape == p.epistemic.shape == (5, 8, 8)
    code = model.prior(x)
    assert code.mean.shape == code.std.shape == (5, 4)
    assert (code.log_tails is not None) == ordered


def test_images_of_odd_sides_and_several_channels():
    model = ProbabilisticUNet(2, (3, 6, 10), dimensions=2, ordered=True, widths=(3, 4))
    assert model.sample(torch.randn(2, 3, 6, 10), 2).shape == (2, 2, 2, 6, 10)
    assert model(torch.randn(2, 3, 6, 10), torch.zeros(2, 6, 10)).isfinite().all()


def test_lengths_of_a_fixed_chain_tell_nothing():
    """Images and masks change means and deviations alone; the divergence has no part for the length."""
    model, x = tiny(keep=0.75).eval(), scans()
    planes = torch.nn.functional.one_hot(masks().long(), model.num_classes).movedim(-1, 1).float()
    prior, posterior = model.prior(x), model.posterior(torch.cat([x, planes], 1))
    tails = torch.tensor([0.25, 0.75 * 0.25, 0.75**2 * 0.25, 0.75**3]).expand(5, -1)
    torch.testing.assert_close(prior.log_tails.exp(), tails)
    torch.testing.assert_close(posterior.log_tails, prior.log_tails)
    kappa = kl_divergence(Normal(posterior.mean, posterior.std), Normal(prior.mean, prior.std))
    torch.testing.assert_close(posterior.kl(prior), (tails * kappa.cumsum(1)).sum(1))
    torch.testing.assert_close(posterior.kl(prior), (prior.keep * kappa).sum(1))
    assert all("keep_logits" not in name and "chain" not in name for name in model.state_dict())
    for length in (1, 2, 3, 4, None):
        assert model.sample(x, 2, length=length).isfinite().all()


@pytest.mark.parametrize(("ordered", "keep"), [(False, 0.5), (True, 0.0), (True, 1.0)])
def test_a_chain_needs_ordered_codes_and_a_probability(ordered, keep):
    with pytest.raises(ValueError, match="expected keep between 0 and 1, and ordered codes"):
        tiny(ordered, keep=keep)


@torch.no_grad()
@ordered_or_not
def test_the_loss_by_hand(ordered):
    """Pixel by pixel, tail by tail, with the noise that the model draws."""
    model, x, y = tiny(ordered, beta=0.7, temperature=0.4).eval().double(), scans(2).double(), masks(2)
    torch.manual_seed(9)
    found = model(x, y)
    torch.manual_seed(9)
    normal, uniform = torch.randn(2, 4, dtype=torch.float64), torch.rand(2, 4, dtype=torch.float64)
    prior, features = model.prior(x), model.unet(x)
    planes = torch.stack([(y == k).double() for k in range(3)], 1)
    posterior = model.posterior(torch.cat([x, planes], 1))
    for row in range(2):
        code, divergence = by_hand(posterior, prior, row, normal[row], uniform[row])
        nll = 0.0
        for i in range(8):
            for j in range(8):
                hidden = torch.cat([features[row, :, i, j], code])
                for layer in model.combine:
                    weight = getattr(layer, "weight", None)
                    hidden = hidden.clamp(min=0) if weight is None else weight[:, :, 0, 0] @ hidden + layer.bias
                nll -= hidden.log_softmax(0)[y[row, i, j]].item()
        assert found[row].item() == pytest.approx(nll + 0.7 * divergence)


def by_hand(q, p, row: int, normal: Tensor, uniform: Tensor) -> tuple[Tensor, float]:
    """Return the code of given noise and the divergence of a row."""
    code = q.mean[row] + q.std[row] * normal
    kappa = kl_divergence(Normal(q.mean[row], q.std[row]), Normal(p.mean[row], p.std[row]))
    if q.log_tails is None:
        return code, kappa.sum().item()
    last = int((q.log_tails[row] - (-uniform.log()).log()).argmax())
    code[last + 1 :] = 0
    tails = [(q.log_tails[row, j].exp().item(), p.log_tails[row, j].exp().item()) for j in range(4)]
    return code, sum(a * (math.log(a / b) + kappa[: j + 1].sum().item()) for j, (a, b) in enumerate(tails))


@ordered_or_not
def test_every_parameter_gets_a_gradient(ordered):
    model = tiny(ordered)
    model(scans(), masks()).mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@ordered_or_not
def test_opinions_repeat_by_seed_and_leave_everything_as_it_was(ordered):
    model, x = tiny(ordered).train(), scans()
    model.unet.head.eval()
    state, before = torch.get_rng_state(), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first = model.sample(x, 3, seed=4)
    assert torch.equal(first, model.sample(x, 3, seed=4))
    assert not torch.equal(first, model.sample(x, 3, seed=5))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert not model.unet.head.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not first.requires_grad


@ordered_or_not
def test_a_prediction_does_not_depend_on_batches(ordered):
    model, x = tiny(ordered), scans(7)
    whole = model.predict(x, samples=4, seed=3)
    torch.testing.assert_close(whole.samples, model.sample(x, 4, seed=3))
    for batch_size in (1, 2, 5):
        p = model.predict(x, samples=4, seed=3, batch_size=batch_size)
        torch.testing.assert_close(p.samples, whole.samples)
        torch.testing.assert_close(p.epistemic, whole.epistemic, rtol=1e-4, atol=1e-6)


def test_every_row_and_every_opinion_has_noise_of_its_own():
    model = tiny()
    samples = model.predict(scans(1).expand(6, -1, -1, -1), samples=5, length=4, batch_size=2).samples
    assert len(samples.flatten(0, 1).flatten(1).unique(dim=0)) == 30


def test_the_decomposition_of_a_prediction():
    model, x = tiny(), scans()
    p = model.predict(x, samples=8)
    s = p.samples.double()

    def entropies(probabilities: Tensor) -> Tensor:
        return -(probabilities * probabilities.log()).sum(-3)

    torch.testing.assert_close(p.mean.double(), s.mean(0), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(p.total.double(), entropies(s.mean(0)), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(p.aleatoric.double(), entropies(s).mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(p.total, p.aleatoric + p.epistemic)
    assert (p.epistemic >= 0).all()
    assert p.epistemic.max() > 1e-3
    torch.testing.assert_close(opinions(p.samples).total, p.total)
    log_prob = p.log_prob(masks())
    torch.testing.assert_close(log_prob, s.mean(0).log().gather(1, masks()[:, None])[:, 0].float())


@torch.no_grad()
@ordered_or_not
def test_dimensions_behind_a_length_do_not_matter(ordered):
    model, x = tiny(ordered), scans()
    for length in range(1, 5):
        before = model.sample(x, 4, length=length)
        assert before.isfinite().all()
        model.prior.mean.bias[length:].add_(50.0)
        assert torch.equal(model.sample(x, 4, length=length), before)
        model.prior.mean.bias[length - 1 :].sub_(50.0)
        assert not torch.equal(model.sample(x, 4, length=length), before)
    for bad in (0, 5):
        with pytest.raises(ValueError, match=f"expected a code length from 1 to 4, got {bad}"):
            model.sample(x, 1, length=bad)


@torch.no_grad()
def test_without_a_length_the_prior_chooses_it():
    model, x = tiny(), scans()
    whole = model.sample(x, 4, length=4)
    model.prior.keep_logits.weight.zero_()
    for logit, same in ((10.0, True), (-10.0, False)):
        model.prior.keep_logits.bias.fill_(logit)
        assert torch.allclose(model.sample(x, 4), whole) == same
    torch.testing.assert_close(model.sample(x, 4), model.sample(x, 4, length=1))


def test_one_class_or_one_dimension_is_refused():
    for classes, dimensions in ((1, 4), (2, 1)):
        with pytest.raises(ValueError, match=f"at least two classes and dimensions, got {classes} and {dimensions}"):
            ProbabilisticUNet(classes, (1, 8, 8), dimensions=dimensions)


@pytest.mark.slow
@ordered_or_not
def test_it_learns_how_often_annotators_say_what(ordered):
    """Of every image, 70 % say the left half and 30 % the right half, and none a mixture of both.

    Six images with a hundred annotations each: were all images different, the network would know each by heart.
    """
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(6, 1, 8, 8, generator=generator)
    halves = torch.stack([(torch.arange(8) < 4).expand(8, 8), (torch.arange(8) >= 4).expand(8, 8)]).long()
    right = torch.rand(600, generator=generator) > 0.7
    torch.manual_seed(0)
    model = ProbabilisticUNet(2, (1, 8, 8), dimensions=3, ordered=ordered, widths=(8, 8))
    fit(model, (x.repeat(100, 1, 1, 1), halves[right.long()]), short(epochs=12, batch_size=30, lr=5e-3), progress=False)
    said = model.sample(x, 300, seed=1).argmax(2)
    says_left, says_right = ((said == half).double().mean((2, 3)) > 0.95 for half in halves)
    assert (says_left | says_right).double().mean() > 0.9
    assert abs(says_left.double().mean().item() - 0.7) < 0.1
    assert (says_left.any(0) & says_right.any(0)).all()
