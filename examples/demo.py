"""Digits, a small convolutional network, and four ways to train it: plain, and each method of leanbayes.

You will see a table: accuracy, likelihood and calibration on held-out digits, and what each method costs in
parameters, training time and prediction time, as ratios to the plain network measured in the same run. The Bayesian
networks start as the plain one and are converted after two thirds of the epochs, so all cost one training. Run it with
`make demo`; the figures also go to `runs/demo/result.json`.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, Tensor

import leanbayes as lb
from leanbayes.methods import all_methods
from leanbayes.methods.base import Method
from leanbayes.objective import linear_beta

BATCH, RATE, DRAWS = 64, 0.1, 16
ANNEAL = 200  # epochs until the KL has its full weight, as in the papers; the demo ends before
Split = tuple[Tensor, Tensor, Tensor, Tensor]


def main(folder: str = "runs/demo", epochs: int = 45, seeds: int = 3, repeats: int = 15) -> list[dict[str, Any]]:
    """Train every method on several seeds, print the table, write the figures."""
    from rich.progress import Progress

    data = digits()
    methods: dict[str, Method | None] = {"plain": None} | {name: kind() for name, kind in all_methods().items()}
    rows = []
    with Progress(transient=True) as progress:
        task = progress.add_task("training", total=len(methods) * seeds)
        for name, method in methods.items():
            results = []
            for seed in range(seeds):
                progress.update(task, description=f"{name}, seed {seed}")
                results.append(evaluate(train(method, data, epochs, seed), data))
                progress.advance(task)
            rows.append({"method": name} | {key: statistics.mean(r[key] for r in results) for key in results[0]})
        progress.update(task, description="measuring costs")
        measured = costs(methods, data, repeats)
    rows = [row | cost for row, cost in zip(rows, measured, strict=True)]
    show(rows, seeds)
    path = Path(folder) / "result.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"epochs": epochs, "seeds": seeds, "draws": DRAWS, "rows": rows}, indent=2) + "\n")
    print(f"written to {path}")
    return rows


def digits() -> Split:
    """Return 1,000 digits to train on and 797 to test on."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(bunch.images, dtype=torch.float32)[order, None] / 16, torch.tensor(bunch.target)[order]
    return x[:1000], y[:1000], x[1000:], y[1000:]


def train(method: Method | None, data: Split, epochs: int, seed: int) -> nn.Module:
    """Train plain for two thirds of the epochs, then as `method` says, with one cosine schedule over all."""
    x, y, *_ = data
    torch.manual_seed(seed)
    model: nn.Module = lb.models.SmallConvNet(input_shape=(1, 8, 8))
    late = epochs * 2 // 3
    for start, end in ((0, late), (late, epochs)):
        if start and method is not None:
            model = lb.convert(model, method)
        groups = lb.parameter_groups(model, lr=RATE, posterior_lr=RATE, weight_decay=5e-4)
        optimiser = torch.optim.SGD(groups, lr=RATE, momentum=0.9, nesterov=True)
        for epoch in range(start, end):
            for group in optimiser.param_groups:
                group["lr"] = RATE * (1 + math.cos(math.pi * epoch / epochs)) / 2
            for batch in torch.randperm(len(x)).split(BATCH):
                step(model, optimiser, x[batch], y[batch], len(x), linear_beta(epoch, ANNEAL))
    return model


def step(
    model: nn.Module, optimiser: torch.optim.Optimizer, x: Tensor, y: Tensor, num_data: int, beta: float = 1.0
) -> None:
    """Take one step on the evidence lower bound; for a plain network that is its cross-entropy."""
    optimiser.zero_grad()
    lb.elbo(model, x, y, num_data=num_data, beta=beta).loss.backward()
    optimiser.step()


def evaluate(model: nn.Module, data: Split) -> dict[str, float]:
    """Return accuracy (%), NLL and ECE on the test digits, and the posterior's parameters in percent."""
    *_, x, y = data
    p = lb.predict(model, x, samples=DRAWS)
    return {
        "accuracy": 100 * (p.mean.argmax(1) == y).float().mean().item(),
        "nll": -p.log_prob(y).mean().item(),
        "ece": lb.metrics.ece(p.mean, y).item(),
        "extra_percent": lb.summary(model).extra_percent,
    }


def costs(methods: dict[str, Method | None], data: Split, repeats: int) -> list[dict[str, float]]:
    """Measure a training step and a prediction with 16 draws against the plain network (16 passes), in turn."""
    x, y = data[0][:BATCH], data[1][:BATCH]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    plain = lb.models.SmallConvNet(input_shape=(1, 8, 8))
    models = [plain if method is None else lb.convert(plain, method) for method in methods.values()]
    work: list[tuple[Callable[[], object], Callable[[], object]]] = []
    for model in models:
        optimiser = torch.optim.SGD(lb.parameter_groups(model, lr=1e-3), lr=1e-3, momentum=0.9)
        predict = sixteen_passes(plain, x) if model is plain else lambda model=model: lb.predict(model, x)
        work.append((lambda model=model, optimiser=optimiser: step(model, optimiser, x, y, 1000), predict))
    others = [[ratio(pair[kind], work[0][kind], repeats) for kind in (0, 1)] for pair in work[1:]]
    ratios = [[1.0, 1.0], *others]
    torch.set_num_threads(threads)
    return [{"step_ratio": step_ratio, "predict_ratio": predict_ratio} for step_ratio, predict_ratio in ratios]


def sixteen_passes(net: nn.Module, x: Tensor) -> Callable[[], object]:
    @torch.no_grad()
    def run() -> Tensor:
        return torch.stack([F.softmax(net(x), 1) for _ in range(DRAWS)]).mean(0)

    return run


def ratio(one: Callable[[], object], other: Callable[[], object], repeats: int) -> float:
    """Return the median over paired repeats of the CPU time of one piece of work to that of another."""

    def seconds(work: Callable[[], object]) -> float:
        start = time.process_time()
        for _ in range(3):
            work()
        return time.process_time() - start

    seconds(one)
    return statistics.median(seconds(one) / seconds(other) for _ in range(repeats))


def show(rows: list[dict[str, Any]], seeds: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"8x8 digits, 1,000 to train on, mean of {seeds} seeds, {DRAWS} draws")
    heads = ("method", "accuracy", "NLL", "ECE", "extra", "step", "predict")
    for head in heads:
        table.add_column(head, justify="left" if head == "method" else "right", no_wrap=True)
    best = {
        "accuracy": max(r["accuracy"] for r in rows),
        "nll": min(r["nll"] for r in rows),
        "ece": min(r["ece"] for r in rows),
    }
    for row in rows:
        cells = [f"{row['accuracy']:.2f} %", f"{row['nll']:.4f}", f"{row['ece']:.4f}"]
        marked = [f"[bold]{c}[/]" if row[k] == best[k] else c for k, c in zip(best, cells, strict=True)]
        cost = [f"{row['extra_percent']:.1f} %", f"{row['step_ratio']:.2f}", f"{row['predict_ratio']:.2f}"]
        table.add_row(row["method"], *marked, *cost)
    console = Console()
    console.print(table)
    console.print("extra: parameters of the posterior; step, predict: CPU time of a training step")
    console.print("and of 16 draws against the plain network and 16 passes of it, one thread.")


if __name__ == "__main__":
    main()
