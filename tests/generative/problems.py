"""Small autoencoders, one of each kind, and the digits to train them on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn, Tensor

import leanbayes as lb
from leanbayes.generative import Autoencoder, JointVAE, SlicedWassersteinAutoencoder, VAE, VNDAutoencoder

SHAPE = (1, 8, 8)


class Encoder(nn.Sequential):
    """A user's own encoder of images of 8 x 8 pixels."""

    features = 32

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 64), nn.LeakyReLU(), nn.Linear(64, 32), nn.LeakyReLU())


def decoder(dimensions: int) -> nn.Module:
    """Return a user's own decoder, with a norm in it."""
    return nn.Sequential(
        nn.Linear(dimensions, 32), nn.BatchNorm1d(32), nn.LeakyReLU(), nn.Linear(32, 64), nn.Unflatten(1, SHAPE)
    )


def small(kind: Callable[..., Autoencoder], dimensions: int = 6, **options: object) -> Autoencoder:
    """Return an autoencoder for images of 8 x 8 pixels, the same for every call."""
    torch.manual_seed(0)
    read = dimensions + (4 if kind is JointVAE else 0)
    options = {"categories": 4} | options if kind is JointVAE else options
    return kind(SHAPE, dimensions=dimensions, encoder=Encoder(), decoder=decoder(read), **options)


KINDS = [VAE, VNDAutoencoder, JointVAE, SlicedWassersteinAutoencoder]


def images(rows: int = 24) -> Tensor:
    """Return random grey images."""
    return torch.rand(rows, *SHAPE, generator=torch.Generator().manual_seed(1))


def digits() -> Tensor:
    """Return the digits that come with scikit-learn, grey between 0 and 1."""
    from sklearn.datasets import load_digits

    return torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16


def short(**fields: object) -> lb.Recipe:
    """Return a recipe for tests."""
    defaults = {
        "epochs": 3,
        "batch_size": 8,
        "optimizer": "adam",
        "lr": 1e-3,
        "accelerator": "cpu",
        "weight_decay": 0.0,
    }
    return lb.Recipe(**(defaults | fields))
