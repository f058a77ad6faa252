"""The probabilistic U-Net (Kohl et al., 2018) for segmentation with several annotators, and its ordered variant.

    y ~ p(y | f(x, h)),   h ~ p(h | x),      trained with q(h | x, y) on   log p(y | x, h) - beta KL(q || p)   (eq. 29)

Prior and posterior are separate networks. Codes are Gaussian, or ordered (VND-PUNet, eq. 25 to 28): an ordered code can
be cut to a length, with the divergence of `leanbayes.generative.codes` (eq. 30, with the cumulative kappa).

In the paper both networks learn the distribution of lengths. The length then carries information: long codes may mean
an empty mask, short ones all others. Samples with drawn lengths are correct; a forced length leaves only the opinions
of that length. With `keep`, lengths come from a fixed distribution and carry no information: codes of every length
represent all opinions.
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
from leanbayes.models.classic import UNet
from leanbayes.runtime.twins import in_eval_mode

FEATURES = 32


class CodeNet(nn.Module):
    """A convolutional network from images to the distribution of a code; ordered codes have a length.

    Each of its `widths` is a level: two 3x3 convolutions that halve the image. `keep` is the fixed probability that a
    code continues after a dimension; None learns it.
    """

    chain: Tensor | None

    def __init__(
        self, channels: int, dimensions: int, *, ordered: bool, widths: Sequence[int], keep: float | None = None
    ) -> None:
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
        """Return the distribution of the code of each image."""
        features = self.levels(x)
        logits = None if self.chain is None else self.chain.expand(len(features), -1)  # that a code continues
        if self.keep_logits is not None:
            logits = self.keep_logits(features)
        return Code.of(self.mean(features), self.log_std(features), logits)


class ProbabilisticUNet(nn.Module):
    """A U-Net whose last layers read a random code: each code gives one opinion on the whole image.

    Args:
        num_classes: of a pixel.
        input_shape: of an image (C, H, W).
        dimensions: of the code.
        ordered: codes with a length (VND-PUNet).
        keep: None learns the distribution of lengths, as in the paper. A number is the fixed probability that a code
            continues after a dimension: use 0.8, for example, if codes will be cut.
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
        first, second = nn.Conv2d(FEATURES + dimensions, FEATURES, 1), nn.Conv2d(FEATURES, FEATURES, 1)
        self.combine = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Conv2d(FEATURES, num_classes, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss (B,) of images with one annotation each (B, H, W), which `lb.generative.fit` minimises."""
        planes = F.one_hot(y.long(), self.num_classes).movedim(-1, 1).float()
        posterior, prior = self.posterior(torch.cat([x, planes], 1)), self.prior(x)
        logits = self.logits(self.unet(x), posterior.rsample(self.temperature))
        nll = F.cross_entropy(logits, y.long(), reduction="none").flatten(1).sum(1)
        divergence: Tensor = posterior.kl(prior)
        return nll + self.beta * divergence

    def logits(self, features: Tensor, code: Tensor) -> Tensor:
        """Return the logits of all pixels (B, classes, H, W) for one code per image."""
        planes = code[:, :, None, None].expand(-1, -1, *features.shape[-2:])
        found: Tensor = self.combine(torch.cat([features, planes], 1))
        return found

    def sample(self, x: Tensor, count: int = 16, *, length: int | None = None, seed: int = 0) -> Tensor:
        """Return the class probabilities of several opinions (count, B, classes, H, W).

        Args:
            x: images.
            count: opinions on each.
            length: number of dimensions of the code; None draws it from the prior. If lengths are learned (`keep` is
                None), a forced length leaves out the opinions of all others.
            seed: the same seed gives the same opinions on the same images.
        """
        return self._opinions(x, self._noise(count, len(x), seed), length)

    def predict(
        self, x: Tensor, *, samples: int = 16, length: int | None = None, seed: int = 0, batch_size: int = 50
    ) -> Prediction:
        """Return class probabilities and uncertainties of pixels over opinions; arguments as of `sample`."""
        noise = self._noise(samples, len(x), seed)  # for all rows, so that batches do not change it
        parts = zip(torch.split(x, batch_size), torch.split(noise, batch_size, 2), strict=True)
        return opinions(torch.cat([self._opinions(rows, own, length) for rows, own in parts], 1))

    def _noise(self, count: int, rows: int, seed: int) -> Tensor:
        """Draw the noise of all codes (count, 2, rows, dimensions), on the CPU."""
        generator = torch.Generator().manual_seed(seed)
        shape = (count, rows, self.dimensions)
        return torch.stack(
            [draw(shape, generator=generator, dtype=torch.float32, device="cpu") for draw in (torch.randn, torch.rand)],
            1,
        )

    @torch.no_grad()
    def _opinions(self, x: Tensor, noise: Tensor, length: int | None) -> Tensor:
        x = x.to(next(self.parameters()).device)
        with in_eval_mode(self):
            features, prior = self.unet(x), self.prior(x).cut(length)
            codes = (prior.at(*pair, self.temperature) for pair in noise.to(x.device))
            return torch.stack([self.logits(features, code).softmax(1) for code in codes])


def opinions(probabilities: Tensor) -> Prediction:
    """Return the prediction of several opinions with class probabilities (S, B, classes, ...)."""
    own = torch.stack([entropy(each) for each in probabilities])
    parts = decompose(probabilities, own, "entropy")._asdict()
    return Prediction(**parts, samples=probabilities, variances=None, likelihood=Categorical())
