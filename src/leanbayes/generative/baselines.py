"""Baselines: the Joint-VAE (Dupont, 2018) and the sliced-Wasserstein autoencoder (Kolouri et al., 2018).

A Joint-VAE has a code of Gaussian numbers and one category,

    h = (mu + sigma eps, c),   c ~ Gumbel-softmax(q(. | x), temperature),
    KL = sum_i KL(N(mu_i, sigma_i^2) || N(0, 1)) + sum_k q_k log(K q_k).

Dupont moves both divergences towards capacities that grow during training. Here they have constant weights: with both
at one the loss is, up to the relaxation, a bound on -log p(x) like that of other models. Capacities do not make
categories informative either: one certain category for all images also has a divergence of log K.

A sliced-Wasserstein autoencoder has no noise in the encoder, and codes that fill the prior,

    loss = -log p(x | f(x)) + weight * pixels * SW2(codes of the batch, samples of the prior),

with SW2 the mean over random directions of the squared distance between two sorted projections.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn, Tensor
from typing_extensions import override

from leanbayes.distributions.ordered import gumbel
from leanbayes.generative.autoencoder import Autoencoder, Bound, ConvDecoder, generator_of
from leanbayes.generative.codes import Code, standard


@dataclass(frozen=True, kw_only=True)
class JointCode(Code):
    """The distribution of codes with a category after their D numbers.

    Attributes:
        log_categories: logarithms of the probabilities of K categories (B, K).
    """

    log_categories: Tensor

    @override
    def rsample(self, temperature: float | Tensor = 1.0, *, hard: bool = False) -> Tensor:
        """Draw codes (B, D + K), the category relaxed, or with `hard` straight-through."""
        scores = (self.log_categories + gumbel(torch.rand_like(self.log_categories))) / temperature
        soft = scores.softmax(-1)
        chosen = one_hot(scores) + (soft - soft.detach()) if hard else soft
        return torch.cat([super().rsample(), chosen], -1)

    @property
    def category_kl(self) -> Tensor:
        """Divergence of the category to the uniform distribution, log K minus its entropy (B,)."""
        return (self.log_categories.exp() * self.log_categories).sum(-1) + math.log(self.log_categories.shape[-1])


class JointVAE(Autoencoder):
    """A variational autoencoder with a category in its code. A length cuts only the continuous part.

    Args:
        dimensions: of the continuous part of the code.
        categories: K.
        temperature: of the relaxed category; Dupont's.
        beta: weight of the divergence of the continuous part.
        category_beta: weight of the divergence of the category.
        decoder: your own, from codes (B, dimensions + categories) to images.
        options: of `Autoencoder`: encoder, pixels, pixel_std.

    Example:
        >>> model = lb.generative.JointVAE((1, 28, 28), dimensions=10, categories=10)
        >>> lb.generative.fit(model, x, lb.Recipe(epochs=20, optimizer="adam", lr=1e-3))
        >>> model.encode(x).log_categories.argmax(1)      # clusters
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        *,
        dimensions: int = 128,
        categories: int = 10,
        temperature: float = 0.67,
        beta: float = 1.0,
        category_beta: float = 1.0,
        decoder: nn.Module | None = None,
        **options: object,
    ) -> None:
        if not (categories >= 2 and temperature > 0 and beta >= 0 and category_beta >= 0):
            raise ValueError(
                "expected at least two categories, a positive temperature and weights of at least 0, got "
                f"{categories}, {temperature}, {beta} and {category_beta}"
            )
        decoder = ConvDecoder(dimensions + categories, input_shape) if decoder is None else decoder
        super().__init__(input_shape, dimensions=dimensions, decoder=decoder, **options)  # type: ignore[arg-type]
        self.categories, self.temperature = categories, temperature
        self.beta, self.category_beta = beta, category_beta
        self.category_logits = nn.Linear(self.mean.in_features, categories)

    @property
    @override
    def code_dimensions(self) -> int:
        return self.dimensions + self.categories

    @override
    def code_of(self, features: Tensor) -> JointCode:
        code = super().code_of(features)
        return JointCode(code.mean, code.std, log_categories=self.category_logits(features).log_softmax(-1))

    @override
    def encode(self, x: Tensor) -> JointCode:
        return self.code_of(self.encoder(x))

    @override
    def mean_code(self, x: Tensor, length: int | None = None) -> Tensor:
        code = self.encode(x)  # mean numbers and the most probable category
        return self.cut(torch.cat([code.mean, one_hot(code.log_categories)], -1), length)

    @override
    def cut(self, h: Tensor, length: int | None) -> Tensor:
        return torch.cat([super().cut(h[..., : self.dimensions], length), h[..., self.dimensions :]], -1)

    @override
    def prior_codes(self, count: int, length: int | None = None, seed: int | None = None) -> Tensor:
        generator = generator_of(seed)
        numbers = torch.randn(count, self.dimensions, generator=generator, dtype=torch.float32, device="cpu")
        category = torch.randint(self.categories, (count,), generator=generator, device="cpu")
        return self.cut(torch.cat([numbers, F.one_hot(category, self.categories)], -1).to(self.mean.weight), length)

    @override
    def bound(self, x: Tensor) -> Bound:
        code = self.encode(x)
        reconstruction = -self.log_likelihood(x, code.rsample(self.temperature))
        numbers, category = code.kl(standard(code.mean)), code.category_kl
        loss = reconstruction + self.beta * numbers + self.category_beta * category
        return Bound(loss, reconstruction, numbers + category)


