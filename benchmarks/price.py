"""Price of an answer of sixteen draws in plain passes of the same network: `python -m benchmarks.price`.

One thread, process CPU time. Every repeat measures the plain network before and after the method; the result is the
median of the ratios, for `lb.predict` and for a built `lb.Predictor`. On a GPU, `benchmarks/gpu_price.py` measures
large networks instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn, Tensor

import leanbayes as lb
from benchmarks import gpu_price
from leanbayes.methods import all_methods

METHODS = ("rank1", "implicit", "batch_ensemble", "patch", "mean_field")
CASES = {"mlp": (45,), "wrn-16-2": (1, 64)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file to write; on a GPU, a folder with a file for each pair")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    on_gpu = parser.add_argument_group("on a GPU")
    on_gpu.add_argument("--only", nargs="*", default=[], help="pairs whose file names contain one of these")
    on_gpu.add_argument("--budget", type=float, default=gpu_price.BUDGET, help="seconds after which no pair begins")
    on_gpu.add_argument("--profile", type=Path, help="file for a profile of the first chosen pair")
    on_gpu.add_argument("--rehearse", action="store_true", help="tiny networks and few repeats, on any device")
    options = parser.parse_args()
    if options.device == "cuda" or options.rehearse:
        options.out = options.out or Path("runs/price")
        sys.exit(gpu_price.run_all(options))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = []
    for name, sizes in CASES.items():
        for rows in sizes:
            net, x = network(name, rows)
            for method in METHODS:
                record = {"net": name, "rows": rows, "method": method, **price(net, x, method, options.repeats)}
                found.append(record)
                print(json.dumps(record), flush=True)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def network(name: str, rows: int) -> tuple[nn.Module, Tensor]:
    """Return a plain network in eval mode and its inputs."""
    torch.manual_seed(0)
    if name == "mlp":
        layers = (nn.Linear(4, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 3))
        return nn.Sequential(*layers).eval(), torch.randn(rows, 4)
    net = lb.models.build(name, num_outputs=10, input_shape=(3, 32, 32))
    return net.eval(), torch.randn(rows, 3, 32, 32)


@torch.no_grad()
def price(net: nn.Module, x: Tensor, method: str, repeats: int) -> dict[str, float]:
    """Return the plain pass in milliseconds, and both answers in plain passes."""
    model = lb.convert(net, all_methods()[method]())
    built = lb.Predictor(model, samples=16)
    answers: dict[str, Callable[[], object]] = {
        "predict": lambda: lb.predict(model, x, samples=16),
        "built": lambda: built(x),
    }
    calls = max(1, int(0.02 / seconds(lambda: net(x), 3)))
    ratios: dict[str, list[float]] = {name: [] for name in answers}
    plain = []
    for name, answer in answers.items():
        seconds(answer, max(1, calls // 16))  # warm up: the first calls of a process are slower
        for _ in range(repeats):
            before = seconds(lambda: net(x), calls)
            own = seconds(answer, max(1, calls // 16))
            plain.append(before)
            ratios[name].append(2 * own / (before + seconds(lambda: net(x), calls)))
    return {"plain_ms": 1e3 * statistics.median(plain), **{n: statistics.median(r) for n, r in ratios.items()}}


def seconds(run: Callable[[], object], times: int) -> float:
    """Return the CPU seconds of one call."""
    start = time.process_time()
    for _ in range(times):
        run()
    return (time.process_time() - start) / times


if __name__ == "__main__":
    main()
