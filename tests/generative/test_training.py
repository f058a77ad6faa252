"""Training: the order that VND-AE finds, and resuming to the last bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import leanbayes as lb
from leanbayes.generative import explained, fit, ProbabilisticUNet, VAE, VNDAutoencoder

from .problems import digits, images, KINDS, short, small


class Wide(nn.Sequential):
    features = 64

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 128), nn.LeakyReLU(), nn.Linear(128, 64), nn.LeakyReLU())


def trained(kind, **options):
    torch.manual_seed(0)
    decoder = nn.Sequential(
        nn.Linear(12, 64), nn.LeakyReLU(), nn.Linear(64, 128), nn.LeakyReLU(), nn.Linear(128, 64),
        nn.Unflatten(1, (1, 8, 8)),
    )  # fmt: skip
    model = kind((1, 8, 8), dimensions=12, encoder=Wide(), decoder=decoder, pixels="gaussian", **options)
    history = fit(model, digits(), short(epochs=30, batch_size=64, lr=3e-3), progress=False)
    assert history[-1]["loss"] < history[0]["loss"]
    return model


@pytest.fixture(scope="module")
def ordered():
    return trained(VNDAutoencoder, prior_keep=0.95)


@pytest.fixture(scope="module")
def plain():
    return trained(VAE)


@pytest.mark.slow
def test_training_orders_the_code(ordered):
    """Every dimension more explains more, up to noise, and the first ones most of it."""
    x = digits()
    errors = torch.tensor(explained(ordered, x, range(1, 13)))
    nothing = (x - x.mean(0)).square().mean().item()
    assert errors.isfinite().all()
    assert (errors.diff() < 0.02 * errors[:-1]).all()
    assert errors[0] < nothing
    assert nothing - errors[3] > 0.6 * (nothing - errors[-1])


@pytest.mark.slow
def test_truncated_ordered_codes_beat_truncated_plain_ones(ordered, plain):
    ours, theirs = (torch.tensor(explained(model, digits(), range(2, 13))) for model in (ordered, plain))
    assert (ours[:5] < theirs[:5]).all()
    assert (ours[2:5] < 0.85 * theirs[2:5]).all()
    assert ours[-1] < 1.4 * theirs[-1]  # nor does the whole code suffer much


@pytest.mark.slow
def test_every_length_gives_images(ordered):
    x = digits()[:20]
    for length in range(1, 13):
        for found in (ordered.reconstruct(x, length=length), ordered.sample(20, length=length, seed=0)):
            assert found.isfinite().all()
            assert found.abs().max() < 3  # pixels are between 0 and 1


class Stop(Exception):
    """Raised by a callback, as an interruption would be."""


def stop(state) -> None:
    if state.epoch == 2:
        raise Stop


def unet() -> ProbabilisticUNet:
    torch.manual_seed(0)
    return ProbabilisticUNet(2, (1, 8, 8), dimensions=3, ordered=True, widths=(3, 4))


def annotated() -> tuple[torch.Tensor, torch.Tensor]:
    return images(), (images()[:, 0] > 0.5).long()


CASES = [*((lambda kind=kind: small(kind), images) for kind in KINDS), (unet, annotated)]


@pytest.mark.parametrize(("make", "data"), CASES)
def test_a_resumed_training_equals_an_unbroken_one(tmp_path, make, data):
    unbroken, fresh = make(), make()
    whole = fit(unbroken, data(), short(epochs=4), progress=False)
    with pytest.raises(Stop):
        fit(make(), data(), short(epochs=4), folder=tmp_path, callbacks=[stop], progress=False)
    torch.randn(99)
    history = fit(fresh, data(), short(epochs=4), folder=tmp_path, resume=True, progress=False)
    assert [row["loss"] for row in history] == [row["loss"] for row in whole]
    ours, theirs = fresh.state_dict(), unbroken.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(("make", "data"), CASES)
def test_training_in_bfloat16(make, data):
    model = make()
    history = fit(model, data(), short(epochs=1, precision="bf16-mixed"), progress=False)
    assert torch.tensor(history[-1]["loss"]).isfinite()
    assert lb.generative.fit is fit


@pytest.mark.parametrize("wrong", [2.0, -0.5, float("nan")])
def test_pixels_that_are_no_probabilities_are_refused(wrong):
    x = images()
    x[0, 0, 0, 0] = wrong
    with pytest.raises(ValueError, match=r"expected pixels from 0 to 1, .* or take pixels='gaussian'"):
        fit(VAE((1, 8, 8), dimensions=2), x, short(epochs=1), progress=False)
