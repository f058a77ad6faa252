"""Generative models with ordered codes, and baselines."""

from leanbayes.generative.autoencoder import Autoencoder, Bound, explained, fit, VAE, VNDAutoencoder
from leanbayes.generative.baselines import JointVAE, SlicedWassersteinAutoencoder
from leanbayes.generative.codes import Code
from leanbayes.generative.probabilistic_unet import ProbabilisticUNet

__all__ = [
    "VAE",
    "Autoencoder",
    "Bound",
    "Code",
    "JointVAE",
    "ProbabilisticUNet",
    "SlicedWassersteinAutoencoder",
    "VNDAutoencoder",
    "explained",
    "fit",
]
