"""Generative models with ordered codes, and what to compare them with."""

from leanbayes.generative.autoencoder import Autoencoder as Autoencoder
from leanbayes.generative.autoencoder import Bound as Bound
from leanbayes.generative.autoencoder import explained as explained
from leanbayes.generative.autoencoder import VAE as VAE
from leanbayes.generative.codes import Code as Code
from leanbayes.generative.joint_vae import JointVAE as JointVAE
from leanbayes.generative.probabilistic_unet import ProbabilisticUNet as ProbabilisticUNet
from leanbayes.generative.sliced_wasserstein import SlicedWassersteinAutoencoder as SlicedWassersteinAutoencoder
from leanbayes.generative.training import fit as fit
from leanbayes.generative.vnd_autoencoder import VNDAutoencoder as VNDAutoencoder

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
