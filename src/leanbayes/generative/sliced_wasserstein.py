"""The sliced-Wasserstein autoencoder (Kolouri et al., 2018): no noise in the encoder, and codes that fill the prior.

    loss = -log p(x | f(x)) + weight * pixels * SW2(codes of the batch, as many samples of the prior)

where SW2 is the mean over random directions of the squared distance between two sorted rows of numbers: the optimal
transport of what is left of both sets on a line.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from leanbayes.generative.autoencoder import Autoencoder, Bound
from leanbayes.generative.codes import Code


class SlicedWassersteinAutoencoder(Autoencoder):
    """An autoencoder whose codes, of a batch together, are distributed as the prior.

    The loss of an image depends on its batch: all rows of a batch carry the same distance. Large batches estimate it
    better; with few rows, even samples of the prior are apart.

    Args:
        input_shape: of an image (C, H, W).
        weight: of the distance beside the reconstruction term of a pixel on average; its authors take 10.
        projections: random directions in each batch.
        options: of `Autoencoder`: dimensions, encoder, decoder, pixels, pixel_std.

    Example:
        >>> model = lb.generative.SlicedWassersteinAutoencoder((1, 28, 28), dimensions=32)
        >>> lb.generative.fit(model, x, lb.Recipe(epochs=20, optimizer="adam", lr=1e-3, batch_size=500))
    """

    def __init__(
        self, input_shape: tuple[int, ...], *, weight: float = 1.0, projections: int = 50, **options: object
    ) -> None:
        """Build an autoencoder without the head of standard deviations."""
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
        """Return reconstruction terms, and as divergence the weighted distance of the batch in every row."""
        code = self.encode(x).mean
        reconstruction = -self.log_likelihood(x, code)
        distance = sliced_wasserstein(code, torch.randn_like(code), self.projections)
        divergence = (self.weight * x[0].numel() * distance).expand(len(x))
        return Bound(reconstruction + divergence, reconstruction, divergence)


def sliced_wasserstein(a: Tensor, b: Tensor, projections: int = 50) -> Tensor:
    """Estimate the squared sliced 2-Wasserstein distance of two sets of as many points (N, D).

    On a line the optimal transport keeps the order: (1 / N) sum_i (a_(i) - b_(i))^2, a mean over random directions.
    """
    directions = F.normalize(torch.randn(a.shape[-1], projections, dtype=a.dtype, device=a.device), dim=0)
    return ((a @ directions).sort(0).values - (b @ directions).sort(0).values).square().mean()
