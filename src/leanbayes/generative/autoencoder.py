"""Autoencoders with one interface: `encode`, `decode`, `reconstruct`, `sample`, `bound`.

A variational autoencoder is trained on log p(x) >= E log p(x | h) - beta KL(q(h | x) || p(h)). Its code length is
fixed, but `length=` truncates it as well, to compare ordered codes with codes that were not trained to be cut.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn, Tensor
from typing_extensions import override

from leanbayes.generative.codes import Code, standard, truncated
from leanbayes.runtime.twins import in_eval_mode

Pixels = Literal["gaussian", "bernoulli"]

WIDTHS = (32, 64, 128, 256, 512)


class Bound(NamedTuple):
    """The terms of a bound for each image, in nats, and their weighted sum `loss`, which is minimised."""

    loss: Tensor
    reconstruction: Tensor
    divergence: Tensor


class Autoencoder(nn.Module, abc.ABC):
    """Base class of autoencoders.

    Args:
        input_shape: of an image (C, H, W).
        dimensions: of the code.
        encoder: your own network, images to features (B, F), with an attribute `features`; default the paper's.
        decoder: your own network, codes (B, D) to images; default the paper's.
        pixels: "bernoulli" for pixels in [0, 1], read as probabilities; "gaussian" with a fixed standard deviation.
        pixel_std: of the Gaussian.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        *,
        dimensions: int = 128,
        encoder: nn.Module | None = None,
        decoder: nn.Module | None = None,
        pixels: Pixels = "bernoulli",
        pixel_std: float = 0.1,
    ) -> None:
        super().__init__()
        if pixels not in ("gaussian", "bernoulli"):
            raise ValueError(f"expected pixels to be gaussian or bernoulli, got {pixels!r}")
        if dimensions < 1 or not pixel_std > 0:
            raise ValueError(f"expected dimensions and pixel_std above zero, got {dimensions} and {pixel_std}")
        self.dimensions, self.pixels, self.pixel_std = dimensions, pixels, pixel_std
        self.encoder = ConvEncoder(input_shape) if encoder is None else encoder
        features = getattr(self.encoder, "features", None)
        if not isinstance(features, int):
            raise ValueError(
                f"expected an encoder that says how many features an image has, got {type(self.encoder).__name__} with "
                f"features = {features!r}; set encoder.features"
            )
        self.mean, self.log_std = nn.Linear(features, dimensions), nn.Linear(features, dimensions)
        self.decoder = ConvDecoder(self.code_dimensions, input_shape) if decoder is None else decoder

    @property
    def code_dimensions(self) -> int:
        """Number of inputs of the decoder."""
        return self.dimensions

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.mean.weight.device

    def encode(self, x: Tensor) -> Code:
        """Return the distribution of the codes of images."""
        return self.code_of(self.encoder(x))

    def code_of(self, features: Tensor) -> Code:
        """Return the distribution of the codes of encoded images."""
        return Code.of(self.mean(features), self.log_std(features))

    def decode(self, h: Tensor) -> Tensor:
        """Return the expected images of codes."""
        y: Tensor = self.decoder(h)
        return y.sigmoid() if self.pixels == "bernoulli" else y

    @torch.no_grad()
    def reconstruct(self, x: Tensor, *, length: int | None = None) -> Tensor:
        """Return the images of the mean codes, cut to a length; in eval mode."""
        with in_eval_mode(self):
            return self.decode(self.mean_code(x, length))

    def mean_code(self, x: Tensor, length: int | None = None) -> Tensor:
        """Return the mean codes of images, zero after a length."""
        return self.cut(self.encode(x).mean, length)

    def cut(self, h: Tensor, length: int | None) -> Tensor:
        """Return codes that are zero after a length; None changes nothing."""
        return h if length is None else truncated(h, length)

    @torch.no_grad()
    def sample(self, count: int, *, length: int | None = None, seed: int | None = None) -> Tensor:
        """Return new images from codes of the prior, cut to a length; in eval mode."""
        with in_eval_mode(self):
            return self.decode(self.prior_codes(count, length, seed))

    def prior_codes(self, count: int, length: int | None = None, seed: int | None = None) -> Tensor:
        """Draw codes from the prior; with the same seed, all lengths have the same first numbers."""
        return self.cut(torch.randn(count, self.dimensions, generator=generator_of(seed)).to(self.device), length)

    def log_likelihood(self, x: Tensor, h: Tensor) -> Tensor:
        """Return log p(x | h) of each image, summed over pixels (B,)."""
        y: Tensor = self.decoder(h)
        if self.pixels == "bernoulli":
            each = -F.binary_cross_entropy_with_logits(y, x, reduction="none")
        else:
            scaled = (x - y) / self.pixel_std
            each = -0.5 * scaled.square() - math.log(self.pixel_std) - 0.5 * math.log(2 * math.pi)
        return each.flatten(1).sum(1)

    @abc.abstractmethod
    def bound(self, x: Tensor) -> Bound:
        """Return the terms of the objective for each image."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss of each image (B,), which `lb.generative.fit` minimises."""
        return self.bound(x).loss


