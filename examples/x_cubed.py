"""Implicit nodes on y = x^3 with 30 points: networks of 1 to 5 hidden layers of 256 ReLU units (figure 1 of the paper).

Five columns show the data in red and the prediction in blue: its mean, and bands of +-2 standard deviations, epistemic
(dark) and total (light). Below, x^3 is subtracted where there are data. The deepest network fits as well as the
shallowest and keeps its epistemic band: small among the data, several times larger beyond them. ReLU networks
extrapolate in straight lines, so beyond the data the curve leaves the band. A wide band reports doubt; it does not make
the extrapolation right.

The data are the usual toy: x uniform on [-4, 4], noise of standard deviation 3, shown on [-6, 6]. About a minute;
`python -m examples.x_cubed` writes x_cubed.png and x_cubed.json to runs/examples.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn, Tensor

import leanbayes as lb

NOISE, X_UNIT, Y_UNIT = 3.0, 4 / 3**0.5, 64 / 7**0.5  # units: standard deviations of x and of x^3 on [-4, 4]
LIKELIHOOD = lb.Gaussian(std=NOISE / Y_UNIT)
METHOD = lb.ImplicitNodes(components=8, prior_std=0.3, init_spread=0.75)
FOLDER = Path("runs/examples")


def fit(depth: int, x: Tensor, y: Tensor, steps: int) -> nn.Module:
    bnn = lb.convert(lb.models.MLP(1, 1, hidden=(256,) * depth), METHOD)
    opt = torch.optim.Adam(lb.parameter_groups(bnn, lr=1e-3, posterior_lr=1e-2))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    for _ in range(steps):
        terms = lb.elbo(bnn, x / X_UNIT, y / Y_UNIT, LIKELIHOOD, num_data=len(x), tile=True)
        opt.zero_grad()
        terms.loss.backward()
        opt.step()
        schedule.step()
    return bnn


def predict(bnn: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return the mean and the standard deviations in the units of y."""
    p = lb.predict(bnn, x / X_UNIT, LIKELIHOOD, samples=64)
    return {"mean": p.mean * Y_UNIT, "epistemic": p.epistemic.sqrt() * Y_UNIT, "total": p.std * Y_UNIT}


def plot(x: Tensor, y: Tensor, grid: Tensor, bands: dict[int, dict[str, Tensor]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(bands), figsize=(3.2 * len(bands), 6.4), sharey="row", squeeze=False)
    for column, (depth, band) in enumerate(bands.items()):
        for axis, less in zip(axes[:, column], (0, 1), strict=True):  # how much of x^3 is taken off
            for name, colour in (("total", "#cfe2f3"), ("epistemic", "#6fa8dc")):
                low, high = ((band["mean"] + sign * band[name] - less * grid**3).flatten() for sign in (-2, 2))
                axis.fill_between(grid.flatten(), low, high, color=colour, lw=0, label=f"±2 std, {name}")
            axis.plot(grid, band["mean"] - less * grid**3, color="navy", label="mean")
            axis.plot(grid, (1 - less) * grid**3, "--", color="grey", lw=1, label="x³")
            axis.plot(x, y - less * x**3, "o", color="red", ms=3, label="data")
        axes[0, column].set(title=f"hidden layers: {depth}", xlim=(-6, 6), ylim=(-170, 170), ylabel="y")
        axes[1, column].set(xlabel="x", xlim=(-4.5, 4.5), ylim=(-15, 15), ylabel="y - x³")
    axes[0, 0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(
    *, depths: Sequence[int] = (1, 2, 3, 4, 5), steps: int = 1200, seed: int = 0, folder: Path = FOLDER
) -> list[dict[str, float]]:
    torch.manual_seed(seed)
    x = torch.rand(30, 1) * 8 - 4
    y = x**3 + NOISE * torch.randn_like(x)
    grid = torch.linspace(-6, 6, 241)[:, None]
    bands: dict[int, dict[str, Tensor]] = {}
    figures: list[dict[str, float]] = []
    for depth in depths:
        bnn = fit(depth, x, y, steps)
        band, at_data = predict(bnn, grid), predict(bnn, x)
        errors = {"rmse_data": at_data["mean"] - y, "rmse_curve": (band["mean"] - grid**3)[grid.abs() <= 4]}
        spread = {"spread_inside": grid.abs() <= 4, "spread_outside": grid.abs() > 5}
        errors |= {name: band["epistemic"][where] for name, where in spread.items()}
        row = {"depth": depth} | {name: v.square().mean().sqrt().item() for name, v in errors.items()}
        row["data_in_band"] = (errors["rmse_data"].abs() <= 2 * at_data["total"]).float().mean().item()
        print("  ".join(f"{name} {value:.3g}" for name, value in row.items()), flush=True)
        bands[depth] = band
        figures.append(row)
    folder.mkdir(parents=True, exist_ok=True)
    plot(x, y, grid, bands, folder / "x_cubed.png")
    (folder / "x_cubed.json").write_text(json.dumps({"method": METHOD.fields(), "steps": steps, "depths": figures}))
    return figures


if __name__ == "__main__":
    main()
