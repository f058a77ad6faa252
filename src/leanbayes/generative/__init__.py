"""Generative models with ordered codes, and baselines."""

from leanbayes.generative.autoencoder import Autoencoder, Bound, explained, VAE
from leanbayes.generative.baselines import JointVAE, SlicedWassersteinAutoencoder
from leanbayes.generative.codes import Code
from leanbayes.generative.probabilistic_unet import ProbabilisticUNet
from leanbayes.generative.training import fit
from leanbayes.generative.vnd_autoencoder import VNDAutoencoder

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
