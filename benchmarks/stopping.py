"""Quality against draws on Fashion-MNIST: designs and early stopping: `python -m benchmarks.stopping --out FILE`.

A LeNet is trained for three epochs, converted, and trained for two more. The test NLL is then measured at 1 to 32 draws
of both designs, with `tolerance=`, and with the older rule: the standard error of the top class is below a share of
its distance from one, checked after the same draws.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn, Tensor

import leanbayes as lb
from leanbayes.core.stopping import stages

METHODS = {"implicit": lb.ImplicitNodes(), "rank1": lb.Rank1()}
DRAWS = (1, 2, 4, 8, 16, 32)
TOLERANCES = (3e-4, 1e-3, 3e-3, 1e-2)
SHARES = (0.1, 0.2, 0.3, 0.5)
LIMIT = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=60_000, help="training rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = lb.data.load("fashion-mnist")
    x, y = data.inputs(data.train.x[: options.rows]), data.train.y[: options.rows]
    found = {}
    for name, method in METHODS.items():
        torch.manual_seed(options.seed)
        net = lb.models.build("lenet", num_outputs=10, input_shape=(1, 28, 28))
        train(net, x, y, epochs=3, lr=2e-3, posterior_lr=2e-3)
        model = lb.convert(net, method)
        train(model, x, y, epochs=2, lr=1e-3, posterior_lr=1e-2)
        found[name] = {d: measure(model, data.inputs(data.test.x), data.test.y, d) for d in ("independent", "paired")}
    text = json.dumps({"data": "fashion-mnist", "net": "lenet", "seed": options.seed, "methods": found}, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


def train(model: nn.Module, x: Tensor, y: Tensor, *, epochs: int, lr: float, posterior_lr: float) -> None:
    """Train with Adam on the whole bound."""
    optimizer = torch.optim.Adam(lb.parameter_groups(model, lr=lr, posterior_lr=posterior_lr))
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(128):
            optimizer.zero_grad()
            lb.elbo(model, x[rows], y[rows], lb.Categorical(), num_data=len(x)).loss.backward()
            optimizer.step()


def measure(model: nn.Module, x: Tensor, y: Tensor, design: Any) -> dict[str, Any]:
    """Return the NLL by number of draws, by tolerance and by the older rule, with the mean draws of a row."""
    samples = lb.predict(model, x, samples=max(DRAWS), seed=1, design=design).samples
    assert samples is not None
    by_tolerance = {}
    for tolerance in TOLERANCES:
        p = lb.predict(model, x, samples=LIMIT, seed=1, design=design, tolerance=tolerance)
        assert p.draws is not None
        by_tolerance[tolerance] = {"draws": p.draws.double().mean().item(), "nll": -p.log_prob(y).mean().item()}
    return {
        "nll": {count: nll(samples[:count].mean(0), y) for count in DRAWS},
        "tolerance": by_tolerance,
        "top class": {share: by_top_class(samples, y, share, 2 if design == "paired" else 1) for share in SHARES},
    }


def by_top_class(samples: Tensor, y: Tensor, share: float, unit: int) -> dict[str, float]:
    """Return draws and NLL if a row stops when the standard error of its top class is below a share of 1 - p."""
    mean, draws = samples[:LIMIT].mean(0), torch.full((len(y),), float(LIMIT))
    for stage in reversed(stages(LIMIT)[:-1]):
        units = samples[: stage.stop].unflatten(0, (-1, unit)).mean(1)
        top, chosen = units.mean(0).max(1)
        error = (units.std(0) / len(units) ** 0.5).gather(1, chosen[:, None])[:, 0]
        stops = error <= share * (1 - top)
        mean, draws = torch.where(stops[:, None], units.mean(0), mean), draws.masked_fill(stops, float(stage.stop))
    return {"draws": draws.mean().item(), "nll": nll(mean, y)}


def nll(mean: Tensor, y: Tensor) -> float:
    return -mean.gather(1, y[:, None]).log().mean().item()


if __name__ == "__main__":
    main()
