"""Training step and prediction of each method against the plain network: `python -m benchmarks.cost`.

Every repeat runs the plain network and the methods in turn. The result is the median over repeats of the ratio to the
plain network of the same repeat. On a CPU: one thread, process CPU time, and glibc's allocator told not to
give pages back (otherwise activations are page-faulted at every call, on both sides). On a GPU: CUDA events, bfloat16
autocast, channels_last, everything compiled.
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
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn, Tensor

import leanbayes as lb
from benchmarks.problems import converted, layer_methods

TUNABLES = "glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=8589934592"
Step = Callable[[], object]


def main() -> None:
    options = parse()
    if options.device == "cpu" and os.environ.get("GLIBC_TUNABLES") != TUNABLES:
        os.environ["GLIBC_TUNABLES"] = TUNABLES
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.cost", *sys.argv[1:]])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    result = {
        "net": options.net,
        "batch": options.batch,
        "draws": options.draws,
        "repeats": options.repeats,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or "cpu",
        "precision": "bfloat16 autocast, channels_last, compiled" if options.device == "cuda" else "float32, eager",
        "torch": torch.__version__,
        "train_step": measure(train_steps(options), options),
        "predict": measure(predictions(options), options),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", default="wrn-16-2")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--draws", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--methods", nargs="*", default=["naive_rank1", *layer_methods()])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    return parser.parse_args()


def network(options: argparse.Namespace) -> nn.Module:
    net = lb.models.build(options.net, num_outputs=10, input_shape=(3, 32, 32))
    return net.to(options.device, memory_format=torch.channels_last) if options.device == "cuda" else net


def batch(options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    x = torch.randn(options.batch, 3, 32, 32, device=options.device)
    y = torch.randint(10, (options.batch,), device=options.device)
    return (x.to(memory_format=torch.channels_last) if options.device == "cuda" else x), y


def train_steps(options: argparse.Namespace) -> dict[str, Step]:
    """Return a training step (forward, backward, SGD) of the plain network and of each method."""
    net, (x, y) = network(options), batch(options)

    def make(model: nn.Module) -> Step:
        optimiser = torch.optim.SGD(lb.parameter_groups(model, lr=1e-3), lr=1e-3, momentum=0.9)

        def loss_of(x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast(options.device, torch.bfloat16, enabled=options.device == "cuda"):
                outputs = model(x)
            return F.cross_entropy(outputs.float(), y) + lb.kl(model) / 50_000

        loss = torch.compile(loss_of) if options.device == "cuda" else loss_of

        def step() -> None:
            optimiser.zero_grad()
            loss(x, y).backward()
            optimiser.step()

        return step

    return {"plain": make(net)} | {name: make(converted(name, net)) for name in options.methods}


def predictions(options: argparse.Namespace) -> dict[str, Step]:
    """Return a prediction with S draws of each method, and S plain passes; freezing the draws is included."""
    net, (x, _) = network(options).eval(), batch(options)

    def passes(model: nn.Module) -> Step:
        @torch.no_grad()
        def run() -> Tensor:
            with torch.autocast(options.device, torch.bfloat16, enabled=options.device == "cuda"):
                return torch.stack([model(x).float().softmax(1) for _ in range(options.draws)]).mean(0)

        return run

    def predict(model: nn.Module) -> Step:
        def run() -> object:
            with torch.autocast(options.device, torch.bfloat16, enabled=options.device == "cuda"):
                return lb.predict(model, x, samples=options.draws)

        return run

    steps: dict[str, Step] = {"plain": passes(net)}
    for name in options.methods:
        model = converted(name, net).eval()
        steps[name] = passes(model) if name == "naive_rank1" else predict(model)
    return steps


def measure(steps: dict[str, Step], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Time the steps in turn, in random order within a repeat, and return medians and ratios to the plain network."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    clock = cuda_seconds if options.device == "cuda" else cpu_seconds
    inner = 10 if options.device == "cuda" else 1
    for repeat in range(options.repeats + 2):
        for name in random.sample(list(steps), len(steps)):
            spent = clock(steps[name], inner)
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


def cpu_seconds(step: Step, inner: int) -> float:
    start = time.process_time()
    for _ in range(inner):
        step()
    return (time.process_time() - start) / inner


def cuda_seconds(step: Step, inner: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    step()
    begin.record()
    for _ in range(inner):
        step()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / inner


if __name__ == "__main__":
    main()
