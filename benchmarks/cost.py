"""Training step and prediction of each method against the plain network: `python -m benchmarks.cost`.

Every repeat runs the plain network and the methods in turn. The result is the median over repeats of the ratio to the
plain network of the same repeat: one CPU thread, process CPU time, and glibc's allocator told not to give pages back
(otherwise activations are page-faulted at every call, on both sides).

With `--device cuda`, training steps on a GPU (`benchmarks.gpu`): bfloat16 autocast, channels_last, eager and compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn, Tensor

import leanbayes as lb
from benchmarks import gpu
from benchmarks.problems import converted, layer_methods, Problem, Step, train_step

TUNABLES = "glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=8589934592"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the result, and return the number of failures."""
    options = parse(arguments)
    if options.device == "cuda" or options.rehearse:
        options.out = options.out or Path("runs/cost")
        return gpu.run_all(options)
    if os.environ.get("GLIBC_TUNABLES") != TUNABLES:
        os.environ["GLIBC_TUNABLES"] = TUNABLES
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.cost", *sys.argv[1:]])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    result = {
        "net": options.net,
        "batch": options.batch,
        "draws": options.draws,
        "repeats": options.repeats,
        "device": platform.processor() or "cpu",
        "precision": "float32, eager",
        "torch": torch.__version__,
        "train_step": measure(train_steps(options), options),
        "predict": measure(predictions(options), options),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", default="wrn-16-2")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--draws", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--methods", nargs="*", default=["naive_rank1", *layer_methods()])
    parser.add_argument("--out", type=Path, help="JSON file to write; on a GPU, a folder with a file for each pair")
    on_gpu = parser.add_argument_group("on a GPU")
    on_gpu.add_argument("--only", nargs="*", default=[], help="pairs whose file names contain one of these")
    on_gpu.add_argument("--budget", type=float, default=gpu.BUDGET, help="seconds after which no pair begins")
    on_gpu.add_argument("--workers", type=int, default=4, help="pairs that compile and hold memory at a time")
    on_gpu.add_argument("--kernels", action="store_true", help="add the kernels of a step, from a profile")
    on_gpu.add_argument("--rehearse", action="store_true", help="tiny networks and one group, on any device")
    return parser.parse_args(arguments)


def problem(options: argparse.Namespace) -> Problem:
    return Problem(options.net, options.batch)


def train_steps(options: argparse.Namespace) -> dict[str, Step]:
    """Return a training step of the plain network and of each method."""
    net, (x, y) = problem(options).network(), problem(options).inputs()
    names = ("plain", *options.methods)
    return {name: train_step(converted(name, net), x, y, half=False) for name in names}


def predictions(options: argparse.Namespace) -> dict[str, Step]:
    """Return a prediction with S draws of each method, and S plain passes; freezing the draws is included."""
    net, (x, _) = problem(options).network().eval(), problem(options).inputs()

    def passes(model: nn.Module) -> Step:
        @torch.no_grad()
        def run() -> Tensor:
            return torch.stack([model(x).softmax(1) for _ in range(options.draws)]).mean(0)

        return run

    def predict(model: nn.Module) -> Step:
        return lambda: lb.predict(model, x, samples=options.draws)

    steps: dict[str, Step] = {"plain": passes(net)}
    for name in options.methods:
        model = converted(name, net).eval()
        steps[name] = passes(model) if name == "naive_rank1" else predict(model)
    return steps


def measure(steps: dict[str, Step], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Time the steps in turn, in random order within a repeat, and return medians and ratios to the plain network."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(options.repeats + 2):
        for name in random.sample(list(steps), len(steps)):
            spent = cpu_seconds(steps[name])
            if repeat >= 2:  # the first two warm up
                seconds[name].append(spent)
        print(f"repeat {repeat + 1} of {options.repeats + 2}", file=sys.stderr, end="\r")
    ratios = {
        name: sorted(a / b for a, b in zip(times, seconds["plain"], strict=True)) for name, times in seconds.items()
    }
    return {
        name: {
            "ratio": round(statistics.median(values), 3),
            "quartiles": [round(values[len(values) // 4], 3), round(values[3 * len(values) // 4], 3)],
            "milliseconds": round(1000 * statistics.median(seconds[name]), 2),
        }
        for name, values in ratios.items()
    }


def cpu_seconds(step: Step) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


if __name__ == "__main__":
    sys.exit(main())
