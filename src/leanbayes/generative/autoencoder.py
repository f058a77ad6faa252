"""Autoencoders with one interface: `encode`, `decode`, `reconstruct`, `sample`, `bound`; and `fit`.

A variational autoencoder is trained on log p(x) >= E log p(x | h) - beta KL(q(h | x) || p(h)). Its code length is
fixed, but `length=` truncates it as well, to compare ordered codes with codes that were not trained to be cut.

VND-AE (Cui et al., section 4.1) has a code that can be cut to any length after training. The encoder returns a Gaussian
for each dimension, and probabilities of the length. Training draws lengths, so the first dimensions learn the common
features of all images, and later ones refine them.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence, Sized
from itertools import pairwise
from typing import Any, cast, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn, Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from leanbayes.distributions.ordered import log_tails_of
from leanbayes.generative.codes import check_length, Code, standard, truncated
from leanbayes.runtime.twins import in_eval_mode
from leanbayes.training import Recipe
from leanbayes.training.fit import fit as fit_network
from leanbayes.training.progress import History

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
        h = torch.randn(count, self.dimensions, generator=generator_of(seed), dtype=torch.float32, device="cpu")
        return self.cut(h.to(self.mean.weight), length)

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


class VNDAutoencoder(Autoencoder):
    """An autoencoder with ordered codes.

    Args:
        prior_keep: the prior's probability that a code continues after a dimension; the mean length is
            1 / (1 - prior_keep), at most `dimensions`.
        temperature: of the relaxed masks.
        hard: masks of zeros and ones, with the (biased) gradient of soft ones.
        beta: weight of the divergence.
        options: of `Autoencoder`: dimensions, encoder, decoder, pixels, pixel_std.

    Example:
        >>> model = lb.generative.VNDAutoencoder((1, 28, 28), dimensions=64)
        >>> lb.generative.fit(model, x, lb.Recipe(epochs=20, optimizer="adam", lr=1e-3))
        >>> short, long = model.reconstruct(x, length=8), model.reconstruct(x, length=64)
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        *,
        prior_keep: float = 0.98,
        temperature: float = 1.0,
        hard: bool = True,
        beta: float = 1.0,
        **options: object,
    ) -> None:
        super().__init__(input_shape, **options)  # type: ignore[arg-type]
        if not (0 < prior_keep < 1 and temperature > 0 and beta >= 0):
            raise ValueError(
                "expected prior_keep between 0 and 1, a positive temperature and beta of at least 0, got "
                f"{prior_keep}, {temperature} and {beta}"
            )
        if self.dimensions < 2:
            raise ValueError(f"expected two dimensions or more to put in an order, got {self.dimensions}; take a VAE")
        self.temperature, self.hard, self.beta = temperature, hard, beta
        logits = torch.full((self.dimensions - 1,), math.log(prior_keep / (1 - prior_keep)))
        self.register_buffer("prior_log_tails", log_tails_of(logits), persistent=False)
        self.keep_logits = nn.Linear(self.mean.in_features, self.dimensions - 1)
        nn.init.zeros_(self.keep_logits.weight)
        with torch.no_grad():
            self.keep_logits.bias.copy_(logits)  # start at the prior's lengths

    prior_log_tails: Tensor

    @override
    def code_of(self, features: Tensor) -> Code:
        return Code.of(self.mean(features), self.log_std(features), self.keep_logits(features))

    @override
    def bound(self, x: Tensor) -> Bound:
        code = self.encode(x)
        reconstruction = -self.log_likelihood(x, code.rsample(self.temperature, hard=self.hard))
        divergence = code.kl(standard(code.mean, self.prior_log_tails))
        return Bound(reconstruction + self.beta * divergence, reconstruction, divergence)

    @override
    def prior_codes(self, count: int, length: int | None = None, seed: int | None = None) -> Tensor:
        generator = generator_of(seed)  # one for both: equal seeds would correlate lengths and numbers
        h = torch.randn(count, self.dimensions, generator=generator, dtype=torch.float32, device="cpu")
        h = h.to(self.mean.weight)
        if length is not None:
            return self.cut(h, length)
        reach = torch.rand(count, 1, generator=generator, dtype=torch.float32, device="cpu").to(self.device)
        return h * (reach < standard(h[:1], self.prior_log_tails).keep)  # one number a row: no gaps

    def progressive(self, count: int, lengths: list[int], *, seed: int = 0) -> Tensor:
        """Return the same new images at several code lengths (len(lengths), count, C, H, W), as in Figure 12."""
        return torch.stack([self.sample(count, length=length, seed=seed) for length in lengths])

    @torch.no_grad()
    def tree(self, depth: int = 4, *, spread: float = 1.0, seed: int = 0) -> list[Tensor]:
        """Return the images of Figure 9: level i has two values for each dimension from the second to the i-th.

        Level i is (2^(i-1), C, H, W); images 2 k and 2 k + 1 of a level refine image k of the level before.
        """
        check_length(depth, self.dimensions)
        levels = [self.prior_codes(1, 1, seed)]
        for dimension in range(1, depth):
            step = torch.zeros_like(levels[0])
            step[:, dimension] = spread
            levels.append(torch.stack([levels[-1] - step, levels[-1] + step], 1).flatten(0, 1))
        with in_eval_mode(self):
            return [self.decode(codes) for codes in levels]


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
    errors = torch.zeros(len(lengths), dtype=torch.float64, device="cpu")
    with in_eval_mode(model):
        for rows in torch.split(x, batch_size):
            code = model.mean_code(rows.to(model.device))
            for k, length in enumerate(lengths):
                errors[k] += float((model.decode(model.cut(code, length)).to(x.device) - rows).square().sum())
    return (errors / x.numel()).tolist()


