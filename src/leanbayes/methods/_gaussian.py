"""What methods with an independent Gaussian over every weight share: mean field and variance layers.

    W_ij ~ Normal(M_ij, S_ij^2)

In training every row has noise of its own on the pre-activations, local reparameterisation (Kingma et al., 2015),

    y = M x + b + eps sqrt(S^2 x^2),      fresh eps for every entry of y;

the bias belongs to the mean alone. A draw is a sampled weight matrix, the same for all rows. So it is in training for
the steps of a sequence, which must all see the same weights: fresh noise at every step would be other weights.

Embeddings, too, are sampled as a whole table, one for every pass: with noise on what is looked up, a word would have
two vectors in one sentence. The vector of the padding is no random variable: it has no noise, no divergence, and no
gradient.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from leanbayes.distributions.assignment import Assignment
from leanbayes.layers.family import EMBEDDINGS, LinearFamily
from leanbayes.methods._base import Method, StochasticLayer
from leanbayes.runtime.noise import Noise, NoiseSpec
from leanbayes.runtime.passes import Variables, Width
from leanbayes.runtime.rows import materialise

SMALLEST_VARIANCE = 1e-16
"""Under the square root, whose gradient at zero is infinite."""


class GaussianLayer(StochasticLayer):
    """A linear map with a Gaussian over every weight; subclasses say what its means and scales are.

    Attributes:
        padding: the row of the weight that is no random variable, an embedding's padding; None where there is none.
    """

    family: LinearFamily

    def __init__(self, base: Any, method: Method) -> None:
        """Count the weights."""
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
        if self.sequential or self.state.current().shared:
            return self.linear(x, self.state.variables_of(self, 1)["weight"][0], args)
        return self.local(x, args)

    def local(self, x: Tensor, args: Any) -> Tensor:
        """Sample the pre-activations."""
        means = self.means
        mean = None if means is None else self.linear(x, means, args)
        with torch.autocast(x.device.type, enabled=False):  # small variances underflow in half precision
            wide = torch.promote_types(x.dtype, torch.float32)
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

    @override
    def noise_specs(self, shared: bool) -> tuple[NoiseSpec, ...]:
        table = NoiseSpec("normal", tuple(self.base.weight.shape), per_row=False, counted=True)
        return (table,) if shared or self.sequential else ()  # else noise is on pre-activations

    @override
    def sample(self, component: Assignment | None, noise: Noise | None, width: Width) -> Variables:
        """Return the "weight" (R, ...) of fixed draws."""
        means = self._zeros() if self.means is None else self.means
        return {"weight": means[None] if noise is None else means + self.deviations(noise[0])}

    def deviations(self, noise: Tensor) -> Tensor:
        """Return sampled weights (R, ...) without their means; the padding of an embedding has none."""
        if self.padding is not None:
            rows = torch.arange(noise.shape[1], device=noise.device) == self.padding
            noise = noise.masked_fill(rows[:, None], 0.0)
        deviations: Tensor = (self.scales * noise).to(self.base.weight.dtype)
        return deviations

    @override
    def fold(self, variables: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"weight": variables["weight"]}

    def random(self, each: Tensor) -> Tensor:
        """Return what belongs to random weights: of a table with a number for each weight, all but the padding."""
        if self.padding is None or each.shape != self.base.weight.shape:
            return each
        return torch.cat([each[: self.padding], each[self.padding + 1 :]])

    def _zeros(self) -> Tensor:
        """Return means of zero, but for the padding."""
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
        """Add the bias, where there is one."""
        bias: Tensor | None = getattr(self.base, "bias", None)  # an embedding has none at all
        if bias is None:
            return y
        return y + self.spread(bias[None], y)


def _computed_in(x: Tensor) -> torch.dtype:
    """Return the dtype in which a linear map of x is computed: autocast's where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
