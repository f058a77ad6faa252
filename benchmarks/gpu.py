"""The table of training steps on a GPU: `python -m benchmarks.cost --device cuda`.

Each pair of a network and a method is measured in a process of its own, next to the plain network: groups of ten steps
of either in turn, after a warm-up. A step is "eager"; "compiled"; or "graph", compiled and captured as a CUDA graph as
by `fit`. The result is one JSON file per pair, so that the command can be interrupted; a second call skips the
pairs that are finished. Time is by CUDA events; memory is the most that steady steps allocate.
Several pairs of a network compile at a time. Then one by one chooses its convolutions, is captured and measured, while
the others wait with little memory. A pair that fails among others, such as for memory, is tried again alone. The pairs
come in the order of `pairs`, the large networks first, and no pair begins after the budget of seconds.
`--kernels` adds the kernels of a step, from a profile; the times are stored before.

`--rehearse` runs the same on a CPU with tiny networks and one group.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.problems import converted, Problem, PROBLEMS, Step, train_step, TrainStep

LEAN = ("rank1", "batch_ensemble", "implicit", "patch")
LARGE = ("wrn-28-10", "resnet-50", "bert-base")
GROUPS, STEPS, WARM_UP = 7, 10, 3
BUDGET = 12 * 60
"""Seconds of all pairs together."""

LONGEST = 300
"""Seconds of several pairs that compile at a time and are then measured; those that hang are ended."""

READY = "READY\n"


class Pair(NamedTuple):
    """A network, a method and a mode."""

    net: str
    method: str
    mode: str

    @property
    def file(self) -> str:
        """The name of the result."""
        return f"{self.net}-{self.mode}-{self.method}.json"


def pairs() -> list[Pair]:
    """Return all pairs in the order of their measurement."""
    found = [Pair(net, method, "graph") for net in LARGE for method in LEAN]
    found += [Pair(net, method, "eager") for net in LARGE for method in LEAN]
    small = (*LEAN, "mc_dropout", "mean_field", "variance", "patch_crossed", "nested")
    found += [Pair("wrn-16-4", method, mode) for mode in ("graph", "eager") for method in small]
    others = ("mc_dropout", "mean_field", "variance", "mean_field_weights", "rank1_component")
    found += [Pair(net, method, "graph") for net in LARGE for method in others]
    return found + [Pair(net, method, "compiled") for net in LARGE for method in LEAN]


def run_all(options: argparse.Namespace) -> int:
    """Measure every pair that has no result, print the table, and return the number of failures."""
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = [pair for pair in pairs() if not options.only or any(part in pair.file for part in options.only)]
    waiting = [pair for pair in chosen if not (options.out / pair.file).is_file()]
    started, failures = time.monotonic(), 0
    alone: set[Pair] = set()
    while waiting and time.monotonic() - started <= options.budget:
        net = waiting[0].net
        wave = [pair for pair in waiting if pair.net == net and pair not in alone][: options.workers] or waiting[:1]
        failed = run_wave(wave, options)
        waiting = [pair for pair in waiting if pair not in wave]
        if len(wave) > 1:  # such as for memory
            alone |= set(failed)
            waiting += failed
        else:
            failures += len(failed)
    sys.stdout.write(table(options.out, chosen))
    if waiting:
        sys.stderr.write(f"{len(waiting)} pairs are left at the budget of {options.budget} s; call the command again\n")
    return failures


def run_wave(wave: Sequence[Pair], options: argparse.Namespace) -> list[Pair]:
    """Compile several pairs at a time, then measure them one by one; return those that failed."""
    failed, running = [], []
    threads = str(max(1, (os.cpu_count() or 1) // len(wave)))
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": threads} | os.environ
    for pair in wave:
        errors = (options.out / pair.file).with_suffix(".err").open("w+")
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        process = subprocess.Popen(_command(pair, options), text=True, env=environment, **pipes)
        running.append((pair, process, errors))
    limit = threading.Timer(LONGEST, lambda: [process.kill() for _, process, _ in running])
    limit.daemon = True
    limit.start()
    for _, process, _ in running:
        while process.stdout.readline() not in (READY, ""):  # the end if it failed
            pass
    for pair, process, errors in running:
        said, _ = process.communicate("go\n" if process.poll() is None else None)
        errors.seek(0)
        text = said if process.returncode == 0 else f"exit {process.returncode}\n{errors.read()[-1500:]}"
        failed += [pair] if process.returncode else []
        sys.stderr.write(f"{pair.file}: {text.strip()}\n")
        errors.close()
        Path(errors.name).unlink()
    limit.cancel()
    return failed


def _command(pair: Pair, options: argparse.Namespace) -> list[str]:
    file = str(options.out / pair.file)
    command = [sys.executable, "-m", "benchmarks.gpu", *pair, "--file", file, "--device", options.device]
    return [*command, *(f"--{flag}" for flag in ("rehearse", "kernels") if getattr(options, flag))]


def measure(
    pair: Pair,
    device: str,
    *,
    rehearse: bool,
    wait_for_turn: Callable[[], object] = bool,
    store: Callable[[dict[str, Any]], object] = bool,
    kernels: bool = False,
) -> dict[str, Any]:
    """Measure the plain network and one method in turn, with their kernels if asked.

    `wait_for_turn` is called after the first steps, which compile; `store` gets the times before the kernels are found.
    """
    problem = PROBLEMS[pair.net].shrunk() if rehearse else PROBLEMS[pair.net]
    groups, steps = (1, 1) if rehearse else (GROUPS, STEPS)
    torch.set_float32_matmul_precision("high")
    kept: dict[str, TrainStep] = {}
    first: dict[str, float] = {}
    held: dict[str, int] = {}
    for name in ("plain", pair.method):
        before = _held(pair.mode, device)
        kept[name], first[name] = _step(problem, name, pair.mode, device)
        held[name] = _held(pair.mode, device) - before
    wait_for_turn()
    torch.backends.cudnn.benchmark = True  # now, since other processes would disturb the choice
    used: dict[str, int] = {}
    for name, step in kept.items():
        others = _held(pair.mode, device) - held[name]
        step.capture()
        for _ in range(WARM_UP):
            step()
        used[name] = _bytes(step, pair.mode, device) - others
    times: dict[str, list[float]] = {name: [] for name in kept}
    for _ in range(groups):
        for name, step in kept.items():
            times[name].append(_milliseconds(step, steps, device))
    ratios = sorted(a / b for a, b in zip(times[pair.method], times["plain"], strict=True))
    found = {
        **pair._asdict(),
        "batch": problem.batch,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "plain_ms": round(statistics.median(times["plain"]), 3),
        "ms": round(statistics.median(times[pair.method]), 3),
        "ratio": round(statistics.median(ratios), 3),
        "quartiles": [round(ratios[len(ratios) // 4], 3), round(ratios[3 * len(ratios) // 4], 3)],
        "plain_bytes": used["plain"],
        "bytes": used[pair.method],
        "memory": round(used[pair.method] / used["plain"], 3) if used["plain"] else None,
        "first_s": first[pair.method],
        "plain_first_s": first["plain"],
    }
    store(found)
    if kernels:
        found["kernels"] = {name: kernels_of(step) for name, step in kept.items()}
        store(found)
    return found


def kernels_of(step: Step) -> dict[str, list[float]]:
    """Return milliseconds and launches of the kernels of one step, by name; the slowest first."""
    steps = 3
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    spent: dict[str, list[float]] = {}
    for event in profiled.events() or ():
        if str(event.device_type).endswith("CUDA"):
            own = spent.setdefault(event.name[:150], [0.0, 0.0])
            own[0] += event.device_time / 1e3 / steps
            own[1] += 1 / steps
    return dict(sorted(spent.items(), key=lambda item: -item[1][0]))


def _step(problem: Problem, method: str, mode: str, device: str) -> tuple[TrainStep, float]:
    """Return a step that is compiled and not yet captured, and the seconds of its first call."""
    torch.manual_seed(0)
    x, y = problem.inputs(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a network without streams gets noise alone
        model = converted(method, problem.network(device))
    compiled = mode != "eager" and device == "cuda"  # a CPU may have no compiler
    captured = mode == "graph" and device == "cuda"
    step = train_step(model, x, y, half=True, compiled=compiled, captured=captured)
    start = time.monotonic()
    step()
    _wait(device)
    return step, round(time.monotonic() - start, 2)


def _bytes(step: Step, mode: str, device: str) -> int:
    """Return the most memory that a steady step allocates; 0 on a CPU.

    The memory of a captured step belongs to its graph: torch counts it as reserved, not as allocated.
    """
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    step()
    torch.cuda.synchronize()
    return _held(mode, device) if mode == "graph" else int(torch.cuda.max_memory_allocated())


def _held(mode: str, device: str) -> int:
    """Return the memory that is held at rest."""
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved() if mode == "graph" else torch.cuda.memory_allocated())


def _milliseconds(step: Step, steps: int, device: str) -> float:
    if device != "cuda":
        start = time.process_time()
        for _ in range(steps):
            step()
        return 1e3 * (time.process_time() - start) / steps
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(steps):
        step()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / steps


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def table(folder: Path, chosen: Sequence[Pair]) -> str:
    """Return the finished pairs as a Markdown table: a row for each network and mode, ratios (quartiles), memory."""
    found = {pair: json.loads((folder / pair.file).read_text()) for pair in chosen if (folder / pair.file).is_file()}
    methods = list(dict.fromkeys(pair.method for pair in found))
    rows = list(dict.fromkeys((pair.net, pair.mode) for pair in found))
    lines = [["network, batch, mode", "plain, ms", *methods], ["---"] * (2 + len(methods))]
    for net, mode in rows:
        own = {pair.method: result for pair, result in found.items() if (pair.net, pair.mode) == (net, mode)}
        plain = statistics.median(result["plain_ms"] for result in own.values())
        batch = next(iter(own.values()))["batch"]
        lines.append([f"{net}, {batch}, {mode}", f"{plain:.1f}", *(_cell(own.get(method)) for method in methods)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return ""
    low, high = result["quartiles"]
    memory = "" if result["memory"] is None else f", memory {result['memory']:.2f}"
    return f"{result['ratio']:.2f} ({low:.2f}-{high:.2f}){memory}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one pair in this process and write its result."""
    parser = argparse.ArgumentParser(description="measure one pair")
    for name in Pair._fields:
        parser.add_argument(name)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--kernels", action="store_true", help="add the kernels of a step")
    chosen = parser.parse_args(arguments)

    def wait_for_turn() -> None:
        """Report that this process has compiled, and wait until no other one uses the GPU."""
        sys.stdout.write(READY)
        sys.stdout.flush()
        if not sys.stdin.readline():
            sys.exit("the command that began this measurement has ended")

    def store(result: dict[str, Any]) -> None:
        part = chosen.file.with_suffix(".part")
        part.write_text(json.dumps(result, indent=2) + "\n")
        part.replace(chosen.file)

    pair = Pair(chosen.net, chosen.method, chosen.mode)
    options: dict[str, Any] = {"rehearse": chosen.rehearse, "kernels": chosen.kernels, "store": store}
    result = measure(pair, chosen.device, wait_for_turn=wait_for_turn, **options)
    sys.stdout.write(f"{result['ratio']} of {result['plain_ms']} ms, memory {result['memory']}\n")


if __name__ == "__main__":
    main()