class VAE(Autoencoder):
    """A variational autoencoder (Kingma, Welling, 2014); with beta above one a beta-VAE (Higgins et al., 2017).

    `VAE(shape, beta=4)` is the usual beta-VAE. To compare with codes that can be cut, train one VAE for each length.

    Args:
        input_shape: of an image (C, H, W).
        beta: weight of the divergence.
        options: of `Autoencoder`.

    Example:
        >>> vae = lb.generative.VAE((1, 28, 28), dimensions=32)
        >>> lb.generative.fit(vae, x, lb.Recipe(epochs=20, optimizer="adam", lr=1e-3))
        >>> images = vae.sample(16, seed=0)
    """

    def __init__(self, input_shape: tuple[int, ...], *, beta: float = 1.0, **options: object) -> None:
        super().__init__(input_shape, **options)  # type: ignore[arg-type]
        if not beta >= 0:
            raise ValueError(f"expected beta of at least 0, got {beta}")
        self.beta = beta

    @override
    def bound(self, x: Tensor) -> Bound:
        code = self.encode(x)
        reconstruction = -self.log_likelihood(x, code.rsample())
        divergence = code.kl(standard(code.mean))
        return Bound(reconstruction + self.beta * divergence, reconstruction, divergence)


class ConvEncoder(nn.Sequential):
    """The paper's encoder: five 3x3 convolutions of stride 2 with norms and leaky ReLUs, to `features` per image."""

    def __init__(self, input_shape: tuple[int, ...], widths: tuple[int, ...] = WIDTHS) -> None:
        channels, height, width = input_shape
        layers: list[nn.Module] = []
        for narrow, wide in pairwise((channels, *widths)):
            layers += [nn.Conv2d(narrow, wide, 3, 2, 1, bias=False), nn.BatchNorm2d(wide), nn.LeakyReLU()]
            height, width = (height + 1) // 2, (width + 1) // 2
        super().__init__(*layers, nn.Flatten())
        self.features = widths[-1] * height * width


class ConvDecoder(nn.Module):
    """The mirror of `ConvEncoder`: transposed convolutions to at least the size of the image, cropped to its middle."""

    def __init__(self, dimensions: int, output_shape: tuple[int, ...], widths: tuple[int, ...] = WIDTHS) -> None:
        super().__init__()
        channels, self.height, self.width = output_shape
        factor = 2 ** len(widths)
        self.start = (widths[-1], -(-self.height // factor), -(-self.width // factor))
        self.first = nn.Linear(dimensions, self.start[0] * self.start[1] * self.start[2])
        layers: list[nn.Module] = []
        for wide, narrow in pairwise((*reversed(widths), widths[0])):
            layers += [nn.ConvTranspose2d(wide, narrow, 4, 2, 1, bias=False), nn.BatchNorm2d(narrow), nn.LeakyReLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(widths[0], channels, 3, padding=1))

    def forward(self, h: Tensor) -> Tensor:
        """Map codes (B, D) to images (B, C, H, W) of real numbers."""
        y: Tensor = self.layers(self.first(h).view(-1, *self.start))
        top, left = (y.shape[-2] - self.height) // 2, (y.shape[-1] - self.width) // 2
        return y[..., top : top + self.height, left : left + self.width]


def generator_of(seed: int | None) -> torch.Generator | None:
    """Return a new generator for a seed; None means torch's global one."""
    return None if seed is None else torch.Generator().manual_seed(seed)


@torch.no_grad()
def explained(model: Autoencoder, x: Tensor, lengths: Sequence[int], *, batch_size: int = 500) -> list[float]:
    """Return the mean squared error of reconstructions at each code length: it falls if codes are ordered."""
    errors = torch.zeros(len(lengths), dtype=torch.float64)
    with in_eval_mode(model):
        for rows in torch.split(x, batch_size):
            code = model.mean_code(rows.to(model.device))
            for k, length in enumerate(lengths):
                errors[k] += float((model.decode(model.cut(code, length)).to(x.device) - rows).square().sum())
    return (errors / x.numel()).tolist()
