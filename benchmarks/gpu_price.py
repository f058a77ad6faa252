"""Price of an answer on a GPU in plain passes: `python -m benchmarks.price --device cuda --out runs/price`.

Each pair of a network and a method is measured in a process of its own, under bfloat16 autocast, next to the plain
network in the same mode. Time is that of a call on inputs on the device, up to the end of its kernels:

    eager        `predictor(x)` against `net(x)`, one row
    graph        `Predictor(capture=True)` against the plain network in a CUDA graph with a copy of the inputs, one row
    predict      `lb.predict` against `net(x)`, one row
    throughput   each draw that is run by `predictor(x)` against `net(x)`, many rows

The result is one JSON file per pair, so that the command can be interrupted; a second call skips the finished pairs. It
also has the differences between a replayed and an eager answer, between draws that are folded and run together in
float32 without TF32, and the errors of both under bfloat16. `--rehearse` runs the same on a CPU with tiny networks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn, Tensor

import leanbayes as lb
from benchmarks.problems import converted, Problem, PROBLEMS
from leanbayes.core import batched

METHODS = ("rank1", "implicit", "batch_ensemble", "patch")
ROWS = {"wrn-28-10": 1024, "resnet-50": 512, "bert-base": 256}
DRAWS, REPEATS, FEW, WARM_UP = 16, 25, 7, 3
BUDGET = 9 * 60
"""Seconds after which no pair begins."""

Call = Callable[[], object]


class Pair(NamedTuple):
    """A network and a method."""

    net: str
    method: str

    @property
    def file(self) -> str:
        """The name of the result."""
        return f"{self.net}-{self.method}.json"


class Setting(NamedTuple):
    """Networks and inputs of one pair."""

    net: nn.Module
    model: nn.Module
    one: Any
    many: Any
    device: str
    rehearse: bool


def run_all(options: argparse.Namespace) -> int:
    """Measure every pair that has no result, print the table, and return the number of failures."""
    options.out.mkdir(parents=True, exist_ok=True)
    every = [Pair(net, method) for method in METHODS for net in ROWS]
    chosen = [pair for pair in every if not options.only or any(part in pair.file for part in options.only)]
    started, failures = time.monotonic(), 0
    for pair in chosen:
        file = options.out / pair.file
        if file.is_file() or time.monotonic() - started > options.budget:
            continue
        command = [sys.executable, "-m", "benchmarks.gpu_price", *pair, "--file", str(file), "--device", options.device]
        command += ["--rehearse"] if options.rehearse else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        failures += done.returncode != 0
        said = done.stdout.strip() if done.returncode == 0 else done.stderr.strip()[-1500:]
        sys.stderr.write(f"{pair.file}: {said}\n")
    sys.stdout.write(table(options.out, chosen))
    if options.profile and chosen:
        options.profile.parent.mkdir(parents=True, exist_ok=True)
        options.profile.write_text(profile(setting(chosen[0], options.device, rehearse=options.rehearse)))
    return failures


@torch.no_grad()
def setting(pair: Pair, device: str, *, rehearse: bool) -> Setting:
    """Return the networks and inputs of a pair; statistics of batch norms are those of random rows."""
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    problem: Problem = PROBLEMS[pair.net].shrunk() if rehearse else PROBLEMS[pair.net]
    net = problem.network(device)
    norms = [module for module in net.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.momentum = None
    if norms:
        net.train()(problem.inputs(device, rows=32)[0])
    net.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = converted(pair.method, net).eval()
    one, many = (problem.inputs(device, rows=rows)[0] for rows in (1, 4 if rehearse else ROWS[pair.net]))
    for x in (one, many):
        if isinstance(x, dict):
            del x["attention_mask"]  # all ones; transformers reads it on the host, but not in a capture
    return Setting(net, model, one, many, device, rehearse)


def measure(pair: Pair, device: str, *, rehearse: bool) -> dict[str, Any]:
    """Return the prices and differences of a pair."""
    s = setting(pair, device, rehearse=rehearse)
    repeats, few = (2, 2) if rehearse else (REPEATS, FEW)
    if rehearse:
        batched.TILED["cpu"] = batched.TILED["cuda"]
    found: dict[str, Any] = {
        **pair._asdict(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "draws": DRAWS,
        "rows": len(next(iter(s.many.values())) if isinstance(s.many, dict) else s.many),
    }
    answers = {}
    for mode, capture in (("eager", False), ("graph", True)):
        built, seconds = timed(lambda capture=capture: lb.Predictor(s.model, samples=DRAWS, capture=capture), s)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            answers[mode], first = timed(lambda built=built: built(s.one), s)
        plain = plain_graph(s) if capture and device == "cuda" else lambda: plain_pass(s, s.one)
        found[mode] = ratios(lambda built=built: built(s.one), plain, s, repeats)
        found[mode] |= {"build_s": round(seconds, 3), "first_s": round(first, 3), "memory": built.memory}
        found[mode] |= {"way": way(built, s.one), "captured": bool(built.graphs.graphs)}
        found[mode] |= {"said": [str(one.message)[:300] for one in said]}
    found["predict"] = ratios(lambda: lb.predict(s.model, s.one, samples=DRAWS), lambda: plain_pass(s, s.one), s, few)
    built = lb.Predictor(s.model, samples=DRAWS)
    found["throughput"] = ratios(lambda: built(s.many), lambda: plain_pass(s, s.many), s, few)
    found["throughput"] |= {"run": built.number, "way": way(built, s.many), "memory": built.memory}
    found["throughput"]["per_draw"] = round(found["throughput"]["ratio"] / built.number, 4)
    whole = ratios(lambda: lb.predict(s.model, s.many, samples=DRAWS), lambda: plain_pass(s, s.many), s, 2)
    found["throughput_predict"] = whole | {"per_draw": round(whole["ratio"] / built.number, 4)}
    found["replayed_difference"] = difference(answers["eager"].mean, answers["graph"].mean)
    return found | agreement(s)


def ratios(answer: Call, plain: Call, s: Setting, repeats: int) -> dict[str, Any]:
    """Time an answer and a plain pass in turn; return medians and the quartiles of the ratio."""
    for _ in range(1 if s.rehearse else WARM_UP):
        timed(answer, s)
        timed(plain, s)
    spent: list[tuple[float, float]] = []
    for _ in range(repeats):
        before, own, after = timed(plain, s)[1], timed(answer, s)[1], timed(plain, s)[1]
        spent.append((own, (before + after) / 2))
    found = sorted(own / base for own, base in spent)
    return {
        "ms": round(1e3 * statistics.median(own for own, _ in spent), 3),
        "plain_ms": round(1e3 * statistics.median(base for _, base in spent), 3),
        "ratio": round(statistics.median(found), 3),
        "quartiles": [round(found[len(found) // 4], 3), round(found[3 * len(found) // 4], 3)],
        "repeats": repeats,
    }


def timed(run: Call, s: Setting) -> tuple[Any, float]:
    """Return the result of a call under autocast, and its seconds up to the end of its kernels."""
    wait(s.device)
    start = time.perf_counter()
    with torch.autocast(s.device, torch.bfloat16):
        result = run()
    wait(s.device)
    return result, time.perf_counter() - start


def wait(device: str) -> None:
    """Wait for the kernels of the device."""
    if device == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()
def plain_pass(s: Setting, x: Any) -> object:
    """Run the plain network."""
    return s.net(**x) if isinstance(x, dict) else s.net(x)


@torch.no_grad()
def plain_graph(s: Setting) -> Call:
    """Return a replay of the plain network on one row, with a copy of the inputs as a predictor makes it."""
    given = list(s.one.values()) if isinstance(s.one, dict) else [s.one]
    fixed = [torch.empty_like(tensor).copy_(tensor) for tensor in given]
    inputs = dict(zip(s.one, fixed, strict=True)) if isinstance(s.one, dict) else fixed[0]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        for _ in range(WARM_UP):
            plain_pass(s, inputs)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph), torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        kept = plain_pass(s, inputs)

    def replay() -> object:
        torch._foreach_copy_(fixed, given)
        graph.replay()
        return kept

    return replay


def agreement(s: Setting) -> dict[str, Any]:
    """Return differences of probabilities of draws: run together and folded, in float32 and under bfloat16."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    together = lb.Predictor(s.model, samples=DRAWS)(s.one).samples
    half_together = timed(lambda: lb.Predictor(s.model, samples=DRAWS)(s.one), s)[0].samples
    with folded(s.device):
        exact = lb.Predictor(s.model, samples=DRAWS)(s.one).samples
        half_folded = timed(lambda: lb.Predictor(s.model, samples=DRAWS)(s.one), s)[0].samples
    return {
        "together_difference": difference(together, exact),
        "half_error": {"together": difference(half_together, exact), "folded": difference(half_folded, exact)},
        "half_rms": {"together": rms(half_together, exact), "folded": rms(half_folded, exact)},
    }


