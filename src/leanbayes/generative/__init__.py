"""Generative models with ordered codes, and what to compare them with."""

from leanbayes.generative.autoencoder import Autoencoder as Autoencoder
from leanbayes.generative.autoencoder import explained as explained
from leanbayes.generative.autoencoder import VAE as VAE
from leanbayes.generative.codes import Code as Code
from leanbayes.generative.probabilistic_unet import ProbabilisticUNet as ProbabilisticUNet
from leanbayes.generative.training import fit as fit
from leanbayes.generative.vnd_autoencoder import VNDAutoencoder as VNDAutoencoder

__all__ = ["VAE", "Autoencoder", "Code", "ProbabilisticUNet", "VNDAutoencoder", "explained", "fit"]
