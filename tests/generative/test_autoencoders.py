"""Properties of all autoencoders: shapes, pixels, sampling, lengths, modes, gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli, Independent, kl_divergence, MultivariateNormal, Normal

from leanbayes.generative import Autoencoder, explained, JointVAE, SlicedWassersteinAutoencoder, VAE, VNDAutoencoder
from leanbayes.generative.autoencoder import ConvDecoder, ConvEncoder

from .problems import decoder, Encoder, images, KINDS, SHAPE, small

kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 64, 64), (1, 64, 24), (3, 9, 50), (1, 1, 1)])
def test_the_networks_of_the_paper_fit_all_sizes(shape):
    widths = (2, 3, 4, 5, 6)
    encoder, mirror = ConvEncoder(shape, widths), ConvDecoder(7, shape, widths)
    features = encoder(torch.rand(2, *shape))
    assert features.shape == (2, encoder.features)
    assert mirror(torch.randn(2, 7)).shape == (2, *shape)


def test_the_encoder_of_the_paper_has_five_convolutions_with_norms():
    model = VAE((3, 32, 32), dimensions=128)
    for network, convolution in ((model.encoder, nn.Conv2d), (model.decoder, nn.ConvTranspose2d)):
        assert sum(isinstance(layer, convolution) for layer in network.modules()) == 5
        assert sum(isinstance(layer, nn.BatchNorm2d) for layer in network.modules()) == 5
        assert sum(isinstance(layer, nn.LeakyReLU) for layer in network.modules()) == 5
    assert model.sample(2).shape == (2, 3, 32, 32)


def test_no_edge_of_an_image_is_out_of_reach_of_the_decoder():
    """The middle of a larger image is kept; every pixel of it still depends on the code."""
    for size in (28, 32, 33):
        mirror = ConvDecoder(4, (1, size, size), (4, 4, 4, 4, 4)).eval()
        a, b = mirror(torch.randn(2, 4))
        assert ((a - b).abs() > 0).all()


@kinds
def test_one_interface(kind):
    model, x = small(kind), images()
    code = model.encode(x)
    assert code.mean.shape == code.std.shape == (24, 6)
    assert model.decode(torch.randn(3, model.code_dimensions)).shape == (3, *SHAPE)
    assert model.reconstruct(x).shape == x.shape
    assert model.sample(5).shape == (5, *SHAPE)
    bound = model.bound(x)
    assert bound.loss.shape == bound.reconstruction.shape == bound.divergence.shape == (24,)
    assert (bound.divergence >= 0).all()
    torch.manual_seed(3)
    expected = model.bound(x).loss
    torch.manual_seed(3)
    assert torch.equal(model(x), expected)


@kinds
def test_every_length_is_finite_and_nothing_behind_it_matters(kind):
    model, x = small(kind), images()
    for length in range(1, 7):
        found = model.reconstruct(x, length=length)
        assert found.isfinite().all()
        code = model.eval().mean_code(x, length)
        assert (code[:, length : model.dimensions] == 0).all()
        torch.testing.assert_close(found, model.decode(code))
        torch.testing.assert_close(code[:, :length], model.mean_code(x)[:, :length])
        assert model.sample(7, length=length).isfinite().all()
    for bad in (0, 7, 1.5):
        for call in (lambda bad=bad: model.reconstruct(x, length=bad), lambda bad=bad: model.sample(1, length=bad)):
            with pytest.raises(ValueError, match="expected a code length from 1 to 6, got"):
                call()


@kinds
def test_every_parameter_gets_a_gradient(kind):
    model = small(kind, pixels="gaussian")
    model(images()).mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@kinds
def test_samples_repeat_by_seed_and_begin_alike_for_all_lengths(kind):
    model = small(kind)
    state = torch.get_rng_state()
    first, again, other = model.sample(4, seed=5), model.sample(4, seed=5), model.sample(4, seed=6)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    whole = model.prior_codes(4, 6, seed=5)
    for length in range(1, 7):
        assert torch.equal(model.prior_codes(4, length, seed=5), model.cut(whole, length))
    assert not torch.equal(model.sample(4), model.sample(4))


@kinds
def test_new_images_and_reconstructions_leave_the_model_as_it_was(kind):
    model, x = small(kind).train(), images()
    model.decoder[1].eval()  # a norm that its owner has frozen
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    one_by_one = torch.cat([model.reconstruct(row[None]) for row in x])
    torch.testing.assert_close(model.reconstruct(x), one_by_one)  # norms do not look at the batch
    assert not model.sample(3, seed=0).requires_grad
    explained(model, x, [1, 6])
    assert model.training
    assert not model.decoder[1].training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@kinds
def test_numbers_of_the_prior_are_standard_normal(kind):
    code = small(kind).prior_codes(40_000, 6, seed=0)[:, :6].double()
    error = 1 / math.sqrt(40_000)
    assert (code.mean(0).abs() < 4 * error).all()
    assert ((code.T @ code / 40_000 - torch.eye(6)).abs() < 4 * math.sqrt(2) * error).all()


@kinds
def test_explained_is_the_squared_error_at_every_length(kind):
    model, x = small(kind), images()
    lengths = [1, 3, 6]
    expected = [(model.reconstruct(x, length=length) - x).square().mean().item() for length in lengths]
    assert explained(model, x, lengths) == pytest.approx(expected, rel=1e-5)
    assert explained(model, x, lengths, batch_size=5) == pytest.approx(expected, rel=1e-5)


@kinds
def test_state_dict_round_trip(kind):
    model, other = small(kind), small(kind)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
    other.load_state_dict(model.state_dict())
    assert torch.equal(model.sample(3, seed=1), other.sample(3, seed=1))


@kinds
def test_double_precision_stays_double(kind):
    model = small(kind).double()
    assert model(images().double()).dtype == torch.float64


def test_bernoulli_pixels_are_those_of_torch():
    model, h = small(VAE).eval(), torch.randn(24, 6)
    ones = (images() > 0.5).float()
    law = Independent(Bernoulli(logits=model.decoder(h)), 3)
    torch.testing.assert_close(model.log_likelihood(ones, h), law.log_prob(ones))
    torch.testing.assert_close(model.decode(h), law.mean)
    grey = images()
    own = Bernoulli(logits=model.decoder(h))
    expected = grey * own.log_prob(torch.ones_like(grey)) + (1 - grey) * own.log_prob(torch.zeros_like(grey))
    torch.testing.assert_close(model.log_likelihood(grey, h), expected.sum((1, 2, 3)))


def test_gaussian_pixels_are_those_of_torch():
    model, h, x = small(VAE, pixels="gaussian", pixel_std=0.3).eval(), torch.randn(24, 6), images()
    law = Independent(Normal(model.decoder(h), 0.3), 3)
    torch.testing.assert_close(model.log_likelihood(x, h), law.log_prob(x))
    torch.testing.assert_close(model.decode(h), law.mean)


def test_the_bound_of_a_vae_by_hand_and_beta():
    x = images()
    for beta in (1.0, 4.0):
        model = small(VAE, beta=beta).eval()
        code = model.encode(x)
        divergence = kl_divergence(Normal(code.mean, code.std), Normal(0.0, 1.0)).sum(1)
        torch.manual_seed(7)
        noise = torch.randn(24, 6)
        reconstruction = -model.log_likelihood(x, code.mean + code.std * noise)
        torch.manual_seed(7)
        bound = model.bound(x)
        torch.testing.assert_close(bound.divergence, divergence)
        torch.testing.assert_close(bound.reconstruction, reconstruction)
        torch.testing.assert_close(bound.loss, reconstruction + beta * divergence)


def test_the_bound_of_a_linear_vae_is_below_the_evidence_and_reaches_it():
    """With a linear decoder p(x) is Gaussian and its exact posterior a Gaussian, which makes the bound tight."""
    torch.manual_seed(0)
    model = VAE((1, 2, 2), dimensions=1, encoder=Identity(), decoder=linear(), pixels="gaussian", pixel_std=0.5)
    weight, bias = model.decoder[0].weight.detach(), model.decoder[0].bias.detach()
    x = torch.randn(6, 1, 2, 2)
    evidence = MultivariateNormal(bias, weight @ weight.T + 0.25 * torch.eye(4)).log_prob(x.flatten(1))
    variance = 1 / (1 + weight.square().sum() / 0.25)
    with torch.no_grad():
        model.mean.weight.copy_(variance * weight.T / 0.25)
        model.mean.bias.copy_(-variance * weight.T @ bias / 0.25)
        model.log_std.weight.zero_()
        model.log_std.bias.fill_((variance.sqrt() - 1e-4).expm1().log())
        losses = torch.stack([model(x) for _ in range(4000)])
        error = losses.std(0) / math.sqrt(4000)
        assert ((losses.mean(0) + evidence).abs() < 4 * error + 1e-4).all()
        model.mean.bias.add_(0.3)
        losses = torch.stack([model(x) for _ in range(1000)])
        assert (losses.mean(0) > -evidence).all()


class Identity(nn.Flatten):
    features = 4


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 4), nn.Unflatten(1, (1, 2, 2)))


def test_own_encoder_and_decoder_are_used_as_they_are():
    encoder, own = Encoder(), decoder(6)
    model = VAE(SHAPE, dimensions=6, encoder=encoder, decoder=own)
    assert model.encoder is encoder
    assert model.decoder is own
    with pytest.raises(ValueError, match=r"says how many features an image has, got Flatten with features = None; set"):
        VAE(SHAPE, dimensions=6, encoder=nn.Flatten(), decoder=own)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: VAE(SHAPE, pixels="poisson"), "expected pixels to be gaussian or bernoulli, got 'poisson'"),
        (lambda: VAE(SHAPE, dimensions=0), "expected dimensions and pixel_std above zero, got 0 and 0.1"),
        (lambda: VAE(SHAPE, pixel_std=0.0), "expected dimensions and pixel_std above zero"),
        (lambda: VAE(SHAPE, beta=-1), "expected beta of at least 0, got -1"),
        (lambda: small(VNDAutoencoder, prior_keep=1.0), "expected prior_keep between 0 and 1, a positive temp"),
        (lambda: small(VNDAutoencoder, temperature=0), "a positive temperature and beta of at least 0, got 0.98, 0"),
        (lambda: small(VNDAutoencoder, 1), "two dimensions or more to put in an order, got 1; take a VAE"),
        (lambda: small(JointVAE, categories=1), "expected at least two categories, .* got 1, 0.67"),
        (lambda: SlicedWassersteinAutoencoder(SHAPE, projections=0), "one projection or more, got 1.0 and 0"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_autoencoder_itself_has_no_bound():
    with pytest.raises(TypeError, match="abstract"):
        Autoencoder(SHAPE)
