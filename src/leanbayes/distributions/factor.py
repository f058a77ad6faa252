"""Learned mixture of K distributions over n factors, used by rank-1 factors and node posteriors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn, Tensor
from torch.distributions import Distribution

from leanbayes.distributions.assignment import Assignment
from leanbayes.distributions.law import law, LawName
from leanbayes.distributions.positive import inverse_softplus, softplus

LARGE_ENOUGH = (torch.float32, torch.float64, torch.bfloat16)
"""Types whose exponents reach far: a product with a tiny factor, divided by it, loses nothing."""


class Factor(nn.Module):
    """K distributions over n factors, z_k ~ law(loc_k, softplus(rho_k)); shapes (K, n)."""

    def __init__(self, name: LawName, centres: Tensor, stds: Tensor) -> None:
        super().__init__()
        self.law = law(name)
        if not self.law.has_loc:  # the only parameter is the scale, and it is the centre
            stds = centres
        if self.law.positive:
            require_positive(centres)
        if self.law.has_loc:
            self.loc = nn.Parameter(self.law.locate(centres, stds))
        if self.law.has_scale:
            self.rho = nn.Parameter(inverse_softplus(stds))
        self.names = tuple(self._parameters)

    def parameters_of_all(self) -> tuple[Tensor, Tensor]:
        """Return location and scale of all components (K, n); zeros for a parameter that does not exist."""
        nothing = torch.zeros_like(getattr(self, self.names[0]))
        return (
            self.loc if self.law.has_loc else nothing,
            softplus(self.rho) if self.law.has_scale else nothing,
        )

    @property
    def count(self) -> int:
        """n, the number of factors."""
        known: Tensor = getattr(self, self.names[0])
        return known.shape[1]

    def forward(self, component: Assignment | None, noise: Tensor | None) -> Tensor:
        """Return factors (R, n) of the rows' components: samples under noise, or centres if noise is None.

        Noise is (R, n), or (1, K, n) for rows that share that of their component. If `component` is None, return the
        centres averaged over all components (1, n).
        """
        loc, scale = self.parameters_of_all()
        if component is None:
            return self.law.centre(loc, scale).mean(0, keepdim=True)
        if noise is not None and noise.dim() > 2:
            return component.take(self.law.sample(loc, scale, noise[0]))
        loc, scale = component.by_block(loc), component.by_block(scale)
        if noise is None:
            return self.law.centre(loc, scale).expand(-1, component.each, -1).flatten(0, 1)
        by_block = noise.view(len(loc), len(noise) // len(loc), noise.shape[1])
        return self.law.sample(loc, scale, by_block).expand(-1, by_block.shape[1], -1).flatten(0, 1)  # a point has one

    def distribution(self) -> Distribution:
        """Return the component distributions in float32, shape (K, n)."""
        return joint_distribution([self])


def joint_distribution(factors: Sequence[Factor]) -> Distribution:
    """Return the component distributions of several factors of one `Law`, joined: float32, (K, n_1 + n_2 + ...).

    A few large operations then replace many small ones.
    """
    loc, scale = _joined(factors, torch.float32)
    return factors[0].law.distribution(loc, scale)


def _joined(factors: Sequence[Factor], dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Return location and scale of several factors, (K, n_1 + n_2 + ...); zero for one that their `Law` lacks."""
    parts = {name: torch.cat([getattr(factor, name) for factor in factors], 1) for name in factors[0].names}
    if dtype is not None:
        parts = {name: part.to(dtype) for name, part in parts.items()}
    loc, rho = parts.get("loc"), parts.get("rho")
    scale = None if rho is None else softplus(rho)
    if loc is None or scale is None:
        nothing = torch.zeros_like(next(iter(parts.values())))
        return nothing if loc is None else loc, nothing if scale is None else scale
    return loc, scale


def joint_sample(
    factors: Sequence[Factor], component: Assignment, noise: Sequence[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """Return samples (R, n_1), (R, n_2), ... of several factors of one `Law`, by a few large operations.

    Noise is (R, n_1), ..., or (1, K, n_1), ... for rows that share that of their component. The samples are rounded to
    `dtype`, in which layers compute.
    """
    kind, joined = factors[0].law, torch.cat(list(noise), -1)
    loc, scale = _joined(factors)
    if joined.dim() > 2:
        z = component.take(kind.sample(loc, scale, joined.squeeze(0)))
    elif not kind.has_scale:
        z = component.take(loc)
    else:
        loc, scale = component.by_block(loc), component.by_block(scale)
        blocks = loc.shape[0]
        by_block = joined.view(blocks, joined.shape[0] // blocks, joined.shape[1])
        z = kind.sample(loc, scale, by_block).flatten(0, 1)
    return list(materialise(z.to(dtype)).split_with_sizes([factor.count for factor in factors], 1))


def away_from_zero(factors: Tensor) -> Tensor:
    """Move factors that are zero to a number as good as zero; their gradients stay unchanged.

    A layer can then divide by its factors. Types with few exponents have no such number: they stay unchanged.
    """
    if factors.dtype not in LARGE_ENOUGH:
        return factors
    tiny = torch.finfo(factors.dtype).tiny ** 0.5
    return torch.add(factors, factors.detach().abs() < tiny, alpha=tiny)


def require_positive(centres: Tensor) -> None:
    """Raise unless every component centre is positive."""
    if not centres.is_meta and bool((centres <= 0).any()):
        raise ValueError(
            f"a factor of this distribution is positive, but component centres start at {centres.min().item():.3g}; "
            "take a smaller init_spread"
        )


def spread_around(
    around: float,
    spread: float,
    shape: tuple[int, int],
    *,
    device: torch.device,
    dtype: torch.dtype,
    centre: bool = True,
) -> Tensor:
    """Draw component centres Normal(around, spread), then shift them so that their average is exactly `around`.

    The average network then equals the converted network. The standard deviation becomes sqrt(1 - 1/K) spread. With
    `centre=False` nothing is shifted: the standard deviation is `spread`, also for K = 1.
    """
    centres = torch.randn(shape, device=device, dtype=dtype) * spread
    if not centre:
        return centres + around
    return centres - centres.mean(0, keepdim=True) + around


def random_signs(probability: float, shape: tuple[int, int], *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Draw +1 with the given probability, else -1: the components start as different functions."""
    return torch.where(torch.rand(shape, device=device) < probability, 1.0, -1.0).to(dtype)


# Inductor fuses cheap element-wise producers into their consumers. A factor is cheap, but its consumers are kernels
# over whole activations: its softplus and exponential would be computed per pixel instead of per channel. An opaque
# copy of the few thousand numbers of a factor prevents that. Eager code does not need it.


@torch.library.custom_op("leanbayes::materialise", mutates_args=())
def _copy(x: Tensor) -> Tensor:
    return x.clone()


@_copy.register_fake
def _fake(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _backward(context: object, gradient: Tensor) -> Tensor:
    return gradient


_copy.register_autograd(_backward)


def materialise(x: Tensor) -> Tensor:
    """Return x, in compiled code as a tensor that exists in memory."""
    if not torch.compiler.is_compiling():
        return x
    copied: Tensor = _copy(x)
    return copied
