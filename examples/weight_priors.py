"""The prior on a weight that a prior on a rank-1 factor implies: densities of w' = w * r * s (rank-1 paper, figure 1).

The density of w' is shown on a plain and on a logarithmic scale. w is Normal(0, 1), and s is fixed at one. r is one (w
alone), Normal, Cauchy or half-Cauchy (the horseshoe), or has an inverse-gamma square (Student's t). Factors that may be
near zero give w' a pole at zero, which makes weights sparse. Heavy tails of r are heavy tails of w'.

Given r, w' is Normal(0, r^2), so its density is one integral over r. With r = +-exp(t) the trapezoidal rule is all but
exact; the closed form of Student's t says how exact. Seconds; `python -m examples.weight_priors` writes
weight_priors.png and weight_priors.json to runs/examples.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributions import InverseGamma, Normal, StudentT

from leanbayes.distributions.divergence import rebuild
from leanbayes.distributions.law import law

STEP = 0.01
R = torch.arange(-30, 30, STEP, dtype=torch.float64).exp()[:, None]
ONE = torch.ones((), dtype=torch.float64)


def laws_of_r(std: float, freedom: float) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the log-densities of r; the first three are the priors that `lb.Rank1(prior=..., prior_std=std)` takes."""
    names = ("normal", "cauchy", "half_cauchy")
    named = {name: rebuild(law(name).prior(1.0, std), Tensor.double) for name in names}
    square = InverseGamma(freedom / 2 * ONE, freedom / 2 * ONE)

    def inverse_gamma(r: Tensor) -> Tensor:
        return (square.log_prob(r.square()) + (2 * r.abs()).log()).where(r > 0, -math.inf)

    return {f"r {name}": prior.log_prob for name, prior in named.items()} | {"r² inverse-gamma": inverse_gamma}


def expect(log_density: Callable[[Tensor], Tensor], function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the mean of an even function of r."""
    weights = STEP * R * (log_density(R).exp() + log_density(-R).exp())
    return (weights * function(R)).sum(0)


def density(log_density: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    """Return the density of w' = w * r."""
    return expect(log_density, lambda r: Normal(0 * r, r).log_prob(w).exp())


def tail(log_density: Callable[[Tensor], Tensor], limit: float) -> float:
    """Return the probability of |w'| > limit."""
    return expect(log_density, lambda r: torch.special.erfc(limit / (math.sqrt(2) * r))).item()


def draw_densities(w: Tensor, curves: dict[str, Tensor], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, values in curves.items():
        for axis in axes:
            axis.plot(w, values, label=name)
    axes[0].set(title="density", xlabel="w'", xlim=(-3, 3), ylim=(0, 1.2))
    axes[1].set(title="the same, tails", xlabel="w'", yscale="log", ylim=(1e-6, 3))
    axes[0].legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(
    *, std: float = 1.0, freedom: float = 3.0, points: int = 800, folder: Path = Path("runs/examples")
) -> dict[str, dict[str, float]]:
    folder.mkdir(parents=True, exist_ok=True)
    w = 10 * torch.linspace(-1, 1, 2 * (points // 2), dtype=torch.float64) ** 3  # dense near the pole, never at it
    curves = {"w alone": Normal(0 * ONE, ONE).log_prob(w).exp()}
    near_zero = Normal(0 * ONE, ONE).log_prob(0.05 * ONE).exp().item()
    figures = {"w alone": {"density_at_0.05": near_zero, "beyond_5": math.erfc(5 / math.sqrt(2))}}
    for name, log_density in laws_of_r(std, freedom).items():
        curves[name] = density(log_density, w)
        near_zero = density(log_density, 0.05 * ONE).item()
        figures[name] = {"density_at_0.05": near_zero, "beyond_5": tail(log_density, 5.0)}
    for name, row in figures.items():
        print(f"{name:<16} density at 0.05: {row['density_at_0.05']:.3f}   P(|w'| > 5): {row['beyond_5']:.2e}")
    exact = StudentT(freedom * ONE).log_prob(w).exp()
    figures["r² inverse-gamma"]["largest_error"] = (curves["r² inverse-gamma"] - exact).abs().max().item()
    print(f"largest error against Student's t density: {figures['r² inverse-gamma']['largest_error']:.1e}")
    draw_densities(w, curves, folder / "weight_priors.png")
    (folder / "weight_priors.json").write_text(json.dumps(figures, indent=1))
    return figures


if __name__ == "__main__":
    main()