def fit(
    model: nn.Module, inputs: Tensor | tuple[Tensor, ...] | Dataset[Any], recipe: Recipe, **options: Any
) -> History:
    """Train a model whose call returns the loss of each row.

    Args:
        model: an autoencoder of `lb.generative`, or any module that returns losses (B,).
        inputs: images, or a tuple of inputs; a Dataset yields those of each row. Its method `set_epoch`, if any, gets
            the epoch, as that of `lb.data.OneAnnotator` for a probabilistic U-Net.
        recipe: of the training; Adam at 1e-3 is usual.
        options: of `lb.fit`: folder, resume, callbacks, progress.

    Example:
        >>> lb.generative.fit(vae, x, lb.Recipe(epochs=20, optimizer="adam", lr=1e-3), folder="runs/vae", resume=True)
    """
    if isinstance(inputs, Dataset):
        return fit_network(model, _Untargeted(inputs), recipe, likelihood=_own_loss, **options)
    first = inputs if isinstance(inputs, Tensor) else inputs[0]
    if isinstance(model, Autoencoder) and model.pixels == "bernoulli" and first.numel():
        low, high = first.min().item(), first.max().item()
        if not (low >= 0 and high <= 1):
            raise ValueError(
                f"expected pixels from 0 to 1, read as probabilities, got {low:g} to {high:g}; scale them, or "
                "take pixels='gaussian'"
            )
    unused = torch.zeros(len(first), device="cpu")
    return fit_network(model, (inputs, unused), recipe, likelihood=_own_loss, **options)


class _Untargeted(Dataset[tuple[Any, Tensor]]):
    """Rows of a Dataset as inputs, with an unused target."""

    def __init__(self, rows: Dataset[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(cast(Sized, self.rows))

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        return self.rows[index], torch.zeros((), device="cpu")

    def set_epoch(self, epoch: int) -> None:
        method = getattr(self.rows, "set_epoch", None)
        if method is not None:
            method(epoch)


def _own_loss(losses: Tensor, y: Tensor) -> Tensor:
    return losses  # computed by the model itself; there is no target
