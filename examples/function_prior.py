"""The prior on functions that dropout and ensemble model patching imply (figure 3 of the model patching paper).

Two panels show three functions each, y = B + sum_h W_h sign(b_h + w_h x) of H = 100 hidden units. This is nearly a
Gaussian process when all numbers are normal: B and b with variance 20, W and w with variance 5. The paper writes
N(0, 20) and N(0, 5), and variances in its densities, N(W | M, sigma^2 I). As standard deviations they would put as many
steps twice as far out.

Left, dropout: every W_h and w_h of one network is zero with probability 0.5. A hidden unit needs both. So 25 of 100
units keep their step at x = -b_h / w_h, and all functions step at the same hundred places. Right, model patching: each
layer takes one of K = 5 independent components, drawn uniformly. No weight is ever zero: all 100 steps are there, at
five hundred places. Both are piecewise constant. With four times as many steps the right ones are finer, and nearer to
the Gaussian process.

Seconds; `python -m examples.function_prior` writes function_prior.png and function_prior.json to runs/examples.
"""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from leanbayes.distributions.assignment import pick

BIAS_STD, WEIGHT_STD = 20**0.5, 5**0.5
EDGE = 10.0  # shown on [-10, 10]: 87 % of the steps, whose places are Cauchy with scale 2


class Networks(NamedTuple):
    """N networks of H hidden units: biases (N, 1) and (N, H), weights (N, H) and (N, H)."""

    output_bias: Tensor
    output_weight: Tensor
    hidden_bias: Tensor
    hidden_weight: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Return y (N, points)."""
        units = torch.sign(self.hidden_bias[..., None] + self.hidden_weight[..., None] * x)
        return self.output_bias + (self.output_weight[..., None] * units).sum(1)

    def places(self) -> Tensor:
        """Return where each function steps, at x = -b / w (N, H); NaN for a unit that is never heard to change."""
        heard = (self.hidden_weight != 0) & (self.output_weight != 0)
        return (-self.hidden_bias / self.hidden_weight).where(heard, torch.nan)


def normal_networks(count: int, hidden: int, generator: torch.Generator) -> Networks:
    def normal(std: float, width: int) -> Tensor:
        return std * torch.randn(count, width, generator=generator, dtype=torch.float64)

    return Networks(
        normal(BIAS_STD, 1), normal(WEIGHT_STD, hidden), normal(BIAS_STD, hidden), normal(WEIGHT_STD, hidden)
    )


def dropped(count: int, hidden: int, rate: float, generator: torch.Generator) -> Networks:
    """Drop weights of one network, each for itself: component 0 is nothing, component 1 the weight."""
    one = normal_networks(1, hidden, generator)
    kept = pick(torch.rand(2, count, hidden, generator=generator), (rate, 1 - rate))
    return Networks(
        one.output_bias.expand(count, 1),
        one.output_weight * kept[0],
        one.hidden_bias.expand(count, hidden),
        one.hidden_weight * kept[1],
    )


def patched(count: int, hidden: int, components: int, generator: torch.Generator) -> Networks:
    """Take each layer, weights and biases together, from one of K independent components."""
    each = normal_networks(components, hidden, generator)
    output, inner = pick(torch.rand(2, count, generator=generator), (1 / components,) * components)
    return Networks(
        each.output_bias[output], each.output_weight[output], each.hidden_bias[inner], each.hidden_weight[inner]
    )


def measure(networks: Networks) -> dict[str, float]:
    """Count steps: of a function on average, of those shown, and the places where any function may step."""
    places = networks.places()
    return {
        "steps": (~places.isnan()).sum(1).double().mean().item(),
        "steps_shown": (places.abs() < EDGE).sum(1).double().mean().item(),
        "places": len(set(places[~places.isnan()].tolist())),
    }


def draw_functions(functions: dict[str, Tensor], x: Tensor, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for axis, (name, values) in zip(axes, functions.items(), strict=True):
        axis.plot(x, values.T, lw=1)
        axis.set(title=name, xlabel="x", xlim=(-EDGE, EDGE))
    axes[0].set_ylabel("y")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(
    *, hidden: int = 100, rate: float = 0.5, components: int = 5, seed: int = 0, folder: Path = Path("runs/examples")
) -> dict[str, dict[str, float]]:
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    families = {
        f"dropout, rate {rate:g}": dropped(1000, hidden, rate, generator),
        f"model patching, K = {components}": patched(1000, hidden, components, generator),
    }
    figures = {name: measure(networks) for name, networks in families.items()}
    for name, row in figures.items():
        print(
            f"{name:<22} {row['steps']:.1f} steps a function, {row['steps_shown']:.1f} of them shown, "
            f"at {row['places']} places in all"
        )
    x = torch.linspace(-EDGE, EDGE, 4001, dtype=torch.float64)
    three = {name: Networks(*(part[:3] for part in networks))(x) for name, networks in families.items()}
    draw_functions(three, x, folder / "function_prior.png")
    (folder / "function_prior.json").write_text(json.dumps(figures, indent=1))
    return figures


if __name__ == "__main__":
    main()