def one_hot(scores: Tensor) -> Tensor:
    """Return ones at the largest of the last axis, zeros elsewhere."""
    return F.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores.dtype)


class SlicedWassersteinAutoencoder(Autoencoder):
    """An autoencoder whose codes, over a batch, are distributed like the prior.

    The loss of an image depends on its batch: all rows of a batch have the same distance as `divergence`. Large batches
    estimate it better; with few rows, even samples of the prior have a distance.

    Args:
        weight: of the distance, relative to the mean reconstruction term of a pixel; 10 in their paper.
        projections: random directions in each batch.
        options: of `Autoencoder`: dimensions, encoder, decoder, pixels, pixel_std.

    Example:
        >>> model = lb.generative.SlicedWassersteinAutoencoder((1, 28, 28), dimensions=32)
        >>> lb.generative.fit(model, x, lb.Recipe(epochs=20, optimizer="adam", lr=1e-3, batch_size=500))
    """

    def __init__(
        self, input_shape: tuple[int, ...], *, weight: float = 1.0, projections: int = 50, **options: object
    ) -> None:
        super().__init__(input_shape, **options)  # type: ignore[arg-type]
        if not (weight >= 0 and projections >= 1):
            raise ValueError(
                f"expected a weight of at least 0 and one projection or more, got {weight} and {projections}"
            )
        self.weight, self.projections = weight, projections
        del self.log_std  # a parameter without gradient would stop training on several devices

    @override
    def code_of(self, features: Tensor) -> Code:
        mean = self.mean(features)
        return Code(mean, torch.zeros_like(mean))

    @override
    def bound(self, x: Tensor) -> Bound:
        code = self.encode(x).mean
        reconstruction = -self.log_likelihood(x, code)
        distance = sliced_wasserstein(code, torch.randn_like(code), self.projections)
        divergence = (self.weight * x[0].numel() * distance).expand(len(x))
        return Bound(reconstruction + divergence, reconstruction, divergence)


def sliced_wasserstein(a: Tensor, b: Tensor, projections: int = 50) -> Tensor:
    """Estimate the squared sliced 2-Wasserstein distance of two sets of N points (N, D).

    On a line the optimal transport keeps the order: (1 / N) sum_i (a_(i) - b_(i))^2, averaged over random directions.
    """
    directions = F.normalize(torch.randn(a.shape[-1], projections, dtype=a.dtype, device=a.device), dim=0)
    return ((a @ directions).sort(0).values - (b @ directions).sort(0).values).square().mean()
