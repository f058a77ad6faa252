"""Expected log-density of a Cauchy or half-Cauchy prior, which has no closed form under other laws.

Up to a constant, log p(z) = -log(1 + ((z - x0) / g)^2). In the standard variable t of the posterior (z = mu + sigma t
for a Normal, z = exp(mu + sigma t) for a log-normal, z = scale exp(t) for a half-Cauchy, where t has the density
1 / (pi cosh t)) it has branch points at re +- i im. They lie close to the real line where the prior is much narrower
than the posterior, and there ordinary Gauss-Hermite nodes fail. The substitution t = re + im sinh(u) moves them away,
and the trapezoid rule in u is accurate to 2e-6 for scales from 0.01 to 2 with 65 nodes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Cauchy, HalfCauchy, LogNormal, Normal

Posterior = Normal | LogNormal | HalfCauchy
Prior = Cauchy | HalfCauchy
NODES = 65


def expected_log_density(q: Posterior, p: Prior) -> Tensor:
    """Return E_q[log p] per element; the nodes are constants, so it is differentiable in the parameters of q."""
    nodes, weights = _nodes(q, p)
    if isinstance(q, HalfCauchy):
        z = q.scale[..., None] * nodes.exp()
    else:
        z = q.loc[..., None] + q.scale[..., None] * nodes
        z = z.exp() if isinstance(q, LogNormal) else z
    kind: Any = type(p)
    wide = kind(*(getattr(p, name)[..., None] for name in p.arg_constraints), validate_args=False)
    log_density: Tensor = wide.log_prob(z)
    return (log_density * weights).sum(-1)


@torch.no_grad()
def _nodes(q: Posterior, p: Prior) -> tuple[Tensor, Tensor]:
    """Return nodes t and normalised weights, both with one further axis."""
    re, im = _branch_point(q, p)
    reach = 25.0 if isinstance(q, HalfCauchy) else 8.0  # beyond, the density is below what float32 resolves
    low, high = ((-reach - re) / im).asinh(), ((reach - re) / im).asinh()
    share = torch.linspace(0, 1, NODES, dtype=re.dtype, device=re.device)
    u = low[..., None] + (high - low)[..., None] * share
    t = re[..., None] + im[..., None] * u.sinh()
    density = 1 / t.cosh() if isinstance(q, HalfCauchy) else (-t.square() / 2).exp()
    weights = density * u.cosh()
    return t, weights / weights.sum(-1, keepdim=True)


def _branch_point(q: Posterior, p: Prior) -> tuple[Tensor, Tensor]:
    """Return where 1 + ((z - x0) / g)^2 vanishes in the standard variable: z = x0 + i g."""
    x0 = p.loc if isinstance(p, Cauchy) else torch.zeros_like(p.scale)
    if isinstance(q, Normal):
        return (x0 - q.loc) / q.scale, p.scale / q.scale
    log_size, angle = (x0.square() + p.scale.square()).log() / 2, torch.atan2(p.scale, x0)
    if isinstance(q, LogNormal):
        return (log_size - q.loc) / q.scale, angle / q.scale
    return log_size - q.scale.log(), angle.expand_as(q.scale)
