"""Segmentation that disagrees as annotators do: the probabilistic U-Net (Kohl et al., 2018), and its ordered variant.

    y ~ p(y | f(x, h)),   h ~ p(h | x),      trained with q(h | x, y) on   log p(y | x, h) - beta KL(q || p)   (eq. 29)

Prior and posterior are networks of their own, Gaussian, or with ordered codes (VND-PUNet, eq. 25 to 28): then a code
may be cut to a length, and the divergence is that of `leanbayes.generative.codes` (eq. 30, with the cumulative kappa).

The paper lets both networks learn how long codes are. The length is then a message of its own: long codes may say that
nothing is marked, short ones all else. As drawn, samples are right; at a forced length only the opinions of that length
are left. With `keep`, lengths come from a fixed chain, whatever image and annotation are: they tell nothing, and codes
of every length carry all opinions as well as they can.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn, Tensor

from leanbayes.core.prediction import decompose, Prediction
from leanbayes.distributions.likelihoods import Categorical, entropy
from leanbayes.generative.codes import Code
from leanbayes.models import UNet
from leanbayes.runtime.twins import in_eval_mode

FEATURES = 32


class CodeNet(nn.Module):
    """A convolutional network from images to the law of a code.

    Args:
        channels: of its input.
        dimensions: of the code.
        ordered: whether codes have a length.
        widths: of its levels; each is two 3x3 convolutions, and halves the image.
        keep: probability to go on to the next dimension, if it is not to be learned.
    """

    chain: Tensor | None

    def __init__(
        self, channels: int, dimensions: int, *, ordered: bool, widths: Sequence[int], keep: float | None = None
    ) -> None:
        """Build the levels and the heads."""
        super().__init__()
        levels: list[nn.Module] = []
        for width in widths:
            for _ in range(2):
                levels += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
                channels = width
            levels.append(nn.AvgPool2d(2, ceil_mode=True))
        self.levels = nn.Sequential(*levels, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.mean, self.log_std = nn.Linear(channels, dimensions), nn.Linear(channels, dimensions)
        self.keep_logits = nn.Linear(channels, dimensions - 1) if ordered and keep is None else None
        chain = None if keep is None else torch.full((dimensions - 1,), math.log(keep / (1 - keep)))
        self.register_buffer("chain", chain, persistent=False)

    def forward(self, x: Tensor) -> Code:
        """Return the law of the code of every image."""
        features = self.levels(x)
        return Code.of(self.mean(features), self.log_std(features), self._going_on(features))

    def _going_on(self, features: Tensor) -> Tensor | None:
        """Return the logits of going on to the next dimension (B, D - 1); None where codes have no length."""
        if self.keep_logits is not None:
            logits: Tensor = self.keep_logits(features)
            return logits
        return None if self.chain is None else self.chain.expand(len(features), -1)


class ProbabilisticUNet(nn.Module):
    """A U-Net whose last layers read a random code: each code is one opinion on the whole image.

    Args:
        num_classes: of a pixel.
        input_shape: of an image (C, H, W).
        dimensions: of the code.
        ordered: codes with a length (VND-PUNet).
        keep: None lets prior and posterior learn how long codes are, as the paper does; sample them as drawn. A number
            is the probability to go on to the next dimension, in both: take 0.8, say, if codes are to be cut.
        widths: of the U-Net and of both code networks.
        beta: weight of the divergence.
        temperature: of the relaxed masks of ordered codes.

    Example:
        >>> model = lb.generative.ProbabilisticUNet(2, (1, 32, 32), ordered=True)
        >>> lb.generative.fit(model, (x, y), lb.Recipe(epochs=30, optimizer="adam", lr=1e-3))
        >>> masks = model.sample(x_test, 16).argmax(2)      # (16, B, H, W)
        >>> p = model.predict(x_test, samples=16)           # an ordinary Prediction, for every pixel
    """

    def __init__(  # noqa: PLR0913 - all but two have a usual value
        self,
        num_classes: int,
        input_shape: tuple[int, ...],
        *,
        dimensions: int = 6,
        ordered: bool = False,
        keep: float | None = None,
        widths: Sequence[int] = (32, 64, 128, 192),
        beta: float = 1.0,
        temperature: float = 1.0,
    ) -> None:
        """Build the U-Net, both code networks and the layers that combine features and code."""
        super().__init__()
        if num_classes < 2 or dimensions < 2:
            raise ValueError(f"expected at least two classes and dimensions, got {num_classes} and {dimensions}")
        if keep is not None and not (ordered and 0 < keep < 1):
            raise ValueError(
                f"expected keep between 0 and 1, and ordered codes, got {keep} and ordered={ordered}; leave keep out "
                "to learn lengths, or for codes without one"
            )
        self.num_classes, self.dimensions, self.ordered = num_classes, dimensions, ordered
        self.beta, self.temperature = beta, temperature
        self.unet = UNet(FEATURES, input_shape, widths=widths)
        self.prior = CodeNet(input_shape[0], dimensions, ordered=ordered, widths=widths, keep=keep)
        self.posterior = CodeNet(input_shape[0] + num_classes, dimensions, ordered=ordered, widths=widths, keep=keep)
        self.combine = nn.Sequential(
            nn.Conv2d(FEATURES + dimensions, FEATURES, 1),
            nn.ReLU(),
            nn.Conv2d(FEATURES, FEATURES, 1),
            nn.ReLU(),
            nn.Conv2d(FEATURES, num_classes, 1),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of every image under one annotation each (B, H, W): what `lb.generative.fit` minimises."""
        posterior, prior = self.posterior(torch.cat([x, self._planes(y)], 1)), self.prior(x)
        logits = self.logits(self.unet(x), posterior.rsample(self.temperature))
        nll = F.cross_entropy(logits, y.long(), reduction="none").flatten(1).sum(1)
        divergence: Tensor = posterior.kl(prior)
        return nll + self.beta * divergence

    def logits(self, features: Tensor, code: Tensor) -> Tensor:
        """Return the logits of every pixel (B, classes, H, W) under one code each."""
        spread = code[:, :, None, None].expand(-1, -1, *features.shape[-2:])
        found: Tensor = self.combine(torch.cat([features, spread], 1))
        return found

    def sample(self, x: Tensor, count: int = 16, *, length: int | None = None, seed: int = 0) -> Tensor:
        """Return the class probabilities of several opinions (count, B, classes, H, W).

        Args:
            x: images.
            count: opinions on each.
            length: use only so many dimensions of the code; None as many as the prior draws. Where lengths are learned
                (`keep` is None) they carry opinions of their own, and a forced length leaves out those of all others.
            seed: the same seed gives the same opinions on the same images.
        """
        return self._opinions(x, self._noise(count, len(x), seed), length)

    def predict(
        self, x: Tensor, *, samples: int = 16, length: int | None = None, seed: int = 0, batch_size: int = 50
    ) -> Prediction:
        """Return class probabilities and uncertainties of every pixel, over opinions; arguments as of `sample`."""
        noise = self._noise(samples, len(x), seed)  # for all rows at once: batches neither share it nor change it
        parts = zip(torch.split(x, batch_size), torch.split(noise, batch_size, 2), strict=True)
        return opinions(torch.cat([self._opinions(rows, own, length) for rows, own in parts], 1))

    def _noise(self, count: int, rows: int, seed: int) -> Tensor:
        """Draw the noise of the codes of all opinions on all rows (count, 2, rows, dimensions), on the CPU."""
        generator = torch.Generator().manual_seed(seed)
        shape = (count, rows, self.dimensions)
        return torch.stack([draw(shape, generator=generator) for draw in (torch.randn, torch.rand)], 1)

    @torch.no_grad()
    def _opinions(self, x: Tensor, noise: Tensor, length: int | None) -> Tensor:
        x = x.to(next(self.parameters()).device)
        with in_eval_mode(self):
            features, prior = self.unet(x), self.prior(x).cut(length)
            codes = (prior.at(*pair, self.temperature) for pair in noise.to(x.device))
            return torch.stack([self.logits(features, code).softmax(1) for code in codes])

    def _planes(self, y: Tensor) -> Tensor:
        return F.one_hot(y.long(), self.num_classes).movedim(-1, 1).float()


def opinions(probabilities: Tensor) -> Prediction:
    """Make a prediction of the class probabilities of several opinions (S, B, classes, ...)."""
    own = torch.stack([entropy(each) for each in probabilities])
    mean, total, aleatoric, epistemic = decompose(probabilities, own, "entropy")
    return Prediction(
        mean=mean,
        total=total,
        aleatoric=aleatoric,
        epistemic=epistemic,
        samples=probabilities,
        variances=None,
        likelihood=Categorical(),
    )
