"""A mixture of K laws over n factors, with its parameters: the primitive under rank-1 factors and node posteriors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn, Tensor
from torch.distributions import Distribution

from leanbayes.distributions.assignment import Assignment
from leanbayes.distributions.law import law, LawName
from leanbayes.distributions.positive import inverse_softplus, softplus


class Factor(nn.Module):
    """K laws over n factors, z_k ~ law(loc_k, softplus(rho_k)); shapes (K, n)."""

    def __init__(self, name: LawName, centres: Tensor, stds: Tensor) -> None:
        """Start from component centres and scales, both (K, n)."""
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
        """Return location and scale of all components (K, n); zeros for what the law does not have."""
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
        """Return factors (R, n): samples of the rows' components under the noise (R, n), or centres without noise.

        Without a component, the centres averaged over all components (1, n).
        """
        loc, scale = self.parameters_of_all()
        if component is None:
            return self.law.centre(loc, scale).mean(0, keepdim=True)
        loc, scale = component.by_block(loc), component.by_block(scale)
        if noise is None:
            return self.law.centre(loc, scale).expand(-1, component.each, -1).flatten(0, 1)
        by_block = noise.view(len(loc), len(noise) // len(loc), noise.shape[1])
        return self.law.sample(loc, scale, by_block).expand(-1, by_block.shape[1], -1).flatten(0, 1)  # a point has one

    def distribution(self) -> Distribution:
        """Return the component laws, float32, shape (K, n)."""
        return joint_distribution([self])


def joint_distribution(factors: Sequence[Factor]) -> Distribution:
    """Return the component laws of several factors of one law side by side, float32, (K, n_1 + n_2 + ...).

    What is computed of them then takes a few large operations instead of many small ones.
    """
    kind = factors[0].law
    parts = [torch.cat([getattr(factor, name) for factor in factors], 1).float() for name in factors[0].names]
    values = dict(zip(factors[0].names, parts, strict=True))
    nothing = torch.zeros_like(parts[0])
    return kind.distribution(values.get("loc", nothing), softplus(values["rho"]) if "rho" in values else nothing)


def joint_sample(factors: Sequence[Factor], component: Assignment, noise: Sequence[Tensor]) -> list[Tensor]:
    """Return samples (R, n_1), (R, n_2), ... of several factors of one law, by a few large operations."""
    kind = factors[0].law
    parts = {name: torch.cat([getattr(factor, name) for factor in factors], 1) for name in factors[0].names}
    nothing = torch.zeros_like(next(iter(parts.values())))
    scale = softplus(parts["rho"]) if "rho" in parts else nothing
    loc, scale = component.by_block(parts.get("loc", nothing)), component.by_block(scale)
    joined = torch.cat(list(noise), 1)
    by_block = joined.view(len(loc), len(joined) // len(loc), joined.shape[1])
    z = kind.sample(loc, scale, by_block).expand(-1, by_block.shape[1], -1).flatten(0, 1)  # a point has one
    return list(torch.split(z, [factor.count for factor in factors], 1))


def require_positive(centres: Tensor) -> None:
    """Raise unless every component centre is positive."""
    if not centres.is_meta and bool((centres <= 0).any()):
        raise ValueError(
            f"a factor of this law is positive, but component centres start at {centres.min().item():.3g}; "
            "take a smaller init_spread"
        )


def spread_around(
    around: float, spread: float, shape: tuple[int, int], *, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Draw component centres Normal(around, spread), then centre them: their average is `around` exactly.

    The average network is then the network that was converted. Centring K centres leaves a standard deviation of
    sqrt(1 - 1/K) spread.
    """
    centres = torch.randn(shape, device=device, dtype=dtype) * spread
    return centres - centres.mean(0, keepdim=True) + around


def random_signs(probability: float, shape: tuple[int, int], *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Draw +1 with the given probability, else -1: the components start as different functions."""
    return torch.where(torch.rand(shape, device=device) < probability, 1.0, -1.0).to(dtype)
