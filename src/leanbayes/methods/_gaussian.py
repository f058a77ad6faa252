"""Layers with an independent Gaussian over every weight: the base of mean field, variance layers, nested dropout.

    W_ij ~ Normal(M_ij, S_ij^2)

In training every row has its own noise on the pre-activations, local reparameterisation (Kingma et al., 2015),

    y = M x + b + eps sqrt(S^2 x^2),      fresh eps for every entry of y.

The bias has no noise. A draw is a sampled weight matrix, the same for all rows. Sequences use a sampled matrix in
training, too: all steps must see the same weights.

Embeddings are sampled as a whole table, one per pass; noise per lookup would give a word two vectors in one sentence.
The vector of the padding has no noise, no divergence and no gradient.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from leanbayes.distributions.assignment import Assignment
from leanbayes.distributions.factor import materialise
from leanbayes.layers.family import EMBEDDINGS, LinearFamily
from leanbayes.methods._base import Method, StochasticLayer, without_autocast
from leanbayes.methods._local_map import apply, pays, SMALLEST_VARIANCE
from leanbayes.methods._scaled_map import is_ordinary, map_of
from leanbayes.runtime.noise import Noise, NoiseSpec
from leanbayes.runtime.passes import Variables, Width


class GaussianLayer(StochasticLayer):
    """A linear map with a Gaussian over every weight; subclasses define means and scales.

    Attributes:
        padding: the row of an embedding's padding, which is not random; None for no padding.
        samples_weights: whether a training pass samples one weight matrix instead of pre-activations.
    """

    family: LinearFamily
    samples_weights: bool = False

    def __init__(self, base: Any, method: Method) -> None:
        super().__init__(base, method)
        embeds = isinstance(base, EMBEDDINGS)
        self.padding: int | None = base.padding_idx if embeds else None
        self.sequential, self.row_noise = embeds, not embeds
        self.nodes = self.random(base.weight).numel()

    @property
    def means(self) -> Tensor | None:
        """The means of the weights; None where all are zero."""
        return self.weight_now

    @property
    @abc.abstractmethod
    def scales(self) -> Tensor:
        """The standard deviations of the weights, in float32 or better; their signs do not matter."""

    @override
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        if self.sequential or self.samples_weights or self.state.current().shared:
            weight = self.state.variables_of(self, 1)["weight"]
            return self.linear(x, weight.squeeze(0) if len(weight) == 1 else weight[0], args)
        return self.local(x, args)

    def local(self, x: Tensor, args: Any) -> Tensor:
        """Sample the pre-activations."""
        means = self.means
        fused = None if means is None else self._local_map(x, means, args)
        if fused is not None:
            return fused
        mean = None if means is None else self.linear(x, means, args)
        wide = _variances_in(x)
        with without_autocast(x.device):
            # Fused with the mean over pixels before it, the square of a vector does not compile with Triton 3.6.
            squares = (materialise(x) if x.dim() == 2 else x).to(wide).square()
            variance = self.linear(squares, self.scales.square().to(wide), args, bias=False)
            noise = self.state.activation_noise(self, variance).to(wide)
            std = variance.add_(SMALLEST_VARIANCE).sqrt_()  # in place: these are as large as activations
        if mean is None:
            return self.add_bias((noise * std).to(_computed_in(x)))
        if mean.dtype == std.dtype:
            return torch.addcmul(mean, noise, std)
        return mean + (noise * std).to(mean.dtype)

    def _local_map(self, x: Tensor, means: Tensor, args: Any) -> Tensor | None:
        """Sample the pre-activations in one function; None if the layer must use autograd."""
        one = _variances_in(x) == _computed_in(x) == x.dtype == means.dtype
        if not (one and pays(x, means) and is_ordinary(x, means)):
            return None
        linear = map_of(self.family, self.base, x, args)
        if linear is None:
            return None
        variances = self.scales.square().to(x.dtype)
        return apply(linear, x, means, variances, self.bias_now, partial(self.state.activation_generator, self))

    @override
    def noise_specs(self, shared: bool) -> tuple[NoiseSpec, ...]:
        table = NoiseSpec("normal", tuple(self.base.weight.shape), per_row=False, counted=True)
        known = shared or self.sequential or self.samples_weights
        return (table,) if known else ()  # else noise is on pre-activations

    @override
    def sample(self, component: Assignment | None, noise: Noise | None, width: Width) -> Variables:
        """Return the "weight" (R, ...) of fixed draws."""
        means = self._zeros() if self.means is None else self.means
        # With an axis for draws: the gradient of a broadcast axis is a sum, which copies all weights for a single draw.
        return {"weight": means[None] if noise is None else means[None] + self.deviations(noise[0])}

    def deviations(self, noise: Tensor) -> Tensor:
        """Return sampled weights (R, ...) without their means; the padding of an embedding has none."""
        if self.padding is not None:
            rows = torch.arange(noise.shape[1], device=noise.device) == self.padding
            noise = noise.masked_fill(rows[:, None], 0.0)
        deviations: Tensor = (self.scales[None] * noise).to(self.base.weight.dtype)
        return deviations

    @override
    def fold(self, variables: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"weight": variables["weight"]}

    def random(self, each: Tensor) -> Tensor:
        """Return the entries of random weights: all but those of the padding."""
        if self.padding is None or each.shape != self.base.weight.shape:
            return each
        return torch.cat([each[: self.padding], each[self.padding + 1 :]])

    def _zeros(self) -> Tensor:
        """Return means of zero; the padding keeps its vector."""
        weight: Tensor = self.base.weight
        means = torch.zeros_like(weight)
        if self.padding is not None:
            means[self.padding] = weight[self.padding].detach()
        return means

    def linear(self, x: Tensor, weight: Tensor, args: Any, *, bias: bool = True) -> Tensor:
        """Apply the linear map with other weights."""
        y = self.family.linear(self.base, x, weight, *args)
        return self.add_bias(y) if bias else y

    def add_bias(self, y: Tensor) -> Tensor:
        """Add the bias, if the layer has one."""
        bias: Tensor | None = getattr(self.base, "bias", None)  # an embedding has none at all
        if bias is None:
            return y
        return y + self.spread(bias[None], y)


def _variances_in(x: Tensor) -> torch.dtype:
    """Return the dtype of variances: float32 or better, or bfloat16 under its autocast.

    bfloat16 has the exponents of float32; in float16 small variances underflow.
    """
    dtype = _computed_in(x)
    is_cast = dtype == torch.bfloat16 and torch.is_autocast_enabled(x.device.type)
    return dtype if is_cast else torch.promote_types(x.dtype, torch.float32)


def _computed_in(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if x.dtype != torch.float64 and torch.is_autocast_enabled(kind) else x.dtype
