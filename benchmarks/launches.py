"""Operations that torch dispatches in one eager training step of each method: `python -m benchmarks.launches`.

On a GPU, each is at least one kernel launch; small networks in eager mode wait for launches. Views and allocations
launch nothing and are not counted; operations on several tensors at once (`_foreach_`) count once. Backward and the
optimizer are included. The forward runs under bfloat16 autocast, so casts are counted as on a GPU.

Networks have their full depth, few channels and few rows: the counts do not depend on sizes. With tiny tensors the CPU
time of a step is that of its calls ("host"), the part that an eager step on a GPU waits for. ResNet-50 keeps its
channels, and its host time means nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.problems import converted, layer_methods, PROBLEMS, Step, train_step

ALLOCATIONS = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided")
NETS = ("wrn-16-4", "resnet-50", "bert-base")


class Launches(TorchDispatchMode):
    """Counts the dispatched operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operation that computes something, and run it."""
        name = func._schema.name
        if name.startswith("aten::") and name not in ALLOCATIONS and not is_view(func._schema):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def is_view(schema: Any) -> bool:
    """Return whether an operation returns a view of its input and writes nothing."""
    infos = [returned.alias_info for returned in schema.returns]
    return any(info is not None and not info.is_write for info in infos)


def steps_of(net: str, methods: Sequence[str]) -> dict[str, Step]:
    """Return a training step of each method on the shrunk network."""
    problem = PROBLEMS[net].shrunk()
    torch.manual_seed(0)
    plain, (x, y) = problem.network(), problem.inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a network without streams gets noise alone
        return {method: train_step(converted(method, plain), x, y, half=True) for method in methods}


def count(step: Step) -> Counter[str]:
    """Count the operations of a step that has run before; the first ones make the plan of a pass and the momenta."""
    step()
    step()
    with Launches() as launches:
        step()
    return launches.counts


def host_milliseconds(steps: Mapping[str, Step], repeats: int) -> dict[str, float]:
    """Return the median process CPU time of each step; the steps run in turn."""
    spent: dict[str, list[float]] = {method: [] for method in steps}
    for _ in range(repeats):
        for method, step in steps.items():
            start = time.process_time()
            step()
            spent[method].append(1e3 * (time.process_time() - start))
    return {method: statistics.median(times) for method, times in spent.items()}


def measure(net: str, methods: Sequence[str], repeats: int) -> dict[str, Any]:
    """Return operations and host time of each method, as ratios to the plain network, too."""
    steps = steps_of(net, ("plain", *methods))
    counts = {method: count(step) for method, step in steps.items()}
    host = host_milliseconds(steps, repeats)
    return {
        method: {
            "operations": counts[method].total(),
            "ratio": round(counts[method].total() / counts["plain"].total(), 3),
            "host_ms": round(host[method], 2),
            "host_ratio": round(host[method] / host["plain"], 3),
            "by_name": {name.removeprefix("aten::"): times for name, times in counts[method].most_common()},
        }
        for method in steps
    }


def main() -> None:
    """Print a table, and the same as JSON."""
    options = parse()
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    sys.stderr.write(f"{'network':12} {'method':16} operations  ratio  host ms  ratio\n")
    for net in options.nets:
        result[net] = measure(net, options.methods, options.repeats)
        for method, row in result[net].items():
            numbers = f"{row['operations']:10} {row['ratio']:6.2f} {row['host_ms']:8.2f} {row['host_ratio']:6.2f}"
            sys.stderr.write(f"{net:12} {method:16} {numbers}\n")
    text = json.dumps(result, indent=2)
    sys.stdout.write(text + "\n")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="*", default=NETS, choices=list(PROBLEMS))
    parser.add_argument("--methods", nargs="*", default=layer_methods())
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    return parser.parse_args()


if __name__ == "__main__":
    main()