@contextmanager
def folded(device: str) -> Iterator[None]:
    """Fold draw by draw inside the context."""
    before = batched.SMALL[device], batched.TILED[device]
    batched.SMALL[device] = batched.TILED[device] = 0
    try:
        yield
    finally:
        batched.SMALL[device], batched.TILED[device] = before


def difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference."""
    return float((a.double() - b.double()).abs().max())


def rms(a: Tensor, b: Tensor) -> float:
    """Return the root of the mean squared difference."""
    return float((a.double() - b.double()).square().mean().sqrt())


def way(predictor: lb.Predictor, x: Any) -> str:
    """Return how the draws run on a batch."""
    (leaf,) = predictor.leaves
    found: str = leaf.way(x, len(next(iter(x.values())) if isinstance(x, dict) else x))
    return found


def profile(s: Setting) -> str:
    """Return the kernels and operations of a few calls: one row eager and replayed, many rows."""
    from torch.profiler import profile as profiled
    from torch.profiler import ProfilerActivity

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if s.device == "cuda" else [])]
    parts = []
    for name, x, capture in (("eager", s.one, False), ("graph", s.one, True), ("throughput", s.many, False)):
        built = lb.Predictor(s.model, samples=DRAWS, capture=capture)
        for _ in range(WARM_UP):
            timed(lambda built=built, x=x: built(x), s)
        with profiled(activities=kinds) as found:
            for _ in range(3):
                timed(lambda built=built, x=x: built(x), s)
        for order in (
            ("self_device_time_total", "self_cpu_time_total") if s.device == "cuda" else ("self_cpu_time_total",)
        ):
            rows = found.key_averages().table(sort_by=order, row_limit=30, max_name_column_width=70)
            parts.append(f"{name}, three calls, by {order}\n{rows}")
    with profiled(activities=kinds) as found:
        for _ in range(3):
            timed(lambda: plain_pass(s, s.one), s)
    parts.append(f"plain, three calls\n{found.key_averages().table(sort_by='self_cpu_time_total', row_limit=30)}")
    return "\n\n".join(parts) + "\n"


def table(folder: Path, chosen: Sequence[Pair]) -> str:
    """Return the finished pairs as a Markdown table."""
    lines = [["network", "method", "eager", "graph", "lb.predict", "each draw at throughput", "difference in float32"]]
    lines.append(["---"] * len(lines[0]))
    for pair in chosen:
        if (folder / pair.file).is_file():
            found = json.loads((folder / pair.file).read_text())
            prices = [f"{found[m]['ratio']} of {found[m]['plain_ms']} ms" for m in ("eager", "graph", "predict")]
            last = [str(found["throughput"]["per_draw"]), f"{found['together_difference']:.1e}"]
            lines.append([pair.net, pair.method, *prices, *last])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one pair in this process and write its result."""
    parser = argparse.ArgumentParser(description="measure one pair")
    parser.add_argument("net")
    parser.add_argument("method")
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rehearse", action="store_true")
    chosen = parser.parse_args(arguments)
    result = measure(Pair(chosen.net, chosen.method), chosen.device, rehearse=chosen.rehearse)
    part = chosen.file.with_suffix(".part")
    part.write_text(json.dumps(result, indent=2) + "\n")
    part.replace(chosen.file)
    prices = {mode: result[mode]["ratio"] for mode in ("eager", "graph", "predict")}
    sys.stdout.write(f"{prices}, each draw {result['throughput']['per_draw']}\n")


if __name__ == "__main__":
    main()
