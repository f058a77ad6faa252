"""VND-AE (Cui et al., section 4.1): an autoencoder whose code can be cut to any length after training.

The encoder returns a Gaussian for each dimension, and probabilities of the length. Training draws lengths, so the first
dimensions learn the common features of all images, and later ones refine them.
"""

from __future__ import annotations

import math

import torch
from torch import nn, Tensor
from typing_extensions import override

from leanbayes.distributions.ordered import log_tails_of
from leanbayes.generative.autoencoder import Autoencoder, Bound, generator_of
from leanbayes.generative.codes import check_length, Code, standard
from leanbayes.runtime.twins import in_eval_mode


class VNDAutoencoder(Autoencoder):
    """An autoencoder with ordered codes.

    Args:
        input_shape: of an image (C, H, W).
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
        h = torch.randn(count, self.dimensions, generator=generator).to(self.device)
        if length is not None:
            return self.cut(h, length)
        reach = torch.rand(count, 1, generator=generator).to(self.device)
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
