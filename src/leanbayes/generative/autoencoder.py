"""Autoencoders behind one interface: `encode`, `decode`, `reconstruct`, `sample`, `bound`.

A variational autoencoder is trained on log p(x) >= E log p(x | h) - beta KL(q(h | x) || p(h)). Its code length is
fixed; `length=` truncates it all the same, so that ordered codes can be compared with codes never meant to be cut.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn, Tensor
from typing_extensions import override

from leanbayes.generative.codes import Code, standard, truncated
from leanbayes.generative.networks import ConvDecoder, ConvEncoder
from leanbayes.runtime.twins import in_eval_mode

Pixels = Literal["gaussian", "bernoulli"]


class Bound(NamedTuple):
    """The terms of a bound for each input, in nats; what is minimised is their weighted sum `loss`."""

    loss: Tensor
    reconstruction: Tensor
    divergence: Tensor


class Autoencoder(nn.Module, abc.ABC):
    """What all autoencoders share.

    Args:
        input_shape: of an image (C, H, W).
        dimensions: of the code.
        encoder: the user's own network, images to features (B, F) with an attribute `features`; default the paper's.
        decoder: the user's own, codes (B, D) to images; default the paper's.
        pixels: "bernoulli" for pixels in [0, 1], read as probabilities; "gaussian" with a fixed standard deviation.
        pixel_std: of the Gaussian.

    Attributes:
        code_dimensions: what the decoder reads.
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
        """Build encoder, heads and decoder."""
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
        """How many numbers the decoder reads."""
        return self.dimensions

    def encode(self, x: Tensor) -> Code:
        """Return the law of the codes of images."""
        return self.code_of(self.encoder(x))

    def code_of(self, features: Tensor) -> Code:
        """Return the law of the codes of encoded images."""
        return Code.of(self.mean(features), self.log_std(features))

    def decode(self, h: Tensor) -> Tensor:
        """Return the expected images of codes."""
        y: Tensor = self.decoder(h)
        return y.sigmoid() if self.pixels == "bernoulli" else y

    @torch.no_grad()
    def reconstruct(self, x: Tensor, *, length: int | None = None) -> Tensor:
        """Return the images of the mean codes, of a given length or of all dimensions; in eval mode, as `sample`."""
        with in_eval_mode(self):
            return self.decode(self.mean_code(x, length))

    def mean_code(self, x: Tensor, length: int | None = None) -> Tensor:
        """Return the mean codes of images, zero behind a length."""
        return self.cut(self.encode(x).mean, length)

    def cut(self, h: Tensor, length: int | None) -> Tensor:
        """Return codes that are zero behind a length; None changes nothing."""
        return h if length is None else truncated(h, length)

    @torch.no_grad()
    def sample(self, count: int, *, length: int | None = None, seed: int | None = None) -> Tensor:
        """Return new images: codes drawn from the prior, of a given length or as the prior draws it."""
        with in_eval_mode(self):
            return self.decode(self.prior_codes(count, length, seed))

    def prior_codes(self, count: int, length: int | None = None, seed: int | None = None) -> Tensor:
        """Draw codes from the prior; with a seed the same ones every time, and the same beginnings for every length."""
        return self.cut(torch.randn(count, self.dimensions, generator=generator_of(seed)).to(self.device), length)

    def log_likelihood(self, x: Tensor, h: Tensor) -> Tensor:
        """Return log p(x | h) of every image, a sum over pixels (B,)."""
        y: Tensor = self.decoder(h)
        if self.pixels == "bernoulli":
            each = -F.binary_cross_entropy_with_logits(y, x, reduction="none")
        else:
            scaled = (x - y) / self.pixel_std
            each = -0.5 * scaled.square() - math.log(self.pixel_std) - 0.5 * math.log(2 * math.pi)
        return each.flatten(1).sum(1)

    @abc.abstractmethod
    def bound(self, x: Tensor) -> Bound:
        """Return the terms of the objective for every image."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss of every image (B,): what `lb.generative.fit` minimises."""
        return self.bound(x).loss

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return self.mean.weight.device


class VAE(Autoencoder):
    """A variational autoencoder (Kingma, Welling, 2014); with beta above one a beta-VAE (Higgins et al., 2017).

    `VAE(shape, beta=4)` is the usual beta-VAE: codes of fewer nats, whose dimensions come apart. To compare with codes
    that can be cut, train one VAE for each length.

    Example:
        >>> vae = lb.generative.VAE((1, 28, 28), dimensions=32)
        >>> lb.generative.fit(vae, x, lb.Recipe(epochs=20, optimizer="adam", lr=1e-3))
        >>> images = vae.sample(16, seed=0)
    """

    def __init__(self, input_shape: tuple[int, ...], *, beta: float = 1.0, **options: object) -> None:
        """Take the weight of the divergence; other options are those of `Autoencoder`."""
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


def generator_of(seed: int | None) -> torch.Generator | None:
    """Return a generator of its own for a seed; None stands for torch's global one."""
    return None if seed is None else torch.Generator().manual_seed(seed)


@torch.no_grad()
def explained(model: Autoencoder, x: Tensor, lengths: Sequence[int], *, batch_size: int = 500) -> list[float]:
    """Return the mean squared error of reconstructions at every code length: it falls where codes are ordered."""
    errors = torch.zeros(len(lengths), dtype=torch.float64)
    with in_eval_mode(model):
        for rows in torch.split(x, batch_size):
            code = model.mean_code(rows.to(model.device))
            for k, length in enumerate(lengths):
                errors[k] += float((model.decode(model.cut(code, length)).to(x.device) - rows).square().sum())
    return (errors / x.numel()).tolist()
